//! Blocks that are mirrored: written after they were copied, dirty in the tracker, and sent as well.

use super::Blocks;
use dray_types::{BlockRange, BlockSet, MAX_RUN_BLOCKS};

impl Blocks {
    /// The guest has written: queues what Copy will not bring and Backfill need not, at most `room`
    /// blocks of it. Returns how many are new.
    pub(in crate::source) fn written(&mut self, range: BlockRange, room: u64) -> u64 {
        // To be named as zeros, and now it holds something.
        self.zeros.remove(range);
        let mut fresh = self.flying.complement_in(range);
        fresh.subtract(&self.todo.blocks().intersection(range));
        fresh.subtract(&self.unsure.intersection(range));
        let mut again = self.flying.intersection(range);
        again.subtract(&self.held.intersection(range));
        let mut left = room;
        let known = [&self.mirror, &self.again, &self.rest].map(|set| set.intersection(range));
        for (waits, into) in [(&mut fresh, &mut self.mirror), (&mut again, &mut self.again)] {
            known.iter().for_each(|known| waits.subtract(known));
            for run in waits.runs() {
                let (fits, _) = run.split_at_most(left);
                into.insert(fits);
                left -= fits.len;
            }
        }
        room - left
    }

    /// The next mirrored blocks are on their way.
    pub(in crate::source) fn launch_mirrored(&mut self) -> Option<BlockRange> {
        let range = self.mirror.next_run(0, MAX_RUN_BLOCKS)?;
        self.mirror.remove(range);
        self.fly(range);
        Some(range)
    }

    /// Blocks have landed that were written while they were in flight.
    pub(super) fn land_mirrored(&mut self, range: BlockRange) {
        if !self.again.is_empty() {
            // Not to `todo`: it would come before what was never sent, again and again.
            let free = self.again.intersection(range);
            self.again.subtract(&free);
            self.mirror.union_with(&free);
        }
    }

    /// A round of Sync brings these blocks; returns how many of them waited to be mirrored.
    pub(in crate::source) fn not_mirrored(&mut self, blocks: &BlockSet) -> u64 {
        let mut fewer = 0;
        for waits in [&mut self.mirror, &mut self.again] {
            if !waits.is_empty() {
                let before = waits.len();
                waits.subtract(blocks);
                fewer += before - waits.len();
            }
        }
        fewer
    }

    /// Nothing waits to be mirrored any more; returns how many blocks did.
    pub(in crate::source) fn forget_mirrored(&mut self) -> u64 {
        let sets = [&mut self.mirror, &mut self.again];
        sets.into_iter().map(|set| std::mem::take(set).len()).sum()
    }
}
