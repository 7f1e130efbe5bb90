//! The source's owner loop.
//!
//! [`SourceSlot`] is what the rest of the agent holds of it; [`SourceLoop::run`] is the loop itself;
//! effects are in [`effects`], the session with the target in [`session`], what is read in
//! [`content`], in which order in `orders`.

mod auto;
mod begin;
pub mod content;
mod counts;
mod effects;
mod hot_set;
mod images;
mod jumps;
mod latency;
mod mirror;
mod orders;
mod qcow2_reports;
mod rate;
mod report;
mod reuse;
mod session;
mod side_requests;
#[cfg(test)]
mod simulated;
mod summary;
mod throttle;
mod vouch;
mod waiting;

use crate::messages::{ToSourceShell, ToTargetShell};
use crate::slots::{self, Board};
use crate::{Clock, Threads, Voided};
use auto::Choices;
pub use counts::{Mark, Memory};
use dray_api::{ErrorKind, MigrationState, Refusal};
use dray_engine::source::SourceNotice;
use dray_engine::{Source, SourceEvent, SourceRecord, Time};
use dray_files::StatePath;
use dray_host::abort;
use dray_host::folder::intent::SourceIntent;
use dray_host::folder::log::{self, Folder, Log, SOURCE_INTENT, SOURCE_JOURNAL};
use dray_host::process::QemuProcess;
use dray_host::registry::Registry;
use dray_image::Quiesced;
use dray_net::memory::Held;
use dray_net::pace::Pacer;
use dray_net::{NetError, NetErrorKind, NetStats};
use dray_provider::bases::Digests;
use dray_provider::reuse::{Company, Reuse};
use dray_types::{BitRate, Why};
use dray_wire::{Envelope, ToSource};
use images::SourceImages;
pub use images::shared;
use latency::Pacing;
use mirror::Mirror;
use orders::Orders;
use parking_lot::{Mutex, MutexGuard};
use report::{COUNTS, Report};
pub use session::{Reach, Session, SessionSettings, keep};
use side_requests::SideRequests;
use std::collections::VecDeque;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};
use throttle::Brakes;
pub use throttle::{Limiter, Slowed};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use waiting::Waiting;

/// Longest sleep of the loop: the engine wants a tick this often.
const TICK: Duration = Duration::from_millis(100);
/// While the guest's memory moves, what it writes is written back this often.
const WRITEBACK: Duration = Duration::from_millis(500);
/// Name of the note that a guest which stays here was seen to.
const HOME: &str = "home.json";

/// What reaches the loop.
pub enum Input {
    /// For the engine.
    Engine(SourceEvent),
    /// The guest's writes have drained; the guards keep it so.
    Quiesced(Vec<(usize, Quiesced)>),
    /// Whether the guest has not run since its memory was sent, looked at after its writes had drained.
    StillStopped(Result<(), Why>),
    /// A session was made.
    SessionUp(Session),
    /// The session with this number is gone.
    SessionDown(u64, NetError),
    /// The target wants no session with this number.
    SessionRefused(u64, NetError),
    /// A message came in the session with this number.
    FromPeer(u64, Envelope<ToSource>, Held),
    /// QEMU has stopped the guest, at this time since 1970 if QEMU said when.
    Stopped(Option<Duration>),
    /// The guest has written something that the strategy sends on.
    Written,
    /// QEMU's own numbers.
    Memory(Memory),
    /// QEMU may stop the guest at any moment from now on; or the guest that it stopped goes on here.
    GuestStops(bool),
    /// Something outside of the engine failed, for instance the VM's part: so does the whole.
    Failed(Refusal),
    /// A message for the target's shell.
    Say(ToTargetShell),
    /// `migrate` or `resume`: begin, or go on after an abandoned try.
    Begin,
    /// It was only prepared, and is not wanted any more; its target has heard that.
    Forget,
    /// The same, and its target has not: that was made durable.
    Cancelled,
    /// Its images are claimed: the migration becomes void and the loop ends, unless they are this
    /// host's anyway.
    Void(Voided),
    /// Its target knows nothing of it any more, or has everything and is away, and the operator wants no more of it:
    /// the copies here are let go, and the loop ends.
    LetGo(oneshot::Sender<io::Result<()>>),
    /// The migration is over for the loop; it ends.
    Stop,
}

