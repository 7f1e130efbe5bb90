//! What goes into the source's machine and what comes out of it.

use crate::Phase;
use crate::record::SourceRecord;
use crate::strategy::Tuning;
use crate::throttle::WriteLimit;
use dray_types::{
    BlockRange, BlockSet, Epoch, ErrorKind, ImageIndex, MigrationId, Refusal, Schedule,
    StrategyTraits, Why,
};
use dray_wire::{Envelope, ImageOffer, ToSource, ToTarget};

/// What to migrate and how.
#[derive(Clone, Debug)]
pub struct SourcePlan {
    /// The migration.
    pub migration: MigrationId,
    /// Its images.
    pub images: Vec<ImageOffer>,
    /// Which blocks move when.
    pub strategy: StrategyTraits,
    /// The epoch in which the source owns the images.
    pub epoch: Epoch,
    /// Longest downtime the operator accepts, in nanoseconds; Sync ends when the rest fits in it.
    pub max_downtime: u64,
    /// A handover that has not succeeded after this long is void, in nanoseconds.
    pub handover_timeout: u64,
    /// Per image, blocks of which it is not known whether they changed since the target received
    /// them (regions open at an unclean stop). Empty for a source that tracked all along.
    pub suspect: Vec<BlockSet>,
    /// Settings beyond the strategy.
    pub tuning: Tuning,
}

/// Something happened at the source.
#[derive(Clone, Debug)]
pub enum SourceEvent {
    /// The migration begins; comes once, first.
    Start,
    /// A session with the target is established.
    LinkUp,
    /// The session is lost.
    LinkDown,
    /// A message from the target.
    Message(Envelope<ToSource>),
    /// Part of the answer to `Scan`, before `Scanned`: blocks that the target's replica of an earlier
    /// generation holds as they are here. Computed after `StartTracking` was carried out, from the
    /// changed sets of all later generations (`lineage::Lineage::changed_since`), and anew in every
    /// life: a write from here on is in the tracker, one from before is in those sets. No blocks when nobody
    /// vouches for the replica: all of it is compared.
    Shared {
        /// Which image.
        image: ImageIndex,
        /// The blocks.
        blocks: BlockSet,
    },
    /// Answer to `Scan`: blocks that hold data; all others read as zeros.
    Scanned {
        /// Which image.
        image: ImageIndex,
        /// Its data blocks.
        data: BlockSet,
    },
    /// A run could not be read.
    RunFailed {
        /// Its tag.
        tag: u64,
        /// What the disk said.
        why: String,
    },
    /// Answer to `TakeDirty`: blocks written since they were last taken.
    DirtyTaken {
        /// Which image.
        image: ImageIndex,
        /// The blocks, no longer dirty in the tracker.
        blocks: BlockSet,
    },
    /// Answer to `Quiesce`: no guest write is in flight and none can start.
    Quiesced {
        /// Length of each image's file in bytes.
        lens: Vec<u64>,
    },
    /// Answer to `Quiesce`: the guest's writes did not drain in time.
    QuiesceFailed {
        /// What stood in the way.
        why: String,
    },
    /// Answer to `SyncImages`.
    ImagesSynced(Result<(), Why>),
    /// A record whose step [`Ends`](crate::record::Unrecorded::Ends) is not durable and never will
    /// be. Comes right after the step that wanted it, before any other event; of that step nothing
    /// was carried out after the record.
    NotRecorded {
        /// Which.
        record: SourceRecord,
        /// What stood in the way: there is no room, or the disk fails.
        kind: ErrorKind,
        /// In the system's words.
        why: String,
    },
    /// The guest no longer runs here: hand over now.
    BeginHandover,
    /// The VM's own migration failed and the guest goes on here: an attempt under way is void.
    AbortHandover {
        /// Why.
        why: String,
    },
    /// The operator wants it to end.
    Cancel {
        /// Remove what the target received instead of keeping it for a next try.
        discard: bool,
    },
    /// Time passes; at least every 100 ms.
    Tick,
    /// The orders in which an image's blocks should move, as far as its heat tells by now. May come
    /// at any time and as often as the shell likes ([`Refresh`](crate::refresh::Refresh)); until the first
    /// one comes blocks move in address order. What is under way stays under way. A restarted
    /// source begins without any.
    Schedule {
        /// Which image.
        image: ImageIndex,
        /// For Copy and the rounds of Sync: what is written most comes last.
        copy: Schedule,
        /// For Backfill: what is read most comes first. It goes to the target after the handover, so
        /// that it is needed only then; none: it is as it was.
        backfill: Option<Schedule>,
    },
    /// What it costs the source's disk that a run does not follow the one read before. May come
    /// whenever it changes; it goes to the target after the handover.
    Jumps {
        /// Nanoseconds.
        nanos: u64,
    },
    /// `auto`: by now the guest's accesses speak for copying other blocks. May come as often as the
    /// shell likes and counts until Copy ends; what was sent stays sent.
    Choose {
        /// Which image.
        image: ImageIndex,
        /// As one of `Tuning::copy_only`.
        copy_only: BlockSet,
    },
    /// A guest's write is complete here and its blocks are dirty in the tracker. Told only while
    /// `StrategyTraits::mirrors`; a shell may join writes and tell them a little later, must not tell them
    /// before they are complete, and may leave any out (they are sent by a round of Sync then).
    Written {
        /// Which image.
        image: ImageIndex,
        /// Every block that the write touched.
        range: BlockRange,
    },
    /// What the shell knows about content that the target may have. Told before `LinkUp`, and again
    /// whenever it changes; without it, and unless `Tuning::reuse` is set, nothing is described.
    Reuse {
        /// The session agreed on `dray_wire::control::FEATURE_REUSE`.
        known: bool,
        /// Other migrations to the same target are under way: what they have in common with this
        /// one may arrive there any moment.
        together: bool,
    },
}

