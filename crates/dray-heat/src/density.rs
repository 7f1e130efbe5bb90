//! [`Density`]: how likely the next access falls into each piece of the image.
//!
//! No single chunk size is right for all accesses of a guest. Some come back to the very place,
//! some fall near it, some into the same region, some anywhere. So the density of accesses is a
//! mixture over chunks of nine sizes, each [`STEP`] times the one before, and the whole image:
//!
//! ```text
//! density(chunk) = w0 · its frequency ÷ all frequencies
//!                + Σ wk · accessed parts of its kth neighbourhood ÷ (accessed parts of all · chunks in it)
//!                + w∞ ÷ chunks of the image
//! ```
//! The smallest size goes by how often a chunk was accessed, the others by how many of the
//! neighbourhood's parts, which are the neighbourhoods one size smaller, were accessed at all: one
//! block that is written all the time says nothing of what is around it.
//! The weights are learnt while trials go on: each place that is accessed is shared out among the
//! sizes by how well each had foretold it (a step of expectation maximisation).

use crate::round::Round;
use dray_types::BlockRange;

/// Each neighbourhood is this many times the one inside it.
const STEP: u64 = 4;
/// Neighbourhoods, the chunk itself the first of them.
const LEVELS: usize = 9;

/// How much each size counts, the smallest first and the whole image last.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Weights([f64; LEVELS + 1]);

impl Default for Weights {
    fn default() -> Self {
        Self([1.0; LEVELS + 1])
    }
}

impl Weights {
    /// Adds newer evidence; what was known counts half. Some of each size always stays.
    pub(crate) fn update(&mut self, newer: &Self) {
        for (weight, new) in self.0.iter_mut().zip(newer.0) {
            *weight = *weight / 2.0 + new + 0.5;
        }
    }

    /// No evidence.
    pub(crate) fn none() -> Self {
        Self([0.0; LEVELS + 1])
    }

    fn shares(&self) -> [f64; LEVELS + 1] {
        let sum: f64 = self.0.iter().sum();
        self.0.map(|weight| weight / sum)
    }
}

/// Counts of equal numbers added up; they come in order.
fn sums(counts: impl Iterator<Item = (u64, f64)>) -> Vec<(u64, f64)> {
    let mut sums: Vec<(u64, f64)> = Vec::new();
    for (id, count) in counts {
        match sums.last_mut() {
            Some(last) if last.0 == id => last.1 += count,
            _ => sums.push((id, count)),
        }
    }
    sums.shrink_to_fit();
    sums
}

/// The history of a round as a density; see the module.
#[derive(Clone, Debug)]
pub(crate) struct Density {
    chunk_blocks: u64,
    blocks: u64,
    shares: [f64; LEVELS + 1],
    /// Per size: numbers of chunks with an access, in address order, and the density that this
    /// size foretells for each smallest chunk in them.
    levels: Vec<Vec<(u64, f64)>>,
    uniform: f64,
}

impl Density {
    /// Of an image of `blocks` blocks; the smallest chunks are the round's.
    pub(crate) fn new(round: &Round, blocks: u64, weights: &Weights) -> Self {
        let chunk_blocks = round.chunk_blocks;
        let chunks = blocks.div_ceil(chunk_blocks).max(1);
        let mut counted: Vec<(u64, f64)> =
            round.list.ascending().map(|(id, frequency)| (id, frequency as f64)).collect();
        counted.sort_unstable_by_key(|&(id, _)| id);
        let mut levels = Vec::with_capacity(LEVELS);
        let mut inner = sums(counted.into_iter());
        for level in 0..LEVELS {
            let size = STEP.pow(level as u32).min(chunks) as f64;
            let all: f64 = inner.iter().map(|(_, count)| count).sum();
            let next = sums(inner.iter().map(|&(id, _)| (id / STEP, 1.0)));
            inner.iter_mut().for_each(|(_, count)| *count /= all * size);
            levels.push(std::mem::replace(&mut inner, next));
        }
        let shares = weights.shares();
        Self { chunk_blocks, blocks, shares, levels, uniform: 1.0 / chunks as f64 }
    }

    /// The density that a chunk has because anything may be accessed.
    pub(crate) fn anywhere(&self) -> f64 {
        self.shares[LEVELS] * self.uniform
    }

    /// Shares an access of `block` out among the sizes.
    pub(crate) fn learn(&self, block: u64, evidence: &mut Weights) {
        let chunk = block / self.chunk_blocks;
        let mut parts = [0.0; LEVELS + 1];
        let mut size = 1;
        for (level, known) in self.levels.iter().enumerate() {
            if let Ok(at) = known.binary_search_by_key(&(chunk / size), |&(id, _)| id) {
                parts[level] = self.shares[level] * known[at].1;
            }
            size *= STEP;
        }
        parts[LEVELS] = self.shares[LEVELS] * self.uniform;
        let sum: f64 = parts.iter().sum();
        for (evidence, part) in evidence.0.iter_mut().zip(parts) {
            *evidence += part / sum;
        }
    }

