//! Mirroring: a guest's write to a block that was already copied is sent as well.
//!
//! The guest does not wait for it: its write is done when it is done here, with its blocks dirty in
//! the tracker, and only then the shell tells of it. So nothing depends on a mirrored frame: a write
//! that finds the window full, or no link, simply stays dirty and is sent by a round of Sync.
//!
//! Whether a block was already copied is known block by block: what is still in `todo` Copy will
//! bring in its newest version, what is in flight waits in `held` until that frame has landed (two
//! versions of a block are never under way at once), and everything else is mirrored.

use super::{ImageState, Link, Source, SourceEffect, Stage};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, ImageIndex, MAX_RUN_BLOCKS};

impl Source {
    pub(super) fn written(
        &mut self,
        image: ImageIndex,
        range: BlockRange,
        out: &mut Vec<SourceEffect>,
    ) {
        let listens = matches!(self.stage, Stage::Copy | Stage::Sync | Stage::Ready);
        if !self.plan.strategy.mirrors() || !listens || self.link != Link::Up || !self.opened {
            return;
        }
        let Some(offer) = self.plan.images.get(image.ix()) else { return };
        let range = crate::order::clip(range, BlockRange::whole(offer.len));
        let room = self.plan.tuning.mirror_window.saturating_sub(self.mirror_bytes) / BLOCK_SIZE;
        let queued = self.images[image.ix()].mirror(range, room);
        self.mirror_bytes += queued * BLOCK_SIZE;
        self.pump(out);
    }

    pub(super) fn send_mirrored(&mut self, out: &mut Vec<SourceEffect>) -> bool {
        let Some(ix) = self.images.iter().position(|image| !image.mirror.is_empty()) else {
            return false;
        };
        let Some(range) = self.images[ix].mirror.next_run(0, MAX_RUN_BLOCKS) else { return false };
        self.images[ix].mirror.remove(range);
        self.blocks_mirrored += range.len;
        self.send_run(ImageIndex(ix as u16), range, true, out);
        true
    }

    /// What waits to be mirrored is dirty in the tracker, and that is enough.
    pub(super) fn forget_mirrored(&mut self) {
        for image in &mut self.images {
            self.mirror_bytes -= image.mirror.len() * BLOCK_SIZE;
            image.mirror = BlockSet::new();
        }
    }

    /// A round of Sync brings these blocks.
    pub(super) fn not_mirrored(&mut self, image: ImageIndex, blocks: &BlockSet) {
        let mirror = &mut self.images[image.ix()].mirror;
        if !mirror.is_empty() {
            let before = mirror.len();
            mirror.subtract(blocks);
            self.mirror_bytes -= (before - mirror.len()) * BLOCK_SIZE;
        }
    }
}

impl ImageState {
    /// Queues what Copy will not bring, at most `room` blocks of it; returns how many are new.
    fn mirror(&mut self, range: BlockRange, room: u64) -> u64 {
        // To be named as zeros, and now it holds something.
        self.zeros.remove(range);
        self.held.union_with(&self.flying.intersection(range));
        let mut fresh = self.flying.complement_in(range);
        fresh.subtract(&self.todo.blocks().intersection(range));
        fresh.subtract(&self.unsure.intersection(range));
        fresh.subtract(&self.mirror.intersection(range));
        let mut left = room;
        for run in fresh.runs() {
            let (fits, _) = run.split_at_most(left);
            self.mirror.insert(fits);
            left -= fits.len;
        }
        room - left
    }
}
