//! What each side makes durable. A restart replays the records in order and nothing else (I1).

use dray_types::{Attempt, BlockSet, Epoch, ImageIndex};
use dray_wire::{HandedOver, ImageHandover, MapHash};
use serde::{Deserialize, Serialize};

/// A record of the source's side of a migration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SourceRecord {
    /// The attempt's number is taken; written before anything is asked of the target.
    Attempt {
        /// The number.
        attempt: Attempt,
    },
    /// The attempt is void: the target's promise for it is worth nothing.
    Void {
        /// The number.
        attempt: Attempt,
    },
    /// The point of no return: from here only the target may serve (I5).
    HandedOver(HandedOver),
    /// The target gave the images back without having served; the source owns them again.
    TakenBack {
        /// The epoch in which the source serves.
        epoch: Epoch,
    },
    /// The target has everything; the source's copy is a replica.
    Done,
    /// The operator cancelled, or the migration failed, before handover.
    Abandoned,
    /// An abandoned migration goes on with what its target still has.
    Resumed,
    /// Everything written before tracking began is durable: from here the write-intent regions
    /// name all that a power cut can undo.
    Settled,
    /// The migration began: blocks may be sent from here on.
    Begun,
}

/// What becomes of the source's step when a record of it cannot be made durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unrecorded {
    /// It goes on: a restart that does not find the record decides the same, or trusts less.
    GoesOn,
    /// It waits: the shell tries until the record is durable, and does nothing else meanwhile.
    Waits,
    /// It ends, if the record is certainly not there: the shell drops what is left of the step and
    /// tells the machine. As long as nobody knows whether it is there, it waits.
    Ends,
}

impl SourceRecord {
    /// What becomes of its step when this cannot be made durable.
    pub fn unrecorded(&self) -> Unrecorded {
        match self {
            // An attempt without an outcome is void, and what is not settled is compared.
            Self::Void { .. } | Self::Settled => Unrecorded::GoesOn,
            // Nothing was asked of anybody on the strength of these.
            Self::Attempt { .. } | Self::HandedOver(_) | Self::Begun => Unrecorded::Ends,
            Self::TakenBack { .. } | Self::Done | Self::Abandoned | Self::Resumed => {
                Unrecorded::Waits
            }
        }
    }
}

/// A record of the target's side of a migration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum TargetRecord {
    /// These blocks are on the target's disk, durably; written after a data sync.
    Received {
        /// Which image.
        image: ImageIndex,
        /// Blocks received since the last such record.
        blocks: BlockSet,
    },
    /// The promise: data is durable, and this side serves as soon as it hears `Commit`.
    Prepared {
        /// The attempt.
        attempt: Attempt,
        /// What was agreed.
        map_hash: MapHash,
        /// Length and missing blocks of each image.
        images: Vec<ImageHandover>,
        /// The epoch in which the source had them.
        epoch: Epoch,
    },
    /// The promise for the attempt is void; the source never handed over.
    Void {
        /// The attempt.
        attempt: Attempt,
    },
    /// The source has handed over: this side owns the images.
    Committed(HandedOver),
    /// The guest is about to be started, or something else is about to change the images; from here on they cannot be
    /// handed back.
    GuestStarting,
    /// The guest was started.
    GuestStarted,
    /// The guest could not be reached, and nothing has changed the images here; they go back.
    Fenced,
    /// Every block is here, durably.
    Complete,
    /// The migration ended before handover; what was received is gone.
    Discarded,
    /// Frames may arrive from here on: after a restart, what no record names can be anything.
    Touched,
    /// A data sync failed: what it covered is not to be trusted, whatever earlier records say. The file is begun anew
    /// before anything is received into it again.
    Lost {
        /// Which image.
        image: ImageIndex,
        /// Blocks that were received or overwritten since they were last durable.
        blocks: BlockSet,
    },
    /// From here on Backfill fetches only what guests wait for, or everything again.
    BackfillPaused {
        /// Only what guests wait for.
        paused: bool,
    },
    /// Another program may have changed the image's file while no agent had it open, and no guest has written to it
    /// here: all of it is missing, whatever earlier records say. The shell writes it between two lives, and makes the
    /// file zeros if nothing is promised. The machine writes it before a file that has lost writes is begun anew.
    Distrusted {
        /// Which image.
        image: ImageIndex,
    },
}

impl TargetRecord {
    /// Whether nothing but sending blocks again is lost with it: it need not be written where there
    /// is no room, and nothing waits for it.
    pub fn may_be_left_out(&self) -> bool {
        matches!(self, Self::Received { .. })
    }
}
