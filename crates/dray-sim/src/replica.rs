//! A target that was there before: its disk is a replica of an earlier generation, and the source
//! knows from the line's changed sets what it need not send.
//!
//! The sets are kept as the agent keeps them: memory, and durable records in which a region is open
//! before the first write into it. What a crash leaves of them decides what is shared.

use crate::faults::Setup;
use crate::rng::Rng;
use crate::source::SourceHost;
use crate::target::TargetHost;
use dray_engine::lineage::{Lineage, LineageRecord, fits, recover};
use dray_types::{BlockRange, BlockSet, GenerationId};
use std::collections::BTreeSet;

/// Blocks of a region: small, so that images here have several.
const REGION: u64 = 16;
/// Generations between the replica's and the open one at most, as after A, B, C and back to A.
const MAX_OWNERS: u64 = 3;
/// First version of what those owners' guests wrote.
const EARLIER: u64 = 1 << 56;

/// The line of one image at its owner.
pub(crate) struct Line {
    lineage: Lineage,
    base: GenerationId,
    /// Written in the closed generations after the base.
    closed: BlockSet,
    /// Written in the open generation; memory.
    changed: BlockSet,
    open: BTreeSet<u64>,
    // Durable:
    records: Vec<LineageRecord>,
}

impl Line {
    /// A write into `range` begins.
    pub(crate) fn mark(&mut self, range: BlockRange) {
        self.changed.insert(range);
        for region in range.start / REGION..=(range.end() - 1) / REGION {
            if self.open.insert(region) {
                self.records.push(LineageRecord::Opened { region });
            }
        }
    }

    /// Regions are closed: a durable set names what was written.
    pub(crate) fn close_regions(&mut self) {
        let (lineage, changed) = (self.lineage.clone(), self.changed.clone());
        self.records = vec![LineageRecord::Whole { lineage, changed }];
        self.open.clear();
    }

    /// Memory is gone, the agent reads its records.
    pub(crate) fn restart(&mut self) {
        if let Some(found) = recover(&self.records, REGION) {
            self.changed = found.changed;
            self.close_regions();
        }
    }

    /// Whether the block may have been written since the replica was left behind.
    pub(crate) fn may_differ(&self, block: u64) -> bool {
        self.closed.contains(block) || self.changed.contains(block)
    }

    /// Blocks that the target's replica holds as they are here.
    pub(crate) fn shared(&self, blocks: u64) -> BlockSet {
        let changed = self.lineage.changed_since(self.base, &self.changed);
        changed.map_or_else(BlockSet::new, |set| set.complement_in(BlockRange::new(0, blocks)))
    }
}

/// Gives some images of the run a past: the target gets what they were, the source what they are.
pub(crate) fn give_pasts(
    setup: &Setup,
    rng: &mut Rng,
    source: &mut SourceHost,
    target: &mut TargetHost,
) -> Vec<Option<Line>> {
    let mut lines = Vec::new();
    for (ix, image) in setup.images.iter().enumerate() {
        lines.push(image.replica.then(|| {
            for block in 0..image.blocks {
                let was = source.disks[ix].read(block);
                target.disks[ix].write(block, was);
            }
            let snapshot = target.disks[ix].snapshot();
            target.disks[ix].settle(&snapshot);
            let line = owners(rng, |rng, version| {
                let range = some_range(rng, image.blocks);
                for block in range.start..range.end() {
                    let version = if version.is_multiple_of(5) { 0 } else { version + block };
                    source.disks[ix].write(block, version);
                }
                range
            });
            let snapshot = source.disks[ix].snapshot();
            source.disks[ix].settle(&snapshot);
            line
        }));
    }
    lines
}

/// The line after the replica's owner has handed the image over, and others after it, each with a
/// guest that writes.
fn owners(rng: &mut Rng, mut write: impl FnMut(&mut Rng, u64) -> BlockRange) -> Line {
    let mut id = u128::from(rng.below(1 << 30)) << 64;
    let mut next = || {
        id += 1;
        GenerationId(id)
    };
    let mut lineage = Lineage::new(next());
    let base = lineage.open();
    let mut version = EARLIER;
    let mut changed = BlockSet::new();
    for owner in 0..rng.between(1, MAX_OWNERS) {
        let past = lineage.closed(std::mem::take(&mut changed), "host", owner);
        lineage = Lineage::after(past, next()).expect("numbers ascend");
        for _ in 0..rng.below(8) {
            version += 1 << 32;
            changed.insert(write(rng, version));
        }
    }
    fits(&lineage.ancestors(), base).expect("the replica is behind its owner");
    let closed = lineage.changed_since(base.id, &BlockSet::new()).expect("it is behind");
    let (base, open, records) = (base.id, BTreeSet::new(), Vec::new());
    let mut line = Line { lineage, base, closed, changed, open, records };
    line.close_regions();
    line
}

fn some_range(rng: &mut Rng, blocks: u64) -> BlockRange {
    let start = rng.below(blocks);
    BlockRange::new(start, rng.between(1, 24.min(blocks - start)))
}
