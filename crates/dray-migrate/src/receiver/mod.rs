//! The target's owner loop.
//!
//! [`TargetSlot`] is what the rest of the agent holds of it; effects are in `effects`, what data
//! streams deliver in [`sink`], what disks ask for in [`fetcher`], the last check in [`verify`]; what is done
//! while the source is away is in [`alone`].

mod alone;
mod basis;
mod effects;
mod fetcher;
mod finder;
mod images;
mod owed;
mod session;
#[cfg(test)]
mod simulated;
mod sink;
mod timed;
mod verify;

use crate::messages::{ToSourceShell, ToTargetShell};
use crate::shown::shown_phase;
use crate::slots::{self, Board};
use crate::{Clock, Threads, Voided};
pub use alone::Question;
use dray_api::{ImageProgress, MigrationState, Phase};
use dray_engine::receiver::{Held, TargetNotice};
use dray_engine::{Target, TargetEvent, TargetPlan, TargetRecord};
use dray_host::abort;
use dray_host::folder::intent::{Settings, TargetIntent};
use dray_host::folder::log::{Folder, Log, TARGET_INTENT, TARGET_JOURNAL};
use dray_host::folder::standing::{self, Unserved};
use dray_host::record::MAX_LEN;
use dray_host::registry::Registry;
use dray_net::{NetError, NetStats};
use dray_provider::reuse::Reuse;
use dray_types::{BlockRange, ImageIndex};
use dray_wire::request::Fate;
use dray_wire::{Envelope, ToTarget};
use fetcher::Peeks;
use images::TargetImages;
use owed::Owed;
use parking_lot::{Mutex, MutexGuard};
use session::Session;
use sink::Sink;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

/// Longest sleep of the loop: the engine wants a tick this often.
const TICK: Duration = Duration::from_millis(100);
/// The source is told how far Backfill is this often.
const PROGRESS: Duration = Duration::from_millis(500);
/// What was received and never handed over is removed when its source stays away this long.
const ORPHAN_AFTER: Duration = Duration::from_secs(24 * 3600);

/// What reaches the loop.
pub enum Input {
    /// For the engine.
    Engine(TargetEvent),
    /// A guest waits for these blocks.
    Demand(ImageIndex, BlockRange),
    /// A QEMU that opens the disk before handover reads.
    Peek(fetcher::Peek),
    /// A session was made.
    SessionUp(Session),
    /// The session with this number is gone.
    SessionDown(u64, String),
    /// A message came in the session with this number.
    FromPeer(u64, Envelope<ToTarget>, dray_net::memory::Held),
    /// A message for the source's shell.
    Say(ToSourceShell),
    /// Verification has looked at everything: blocks compared, blocks that differ.
    Verified(u64, u64),
    /// What happens at the end is done; the migration is over.
    Finished {
        /// The images whose disks QEMU has back, by their numbers. It may have them all, or those that it took
        /// before one of the others could not be released.
        given: BTreeSet<usize>,
    },
    /// Its own source says that it needs nothing here, not even a promise.
    Forget,
    /// Another migration wants the names: forget this one if it was abandoned and has promised
    /// nothing, and answer whether it is gone.
    GiveWay(oneshot::Sender<bool>),
    /// What the source has answered to a [`Question`], or why it has not.
    Fate {
        /// How many sessions there had been when it was asked.
        sessions: u64,
        /// The answer.
        answer: Result<Fate, NetError>,
        /// Told when what follows from it was done, or cannot be done yet.
        heard: oneshot::Sender<()>,
    },
    /// The operator of this host takes it back: forget it if its source is away, and nothing was promised.
    TakeBack {
        /// An image of it was claimed at the source: what was handed back may go, too.
        claimed: bool,
        /// Whether it is gone, or what this host has done with its images.
        answer: oneshot::Sender<Result<(), Unserved>>,
    },
    /// Its images are claimed: the migration becomes void and the loop ends, if there is anything that
    /// can be claimed.
    Void(Voided),
    /// The loop ends.
    Stop,
}