/// Something the source's shell must do, strictly in the order given.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceEffect {
    /// Send to the target if there is a session; else drop, as a message that [is for
    /// reuse](ToTarget::is_reuse) where the session did not agree on that.
    Send(Envelope<ToTarget>),
    /// Make the record durable before going on; where that fails,
    /// [`SourceRecord::unrecorded`] says what becomes of the step.
    Journal(SourceRecord),
    /// Track writes of all images from now on (write intent included); answers nothing.
    StartTracking,
    /// Stop tracking.
    StopTracking,
    /// Find the blocks that hold data; answer `Scanned`.
    Scan {
        /// Which image.
        image: ImageIndex,
    },
    /// Read and send a run. Before handover its blocks leave the dirty set first, so that a write
    /// during the read makes them dirty again.
    SendRun {
        /// Names the frame.
        tag: u64,
        /// Which image.
        image: ImageIndex,
        /// Which blocks.
        range: BlockRange,
        /// A guest waits for it.
        urgent: bool,
        /// Take the blocks out of the dirty set before reading them.
        clear_dirty: bool,
    },
    /// Send a range of zeros without reading; the dirty set stays as it is.
    SendZero {
        /// Names the frame.
        tag: u64,
        /// Which image.
        image: ImageIndex,
        /// Which blocks.
        range: BlockRange,
    },
    /// Read a run of whole pieces and send their hashes; keep the content until the tag is
    /// acknowledged, or until all that it lacks was sent, or the session is lost. Its blocks leave
    /// the dirty set first, as for `SendRun`. After the handover (`Source::owns` is false) nothing
    /// is kept: the content cannot change any more, and what lacks is fetched like anything else.
    Describe {
        /// Names the frame.
        tag: u64,
        /// Which image.
        image: ImageIndex,
        /// Which blocks.
        range: BlockRange,
    },
    /// Send this part of what was described and kept as a run, as it was read then. The dirty set
    /// stays as it is: what was written since is in it. A shell that has not kept it may read it
    /// again.
    SendKept {
        /// Names the frame.
        tag: u64,
        /// Tag of the description.
        of: u64,
        /// Which image.
        image: ImageIndex,
        /// Which blocks.
        range: BlockRange,
    },
    /// Send the hashes of the blocks of this part of what was described and kept, whole pieces. The
    /// content stays kept as that of this tag: until it is acknowledged, asked for by `Mismatch`, or
    /// sent. The dirty set stays as it is, as for `SendKept`. After the handover nothing was kept, and
    /// nothing is: it is read.
    DescribeBlocks {
        /// Names the frame.
        tag: u64,
        /// Tag of the description that it was a part of.
        of: u64,
        /// Which image.
        image: ImageIndex,
        /// Which blocks.
        range: BlockRange,
    },
    /// Send those blocks of what was described under `of` that the mask names, as they were read
    /// then, in one frame (`FrameKind::Part`).
    SendPart {
        /// Names the frame.
        tag: u64,
        /// Tag of the description of these blocks.
        of: u64,
        /// Which image.
        image: ImageIndex,
        /// What was described.
        range: BlockRange,
        /// Bit `i` set: block `i` of it is sent.
        blocks: [u64; 4],
    },
    /// Take all dirty blocks; answer `DirtyTaken`.
    TakeDirty {
        /// Which image.
        image: ImageIndex,
    },
    /// These blocks are dirty after all.
    PutBack {
        /// Which image.
        image: ImageIndex,
        /// The blocks.
        blocks: BlockSet,
    },
    /// Stop guest writes; answer `Quiesced` or `QuiesceFailed`.
    Quiesce,
    /// Let guest writes go on.
    Resume,
    /// Make the images durable; answer `ImagesSynced`.
    SyncImages,
    /// Part of the handed-over record: park guest I/O of all images, which cannot fail, and then give
    /// the files their replica names. A name that cannot be given is given later: the step goes on,
    /// and nothing is opened for it.
    Retire,
    /// Undo `Retire`.
    Restore,
    /// Hold the guest's writes to this from now on, or to nothing: give it to the gate's
    /// [`crate::throttle::Throttle::set`] and let each write wait as long as its `delay` says,
    /// outside any lock and before the write counts as in flight. Without such an effect writes are
    /// not held; a gate that outlives the engine (its migration is over) must be let go.
    Throttle {
        /// The limit.
        limit: Option<WriteLimit>,
    },
    /// For the VM's orchestration, people and programs.
    Notice(SourceNotice),
}

