//! What the checkers of the invariants remember, and what a run counts.

use crate::faults::Setup;
use dray_engine::SECOND;
use dray_types::Epoch;

/// A migration must be over this long after the last fault, in virtual nanoseconds.
pub(crate) const LIVENESS: u64 = 300 * SECOND;

/// What the checkers remember.
pub(crate) struct Tally {
    pub(crate) source_epoch: Epoch,
    pub(crate) target_epoch: Epoch,
    /// Per image and block: a version is under way to the target in this session.
    pub(crate) flying: Vec<Vec<bool>>,
    /// Per image and block: how often it crossed the wire.
    pub(crate) crossings: Vec<Vec<u8>>,
    pub(crate) crashes: u64,
    pub(crate) drops: u64,
    pub(crate) damaged: u64,
    pub(crate) read_errors: u64,
    pub(crate) write_errors: u64,
    /// What the target could not write and tried again.
    pub(crate) full: u64,
    /// Files that another program has changed while they came.
    pub(crate) edited: u64,
    /// Pieces that were described, and those of them that the target had.
    pub(crate) described: u64,
    pub(crate) found: u64,
    /// The same of those that Backfill asked about.
    pub(crate) asked: u64,
    pub(crate) asked_found: u64,
    /// Blocks that the target had of pieces that it lacked.
    pub(crate) blocks_found: u64,
    /// The operator is going to resume an abandoned migration.
    pub(crate) resuming: bool,
}

impl Tally {
    pub(crate) fn new(setup: &Setup) -> Self {
        let sizes = || setup.images.iter().map(|image| image.blocks as usize);
        Self {
            source_epoch: Epoch(setup.epoch),
            target_epoch: Epoch(0),
            flying: sizes().map(|blocks| vec![false; blocks]).collect(),
            crossings: sizes().map(|blocks| vec![0; blocks]).collect(),
            crashes: 0,
            drops: 0,
            damaged: 0,
            read_errors: 0,
            write_errors: 0,
            full: 0,
            edited: 0,
            described: 0,
            found: 0,
            asked: 0,
            asked_found: 0,
            blocks_found: 0,
            resuming: false,
        }
    }

    pub(crate) fn new_session(&mut self) {
        self.flying.iter_mut().for_each(|image| image.fill(false));
    }

    /// A described piece was looked up, in Backfill or before it.
    pub(crate) fn looked_up(&mut self, backfill: bool, found: bool) {
        let (looked, counted) = match backfill {
            true => (&mut self.asked, &mut self.asked_found),
            false => (&mut self.described, &mut self.found),
        };
        *looked += 1;
        *counted += u64::from(found);
    }

    pub(crate) fn source_reborn(&mut self, epoch: Epoch) {
        self.source_epoch = epoch;
    }

    pub(crate) fn target_reborn(&mut self, epoch: Epoch) {
        self.target_epoch = epoch;
    }
}
