//! [`Disk`]: the stack that a guest's disk is served from, always the same: gate, tracker, missing
//! map, backing image.
//!
//! It is what a front end exports (it is an [`Image`]) and what a migration steers. It decides
//! nothing: when to copy, hand over or fetch is the engine's business.

mod brake;
mod history;
mod recorder;
mod request;
mod witness;

pub use brake::WriteDelay;
pub use recorder::{Access, Accesses, RECORDING_PLACES, Recording};
pub use witness::WriteWitness;

use crate::gate::{Gate, Quiesced};
use crate::latency::{Latencies, Meter};
use crate::missing::Missing;
use crate::needs::{Fetcher, Fill, IntentLog, PresentLog};
use crate::snapshot::{self, Keeper, Snapshot, Spill};
use crate::stats::DiskStats;
use crate::stats::{Counter, Counters};
use crate::tracker::{DirtyRuns, Tracker};
use crate::{Error, ErrorKind, Image, Origin, Result};
use brake::Brake;
use dray_heat::{AccessLog, Op};
use dray_types::{BlockRange, BlockSet};
use recorder::Recorder;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use witness::Witness;

/// Lanes of the log of accesses: threads that serve a guest at the same time on a usual host.
const LOG_LANES: usize = 4;
/// Accesses that a lane holds between two drains; more are dropped, which heat does not mind. All of
/// them are counted in a millisecond or two, so that they keep no core from a guest for long. The log
/// takes 64 KiB.
const LOG_PLACES: usize = 2048;

/// How long a change that is in flight may take: a disk that takes longer is stuck.
const IN_FLIGHT: Duration = Duration::from_secs(10);

/// A guest's disk.
pub struct Disk {
    backing: Arc<dyn Image>,
    len: u64,
    gate: Arc<Gate>,
    tracker: Arc<Tracker>,
    /// What was written in the image's open generation.
    history: Arc<Tracker>,
    missing: Missing,
    keeper: Arc<Keeper>,
    brake: Brake,
    accesses: AccessLog,
    witness: Witness,
    recorder: Arc<Recorder>,
    meter: Meter,
    counters: Counters,
    withdrawn: AtomicBool,
    /// Its clients are told that they may write.
    told_writable: AtomicBool,
    /// No lock keeps other programs from the image.
    unlocked: AtomicBool,
}

impl Disk {
    /// A disk over `backing`, open to the guest, not tracked, with nothing missing.
    pub fn new(backing: Arc<dyn Image>) -> Arc<Self> {
        Self::behind(Gate::new(), backing)
    }

    /// A disk over `backing` that is shut, not tracked, with nothing missing.
    pub fn new_shut(backing: Arc<dyn Image>) -> Arc<Self> {
        Self::behind(Gate::new_shut(), backing)
    }

    fn behind(gate: Arc<Gate>, backing: Arc<dyn Image>) -> Arc<Self> {
        let len = backing.geometry().len;
        Arc::new(Self {
            len,
            gate,
            tracker: Tracker::new(BlockRange::whole(len).len),
            history: Tracker::new(BlockRange::whole(len).len),
            missing: Missing::new(Arc::clone(&backing)),
            keeper: Keeper::new(Arc::clone(&backing)),
            brake: Brake::default(),
            accesses: AccessLog::with_lanes(LOG_LANES, LOG_PLACES),
            witness: Witness::default(),
            recorder: Arc::default(),
            meter: Meter::default(),
            counters: Counters::default(),
            withdrawn: AtomicBool::new(false),
            told_writable: AtomicBool::new(false),
            unlocked: AtomicBool::new(false),
            backing,
        })
    }

    /// Whether another program may open the image for writing, because no lock keeps it from that. What a client
    /// has asked for that has gone is not done then: whoever came after it may have written past this disk.
    pub fn set_unlocked(&self, unlocked: bool) {
        self.unlocked.store(unlocked, Ordering::SeqCst);
    }

    /// The image below; the copier reads (at the source) and writes (at the target) here.
    pub fn backing(&self) -> &Arc<dyn Image> {
        &self.backing
    }