/// What the source has to say to those who watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceNotice {
    /// A phase began.
    Phase(Phase),
    /// The images are ready for handover as soon as the guest has stopped.
    Ready,
    /// The attempt is void, the guest may go on here.
    HandoverFailed {
        /// Why.
        why: String,
    },
    /// The point of no return is passed.
    HandedOver,
    /// The target serves.
    TargetServing,
    /// The target verified its copy.
    Verified {
        /// Blocks compared.
        blocks: u64,
        /// Blocks that differed.
        different: u64,
    },
    /// The images are back; the guest may go on here.
    TakenBack,
    /// The target has everything.
    Done,
    /// It is over before handover.
    Abandoned {
        /// Why; none when the operator asked for it.
        why: Option<Refusal>,
    },
    /// The request came too late or too early.
    Refused {
        /// Why.
        why: String,
    },
    /// The target contradicts what it promised; an operator must look.
    Broken {
        /// What it said.
        why: String,
    },
}

/// Progress of a source, for people and programs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceStatus {
    /// Per image: blocks still to be sent before handover.
    pub waiting: Vec<u64>,
    /// Per image: blocks acknowledged.
    pub sent: Vec<u64>,
    /// Per image: blocks that the target had in a replica when the migration began.
    pub shared: Vec<u64>,
    /// Per image: blocks that hot-set and auto leave for Backfill.
    pub left: Vec<u64>,
    /// Per image: blocks sent since the agent started, counting repetitions, fetches included.
    pub image_blocks_sent: Vec<u64>,
    /// Per image: those of them that had been sent before.
    pub image_blocks_resent: Vec<u64>,
    /// Per image: blocks that were not sent because the target had their content somewhere.
    pub image_blocks_found: Vec<u64>,
    /// Blocks sent in all, counting repetitions.
    pub blocks_sent: u64,
    /// Blocks sent again because they were written after they were sent.
    pub blocks_resent: u64,
    /// Blocks sent because the guest wrote them and the strategy mirrors.
    pub blocks_mirrored: u64,
    /// Rounds of Sync.
    pub rounds: u32,
    /// Measured rate in bytes a second.
    pub rate: f64,
    /// Whether there is a session.
    pub link_up: bool,
}