/// What the loop tells the task that moves the VM.
#[derive(Clone, Debug)]
pub enum ToTask {
    /// From the engine.
    Notice(SourceNotice),
    /// From the target's shell.
    /// It has not been heard for as long as the second part is there.
    Shell(ToSourceShell, Arc<()>),
    /// There is no session any more.
    LinkDown,
    /// There is a session.
    LinkUp,
    /// The images are at rest for a handover: an [`Input::StillStopped`] is wanted.
    Quiet,
}

/// A migration at its source, as the rest of the agent holds it.
pub struct SourceSlot {
    /// The state that operators see.
    pub board: Arc<Board>,
    /// The way into the loop.
    pub inputs: Sender<Input>,
    /// The migration's budget.
    pub pacer: Arc<Pacer>,
    /// The migration's counters.
    pub stats: Arc<NetStats>,
    folder: Folder,
    /// What the guest's writes are held to.
    pub limiter: Arc<Limiter>,
    intent: Mutex<SourceIntent>,
    /// It was abandoned, and a later try can use what the target has.
    kept: AtomicBool,
    /// Guests may be served from the images here.
    owns: AtomicBool,
    /// The images were handed over, and their target says that it has nothing to do with them.
    refused: AtomicBool,
}

impl SourceSlot {
    fn lock_intent(&self) -> MutexGuard<'_, SourceIntent> {
        slots::assert_no_board_is_changing();
        self.intent.lock()
    }

    /// The intent as it stands.
    pub fn intent(&self) -> SourceIntent {
        self.lock_intent().clone()
    }

    /// The process that answers for the VM that moves, if one does and it is known.
    fn left_by(&self) -> Option<QemuProcess> {
        self.lock_intent().vm.as_ref()?.qemu.clone()
    }

    /// Limits everything that is sent from now on, and also after a restart.
    ///
    /// # Errors
    /// Why a restart will know only the limit before it.
    pub fn set_limit(&self, limit: Option<BitRate>) -> io::Result<()> {
        let mut intent = self.lock_intent();
        self.pacer.set_limit(limit);
        self.board.change(|shown| shown.progress.bandwidth = limit);
        let Some(options) = &mut intent.options else {
            return Err(io::Error::other("the migration has not begun"));
        };
        options.bandwidth = limit;
        let path = self.folder.file(SOURCE_INTENT);
        if !path.exists()? {
            return Err(io::Error::other("the migration is over at this host"));
        }
        path.put(&*intent)
    }

    /// The limit holds that was asked for last, also by somebody who asks for one while the copy begins.
    fn begin_limited(&self) {
        let intent = self.lock_intent();
        self.pacer.set_limit(intent.options.as_ref().and_then(|options| options.bandwidth));
    }

    /// The migration is void from here on, durably: nobody writes its intent any more.
    fn set_void(&self) -> io::Result<()> {
        let _intent = self.lock_intent();
        self.folder.set_void()
    }

    /// Notes which images were adopted, for a migration that never begins.
    pub fn set_adopted(&self, names: &[String]) {
        let mut intent = self.lock_intent();
        intent.adopted = names.to_vec();
    }

    /// Whether the guest runs, when somebody has paused it or let it go on since the migration began.
    ///
    /// # Errors
    /// When it cannot be made durable.
    pub fn set_running(&self, running: bool) -> io::Result<()> {
        let mut intent = self.lock_intent();
        let mut new = intent.clone();
        let facts = new.vm.iter_mut().filter_map(|vm| vm.facts.as_mut());
        facts.for_each(|facts| facts.running = running);
        let path = self.folder.file(SOURCE_INTENT);
        if !path.exists()? {
            return Err(io::Error::other("the migration is over at this host"));
        }
        path.put(&new)?;
        *intent = new;
        Ok(())
    }

    /// Sends an input; a loop that has ended no longer cares.
    pub fn send(&self, input: Input) {
        let _ = self.inputs.send(input);
    }

    /// Whether it was abandoned and a later try can use what the target has.
    pub fn is_kept(&self) -> bool {
        self.kept.load(Ordering::SeqCst)
    }

    /// Whether guests may be served from the images here: not while they are handed over, nor while
    /// nobody knows whether they are.
    pub fn owns(&self) -> bool {
        self.owns.load(Ordering::SeqCst)
    }

    /// Whether the images were handed over to a target that knows nothing of the migration any more.
    pub fn is_refused(&self) -> bool {
        self.refused.load(Ordering::SeqCst)
    }

    /// Whether the guest of a migration that came to nothing was seen to here: whoever has it now
    /// may have stopped or moved it since.
    pub fn is_home(&self) -> bool {
        // What cannot be told is looked after once more.
        self.folder.file(HOME).exists().unwrap_or(false)
    }

    /// Notes durably that the guest goes on here, on disks of its own.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn set_home(&self) -> io::Result<()> {
        self.folder.file(HOME).put(&true)
    }

    /// It never begins, or never again, durably; that is remembered until its target has heard it.
    ///
    /// # Errors
    /// What the file system reports: then it is as before.
    pub fn set_cancelled(&self) -> io::Result<()> {
        let _intent = self.lock_intent();
        self.folder.set_cancelled()
    }

    /// Removes what is durable of a migration that is over.
    pub fn forget(&self) {
        let _intent = self.lock_intent();
        if let Err(why) = self.folder.remove(log::End::Source) {
            tracing::warn!(migration = %self.board.migration, %why, "cannot remove its folder");
        }
    }
}

