//! A target that was there before: its disk is a replica of an earlier generation, and the source
//! knows from the line's changed sets what it need not send.
//!
//! The sets are kept as the agent keeps them: memory, and durable records in which a region is open
//! before the first write into it. What a crash leaves of them decides what is shared.

use dray_engine::lineage::{Lineage, LineageRecord, recover};
use dray_types::{BlockRange, BlockSet, GenerationId};
use std::collections::BTreeSet;

/// Blocks of a region: small, so that images here have several.
const REGION: u64 = 16;
/// The line of one image at its owner.
pub(crate) struct ImageLineage {
    pub(crate) lineage: Lineage,
    pub(crate) base: GenerationId,
    /// Written in the closed generations after the base.
    pub(crate) closed: BlockSet,
    /// Written in the open generation; memory.
    pub(crate) changed: BlockSet,
    pub(crate) open: BTreeSet<u64>,
    // Durable:
    pub(crate) records: Vec<LineageRecord>,
}

impl ImageLineage {
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
