//! [`SegmentScore`]: reads and writes of fixed pieces of the image, for the hot set.

use crate::order;
use crate::round::{Round, WEIGHT};
use std::collections::BTreeMap;

/// Accesses to one segment of the image in the retained history.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SegmentScore {
    /// Number of the segment: its first block divided by the segment size.
    pub segment: u64,
    /// Blocks read, less what has decayed.
    pub reads: f64,
    /// Blocks written, less what has decayed.
    pub writes: f64,
}

impl SegmentScore {
    /// `(w1 × reads + w2 × writes) / 2` (LiveFS paper; `w1 + w2` is 1 there, 0.5 each by default).
    pub fn score(&self, w1: f64, w2: f64) -> f64 {
        (w1 * self.reads + w2 * self.writes) / 2.0
    }
}

pub(crate) fn scores(
    reads: &Round,
    writes: &Round,
    blocks: u64,
    segment_blocks: u64,
) -> impl Iterator<Item = SegmentScore> + use<> {
    let mut segments: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
    spread(reads, blocks, segment_blocks, |segment, share| {
        segments.entry(segment).or_default().0 += share;
    });
    spread(writes, blocks, segment_blocks, |segment, share| {
        segments.entry(segment).or_default().1 += share;
    });
    segments.into_iter().map(|(segment, (reads, writes))| SegmentScore { segment, reads, writes })
}

fn spread(round: &Round, blocks: u64, segment_blocks: u64, mut add: impl FnMut(u64, f64)) {
    for (id, weight) in round.list.ascending() {
        let chunk = order::chunks(round, blocks, id, id + 1);
        let frequency = weight as f64 / WEIGHT as f64;
        let mut rest = chunk;
        while !rest.is_empty() {
            let room = segment_blocks - rest.start % segment_blocks;
            let (here, others) = rest.split_at_most(room);
            add(here.start / segment_blocks, frequency * here.len as f64 / chunk.len as f64);
            rest = others;
        }
    }
}