    /// Holds new guest writes, zeroes and discards back and waits until none is in flight. Of a disk
    /// that is shut too, which stays so.
    ///
    /// # Errors
    /// `Unavailable` when that takes longer than `timeout` (writes then go on), or when they are
    /// held back already: by another such guard, because the disk is parked, or incoming.
    pub fn quiesce(&self, timeout: Duration) -> Result<Quiesced> {
        self.gate.quiesce(timeout)
    }

    /// After handover, at the source: all guest I/O waits, a flush is answered at once (I5). A disk
    /// that is shut is parked behind that, and is so when it is no longer shut.
    pub fn park(&self, quiesced: Quiesced) {
        self.gate.park(quiesced);
    }

    /// [`park`](Self::park) from any state, without a proof that the disk is quiet: it was quiesced
    /// and is still, or nobody could reach it yet. Cannot fail.
    pub fn park_now(&self) {
        self.gate.park_now();
    }

    /// True between [`park`](Self::park) and [`unpark`](Self::unpark).
    pub fn is_parked(&self) -> bool {
        self.gate.is_parked()
    }

    /// Whether a guest's requests pass at this moment.
    pub fn is_open(&self) -> bool {
        self.gate.is_open()
    }

    /// Whether a guest's changes pass, or are held back for the moment of a handover only: this host takes
    /// the image for its own.
    pub fn takes_changes(&self) -> bool {
        self.gate.takes_changes()
    }

    /// Ends [`park`](Self::park) and [`fail_parked`](Self::fail_parked): waiting I/O goes on, unless
    /// the disk is closed for another cause.
    pub fn unpark(&self) {
        self.missing.set_failed(false);
        self.gate.unpark();
    }

    /// From now on only the clients of one process change the disk, `holder`, or nobody does; the changes of all
    /// others wait. To be said of a disk that is quiet: what is in flight goes on.
    pub fn reserve(&self, holder: Option<&Origin>) {
        self.gate.reserve(holder.map(Origin::id));
    }

    /// Ends [`reserve`](Self::reserve): what waits goes on, unless the disk is closed for another cause.
    pub fn unreserve(&self) {
        self.gate.unreserve();
    }

    /// Nothing passes from now on, whatever the disk is otherwise: guest reads, writes and flushes
    /// wait, because nobody vouches for the image. What is in flight goes on.
    pub fn shut(&self) {
        self.gate.shut();
    }

    /// True between [`shut`](Self::shut) and [`unshut`](Self::unshut).
    pub fn is_shut(&self) -> bool {
        self.gate.is_shut()
    }

    /// Ends [`shut`](Self::shut): the disk is what it would be without (open, parked, incoming, or
    /// quiesced by who still holds the guard).
    pub fn unshut(&self) {
        self.gate.unshut();
    }

    /// Fails waiting I/O, and new I/O that would have to wait, with `Unavailable`: everything when
    /// the disk is parked (but a flush, which is answered) or shut, changes when it is incoming, and
    /// what needs a missing block.
    pub fn fail_parked(&self) {
        self.missing.set_failed(true);
        self.gate.fail();
    }

    /// Clients are told that they may write, whatever the image below takes: those that were told so once do not
    /// come back to a disk that says something else. To be said of a disk that lets no change pass.
    pub fn tell_writable(&self) {
        self.told_writable.store(true, Ordering::SeqCst);
    }

    fn told_writable(&self) -> bool {
        self.told_writable.load(Ordering::SeqCst)
    }

    /// The image is another's from now on, or has another disk: everything fails that waits or comes, for
    /// good, and who is served from it is sent away.
    pub fn withdraw(&self) {
        self.withdrawn.store(true, Ordering::SeqCst);
        self.gate.shut();
        self.fail_parked();
    }

    /// Ends [`fail_parked`](Self::fail_parked) and opens nothing: what would have to wait waits.
    pub fn wait_again(&self) {
        self.missing.set_failed(false);
        self.gate.unfail();
    }

    /// From now on a guest's change that makes clean blocks dirty waits as `rule` says, or nothing
    /// waits: then what waits goes on at once. It waits before it counts as in flight, so nobody
    /// who quiesces waits for it. Has no effect on a disk that is not tracked.
    pub fn set_write_delay(&self, rule: Option<Arc<dyn WriteDelay>>) {
        self.brake.set(rule);
    }