/// What the loop tells the task that looks after the VM.
#[derive(Clone, Debug)]
pub enum ToTask {
    /// The source's shell wants something, and has not been answered for as long as this is there.
    Shell(ToTargetShell, Arc<()>),
    /// See whether the guest's QEMU answers.
    Reach,
    /// Let the guest run.
    Start,
    /// Every block is here: release the disks if the settings say so, then say `Finished`.
    Release,
    /// From the engine.
    Notice(TargetNotice),
}

/// A migration at its target, as the rest of the agent holds it.
pub struct TargetSlot {
    /// The state that operators see.
    pub board: Arc<Board>,
    /// The way into the loop.
    pub inputs: Sender<Input>,
    /// The migration's counters.
    pub stats: Arc<NetStats>,
    /// What data streams deliver to.
    sink: Arc<Sink>,
    newest: session::Newest,
    folder: Folder,
    intent: Mutex<TargetIntent>,
    /// What is to be asked of the source.
    question: Mutex<Option<Question>>,
    /// Held while it is asked: when that was begun last, and what was told.
    pub asked: tokio::sync::Mutex<Option<(Instant, Result<Fate, NetError>)>>,
    /// The disks know what is missing.
    exposed: AtomicBool,
}

impl TargetSlot {
    /// Whether the images are served, each with what is missing of it.
    pub fn is_exposed(&self) -> bool {
        self.exposed.load(Ordering::SeqCst)
    }

    fn lock_intent(&self) -> MutexGuard<'_, TargetIntent> {
        slots::assert_no_board_is_changing();
        self.intent.lock()
    }

    /// The intent as it stands.
    pub fn intent(&self) -> TargetIntent {
        self.lock_intent().clone()
    }

    /// Changes the intent, durably.
    ///
    /// # Errors
    /// That the migration is over, or what the store reports.
    pub fn change_intent(&self, change: impl FnOnce(&mut TargetIntent)) -> io::Result<()> {
        let mut intent = self.lock_intent();
        if self.is_forgotten() {
            return Err(io::Error::other("the migration is over at this host"));
        }
        let mut new = intent.clone();
        change(&mut new);
        self.folder.file(TARGET_INTENT).put(&new)?;
        *intent = new;
        Ok(())
    }

    /// The migration is void from here on, durably: nobody changes its intent any more.
    fn set_void(&self) -> io::Result<()> {
        let _intent = self.lock_intent();
        self.folder.set_void()
    }

    /// Changes the settings for now; [`keep_intent`](Self::keep_intent) makes that durable.
    fn set_settings(&self, settings: Settings) {
        self.lock_intent().settings = settings;
    }

    /// The intent as it stands is durable.
    fn keep_intent(&self) -> io::Result<()> {
        let intent = self.lock_intent();
        if self.is_forgotten() {
            return Err(io::Error::other("the migration is over at this host"));
        }
        self.folder.file(TARGET_INTENT).put(&*intent)
    }

    /// Sends an input; a loop that has ended no longer cares.
    pub fn send(&self, input: Input) {
        let _ = self.inputs.send(input);
    }

    /// Whether the migration is forgotten: nothing of it is left but what is shown.
    pub fn is_forgotten(&self) -> bool {
        matches!(self.folder.file(TARGET_INTENT).exists(), Ok(false))
    }
}

/// What a loop is made of.
pub struct TargetParts {
    /// The migration's folder.
    pub folder: Folder,
    /// The images of this host.
    pub registry: Arc<Registry>,
    /// Guest I/O that waits for a lost source fails after this; never when absent (I5).
    pub stall: Option<Duration>,
    /// What this host has of other images.
    pub reuse: Arc<Reuse>,
    /// Where notices go.
    pub told: UnboundedSender<ToTask>,
    /// What time it is.
    pub clock: Clock,
    /// Where what takes long is done.
    pub threads: Threads,
}

