//! Which blocks are hot (LiveFS, section III): the rule that `hot-set` copies by.
//!
//! The shell observes the guest for a while, counting reads and writes per segment, and passes the
//! counts here. A segment is copied before handover when its score
//!
//! ```text
//! score = (w1 · reads + w2 · writes) ÷ 2,   w1 + w2 = 1        (formula 1)
//! ```
//! is at or above the threshold. A threshold of zero chooses everything: pre-copy; an infinite one
//! nothing: post-copy.

use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};

/// The segment that LiveFS found best, in bytes.
pub const SEGMENT: u64 = 64 << 20;

/// LiveFS's parameters but for the observation period, which is the shell's.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rule {
    /// Weight of a read, `w1`, from 0 to 1; that of a write is `1 − w1`.
    pub read_weight: f64,
    /// Length of a segment in bytes, a multiple of the block.
    pub segment: u64,
    /// Segments with this score and more are copied before handover.
    pub threshold: f64,
}

impl Default for Rule {
    fn default() -> Self {
        Self { read_weight: 0.5, segment: SEGMENT, threshold: 1.0 }
    }
}

/// What was counted of one segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Requests that read from it.
    pub reads: u64,
    /// Requests that wrote to it.
    pub writes: u64,
}

impl Rule {
    /// The score of a segment.
    pub fn score(&self, counts: Counts) -> f64 {
        let reads = self.read_weight * counts.reads as f64;
        let writes = (1.0 - self.read_weight) * counts.writes as f64;
        (reads + writes) / 2.0
    }

    /// The blocks to copy before handover of an image of `len` bytes. Segments that `counts` does
    /// not reach were not used.
    pub fn hot(&self, counts: &[Counts], len: u64) -> BlockSet {
        let blocks = (self.segment / BLOCK_SIZE).max(1);
        let whole = BlockRange::whole(len);
        let hot = |segment: &u64| {
            let counts = counts.get(*segment as usize).copied().unwrap_or_default();
            self.score(counts) >= self.threshold
        };
        let segments = (0..whole.len.div_ceil(blocks)).filter(hot);
        segments.map(|n| BlockRange::new(n * blocks, blocks).intersect(whole)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 3 * SEGMENT + 5000;

    fn counts(pairs: &[(u64, u64)]) -> Vec<Counts> {
        pairs.iter().map(|&(reads, writes)| Counts { reads, writes }).collect()
    }

    fn hot(threshold: f64, read_weight: f64) -> Vec<u64> {
        let rule = Rule { threshold, read_weight, ..Rule::default() };
        let blocks = rule.hot(&counts(&[(10, 0), (0, 10), (4, 4)]), LEN);
        blocks
            .runs_up_to(SEGMENT / BLOCK_SIZE)
            .map(|run| run.start * BLOCK_SIZE / SEGMENT)
            .collect()
    }

    #[test]
    fn segments_at_or_above_the_threshold_are_hot() {
        assert_eq!(hot(2.5, 0.5), [0, 1]);
        assert_eq!(hot(2.0, 0.5), [0, 1, 2]);
        assert_eq!(hot(4.0, 1.0), [0], "reads only");
        assert_eq!(hot(4.0, 0.0), [1], "writes only");
    }

    #[test]
    fn zero_chooses_everything_and_infinity_nothing() {
        let all = Rule { threshold: 0.0, ..Rule::default() }.hot(&[], LEN);
        assert_eq!(all, [BlockRange::whole(LEN)].into_iter().collect());
        let many = counts(&[(u64::MAX, u64::MAX)]);
        let none = Rule { threshold: f64::INFINITY, ..Rule::default() }.hot(&many, LEN);
        assert!(none.is_empty());
    }
}