    /// From now on this one is told of each of the guest's changes when it is complete, or nobody
    /// is.
    pub fn set_write_witness(&self, witness: Option<Arc<dyn WriteWitness>>) {
        self.witness.set(witness);
    }

    /// Whether the guest's changes are timed from now on.
    pub fn measure_writes(&self, on: bool) {
        self.meter.switch(on);
    }

    /// How long the changes took that were timed since the disk was made: from the gate to the end
    /// of the change in the image. What [`set_write_delay`](Self::set_write_delay) adds is not in
    /// it.
    pub fn write_latencies(&self) -> Latencies {
        self.meter.read()
    }

    /// Tracks writes from now on. Nothing is dirty at the start, unless writes were tracked before:
    /// what is dirty then stays so. Changes that were in flight have ended on return, so that the log
    /// has the regions of all that may have reached the image since.
    ///
    /// # Errors
    /// `Unavailable` when one that is in flight does not end within some seconds; writes are tracked
    /// all the same.
    pub fn start_tracking(&self, intent: Option<Arc<dyn IntentLog>>) -> Result<()> {
        let logs = intent.is_some();
        self.tracker.start(intent);
        if logs { self.gate.drain(IN_FLIGHT) } else { Ok(()) }
    }

    /// Ends tracking and forgets what is dirty.
    pub fn stop_tracking(&self) {
        self.tracker.stop();
    }

    /// True while writes are tracked.
    pub fn is_tracking(&self) -> bool {
        self.tracker.is_on()
    }

    /// Makes `range` dirty (a copy of it was lost).
    pub fn mark_dirty(&self, range: BlockRange) {
        self.tracker.mark(range);
    }

    /// Makes `range` clean; to be called just before it is read for a copy.
    pub fn clear_dirty(&self, range: BlockRange) {
        self.tracker.clear(range);
    }

    /// Takes at most `max_blocks` dirty blocks at or after `from_block` and makes them clean.
    pub fn take_dirty(&self, from_block: u64, max_blocks: u64) -> DirtyRuns {
        self.tracker.take(from_block, max_blocks)
    }

    /// Number of dirty blocks; exact while the disk is quiesced.
    pub fn dirty_count(&self) -> u64 {
        self.tracker.count()
    }

    /// The dirty blocks; exact while the disk is quiesced.
    pub fn dirty_snapshot(&self) -> BlockSet {
        self.tracker.snapshot()
    }