/// The loop's own state.
pub struct TargetLoop {
    slot: Arc<TargetSlot>,
    parts: TargetParts,
    clock: Clock,
    engine: Target,
    log: Log<TargetRecord>,
    images: TargetImages,
    peeks: Peeks,
    session: Option<Session>,
    /// How many there were.
    sessions: u64,
    answers: VecDeque<TargetEvent>,
    /// What the machine wants and is not done yet.
    held: Held,
    owed: Owed,
    progress_at: Instant,
    /// Counts what the VM's task was told by the source and has not answered.
    unanswered: Arc<()>,
    /// What the source was last told of Backfill.
    said_paused: bool,
    copied: Option<Copied>,
    /// Per image: blocks found here that it was told of.
    said_found: Vec<u64>,
    verifier: Option<verify::Verifier>,
    /// Since when an owner with missing blocks has no session.
    alone_since: Option<Instant>,
    /// Since when nobody needs what was received.
    idle_since: Instant,
    /// QEMU may be taking the disks back.
    releasing: bool,
    /// QEMU has taken the disks back as plain files.
    released: bool,
    /// The images whose disks QEMU has back, by their numbers.
    given: BTreeSet<usize>,
    /// Who waits to hear that the migration is void.
    voided: Option<Voided>,
}

impl TargetLoop {
    /// Opens the journal and the images, and brings the disks into the state that is durable.
    ///
    /// # Errors
    /// When the journal or an image cannot be opened.
    pub fn open(
        intent: TargetIntent,
        parts: TargetParts,
        board: Arc<Board>,
        inputs: Sender<Input>,
    ) -> io::Result<(Arc<TargetSlot>, Self)> {
        let (log, records) = Log::open(&parts.folder.file(TARGET_JOURNAL))?;
        let plan = TargetPlan {
            migration: intent.migration,
            images: intent.images.iter().map(|image| image.offer.clone()).collect(),
            zeroed: intent.images.iter().map(|image| image.zeroed).collect(),
            based: intent.images.iter().map(|image| image.replica.is_some()).collect(),
        };
        let engine = Target::recover(plan, &records);
        let over = engine.is_over();
        let new = records.is_empty();
        let discarded = records.last() == Some(&TargetRecord::Discarded);
        let owned = records.iter().any(|record| matches!(record, TargetRecord::Committed(_)));
        let images = TargetImages::open(&intent, &parts, &inputs, (new, owned, over, discarded))?;
        let places = if engine.is_over() { Vec::new() } else { images.places() };
        let sink = Sink::new(places, inputs.clone(), Arc::clone(&parts.reuse), &intent.peer);
        let slot = Arc::new(TargetSlot {
            board,
            inputs,
            stats: Arc::default(),
            sink,
            newest: session::Newest::default(),
            folder: parts.folder.clone(),
            intent: Mutex::new(intent),
            question: Mutex::default(),
            asked: tokio::sync::Mutex::default(),
            exposed: AtomicBool::new(false),
        });
        let mut this = Self {
            slot: Arc::clone(&slot),
            clock: parts.clock.clone(),
            parts,
            engine,
            log,
            images,
            peeks: Peeks::default(),
            session: None,
            sessions: 0,
            answers: VecDeque::new(),
            held: Held::default(),
            owed: Owed::default(),
            progress_at: Instant::now(),
            said_paused: false,
            copied: None,
            unanswered: Arc::default(),
            said_found: Vec::new(),
            verifier: None,
            alone_since: None,
            idle_since: Instant::now(),
            releasing: false,
            released: false,
            given: BTreeSet::new(),
            voided: None,
        };
        if !this.engine.owns() {
            this.images.begin_incoming(&this.slot);
        } else if !this.engine.is_complete() {
            this.images.shut();
        }
        this.step(TargetEvent::Start);
        // Who asks at once is told where it is.
        this.show_opened();
        this.refresh();
        if this.engine.is_complete() && !this.images.any_bound() {
            // Only the source's good-bye is missing, which may never come.
            this.show_completed();
        }
        Ok((slot, this))
    }

