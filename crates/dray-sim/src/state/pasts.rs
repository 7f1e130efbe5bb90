//! Images with a past: the target has a replica of an earlier generation.

use super::replica::ImageLineage;
use crate::faults::Setup;
use crate::rng::Rng;
use crate::state::source::SourceHost;
use crate::state::target::TargetHost;
use dray_engine::lineage::{Lineage, fits};
use dray_types::{BlockRange, BlockSet, GenerationId};
use std::collections::BTreeSet;

/// Generations between the replica's and the open one at most, as after A, B, C and back to A.
const MAX_OWNERS: u64 = 3;
/// First version of what those owners' guests wrote.
const EARLIER: u64 = 1 << 56;

/// Gives some images of the run a past: the target gets what they were, the source what they are.
pub(crate) fn give_pasts(
    setup: &Setup,
    rng: &mut Rng,
    source: &mut SourceHost,
    target: &mut TargetHost,
) -> Vec<Option<ImageLineage>> {
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
fn owners(rng: &mut Rng, mut write: impl FnMut(&mut Rng, u64) -> BlockRange) -> ImageLineage {
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
    let mut line = ImageLineage { lineage, base, closed, changed, open, records };
    line.close_regions();
    line
}

fn some_range(rng: &mut Rng, blocks: u64) -> BlockRange {
    let start = rng.below(blocks);
    BlockRange::new(start, rng.between(1, 24.min(blocks - start)))
}