/// What a loop is made of.
pub struct SourceParts {
    /// The migration's folder.
    pub folder: Folder,
    /// The images of this host.
    pub registry: Arc<Registry>,
    /// How long guest writes may take to drain.
    pub quiesce_timeout: Duration,
    /// A handover without an outcome is void after this.
    pub handover_timeout: Duration,
    /// Before handover a migration fails when there is no session for this long.
    pub link_timeout: Duration,
    /// This host's name.
    pub host: String,
    /// The file of what links have carried.
    pub links: StatePath,
    /// The digests of base images.
    pub digests: Arc<Digests>,
    /// What hosts have of each other's images.
    pub reuse: Arc<Reuse>,
    /// Where notices go.
    pub told: UnboundedSender<ToTask>,
    /// What time it is.
    pub clock: Clock,
    /// Where what takes long is done.
    pub threads: Threads,
}

/// How the loop ends.
enum End {
    Stopped,
    /// Who asked for it waits to hear that the migration is void.
    Void(Voided),
}

/// The loop's own state.
pub struct SourceLoop {
    slot: Arc<SourceSlot>,
    parts: SourceParts,
    clock: Clock,
    engine: Option<Source>,
    log: Log<SourceRecord>,
    images: SourceImages,
    asides: SideRequests,
    orders: Orders,
    choices: Choices,
    brakes: Brakes,
    mirror: Option<Mirror>,
    pacing: Option<Pacing>,
    /// The guest is observed until then, and nothing is copied.
    observing: Option<Instant>,
    /// That is over.
    observed: bool,
    guards: Vec<(usize, Quiesced)>,
    session: Option<Session>,
    report: Report,
    /// Answers to effects that were given at once.
    answers: VecDeque<SourceEvent>,
    written_back: Instant,
    said_progress: Instant,
    /// Counts what the VM's task was told by the target and has not heard.
    unheard: Arc<()>,
    /// Since when there is no session, while one is needed.
    link_lost: Option<Time>,
    /// Why the last one broke, or was not made.
    link_why: Option<NetError>,
    /// Why the VM's own migration failed, until the engine has ended the whole.
    failure: Option<Refusal>,
    /// What was durable when the loop began.
    history: Vec<SourceRecord>,
    /// An abandoned migration keeps its folder, so that it can be resumed.
    resumable: bool,
    /// Whether a cancel told the target to throw away what it has.
    discarded: bool,
    /// Migrations to the same peer, and whether the engine was told of others.
    company: Company,
    together: bool,
    waiting: Waiting,
    /// The images' exports are open, or parked after a handover.
    vouched: bool,
}

/// A migration that was refused, or that died, before its images were bound to it has not begun, whatever
/// its intent says: it is only prepared.
fn begun_or_prepared(intent: SourceIntent, images: &SourceImages, new: bool) -> SourceIntent {
    if !new || intent.options.is_none() || images.are_bound() {
        return intent;
    }
    tracing::info!(migration = %intent.migration, "has not begun: it is only prepared");
    if let Err(why) = images.unbind() {
        tracing::warn!(%why, "cannot release the images of a migration that has not begun");
    }
    SourceIntent { options: None, ..intent }
}