    /// Takes inputs until the migration is over.
    pub fn run(mut self, inputs: &Receiver<Input>) {
        self.take_inputs(inputs);
        self.end();
    }

    fn end(mut self) {
        // What is shown of the migration stays; its files are not kept open for that.
        self.slot.sink.let_go();
        self.ask_nothing();
        let (voided, epoch) = (self.voided.take(), self.engine.epoch());
        drop(self);
        if let Some(answer) = voided {
            // Said when nothing of the loop is left.
            let _ = answer.send(Ok(epoch));
        }
    }

    fn take_inputs(&mut self, inputs: &Receiver<Input>) {
        let mut next_tick = Instant::now() + TICK;
        loop {
            let input = match inputs.try_recv() {
                Ok(input) => input,
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {
                    self.step(TargetEvent::Idle);
                    let wait = next_tick.saturating_duration_since(Instant::now());
                    match inputs.recv_timeout(wait) {
                        Ok(input) => input,
                        Err(RecvTimeoutError::Disconnected) => return,
                        Err(RecvTimeoutError::Timeout) => {
                            next_tick = Instant::now() + TICK;
                            if !self.tick() {
                                return;
                            }
                            continue;
                        }
                    }
                }
            };
            if matches!(input, Input::Stop) || !self.take(input) {
                return;
            }
        }
    }

    /// Takes one input; false when the loop shall end.
    fn take(&mut self, input: Input) -> bool {
        match input {
            Input::Engine(event) => self.step(event),
            Input::Demand(image, range) => {
                let runs = self.images.neighbourhood(image, range, self.engine.widens());
                self.step(TargetEvent::Demand { image, runs });
            }
            Input::Peek(peek) => self.peek(peek),
            Input::SessionUp(session) => self.session_up(session),
            Input::SessionDown(number, why) => self.session_down(number, &why),
            Input::FromPeer(number, message, _held) => self.heard(number, message),
            Input::Say(message) => {
                self.released |= message == ToSourceShell::Released(Ok(()));
                self.say(&message);
            }
            Input::Verified(blocks, different) => self.verified(blocks, different),
            Input::Finished { given } => {
                self.given.extend(given);
                return !self.finished();
            }
            Input::Forget => return !self.forget(),
            Input::GiveWay(answer) => {
                let abandoned = self.slot.board.read().state == MigrationState::Interrupted;
                let gone = abandoned && self.has_no_promise() && self.forget();
                // Who asked may have stopped waiting.
                let _ = answer.send(gone);
                return !gone;
            }
            Input::Fate { sessions, answer, heard } => {
                let goes_on = self.heard_fate(sessions, answer);
                // Nobody may be waiting for it.
                let _ = heard.send(());
                return goes_on;
            }
            Input::TakeBack { claimed, answer } => {
                let gone = self.take_back(claimed);
                let _ = answer.send(gone);
                return gone.is_err();
            }
            Input::Void(answer) => match self.set_void() {
                Ok(()) => {
                    self.voided = Some(answer);
                    return false;
                }
                Err(why) => drop(answer.send(Err(why))),
            },
            Input::Stop => return false,
        }
        true
    }

    /// Only what was promised or is served can be claimed, and what is complete while it waits for its
    /// source to compare: after that QEMU may be taking its disks back.
    fn set_void(&self) -> io::Result<()> {
        let complete = self.engine.is_complete();
        // After a restart nobody knows how far QEMU was.
        let releases = self.releasing || self.slot.intent().settings.release;
        if complete && self.verifier.is_none() && releases {
            return Err(io::Error::other(
                "this host owns it already, and the migration is about to end",
            ));
        }
        if !complete && !standing::can_be_claimed(&self.parts.folder.file(TARGET_JOURNAL))? {
            return Err(io::Error::other("the migration has no image to claim any more"));
        }
        abort::step("Claim-Void");
        self.slot.set_void()
    }

