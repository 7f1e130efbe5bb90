//! [`Coverage`]: which chunk size fits the workload, from the accesses of one round.
//!
//! The Scheduling paper's section 5, figure 11. In the first half of a round each candidate size
//! marks the chunks that are accessed: the share of marked chunks is its *storage coverage*. In the
//! second half the chunks of the smallest size are marked anew: the share of those that lie in a
//! chunk marked in the first half is the *access coverage*. The size with the greatest
//! `access + (1 − storage)` is chosen, the smaller one of two that are equal.

use crate::chunks::ChunkSet;
use dray_types::BlockRange;

/// One candidate size and what it covered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CandidateCoverage {
    /// Chunk size in blocks.
    pub chunk_blocks: u64,
    /// Share of the image's chunks that were accessed in the first half, 0 to 1.
    pub storage: f64,
    /// Share of the smallest chunks accessed in the second half that lie in chunks accessed in the
    /// first, 0 to 1; 0 when nothing was accessed in the second half.
    pub access: f64,
}

impl CandidateCoverage {
    /// Balanced coverage: `access + (1 − storage)`, 0 to 2.
    pub fn balanced(&self) -> f64 {
        self.access + (1.0 - self.storage)
    }
}

/// The candidates' bitmaps of one round.
#[derive(Clone, Debug)]
pub(crate) struct Coverage {
    smallest: u64,
    first_half: Vec<ChunkSet>,
    second_half: ChunkSet,
    covered: Vec<u64>,
}

impl Coverage {
    /// Candidates `smallest × 2^k` blocks, `k` below `candidates`.
    pub(crate) fn new(smallest: u64, candidates: u32) -> Self {
        let candidates = candidates as usize;
        Self {
            smallest,
            first_half: vec![ChunkSet::default(); candidates],
            second_half: ChunkSet::default(),
            covered: vec![0; candidates],
        }
    }

    pub(crate) fn access(&mut self, range: BlockRange, second_half: bool) {
        if range.is_empty() {
            return;
        }
        for chunk in range.start / self.smallest..=(range.end() - 1) / self.smallest {
            if second_half { self.second(chunk) } else { self.first(chunk) }
        }
    }

    fn first(&mut self, chunk: u64) {
        for (k, set) in self.first_half.iter_mut().enumerate() {
            // A marked chunk has marked all that contain it.
            if !set.insert(chunk >> k) {
                return;
            }
        }
    }

    fn second(&mut self, chunk: u64) {
        if !self.second_half.insert(chunk) {
            return;
        }
        for (k, set) in self.first_half.iter().enumerate() {
            self.covered[k] += u64::from(set.contains(chunk >> k));
        }
    }

    /// What every candidate covers so far in an image of `blocks` blocks, smallest size first.
    pub(crate) fn candidates(&self, blocks: u64) -> impl Iterator<Item = CandidateCoverage> + '_ {
        self.first_half.iter().zip(&self.covered).enumerate().map(move |(k, (set, &covered))| {
            let chunk_blocks = self.smallest << k;
            CandidateCoverage {
                chunk_blocks,
                storage: share(set.len(), blocks.div_ceil(chunk_blocks)),
                access: share(covered, self.second_half.len()),
            }
        })
    }

    /// The size with the greatest balanced coverage; none when a half saw no access.
    pub(crate) fn choose(&self, blocks: u64) -> Option<u64> {
        if self.second_half.len() == 0 || self.first_half.first()?.len() == 0 {
            return None;
        }
        let mut best: Option<CandidateCoverage> = None;
        for candidate in self.candidates(blocks) {
            if best.is_none_or(|best| candidate.balanced() > best.balanced()) {
                best = Some(candidate);
            }
        }
        best.map(|best| best.chunk_blocks)
    }

    pub(crate) fn memory(&self) -> usize {
        self.first_half.iter().map(ChunkSet::memory).sum::<usize>() + self.second_half.memory()
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