impl SourceLoop {
    /// Opens the journal and the images. The loop does nothing until [`run`](Self::run).
    ///
    /// # Errors
    /// When the journal or an image cannot be opened.
    pub fn open(
        intent: SourceIntent,
        parts: SourceParts,
        board: Arc<Board>,
        inputs: Sender<Input>,
    ) -> io::Result<(Arc<SourceSlot>, Self)> {
        let (log, records) = Log::open(&parts.folder.file(SOURCE_JOURNAL))?;
        let images = SourceImages::open(&intent, &parts, &records)?;
        images.check_handed_over(&records)?;
        let intent = begun_or_prepared(intent, &images, records.is_empty());
        if intent.options.is_none() {
            board.change(|shown| shown.state = MigrationState::Prepared);
        }
        if intent.options.is_none() && parts.folder.file(HOME).exists()? {
            // What became of an earlier try's guest says nothing about this one.
            parts.folder.file(HOME).remove()?;
        }
        let bandwidth = intent.options.as_ref().and_then(|options| options.bandwidth);
        let slot = Arc::new(SourceSlot {
            board,
            inputs,
            pacer: Pacer::new(bandwidth),
            stats: Arc::default(),
            folder: parts.folder.clone(),
            limiter: Limiter::new(),
            intent: Mutex::new(intent),
            kept: AtomicBool::new(false),
            owns: AtomicBool::new(true),
            refused: AtomicBool::new(false),
        });
        let company = parts.reuse.company(&slot.intent().peer);
        let now = parts.clock.now();
        let mut this = Self {
            report: Report::new(
                Arc::clone(&slot),
                parts.host.clone(),
                parts.folder.file(COUNTS),
                parts.clock.clone(),
            ),
            slot: Arc::clone(&slot),
            clock: parts.clock.clone(),
            parts,
            engine: None,
            log,
            asides: SideRequests::new(images.content()),
            images,
            orders: Orders::default(),
            choices: Choices::default(),
            brakes: Brakes::new(Arc::clone(&slot.limiter)),
            mirror: None,
            pacing: None,
            observing: None,
            observed: false,
            guards: Vec::new(),
            session: None,
            answers: VecDeque::new(),
            written_back: Instant::now(),
            said_progress: Instant::now(),
            unheard: Arc::default(),
            link_lost: Some(now),
            link_why: None,
            failure: None,
            history: records,
            resumable: true,
            discarded: false,
            company,
            together: false,
            waiting: Waiting::default(),
            vouched: false,
        };
        if slot.intent().options.is_some() {
            this.revive();
        }
        this.vouch();
        Ok((slot, this))
    }

    /// What the session needs to know of the images.
    pub fn content(&self) -> Arc<content::Content> {
        self.images.content()
    }

    /// Whether this host still owns the images.
    pub fn owns(&self) -> bool {
        self.engine.as_ref().is_none_or(Source::owns)
    }

    /// Whether there is still something to be moved away: no handover, and no end.
    pub fn moves(&self) -> bool {
        self.engine.as_ref().is_none_or(|engine| engine.owns() && !engine.is_over())
    }