    /// Time passes; false when the loop shall end.
    fn tick(&mut self) -> bool {
        self.step(TargetEvent::Tick);
        self.refresh();
        self.ask_if_alone();
        self.watch_stall();
        self.watch_orphan();
        if self.engine.owns() && self.progress_at.elapsed() >= PROGRESS {
            self.progress_at = Instant::now();
            self.say_progress();
        }
        self.try_again()
    }

    /// A migration that was prepared or abandoned, and that no source asks for any more, goes.
    fn watch_orphan(&mut self) {
        let after = orphan_after(&self.engine).filter(|_| self.session.is_none());
        match after {
            None => self.idle_since = Instant::now(),
            Some(after) if self.idle_since.elapsed() >= after => {
                self.idle_since = Instant::now();
                if self.forget() {
                    self.slot.send(Input::Stop);
                }
            }
            Some(_) => {}
        }
    }

    /// Whether the source can only go on by itself, whatever it has recorded. A promise may have
    /// become ownership that this host has not heard of (I1).
    fn has_no_promise(&self) -> bool {
        self.engine.phase() == dray_engine::Phase::Copy
    }

    /// A source that stays away stalls reads of missing blocks, for as long as the operator wants.
    fn watch_stall(&mut self) {
        let Some(stall) = self.parts.stall.filter(|_| self.engine.owns()) else { return };
        match (&self.session, self.alone_since) {
            (Some(_), Some(since)) => {
                self.alone_since = None;
                if since.elapsed() >= stall {
                    self.images.unstall();
                }
            }
            (None, None) => self.alone_since = Some(Instant::now()),
            (None, Some(since)) if since.elapsed() >= stall => self.images.fail_stalled(),
            _ => {}
        }
    }

    fn say_progress(&mut self) {
        let message = ToSourceShell::Progress {
            missing: self.images.missing(),
            remote_reads: self.images.remote_reads(),
            net: self.slot.stats.totals(),
        };
        self.say(&message);
        self.say_found();
        let paused = self.engine.status().paused && !self.engine.is_complete();
        if paused || self.said_paused {
            self.said_paused = paused;
            self.say(&ToSourceShell::Paused(paused));
        }
    }

    fn say_found(&mut self) {
        let found = self.engine.status().blocks_found;
        let before = self.said_found.iter().copied().chain(std::iter::repeat(0));
        let more = found.iter().zip(before).map(|(now, before)| now.saturating_sub(before));
        let more: Vec<_> = more.collect();
        if self.session.is_none() || more.iter().all(|&blocks| blocks == 0) {
            return;
        }
        self.say(&ToSourceShell::Found(more));
        self.said_found = found;
    }

    fn refresh(&self) {
        let status = self.engine.status();
        let mut rows = self.images.progress(&status);
        let phase = match self.engine.has_begun() || self.engine.is_over() {
            true => shown_phase(self.engine.phase()),
            false => Phase::Prepare,
        };
        // Only the source knows what there was to send.
        let (copied, owns) = (self.copied.as_ref(), self.engine.owns());
        if let Some(copied) = copied {
            copied.show_in(&mut rows, owns);
        }
        let paused = status.paused && phase == Phase::Backfill;
        let copied = copied.filter(|_| status.link_up && !paused);
        let rate = copied.filter(|_| !owns).map_or(status.rate as u64, |copied| copied.rate);
        let seconds_left = copied.and_then(|copied| copied.seconds_left);
        let wire = self.slot.stats.totals().wire_bytes();
        let remote_reads = self.images.remote_reads();
        self.slot.board.change(|shown| {
            let progress = &mut shown.progress;
            if progress.phase != Phase::Ended {
                progress.phase = phase;
            }
            progress.total = rows.iter().fold(Default::default(), |sum, row| row.amounts.plus(sum));
            progress.images = rows;
            progress.wire_bytes = wire;
            progress.remote_reads = remote_reads;
            progress.paused = paused;
            progress.rate = rate;
            progress.seconds_left = seconds_left.map(|seconds| seconds as f64);
            progress.link_up = status.link_up;
            if shown.state == MigrationState::Completed {
                progress.complete();
            }
        });
    }