    fn is_quiet(&self, quiesced: &Quiesced, what: &str) -> Result<()> {
        if quiesced.is_of(&self.gate) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Invalid, what, "it is another disk that is quiet"))
    }

    /// Makes ready for a snapshot that will probably want `expected`; what was set aside here costs
    /// nothing at the snapshot's moment. Old content goes to `spill` when the guest overwrites it.
    ///
    /// # Errors
    /// `Unavailable` while blocks are missing or another host owns the image, `InUse` when there is
    /// a snapshot already.
    pub fn prepare_snapshot(
        &self,
        expected: &BlockSet,
        spill: Box<dyn Spill>,
    ) -> Result<snapshot::Prepared> {
        const WHAT: &str = "taking a snapshot";
        if self.gate.is_incoming() || self.is_parked() {
            let why = "another host owns the image";
            return Err(Error::new(ErrorKind::Unavailable, WHAT, why));
        }
        if self.is_shut() {
            let why = "the image is closed, and its content is not certain";
            return Err(Error::new(ErrorKind::Unavailable, WHAT, why));
        }
        let missing = self.missing_count();
        if missing > 0 {
            let why = format!("{missing} blocks of the image are not on this host yet");
            return Err(Error::new(ErrorKind::Unavailable, WHAT, &why));
        }
        self.keeper.prepare(expected, spill)
    }

    /// The snapshot's moment is this quiet one; it wants `more` beside what was expected.
    ///
    /// # Errors
    /// `Invalid` when it is another disk that is quiet.
    pub fn snapshot(
        &self,
        prepared: snapshot::Prepared,
        quiesced: &Quiesced,
        more: &BlockSet,
    ) -> Result<Snapshot> {
        self.is_quiet(quiesced, "taking a snapshot")?;
        prepared.arm_for(&self.keeper, more)
    }

    /// Before handover, at the target: reads come from the owner, a flush is answered, changes wait
    /// until this host owns the image. When it never will, [`fail_parked`](Self::fail_parked) ends
    /// the waiting.
    pub fn begin_incoming(&self, fetcher: Arc<dyn Fetcher>) {
        self.missing.set_fetcher(fetcher);
        self.gate.expect();
    }

    /// Before the disk serves at the target: changes wait until [`start_changes`](Self::start_changes), and the first
    /// one that comes tells `first_change`, once.
    pub fn hold_changes(&self, first_change: impl Fn() + Send + Sync + 'static) {
        self.gate.await_start(Box::new(first_change));
    }

    /// Ends [`hold_changes`](Self::hold_changes): the image does not go back any more.
    pub fn start_changes(&self) {
        self.gate.start();
    }

    /// After the commit, at the target: this host owns the image, `missing` is still to come. Blocks
    /// of `unrecorded` are present only by a note, of an earlier process: the next flush makes them
    /// durable and records them before it is answered. The log must hold everything else that came
    /// before: it is told only of what comes from now on.
    pub fn serve_with_missing(
        &self,
        missing: BlockSet,
        unrecorded: &BlockSet,
        fetcher: Arc<dyn Fetcher>,
        log: Arc<dyn PresentLog>,
    ) {
        self.missing.begin(&missing, unrecorded, fetcher, log);
        self.gate.take_over();
    }

    /// Writes what arrived for `range` into those of its blocks that are still missing and wakes
    /// who waits for them; returns how many there were.
    ///
    /// # Errors
    /// What the image reports; the blocks then stay missing.
    pub fn fill(&self, range: BlockRange, fill: Fill<'_>) -> Result<u64> {
        let filled = self.missing.fill(range, fill)?;
        self.counters.add(Counter::FilledBlocks, filled);
        Ok(filled)
    }

    /// The first run of at most `max_blocks` missing blocks at or after `from_block`.
    pub fn next_missing(&self, from_block: u64, max_blocks: u64) -> Option<BlockRange> {
        self.missing.map().next_run(from_block, max_blocks)
    }

    /// Number of missing blocks.
    pub fn missing_count(&self) -> u64 {
        self.missing.map().count()
    }

    /// Whether it serves [with missing blocks](Self::serve_with_missing), or did until it had all.
    pub fn serves_with_missing(&self) -> bool {
        self.missing.is_logged()
    }

    /// The missing blocks.
    pub fn missing_snapshot(&self) -> BlockSet {
        self.missing.map().snapshot()
    }

    /// The ranges that guest requests wait for just now: what to ask for first when the link
    /// comes back.
    pub fn waiting_ranges(&self) -> Vec<BlockRange> {
        self.missing.waiting()
    }

    /// Makes everything written or filled so far durable, then the record that it is present (I2).
    ///
    /// # Errors
    /// What the image or the log reports.
    pub fn checkpoint(&self) -> Result<()> {
        self.missing.checkpoint()
    }

    /// The guest's accesses since the log was last drained, as blocks: changes when they are complete,
    /// reads that may wait when they begin. Some are missing when more come than the log holds.
    pub fn accesses(&self) -> &AccessLog {
        &self.accesses
    }

    /// Records the guest's accesses one by one until the recording is dropped; none while another
    /// recording goes on. The times are those of [`accesses`](Self::accesses).
    pub fn record(&self) -> Option<Recording> {
        self.recorder.begin()
    }

    fn note(&self, op: Op, offset: u64, len: u64) {
        self.recorder.note(op, offset, len);
        let lane = crate::sync::shard(LOG_LANES);
        self.accesses.push_in(lane, op, BlockRange::covering(offset, len));
    }

    /// Counters since the disk was made.
    pub fn stats(&self) -> DiskStats {
        DiskStats { cancelled_blocks: self.missing.cancelled_blocks(), ..self.counters.total() }
    }

    /// Bytes of memory that the maps and the log of this disk take.
    pub fn memory_bytes(&self) -> usize {
        let log = LOG_LANES * LOG_PLACES * size_of::<u64>();
        self.tracker.memory_bytes()
            + self.history.memory_bytes()
            + self.missing.memory_bytes()
            + self.keeper.memory_bytes()
            + log
    }
}
