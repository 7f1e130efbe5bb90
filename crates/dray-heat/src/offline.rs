//! The paper's algorithms as written down there: slow, over a recorded history, obviously right.
//!
//! For the simulator, and the oracle that the incremental [`Heat`](crate::Heat) is tested against.

use crate::op::Op;
use dray_types::{BlockRange, BlockSet, Schedule};
use std::collections::BTreeMap;

/// What figure 9 found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The neighbourhood size with the greatest balanced coverage, in blocks, within the bounds.
    pub chunk_blocks: u64,
    /// Share of the second part's blocks within that distance of the first part's, 0 to 1.
    pub access: f64,
    /// Share of the image within that distance of the first part's blocks, 0 to 1.
    pub storage: f64,
}

/// Chunk sizes that [`chunk_size`] may answer, in blocks: the paper's 512 bytes are less than a
/// block here, so that the lower bound is one block; the upper one is 1 GiB.
pub const BOUNDS: (u64, u64) = (1, 1 << 18);

/// The paper's figure 9: the neighbourhood size that maximises balanced coverage.
///
/// `accesses` are `(time, blocks)` in the order of time; those before `alpha` (0 to 1, the paper
/// takes 0.7) of the time from the first to the last are the first part. Candidates are 1000 equal
/// steps from the least to the greatest distance of a block of the second part to the first. None
/// when a part is empty.
pub fn chunk_size(
    accesses: &[(f64, BlockRange)],
    alpha: f64,
    blocks: u64,
    bounds: (u64, u64),
) -> Option<Estimate> {
    let (from, to) = (accesses.first()?.0, accesses.last()?.0);
    let part = |first: bool| {
        let mut set = BlockSet::new();
        for (time, range) in accesses {
            if (time - from < (to - from) * alpha) == first {
                set.insert(range.intersect(BlockRange::new(0, blocks)));
            }
        }
        set
    };
    let first: Vec<BlockRange> = part(true).runs().collect();
    let mut distances: Vec<u64> = part(false)
        .runs()
        .flat_map(|run| run.start..run.end())
        .map(|block| distance(&first, block))
        .collect::<Option<_>>()?;
    distances.sort_unstable();
    let (least, greatest) = (*distances.first()?, *distances.last()?);
    let mut best: Option<Estimate> = None;
    for step in 0..=1000 {
        let distance = least + (greatest - least) * step / 1000;
        let within = distances.partition_point(|&d| d <= distance);
        let access = within as f64 / distances.len() as f64;
        let storage = expanded(&first, distance, blocks) as f64 / blocks as f64;
        if best.is_none_or(|best| access - storage > best.access - best.storage) {
            best = Some(Estimate { chunk_blocks: distance, access, storage });
        }
    }
    let best = best?;
    Some(Estimate { chunk_blocks: best.chunk_blocks.clamp(bounds.0, bounds.1), ..best })
}

/// Distance from a block to the nearest of `runs`, which are in address order.
fn distance(runs: &[BlockRange], block: u64) -> Option<u64> {
    let after = runs.partition_point(|run| run.start <= block);
    let below = after.checked_sub(1).map(|at| block.saturating_sub(runs[at].end() - 1));
    let above = runs.get(after).map(|run| run.start - block);
    below.into_iter().chain(above).min()
}

/// Blocks of the image within `distance` of `runs`.
fn expanded(runs: &[BlockRange], distance: u64, blocks: u64) -> u64 {
    let (mut covered, mut at) = (0, 0);
    for run in runs {
        let from = run.start.saturating_sub(distance).max(at);
        let to = (run.end() + distance).min(blocks).max(from);
        covered += to - from;
        at = to;
    }
    covered
}

/// The paper's figure 7 for a chunk size: chunk frequencies, sorted, ties by number. `accesses` are
/// all of one kind, `op`.
pub fn schedule(op: Op, accesses: &[BlockRange], chunk_blocks: u64, blocks: u64) -> Schedule {
    let mut frequencies: BTreeMap<u64, u64> = BTreeMap::new();
    for range in accesses {
        for block in range.start..range.end().min(blocks) {
            *frequencies.entry(block / chunk_blocks).or_default() += 1;
        }
    }
    let chunk = |id: u64| {
        let start = id * chunk_blocks;
        BlockRange::new(start, chunk_blocks.min(blocks - start))
    };
    let mut accessed: Vec<(u64, u64)> = frequencies.iter().map(|(&id, &f)| (id, f)).collect();
    match op {
        Op::Write => accessed.sort_by_key(|&(id, frequency)| (frequency, id)),
        Op::Read => accessed.sort_by_key(|&(id, frequency)| (u64::MAX - frequency, id)),
    }
    let rest = (0..blocks.div_ceil(chunk_blocks)).filter(|id| !frequencies.contains_key(id));
    let accessed = accessed.iter().map(|&(id, _)| id);
    match op {
        Op::Write => rest.chain(accessed).map(chunk).collect(),
        Op::Read => accessed.chain(rest).map(chunk).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_neighbourhood_that_covers_the_later_writes_is_found() {
        // First part: every 1000th block of the first tenth. Second: up to 5 blocks behind them.
        let first = (0..10).map(|i| (i as f64, BlockRange::new(i * 1000, 1)));
        let second = (0..10).map(|i| (10.0 + i as f64 / 2.0, BlockRange::new(i * 1000 + i % 6, 1)));
        let accesses: Vec<_> = first.chain(second).collect();
        let found = chunk_size(&accesses, 0.69, 100_000, BOUNDS).unwrap();
        assert_eq!((found.chunk_blocks, found.access), (5, 1.0));
        // Blocks -5..=5 round each, cut off at the image's start.
        assert_eq!(found.storage, (9 * 11 + 6) as f64 / 100_000.0);
        assert_eq!(chunk_size(&accesses, 1.1, 100_000, BOUNDS), None);
        assert_eq!(chunk_size(&[], 0.7, 100, BOUNDS), None);
    }

    #[test]
    fn equal_frequencies_are_in_the_order_of_their_numbers() {
        let accesses = [9, 0, 4, 9].map(|b| BlockRange::new(b, 1));
        let order = |op| -> Vec<_> {
            schedule(op, &accesses, 2, 10).ranges().iter().map(|r| (r.start, r.len)).collect()
        };
        assert_eq!(order(Op::Write), [(2, 2), (6, 2), (0, 2), (4, 2), (8, 2)]);
        assert_eq!(order(Op::Read), [(8, 2), (0, 2), (4, 2), (2, 2), (6, 2)]);
    }
}
