//! What goes into the target's machine and what comes out of it.

use crate::Phase;
use crate::record::TargetRecord;
use dray_types::{BlockRange, ErrorKind, ImageIndex, MigrationId, Schedule, Why};
use dray_wire::{Envelope, ImageHandover, ImageOffer, ToSource, ToTarget};

/// What was prepared at the target.
#[derive(Clone, Debug)]
pub struct TargetPlan {
    /// The migration.
    pub migration: MigrationId,
    /// Its images, in the migration's order.
    pub images: Vec<ImageOffer>,
    /// Per image: what was never received reads as zeros (a new sparse file).
    pub zeroed: Vec<bool>,
    /// Per image: it begins with what lay here, of which the source sends only what differs.
    pub based: Vec<bool>,
}

/// What became of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Written before handover, or filled into missing blocks after it.
    Written,
    /// A described run: its content was found here and written as other arrivals are, but for the
    /// pieces whose bits are set. Nothing was written of these.
    Partly {
        /// Bit `i` set: piece `i` of the run lacks.
        lacking: u16,
        /// Those of them of which blocks may be here; none unless the session agreed on
        /// `dray_wire::control::FEATURE_REUSE`.
        near: u16,
    },
    /// Described blocks: they were found here and written, or are in their place already, but for
    /// those whose bits are set.
    SomeBlocks {
        /// Bit `i` set: block `i` of the run lacks.
        lacking: [u64; 4],
    },
    /// It did not match its hash; nothing was written.
    Damaged,
    /// The target's disk refused it.
    Failed(DiskFault),
}

/// What a disk of the target refused to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskFault {
    /// It is full, or it fails.
    pub kind: ErrorKind,
    /// In its words.
    pub why: String,
}

impl From<String> for DiskFault {
    /// One that fails.
    fn from(why: String) -> Self {
        Self { kind: ErrorKind::Io, why }
    }
}

/// Something happened at the target.
#[derive(Clone, Debug)]
pub enum TargetEvent {
    /// The machine begins, new or after a restart; comes once, first.
    Start,
    /// A session was made by the source.
    LinkUp,
    /// The session is lost.
    LinkDown,
    /// A message from the source.
    Message(Envelope<ToTarget>),
    /// A frame arrived and was dealt with.
    RunArrived {
        /// Its tag.
        tag: u64,
        /// Which image.
        image: ImageIndex,
        /// Which blocks.
        range: BlockRange,
        /// What became of it.
        arrival: Arrival,
    },
    /// A guest waits for blocks.
    Demand {
        /// Which image.
        image: ImageIndex,
        /// The missing runs to fetch: those it waits for and missing ones around them.
        runs: Vec<BlockRange>,
    },
    /// Answer to `AskMissing`.
    NextMissing {
        /// Which image.
        image: ImageIndex,
        /// The first missing run in the range asked for (it may be cut off at the range's end or
        /// not); none when nothing is missing there.
        run: Option<BlockRange>,
    },
    /// Answer to `SyncImages`.
    ImagesSynced {
        /// The number it was given.
        id: u64,
        /// Whether it worked.
        result: Result<(), DiskFault>,
    },
    /// Answer to `Checkpoint`.
    Checkpointed {
        /// The number it was given.
        id: u64,
        /// Whether it worked; an error too when blocks are missing that nobody fetches.
        result: Result<(), Why>,
    },
    /// A change waits at a disk that is exposed and does not let changes through yet. The guest has gone on without
    /// being started by this side, or another client writes.
    ChangeWaits,
    /// Answer to `ReachGuest`.
    GuestReachable(Result<(), Why>),
    /// Answer to `StartGuest`.
    GuestStarted(Result<(), Why>),
    /// Time passes; at least every 100 ms.
    Tick,
    /// No further event waits: acknowledgements that were held together may go.
    Idle,
    /// The operator starts or pauses Backfill, possible from ownership until completion; any
    /// strategy can be paused, a deferred migration begins paused. Survives a restart. How fast
    /// Backfill goes is the pace of the shell's streams, as for Copy.
    BackfillControl(BackfillControl),
    /// In which order this host's own heat would fetch the rest of an image. Replaces the order
    /// that the source sent; a later one of the source replaces it.
    Schedule {
        /// Which image.
        image: ImageIndex,
        /// What is read most comes first.
        backfill: Schedule,
    },
}

