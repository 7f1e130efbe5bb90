//! Errors of making an image's writes durable, kept until everybody has heard of them whom they may concern.
//!
//! The kernel reports a lost write once to each open file that is synced, and dray has one for all clients of an
//! image. It also syncs the file for reasons of its own (a checkpoint, a handover). What one sync was told no later
//! flush would hear. Nor would it after a restart of the agent: a file that is opened later is not told of what
//! another one was told. Who is to hear of it is counted in [`audience`](super::audience).

use super::audience::Audience;
use super::under_way::UnderWay;
use crate::client::{self, Client};
use crate::error::EarlierLoss;
use crate::image::WriteBackError;
use crate::{Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// What is added when a loss of an earlier process is told.
const EARLIER: &str = ", before the agent was restarted";

/// A loss as it is written down.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loss {
    /// Why writes may be lost; the end of a long text may be cut off.
    pub why: String,
    /// The notes of present blocks that lie beside it may be of the process that it came to. Of later ones
    /// they are once a process has begun them anew.
    pub notes_in_doubt: bool,
}

/// What an earlier process has left in a [`LossLog`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Past {
    /// What somebody is still to be told.
    pub owed: Option<Loss>,
    /// Why the file has lost writes since it was made, whoever has heard of that.
    pub lost: Option<String>,
}

impl Past {
    /// A loss that somebody is still to be told; nothing was lost without one.
    pub fn owing(owed: Option<Loss>) -> Self {
        let lost = owed.as_ref().map(|owed| owed.why.clone());
        Self { owed, lost }
    }
}

/// Remembers across restarts that writes of an image may be lost.
pub trait LossLog: Send + Sync {
    /// Writes may be lost, and somebody has not heard of it. That must survive this process, and that the file has
    /// lost writes must survive the host as well.
    ///
    /// # Errors
    /// When it cannot be written down.
    fn lost(&self, loss: &Loss) -> Result<()>;

    /// Everybody has heard of it. The file has still lost writes, which is `why`.
    ///
    /// # Errors
    /// When that cannot be written down; it is tried again at the next flush.
    fn settled(&self, why: &str) -> Result<()>;

    /// The file holds nothing any more of what it held when writes were lost.
    ///
    /// # Errors
    /// When that cannot be written down.
    fn begun_anew(&self) -> Result<()>;
}

/// What is known of an image's lost writes.
#[derive(Default)]
pub(crate) struct WriteBack {
    /// Their errors are about to be remembered.
    under_way: UnderWay,
    state: Mutex<State>,
    /// What a flush looks at without waiting for others: whether `state` has nothing to do with it, and how often
    /// clients have gone that may come back.
    is_quiet: AtomicBool,
    departures: AtomicU64,
    log: OnceLock<Arc<dyn LossLog>>,
}

#[derive(Default)]
struct State {
    last: Option<WriteBackError>,
    /// Why the file has lost writes since it was made. The page cache may show what is not on the disk.
    lost: Option<String>,
    /// The last error is one of an earlier process.
    inherited: bool,
    /// QEMU may be stopping the guest: a flush may be QEMU's own.
    guest_stops: bool,
    /// The log says that writes are lost.
    logged: bool,
    audience: Audience,
}

/// What is known, while nobody else uses it; what flushes look at is put right when this ends.
struct Held<'a> {
    back: &'a WriteBack,
    state: MutexGuard<'a, State>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let audience = &self.state.audience;
        let is_quiet = audience.is_quiet() && !self.state.logged;
        self.back.is_quiet.store(is_quiet, Ordering::SeqCst);
        self.back.departures.store(audience.departures(), Ordering::SeqCst);
    }
}