    /// Takes inputs until the migration is over.
    pub fn run(mut self, inputs: &Receiver<Input>) {
        let mut next_tick = Instant::now() + TICK;
        let end = loop {
            let wait = next_tick.saturating_duration_since(Instant::now());
            match inputs.recv_timeout(wait) {
                Err(RecvTimeoutError::Disconnected) => break End::Stopped,
                Ok(input) => {
                    if let ControlFlow::Break(end) = self.accept(input) {
                        break end;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    next_tick = Instant::now() + TICK;
                    self.tick();
                }
            }
        };
        if let End::Void(answer) = end {
            // Said when nothing of the loop is left.
            let epoch = self.epoch();
            drop(self);
            let _ = answer.send(Ok(epoch));
        }
    }

    /// Takes one input; tells how the loop ends, if it does.
    fn accept(&mut self, input: Input) -> ControlFlow<End> {
        match input {
            Input::Stop => return ControlFlow::Break(End::Stopped),
            Input::Void(answer) => match self.set_void() {
                Ok(()) => return ControlFlow::Break(End::Void(answer)),
                Err(why) => drop(answer.send(Err(why))),
            },
            Input::LetGo(answer) => {
                let gone = self.let_go();
                let is_over = gone.is_ok();
                // Who asked may have stopped waiting.
                let _ = answer.send(gone);
                if is_over {
                    return ControlFlow::Break(End::Stopped);
                }
            }
            input => {
                if let Some(input) = self.hold_back(input) {
                    self.take(input);
                }
            }
        }
        ControlFlow::Continue(())
    }

    fn set_void(&self) -> io::Result<()> {
        if self.owns() {
            return Err(io::Error::other("this host owns the images"));
        }
        abort::step("Claim-Void");
        self.slot.set_void()
    }

    /// What lies here stays, as replicas of no migration. After a crash half-way the target refuses the
    /// migration again, or is waited for again, and it can be asked for again. A target that has everything and
    /// comes back asks, and hears that nobody here knows the migration.
    fn let_go(&mut self) -> io::Result<()> {
        let unheard = self.is_done() && self.session.is_none();
        if self.owns() || !(self.slot.is_refused() || unheard) || self.is_stuck() {
            return Err(io::Error::other("the target may still need it"));
        }
        self.retire_rest()?;
        self.images.keep_replicas()?;
        self.images.let_go()?;
        abort::step("LetGo-Forget");
        self.slot.forget();
        Ok(())
    }

    fn tick(&mut self) {
        self.try_again();
        if self.is_stuck() {
            return;
        }
        if self.observing.is_some_and(|until| until <= Instant::now()) {
            self.end_observation();
        }
        self.step(SourceEvent::Tick);
        self.vouch();
        self.refresh_orders();
        self.choose_again();
        self.watch_company();
        self.keep_latency();
        self.report.save();
        self.report.refresh(self.engine.as_ref(), &self.images);
        self.say_progress();
        let Some(engine) = &self.engine else { return };
        if engine.is_ready() && self.written_back.elapsed() >= WRITEBACK {
            self.written_back = Instant::now();
            self.images.start_writeback();
        }
        let waiting = self.link_lost.filter(|_| engine.owns() && !engine.is_over());
        if waiting.is_some_and(|since| self.clock.since(since) >= self.parts.link_timeout) {
            self.link_lost = None;
            let seconds = self.parts.link_timeout.as_secs();
            let silent = || NetError::new(NetErrorKind::Timeout, "it does not answer");
            let last = self.link_why.take().unwrap_or_else(silent);
            let peer = self.slot.intent().peer;
            let why = format!("{peer} could not be reached for {seconds} s: {last}");
            let kind = match last.kind {
                NetErrorKind::Version | NetErrorKind::Refused(ErrorKind::Unsupported) => {
                    ErrorKind::Unsupported
                }
                _ => ErrorKind::Peer,
            };
            self.fail(Refusal::new(kind, "migration failed", why).hint(
                "the guest continues at the source; check the link and the target's agent, then \
                 migrate again: dray uses the blocks that the target has",
            ));
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Engine(event) => self.step(event),
            Input::Quiesced(guards) => {
                self.guards = guards;
                self.report.mark(Mark::Quiesced);
                // Until now the guest could have been let go on, and have written what its memory at the target
                // does not know of.
                match self.slot.intent().vm {
                    Some(_) if self.parts.told.send(ToTask::Quiet).is_ok() => {}
                    Some(_) => self.quiet(Err("the vm's part of the migration has ended".into())),
                    None => self.quiet(Ok(())),
                }
            }
            Input::StillStopped(still) => self.quiet(still),
            Input::SessionUp(session) => self.session_up(session),
            Input::SessionDown(number, why) => self.session_down(number, why),
            Input::SessionRefused(number, why) => self.session_refused(number, why),
            Input::FromPeer(number, message, _held) => self.heard(number, message),
            Input::Stopped(at) => self.report.stopped(at),
            Input::Written => self.written(),
            Input::Memory(memory) => self.report.memory(memory),
            Input::GuestStops(stops) => self.images.guest_stops(stops),
            Input::Failed(error) => self.fail(error),
            Input::Say(message) => self.say(&message),
            Input::Begin => self.begin(),
            // Once it has begun, ownership may pass at any moment: only its end makes it worthless.
            Input::Forget if self.engine.as_ref().is_none_or(Source::is_over) => {
                self.unbind();
                self.slot.forget();
                self.leave();
            }
            Input::Cancelled => {
                self.unbind();
                self.leave();
            }
            Input::Forget => {}
            Input::Void(_) | Input::LetGo(_) | Input::Stop => {}
        }
    }

    /// No write of the guest is in flight, and none comes. Its memory fits what is in the images, or not.
    fn quiet(&mut self, still_stopped: Result<(), Why>) {
        let lens = self.images.lens().map_err(Why::of);
        match still_stopped.and(lens) {
            Ok(lens) => self.step(SourceEvent::Quiesced { lens }),
            Err(why) => self.step(SourceEvent::QuiesceFailed { why: why.to_string() }),
        }
    }

    fn unbind(&mut self) {
        if let Err(why) = self.images.unbind() {
            tracing::warn!(%why, "an image stays closed after the next start");
        }
    }

    /// What was only prepared is over.
    fn leave(&mut self) {
        self.resumable = false;
        self.part();
    }

    fn tell(&self, told: ToTask) {
        // The VM's task may have ended; then nobody needs to know.
        let _ = self.parts.told.send(told);
    }
}
