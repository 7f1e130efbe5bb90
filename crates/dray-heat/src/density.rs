//! [`Density`]: how likely the next access falls into each piece of the image.
//!
//! No single chunk size is right for all accesses of a guest. Some come back to the very place,
//! some fall near it, some into the same region, some anywhere; and some go on by address from
//! where the last one ended. So the density of accesses is a mixture over chunks of nine sizes, each
//! [`STEP`] times the one before, over what lies ahead of streams (near and far, [`AHEAD`]), and
//! over the whole image:
//!
//! ```text
//! density(chunk) = w0 · its frequency ÷ all frequencies
//!                + Σ wk · accessed parts of its kth neighbourhood ÷ (accessed parts of all · chunks in it)
//!                + Σ wa · (1 ÷ chunks ahead of all streams, if it is one of them)
//!                + w∞ ÷ chunks of the image
//! ```
//! The smallest size goes by how often a chunk was accessed, the others by how many of the
//! neighbourhood's parts, which are the neighbourhoods one size smaller, were accessed at all: one
//! block that is written all the time says nothing of what is around it.
//! The weights are learnt while trials go on: each place that is accessed is shared out among the
//! parts by how well each had foretold it (a step of expectation maximisation).

use crate::round::Round;
use crate::streams::Streams;
use dray_types::BlockRange;

/// Each neighbourhood is this many times the one inside it.
const STEP: u64 = 4;
/// Neighbourhoods, the chunk itself the first of them.
const LEVELS: usize = 9;
/// How far ahead of streams, in parts of what they have come.
const AHEAD: [u64; 2] = [1, 4];
/// Everything that foretells accesses: neighbourhoods, what lies ahead of streams, the whole image.
const ALL: usize = LEVELS + AHEAD.len() + 1;
const ANYWHERE: usize = ALL - 1;

/// How much each part counts, in that order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Weights([f64; ALL]);

impl Default for Weights {
    fn default() -> Self {
        Self([1.0; ALL])
    }
}

impl Weights {
    /// Adds newer evidence; what was known counts half. Some of each part always stays.
    pub(crate) fn update(&mut self, newer: &Self) {
        for (weight, new) in self.0.iter_mut().zip(newer.0) {
            *weight = *weight / 2.0 + new + 0.5;
        }
    }

    /// No evidence.
    pub(crate) fn none() -> Self {
        Self([0.0; ALL])
    }

    /// As numbers, to be kept.
    pub(crate) fn numbers(&self) -> &[f64] {
        &self.0
    }

    /// Of numbers that were kept; none when there are more or fewer parts now.
    pub(crate) fn of(numbers: &[f64]) -> Option<Self> {
        numbers.try_into().ok().map(Self)
    }

    fn shares(&self) -> [f64; ALL] {
        let sum: f64 = self.0.iter().sum();
        self.0.map(|weight| weight / sum)
    }

    /// Those of the parts that foretell something.
    fn without(mut self, nothing: impl Fn(usize) -> bool) -> Self {
        for (at, weight) in self.0.iter_mut().enumerate() {
            *weight = if nothing(at) { 0.0 } else { *weight };
        }
        self
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
    shares: [f64; ALL],
    /// Per size: numbers of chunks with an access, in address order, and the density that this
    /// size foretells for each smallest chunk in them.
    levels: Vec<Vec<(u64, f64)>>,
    /// Chunks ahead of streams, and the density that this foretells for each.
    ahead: Vec<(Vec<(u64, u64)>, f64)>,
    uniform: f64,
}

impl Density {
    /// Of an image of `blocks` blocks; the smallest chunks are the round's.
    pub(crate) fn new(round: &Round, blocks: u64, weights: &Weights, streams: &Streams) -> Self {
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
        let ahead = AHEAD.map(|times| {
            let ahead = streams.ahead(chunk_blocks, chunks, times);
            let all: u64 = ahead.iter().map(|(from, to)| to - from).sum();
            (ahead, 1.0 / all.max(1) as f64)
        });
        let idle = |at: usize| ahead.get(at.wrapping_sub(LEVELS)).is_some_and(|a| a.0.is_empty());
        let shares = weights.without(idle).shares();
        let ahead = ahead.into();
        Self { chunk_blocks, blocks, shares, levels, ahead, uniform: 1.0 / chunks as f64 }
    }

    /// The density that a chunk has because anything may be accessed.
    pub(crate) fn anywhere(&self) -> f64 {
        self.shares[ANYWHERE] * self.uniform
    }

    /// Shares an access of `block` out among the parts of the mixture.
    pub(crate) fn learn(&self, block: u64, evidence: &mut Weights) {
        let chunk = block / self.chunk_blocks;
        let mut parts = [0.0; ALL];
        let mut size = 1;
        for (level, known) in self.levels.iter().enumerate() {
            if let Ok(at) = known.binary_search_by_key(&(chunk / size), |&(id, _)| id) {
                parts[level] = self.shares[level] * known[at].1;
            }
            size *= STEP;
        }
        for (at, (ahead, density)) in self.ahead.iter().enumerate() {
            let before = ahead.partition_point(|&(from, _)| from <= chunk);
            if before > 0 && chunk < ahead[before - 1].1 {
                parts[LEVELS + at] = self.shares[LEVELS + at] * density;
            }
        }
        parts[ANYWHERE] = self.shares[ANYWHERE] * self.uniform;
        let sum: f64 = parts.iter().sum();
        for (evidence, part) in evidence.0.iter_mut().zip(parts) {
            *evidence += part / sum;
        }
    }