    fn tell(&self, told: ToTask) {
        // The VM's task may have ended; then nobody needs to know.
        let _ = self.parts.told.send(told);
    }

    /// Steps the engine and runs what it wants, until it wants nothing more.
    fn step(&mut self, event: TargetEvent) {
        self.answers.push_back(event);
        self.settle();
    }

    /// Runs what is to be done, and gives the engine the answers.
    fn settle(&mut self) {
        loop {
            self.run_effects();
            let Some(answer) = self.answers.pop_front() else { return };
            let mut effects = Vec::new();
            self.engine.step(self.clock.now(), answer, &mut effects);
            effects.into_iter().for_each(|effect| self.held.push(effect));
        }
    }
}

/// How far the migration is, as the source has told.
struct Copied {
    images: Vec<(u64, u64)>,
    rate: u64,
    seconds_left: Option<u64>,
}

impl Copied {
    fn new(images: Vec<(u64, u64)>, rate: u64, seconds_left: Option<u64>) -> Self {
        // No image is longer: whoever says more cannot make a sum of them too large.
        let within = |(done, total): (u64, u64)| (done.min(MAX_LEN), total.min(MAX_LEN));
        Self { images: images.into_iter().map(within).collect(), rate, seconds_left }
    }

    /// Who owns the images knows best what is missing, and the source what there was to send.
    fn show_in(&self, rows: &mut [ImageProgress], owns: bool) {
        for (row, &(done, total)) in rows.iter_mut().zip(&self.images) {
            let amounts = &mut row.amounts;
            amounts.bytes_total = total.max(amounts.bytes_missing);
            amounts.bytes_done = match owns {
                true => amounts.bytes_total - amounts.bytes_missing,
                false => done.min(total),
            };
        }
    }
}

/// How long a source may stay away before what it left here goes; for ever when this host owns the images or may have
/// to, and when it has handed them back: a source that is lost may have had the only other copy.
fn orphan_after(engine: &Target) -> Option<Duration> {
    (engine.phase() == dray_engine::Phase::Copy).then_some(ORPHAN_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::{Attempt, Epoch, MigrationId};
    use dray_wire::{HandedOver, MapHash};

    #[test]
    fn only_what_can_never_be_needed_goes_by_itself() {
        let map_hash = MapHash::of(&[]);
        let attempt = Attempt(1);
        let (images, epoch) = (Vec::new(), Epoch(1));
        let prepared = TargetRecord::Prepared { attempt, map_hash, images, epoch };
        let handed_over = HandedOver { epoch: Epoch(2), attempt, map_hash };
        let after = |records: &[TargetRecord]| {
            let migration = MigrationId(1);
            let plan =
                TargetPlan { migration, images: Vec::new(), zeroed: Vec::new(), based: Vec::new() };
            orphan_after(&Target::recover(plan, records))
        };
        let void = TargetRecord::Void { attempt };
        let committed = TargetRecord::Committed(handed_over);
        assert_eq!(after(&[]), Some(ORPHAN_AFTER));
        assert_eq!(after(&[TargetRecord::Touched]), Some(ORPHAN_AFTER));
        assert_eq!(after(std::slice::from_ref(&prepared)), None);
        assert_eq!(after(&[prepared.clone(), void]), Some(ORPHAN_AFTER));
        assert_eq!(after(&[prepared.clone(), committed.clone()]), None);
        let fenced = [prepared.clone(), committed.clone(), TargetRecord::Fenced];
        assert_eq!(after(&fenced), None);
        assert_eq!(after(&[prepared, committed, TargetRecord::Complete]), None);
    }
}