    /// The image in pieces of one density each, in address order within each size. The density is
    /// that of a smallest chunk. What no neighbourhood reaches has `None`.
    pub(crate) fn pieces(&self) -> Vec<(Option<f64>, BlockRange)> {
        let chunks = self.blocks.div_ceil(self.chunk_blocks);
        let mut pieces = Vec::new();
        // Chunks `from .. to`, all in one accessed neighbourhood of the size above.
        let mut outer: Vec<(u64, u64, Option<f64>)> = vec![(0, chunks, None)];
        for level in (0..LEVELS).rev() {
            let size = STEP.pow(level as u32);
            let mut inner = Vec::new();
            let mut known = self.levels[level].iter().peekable();
            for (from, to, density) in outer {
                let mut at = from;
                while let Some(&&(id, here)) = known.peek()
                    && id * size < to
                {
                    known.next();
                    let start = id * size;
                    let end = (start + size).min(to);
                    self.put(density, at, start, &mut pieces);
                    let base = density.unwrap_or(self.anywhere());
                    inner.push((start, end, Some(base + self.shares[level] * here)));
                    at = end;
                }
                self.put(density, at, to, &mut pieces);
            }
            outer = inner;
        }
        for (from, to, density) in outer {
            self.put(density, from, to, &mut pieces);
        }
        pieces
    }

    fn put(
        &self,
        density: Option<f64>,
        from: u64,
        to: u64,
        pieces: &mut Vec<(Option<f64>, BlockRange)>,
    ) {
        let start = from.saturating_mul(self.chunk_blocks).min(self.blocks);
        let end = to.saturating_mul(self.chunk_blocks).min(self.blocks);
        if start < end {
            pieces.push((density, BlockRange::new(start, end - start)));
        }
    }

    pub(crate) fn memory(&self) -> usize {
        self.levels.iter().map(|level| level.capacity() * size_of::<(u64, f64)>()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heat::Op;
    use crate::order::by_density;
    use dray_types::BlockSet;

    const BLOCKS: u64 = 1 << 20;

    /// A round at chunks of 32 blocks with an access of one block at each of these.
    fn round(accesses: impl IntoIterator<Item = u64>) -> Round {
        let mut round = Round::new(32);
        accesses.into_iter().for_each(|at| round.access(BlockRange::new(at, 1), true, 1 << 20));
        round
    }

    fn at(density: &Density, block: u64) -> Option<f64> {
        let pieces = density.pieces();
        pieces.iter().find(|(_, range)| (range.start..range.end()).contains(&block)).unwrap().0
    }

    #[test]
    fn densities_cover_the_image_once_and_add_up() {
        let round = round([5, 5, 700, 9000, 9031, BLOCKS - 1]);
        let density = Density::new(&round, BLOCKS, &Weights::default());
        let (mut seen, mut sum) = (BlockSet::new(), 0.0);
        for (density, range) in density.pieces() {
            assert!(!seen.intersects(range));
            seen.insert(range);
            sum += density.unwrap_or(0.1 / 32_768.0) * range.len as f64 / 32.0;
        }
        assert_eq!(seen.len(), BLOCKS);
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert!(at(&density, 5) > at(&density, 9000));
        assert!(at(&density, 9000) > at(&density, 9064), "beside it");
        assert!(at(&density, 9064) > at(&density, 40_000), "far from all");
    }

    #[test]
    fn a_block_written_all_the_time_does_not_heat_its_neighbourhood() {
        // One block 10,000 times, against 16 places once each.
        let many = (0..10_000).map(|_| 100).chain((0..16).map(|n| (1 << 19) + n * 64));
        let density = Density::new(&round(many), BLOCKS, &Weights::default());
        assert!(at(&density, 64) < at(&density, (1 << 19) + 32));
    }

    #[test]
    fn the_sizes_that_foretell_are_learnt() {
        let learnt = |places: &dyn Fn(u64) -> u64| {
            let mut weights = Weights::default();
            for trial in 0..4 {
                let round = round((0..500).map(|n| places(n + trial)));
                let density = Density::new(&round, BLOCKS, &weights);
                let mut evidence = Weights::none();
                (500..1000).for_each(|n| density.learn(places(n + trial), &mut evidence));
                weights.update(&evidence);
            }
            weights.shares()
        };
        let same = learnt(&|n| n % 97 * 10_007);
        assert!(same[0] > 0.9, "{same:?}");
        let anywhere = learnt(&|n| n * 7_368_787 % BLOCKS);
        assert!(anywhere[0] < 0.1 && anywhere[6..].iter().sum::<f64>() > 0.5, "{anywhere:?}");
    }

    #[test]
    fn jumps_take_a_bounded_share() {
        let round = round((0..8000).map(|n| n * 7_368_787 % BLOCKS));
        for jump in [0, 1, 30, 1000, 100_000] {
            for op in [Op::Read, Op::Write] {
                let (schedule, _) = by_density(&round, BLOCKS, &Weights::default(), op, jump);
                let jumps = schedule.ranges().len() as u64 * jump;
                assert!(jumps <= (BLOCKS / 32).max(16 * jump), "{jump}: {jumps}");
            }
        }
    }
}