impl std::ops::Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl std::ops::DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl WriteBack {
    fn hold(&self) -> Held<'_> {
        Held { back: self, state: self.state.lock() }
    }

    /// From now on losses are written down in `log`, in which an earlier process has left `past`.
    pub(crate) fn keep(&self, log: Arc<dyn LossLog>, past: &Past) {
        let mut state = self.hold();
        state.lost = state.lost.take().or_else(|| past.lost.clone());
        if let Some(loss) = &past.owed {
            state.inherit(loss);
            state.logged = true;
        }
        // The first one stays.
        let _ = self.log.set(log);
    }

    /// Writes of an earlier process to `image` are lost, of which nobody can have heard. What is noted beside it is of
    /// this process. Whether that is written down: otherwise it is forgotten at a restart.
    pub(crate) fn owe_earlier(&self, image: &Path, why: &Error) -> bool {
        let loss = Loss { why: why.to_string(), notes_in_doubt: false };
        let mut state = self.hold();
        let recorded = self.record(&mut state, image, &loss);
        if state.last.is_none() {
            state.inherit(&loss);
        }
        recorded
    }

    /// Writes to `image` are lost. Whether that is written down.
    fn record(&self, state: &mut State, image: &Path, loss: &Loss) -> bool {
        let image = image.display();
        tracing::error!(%image, why = %loss.why, "writes of a guest may be lost");
        state.lost = Some(loss.why.clone());
        let Some(log) = self.log.get() else { return false };
        state.logged = true;
        let done = log.lost(loss).inspect_err(|why| {
            tracing::error!(%image, %why, "cannot record this loss: it is forgotten at a restart");
        });
        done.is_ok()
    }

    /// Why the file has lost writes since it was made, as far as is known: a sync under way may be about to fail.
    pub(crate) fn lost(&self) -> Option<String> {
        self.hold().lost.clone()
    }

    /// The file holds nothing any more of what it held when writes were lost: nobody is told either.
    ///
    /// # Errors
    /// When that cannot be written down; they count as lost then.
    pub(crate) fn begin_anew(&self, image: &Path) -> Result<()> {
        let mut state = self.hold();
        self.log.get().map_or(Ok(()), |log| log.begun_anew())?;
        tracing::info!(image = %image.display(), "a file that had lost writes is begun anew");
        *state = State { audience: std::mem::take(&mut state.audience), ..State::default() };
        state.audience.forget();
        Ok(())
    }

    /// What was lost so far was no guest's: nobody is told.
    pub(crate) fn forget(&self, image: &Path) {
        let mut state = self.hold();
        state.last = None;
        (state.inherited, state.guest_stops) = (false, false);
        state.audience.forget();
        self.strike_out(image, &mut state);
    }

    /// Whether QEMU may stop the guest: a flush that is told of a loss then may be QEMU's own, which fails
    /// and tells the guest nothing. Until the guest goes on, each flush fails that is owed a loss, and the loss
    /// stays owed.
    pub(crate) fn guest_stops(&self, stops: bool) {
        self.hold().guest_stops = stops;
    }

    /// Looks at a client, which has come or gone.
    pub(crate) fn look_at(&self, image: &Path, client: &Arc<Client>) {
        let mut state = self.hold();
        state.audience.look_at(client);
        self.settle(image, &mut state);
    }

    /// Writes of `image` may be lost; what said so keeps it from no flush.
    pub(crate) fn owe(&self, image: &Path, why: &Error) {
        self.note(image, why);
    }

    /// A call that is no flush, and in which the system may tell of lost writes: a sync of dray's own, a write
    /// that is durable on return. What it is told may be about other writes.
    ///
    /// # Errors
    /// What `call` reports, which is remembered and owed to all.
    pub(crate) fn own<T>(&self, image: &Path, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let _call = self.under_way.begin();
        call().inspect_err(|why| drop(self.note(image, why)))
    }

    /// A client's flush, of which `sync` is the part that the system does.
    ///
    /// # Errors
    /// What `sync` reports, or another one did since the client's last flush; an
    /// [earlier loss](Error::is_earlier_loss) when `sync` succeeded and only another process failed.
    pub(crate) fn guest(&self, image: &Path, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        let departures = self.departures.load(Ordering::SeqCst);
        let call = self.under_way.begin();
        if let Err(why) = sync() {
            self.note(image, &why).tell(client::current().as_ref());
            return Err(why);
        }
        drop(call);
        // One of the others may have taken the error that this sync was not told any more.
        self.under_way.wait();
        if self.is_quiet.load(Ordering::SeqCst) { Ok(()) } else { self.answer(image, departures) }
    }

    /// What is said to a flush whose sync has succeeded; clients had gone `departures` times when it began.
    fn answer(&self, image: &Path, departures: u64) -> Result<()> {
        let client = client::current();
        let mut state = self.hold();
        if state.audience.owes(client.as_ref()) {
            state.tell(client.as_ref());
            return Err(state.report(image));
        }
        state.audience.succeeds(client.as_ref(), departures);
        self.settle(image, &mut state);
        Ok(())
    }

    fn note(&self, image: &Path, why: &Error) -> Held<'_> {
        let loss = Loss { why: why.to_string(), notes_in_doubt: true };
        let mut state = self.hold();
        self.record(&mut state, image, &loss);
        let count = state.last.as_ref().map_or(0, |last| last.count) + 1;
        let (kind, told, notes_in_doubt) = (why.kind, false, false);
        state.last = Some(WriteBackError { why: loss.why, kind, count, told, notes_in_doubt });
        state.inherited = false;
        state.audience.lose();
        state
    }

    /// The loss is over when everybody has heard of it. Not when everybody was told: an answer may be lost with
    /// its connection, or with the process that gives it.
    fn settle(&self, image: &Path, state: &mut State) {
        let is_over = !state.audience.is_open() || state.audience.have_all_heard();
        if is_over && self.strike_out(image, state) {
            state.audience.close();
        }
    }

    /// Takes the loss out of the log; false when it stays there.
    fn strike_out(&self, image: &Path, state: &mut State) -> bool {
        let lost = state.lost.as_deref().unwrap_or_default();
        if state.logged
            && let Some(Err(why)) = self.log.get().map(|log| log.settled(lost))
        {
            tracing::warn!(image = %image.display(), %why,
                "cannot remove the record of a loss that is over");
            return false;
        }
        state.logged = false;
        true
    }

    /// The next process need not doubt the notes of this one, which has lost nothing. If that cannot be
    /// written down it asks for a restart where it need not.
    pub(crate) fn notes_begin_anew(&self) {
        let state = self.hold();
        if let Some(last) = state.last.as_ref().filter(|last| last.notes_in_doubt) {
            let why = last.why.strip_suffix(EARLIER).unwrap_or(&last.why).to_owned();
            let _ = self.log.get().map(|log| log.lost(&Loss { why, notes_in_doubt: false }));
        }
    }

    /// The last error.
    pub(crate) fn error(&self) -> Option<WriteBackError> {
        let state = self.hold();
        let told = state.audience.are_all_told();
        state.last.clone().map(|last| WriteBackError { told, ..last })
    }

    /// The loss that the guest is still to be told, also one that a sync under way is about to meet.
    pub(crate) fn untold(&self) -> Option<WriteBackError> {
        self.under_way.wait();
        self.error().filter(|last| !last.told)
    }
}

impl State {
    /// An earlier process has left this loss.
    fn inherit(&mut self, loss: &Loss) {
        let why = format!("{}{EARLIER}", loss.why);
        let (kind, count, told) = (ErrorKind::Io, 1, false);
        let notes_in_doubt = loss.notes_in_doubt;
        self.last = Some(WriteBackError { why, kind, count, told, notes_in_doubt });
        self.inherited = true;
        self.audience.lose();
    }

    /// A flush of `client` fails. While QEMU may stop the guest, the next one fails as well: the guest may go on
    /// before anybody has said so.
    fn tell(&mut self, client: Option<&Arc<Client>>) {
        if !self.guest_stops {
            self.audience.tell(client);
        }
    }

    /// The last loss as a flush is told it.
    fn report(&self, image: &Path) -> Error {
        let last = self.last.as_ref();
        let kind = last.map_or(ErrorKind::Io, |last| last.kind);
        let text = last.map_or("a sync failed", |last| &last.why);
        let context = format!("flushing image {}", image.display());
        let why = format!("earlier writes may be lost: {text}");
        if self.inherited {
            return Error { kind, context, source: Box::new(EarlierLoss(why)) };
        }
        Error::new(kind, context, &why)
    }
}

#[cfg(test)]
mod tests;