    /// The image in pieces of one density each, in address order. The density is that of a smallest
    /// chunk. What no neighbourhood reaches has `None`.
    pub(crate) fn pieces(&self) -> Vec<(Option<f64>, BlockRange)> {
        let chunks = self.blocks.div_ceil(self.chunk_blocks);
        let mut pieces = Vec::new();
        let mut rest = [0; LEVELS];
        self.inside((0, chunks), None, LEVELS, &mut rest, &mut pieces);
        for (at, (ahead, density)) in self.ahead.iter().enumerate() {
            if !ahead.is_empty() {
                pieces = self.raised(&pieces, ahead, self.shares[LEVELS + at] * density);
            }
        }
        pieces
    }

    /// Those of chunks `from .. to`, which have this density by the sizes from `above` on. `rest`
    /// tells for each size which accessed chunks lie behind what has been passed.
    fn inside(
        &self,
        (from, to): (u64, u64),
        density: Option<f64>,
        above: usize,
        rest: &mut [usize; LEVELS],
        pieces: &mut Vec<(Option<f64>, BlockRange)>,
    ) {
        let Some(level) = above.checked_sub(1) else {
            return self.put(density, from, to, pieces);
        };
        let size = STEP.pow(level as u32);
        let mut at = from;
        while let Some(&(id, here)) = self.levels[level].get(rest[level])
            && id * size < to
        {
            rest[level] += 1;
            let (start, end) = (id * size, (id * size + size).min(to));
            self.put(density, at, start, pieces);
            let base = density.unwrap_or(self.anywhere());
            let more = Some(base + self.shares[level] * here);
            self.inside((start, end), more, level, rest, pieces);
            at = end;
        }
        self.put(density, at, to, pieces);
    }

    /// The pieces with `more` density in the chunks of `ahead`.
    fn raised(
        &self,
        pieces: &[(Option<f64>, BlockRange)],
        ahead: &[(u64, u64)],
        more: f64,
    ) -> Vec<(Option<f64>, BlockRange)> {
        let mut raised = Vec::with_capacity(pieces.len() + 2 * ahead.len());
        let mut rest = ahead;
        for &(density, range) in pieces {
            let (from, to) =
                (range.start / self.chunk_blocks, range.end().div_ceil(self.chunk_blocks));
            let mut at = from;
            while rest.first().is_some_and(|&(_, end)| end <= from) {
                rest = &rest[1..];
            }
            for &(start, end) in rest.iter().take_while(|(start, _)| *start < to) {
                let (start, end) = (start.max(from), end.min(to));
                self.put(density, at, start, &mut raised);
                self.put(Some(density.unwrap_or(self.anywhere()) + more), start, end, &mut raised);
                at = end;
            }
            self.put(density, at, to, &mut raised);
        }
        raised
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
    use crate::config::HeatConfig;
    use crate::op::Op;
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
        let density = Density::new(&round, BLOCKS, &Weights::default(), &Streams::default());
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
        let density = Density::new(&round(many), BLOCKS, &Weights::default(), &Streams::default());
        assert!(at(&density, 64) < at(&density, (1 << 19) + 32));
    }

    #[test]
    fn the_sizes_that_foretell_are_learnt() {
        let learnt = |places: &dyn Fn(u64) -> u64| {
            let mut weights = Weights::default();
            for trial in 0..4 {
                let round = round((0..500).map(|n| places(n + trial)));
                let density = Density::new(&round, BLOCKS, &weights, &Streams::default());
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
    fn what_lies_ahead_of_a_stream_is_denser_once_it_was_seen_to_go_on() {
        // A log, 100 blocks an access, and as many writes all over the image.
        let (mut streams, mut weights) = (Streams::default(), Weights::default());
        let log = |n: u64| (1 << 18) + n * 100;
        let mut places = Vec::new();
        for n in 0..400 {
            if n % 100 == 0 {
                let round = round(places.iter().copied());
                let density = Density::new(&round, BLOCKS, &weights, &streams);
                let mut evidence = Weights::none();
                (n..n + 100).for_each(|n| density.learn(log(n), &mut evidence));
                weights.update(&evidence);
            }
            streams.access(BlockRange::new(log(n), 100));
            places.extend([log(n), n * 7_368_787 % BLOCKS]);
        }
        let density = Density::new(&round(places), BLOCKS, &weights, &streams);
        let far = at(&density, log(400) + 350_000);
        assert!(at(&density, log(700)) > far, "as far as it has come");
        assert!(at(&density, log(1900)) > far && at(&density, log(1900)) < at(&density, log(700)));
        let (mut seen, mut sum) = (BlockSet::new(), 0.0);
        for (density, range) in density.pieces() {
            assert!(!seen.intersects(range));
            seen.insert(range);
            sum += density.unwrap_or(density_of_nothing(&weights)) * range.len as f64 / 32.0;
        }
        assert_eq!(seen.len(), BLOCKS);
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
    }

    fn density_of_nothing(weights: &Weights) -> f64 {
        weights.shares()[ANYWHERE] / 32_768.0
    }

    #[test]
    fn jumps_take_a_bounded_share() {
        let round = round((0..8000).map(|n| n * 7_368_787 % BLOCKS));
        let none = Streams::default();
        for jump in [0, 1, 30, 1000, 100_000] {
            let config = HeatConfig { jump_blocks: jump, ..HeatConfig::default() };
            for op in [Op::Read, Op::Write] {
                let (schedule, _) =
                    by_density(&round, BLOCKS, &Weights::default(), &none, op, &config);
                let jumps = schedule.ranges().len() as u64 * jump;
                assert!(jumps <= (BLOCKS / config.jump_share).max(16 * jump), "{jump}: {jumps}");
            }
        }
    }
}