/// What the operator wants of Backfill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackfillControl {
    /// Fetch what is missing, in the background.
    Start,
    /// Fetch only what a guest waits for. What is under way still arrives.
    Pause,
}

/// Something the target's shell must do, strictly in the order given.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetEffect {
    /// Send to the source if there is a session; else drop, as a message that [is for
    /// reuse](ToSource::is_reuse) where the session did not agree on that.
    Send(Envelope<ToSource>),
    /// Make the records durable, together, before going on.
    Journal(Vec<TargetRecord>),
    /// Make the images' data durable; answer `ImagesSynced`.
    SyncImages {
        /// Comes back with the answer.
        id: u64,
    },
    /// The file of an image on its way here holds nothing from now on, durably: neither what it had nor the room that
    /// it took. No frame is being written. Idempotent.
    BeginAnew {
        /// Which image.
        image: ImageIndex,
    },
    /// The disks answer reads and flushes from now on; these blocks are missing. Changes wait until `LetChange`: the
    /// first one is told with `ChangeWaits`.
    Expose {
        /// Per image: length and missing blocks as agreed at handover.
        images: Vec<ImageHandover>,
    },
    /// The disks take changes from now on.
    LetChange,
    /// The disks stop serving: the images go back.
    Withdraw,
    /// See whether the guest's QEMU answers; answer `GuestReachable`.
    ReachGuest,
    /// Let the guest run; answer `GuestStarted`.
    StartGuest,
    /// Look in the live map of missing blocks; answer `NextMissing`, exactly once.
    AskMissing {
        /// Which image.
        image: ImageIndex,
        /// Where to look. Never answer "none" for blocks that are missing: they would not be
        /// asked for again.
        range: BlockRange,
        /// Longest run wanted.
        max: u64,
    },
    /// Data sync, then a durable record of every block present; answer `Checkpointed`.
    Checkpoint {
        /// Comes back with the answer.
        id: u64,
    },
    /// Every block is here: give the files their names. Idempotent.
    Finish,
    /// Remove what was received.
    Discard,
    /// For people and programs.
    Notice(TargetNotice),
}

/// What the target has to say to those who watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetNotice {
    /// A phase began.
    Phase(Phase),
    /// This side owns the images.
    Serving,
    /// The guest runs here.
    GuestRunning,
    /// The guest was to be started and did not answer; an operator must look.
    GuestFailed {
        /// Why.
        why: String,
    },
    /// The images were handed back.
    HandedBack {
        /// Why.
        why: String,
    },
    /// The source cannot read blocks that are missing here.
    Unreadable {
        /// Which image.
        image: ImageIndex,
        /// Which blocks.
        range: BlockRange,
        /// What the source said.
        why: String,
    },
    /// The migration failed before handover.
    Failed {
        /// Why.
        why: String,
    },
    /// The source ended the migration before handover.
    Abandoned {
        /// What was received is gone.
        discarded: bool,
    },
    /// Every block is here.
    Complete,
    /// The request came too late or too early.
    Refused {
        /// Why.
        why: String,
    },
}

/// Progress of a target, for people and programs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TargetStatus {
    /// Per image: blocks received before handover.
    pub received: Vec<u64>,
    /// Fetches under way.
    pub fetching: usize,
    /// Measured rate of Backfill in bytes a second.
    pub rate: f64,
    /// Demand fetches sent because a guest waited.
    pub demands: u64,
    /// Backfill fetches only what a guest waits for.
    pub paused: bool,
    /// Blocks asked for since the agent started, counting repetitions.
    pub blocks_fetched: u64,
    /// Those of them that were asked for before: after a lost link, a damaged frame, a disk error.
    pub blocks_refetched: u64,
    /// Per image: missing blocks that were found here since the agent started, and not fetched.
    pub blocks_found: Vec<u64>,
    /// Whether there is a session.
    pub link_up: bool,
}
