//! [`ImageState`]: what the source knows of one image, and how much of it was sent.

use super::blocks::Blocks;
use dray_types::{BlockRange, BlockSet, Schedule};
use dray_wire::frame::mask_bit;

#[derive(Default, Debug)]
pub(super) struct ImageState {
    pub(super) blocks: Blocks,
    /// What the image held at the start; none until it was scanned.
    pub(super) data: Option<BlockSet>,
    /// The order in which the target should fetch what it misses; none until the shell names one,
    /// which is address order as such. One without ranges is told: nothing is known of the guest.
    pub(super) backfill: Option<Schedule>,
    pub(super) blocks_sent: u64,
    pub(super) blocks_resent: u64,
    /// Blocks that were described and found at the target.
    pub(super) blocks_found: u64,
}

impl ImageState {
    /// A run of data is sent.
    pub(super) fn count(&mut self, range: BlockRange) {
        self.blocks_sent += range.len;
        self.blocks_resent += self.blocks.sent_of(range);
    }

    /// A part of a run is sent: blocks that the mask names.
    pub(super) fn count_part(&mut self, range: BlockRange, part: &[u64; 4]) {
        let block = |nth: &u64| mask_bit(part, *nth);
        for nth in (0..range.len).filter(block) {
            self.count(BlockRange::new(range.start + nth, 1));
        }
    }
}
