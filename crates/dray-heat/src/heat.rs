//! [`Heat`]: what is known of a guest's accesses to one image, and the schedules made of it.

use crate::config::HeatConfig;
use crate::coverage::CandidateCoverage;
use crate::op::Op;
use crate::round::WEIGHT;
use crate::segments::{self, SegmentScore};
use crate::track::Track;
use crate::trial::Regret;
use dray_types::{BlockRange, Schedule};

/// Longest part of one access that is counted: 1 GiB. Longer ones are discards and zeroes of whole
/// disks, which say nothing of where the guest works.
pub const MAX_ACCESS_BLOCKS: u64 = 1 << 18;

/// The part of `range` that counts in an image of `blocks` blocks.
pub(crate) fn counted(range: BlockRange, blocks: u64) -> BlockRange {
    let start = range.start.min(blocks);
    let len = range.len.min(MAX_ACCESS_BLOCKS).min(blocks - start);
    BlockRange::new(start, len)
}

/// Heat of one image; see the crate's documentation.
#[derive(Clone, Debug)]
pub struct Heat {
    pub(crate) blocks: u64,
    pub(crate) reads: Track,
    pub(crate) writes: Track,
}

impl Heat {
    /// Heat of an image of `blocks` blocks without any access yet.
    pub fn new(blocks: u64, config: HeatConfig) -> Self {
        let config = HeatConfig {
            round_operations: config.round_operations.max(2),
            smallest_chunk_blocks: config.smallest_chunk_blocks.clamp(1, 1 << 40),
            candidates: config.candidates.clamp(1, 32),
            max_chunks: config.max_chunks.max(1),
            jump_share: config.jump_share.max(1),
            ..config
        };
        Self { blocks, reads: Track::new(Op::Read, config), writes: Track::new(Op::Write, config) }
    }

    /// Number of blocks of the image.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// A jump costs the time of `blocks` blocks from now on, whatever [`HeatConfig::jump_blocks`] said:
    /// over a slow link it costs fewer, and orders may be finer.
    pub fn set_jump(&mut self, blocks: u64) {
        self.reads.config.jump_blocks = blocks;
        self.writes.config.jump_blocks = blocks;
    }

    /// Counts one access. Blocks past the image's end and past [`MAX_ACCESS_BLOCKS`] do not count.
    pub fn access(&mut self, op: Op, range: BlockRange) {
        let range = counted(range, self.blocks);
        let blocks = self.blocks;
        self.track_mut(op).access(range, blocks);
    }

    /// The image has `blocks` blocks now. An image never shrinks here: a smaller number is ignored.
    pub fn grow(&mut self, blocks: u64) {
        self.blocks = self.blocks.max(blocks);
    }

    /// A migration begins: from the next accesses on it is tried whether the past predicts, also where
    /// long histories are tried only now and then. A guest that has turned to something else is noticed
    /// within some tens of accesses, and what it did before counts for less.
    pub fn try_now(&mut self) {
        self.reads.try_now();
        self.writes.try_now();
    }

    /// The order for copying while the guest writes: chunks never written, then the written ones
    /// from least to most frequently written. Names every block of the image; is
    /// [`Schedule::SEQUENTIAL`] when no write is known or the guard found that the past does not
    /// predict ([`Self::regret`]).
    pub fn copy_schedule(&self) -> Schedule {
        self.writes.schedule(self.blocks)
    }

    /// The order for fetching what a running guest may read: chunks from most to least frequently
    /// read, then by nearness what is near them. Blocks it does not name follow in address order;
    /// it names none when the guard found that the past does not predict.
    pub fn backfill_schedule(&self) -> Schedule {
        self.reads.schedule(self.blocks)
    }

    /// The order that the history asks for, `copy_schedule` for writes and `backfill_schedule` for
    /// reads, without the guard.
    pub fn unguarded(&self, op: Op) -> Schedule {
        self.track(op).order(self.blocks)
    }

    /// What the guard found; zeros before the first trial, after 256 operations of the kind, has
    /// ended.
    pub fn regret(&self, op: Op) -> Regret {
        self.track(op).regret
    }

    /// Chunk size in blocks of the round that schedules are made of.
    pub fn chunk_blocks(&self, op: Op) -> u64 {
        self.track(op).scheduled().chunk_blocks
    }

    /// Frequency of the chunk that holds `block` in the history that schedules are made of: blocks
    /// accessed (see [`Count`](crate::Count)), less what has decayed.
    pub fn frequency(&self, op: Op, block: u64) -> f64 {
        let round = self.track(op).scheduled();
        round.list.frequency(block / round.chunk_blocks) as f64 / WEIGHT as f64
    }

    /// Blocks read in the chunk of `block` for each read operation of the guest, on average over
    /// the history. Times the guest's read operations a second: blocks of the chunk read a second.
    pub fn read_rate(&self, block: u64) -> f64 {
        self.rate(Op::Read, block)
    }

    /// Blocks written in the chunk of `block` for each write operation of the guest.
    pub fn write_rate(&self, block: u64) -> f64 {
        self.rate(Op::Write, block)
    }

    /// The chance that `block` is accessed at least once in the next `operations` operations of the
    /// kind: `1 − exp(−rate × operations / chunk)`, accesses spread evenly over the chunk. Nothing
    /// is known of places that were never accessed: their chance is 0.
    pub fn chance(&self, op: Op, block: u64, operations: f64) -> f64 {
        let each = self.rate(op, block) / self.chunk_blocks(op) as f64;
        1.0 - (-each * operations.max(0.0)).exp()
    }

    fn rate(&self, op: Op, block: u64) -> f64 {
        match self.track(op).scheduled().weight {
            0 => 0.0,
            weight => self.frequency(op, block) * WEIGHT as f64 / weight as f64,
        }
    }

    /// Reads and writes of every segment of `segment_blocks` blocks that has any, in address order.
    /// Exact where a segment is made of whole chunks; a chunk that reaches over several segments is
    /// spread evenly over its blocks.
    pub fn segment_scores(
        &self,
        segment_blocks: u64,
    ) -> impl Iterator<Item = SegmentScore> + use<> {
        let rounds = (self.reads.scheduled(), self.writes.scheduled());
        segments::scores(rounds.0, rounds.1, self.blocks, segment_blocks.max(1))
    }

    /// As [`Self::read_rate`] and [`Self::write_rate`], summed up over every segment of
    /// `segment_blocks` blocks that has any: the segment's number, blocks read for each read
    /// operation of the guest, blocks written for each write operation.
    pub fn segment_rates(
        &self,
        segment_blocks: u64,
    ) -> impl Iterator<Item = (u64, f64, f64)> + use<> {
        let weight = |op| (self.track(op).scheduled().weight as f64 / WEIGHT as f64).max(1.0);
        let (reads, writes) = (weight(Op::Read), weight(Op::Write));
        self.segment_scores(segment_blocks)
            .map(move |score| (score.segment, score.reads / reads, score.writes / writes))
    }

    /// What each candidate chunk size covered in the last complete round; empty before its end.
    pub fn coverage(&self, op: Op) -> &[CandidateCoverage] {
        self.track(op).covered()
    }

    /// Heap bytes in use, the overhead of the allocator not counted.
    pub fn memory(&self) -> usize {
        self.reads.memory() + self.writes.memory()
    }

    fn track(&self, op: Op) -> &Track {
        match op {
            Op::Read => &self.reads,
            Op::Write => &self.writes,
        }
    }

    fn track_mut(&mut self, op: Op) -> &mut Track {
        match op {
            Op::Read => &mut self.reads,
            Op::Write => &mut self.writes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heat(blocks: u64, chunk: u64, round: u32) -> Heat {
        let config = HeatConfig {
            smallest_chunk_blocks: chunk,
            candidates: 1,
            round_operations: round,
            ..HeatConfig::paper()
        };
        Heat::new(blocks, config)
    }

    fn ranges(schedule: &Schedule) -> Vec<(u64, u64)> {
        schedule.ranges().iter().map(|r| (r.start, r.len)).collect()
    }

    #[test]
    fn written_chunks_move_last_the_most_written_at_the_end() {
        let mut heat = heat(10, 2, 100);
        assert!(heat.copy_schedule().is_sequential());
        for block in [2, 2, 2, 7, 5, 5] {
            heat.access(Op::Write, BlockRange::new(block, 1));
        }
        assert_eq!(ranges(&heat.copy_schedule()), [(0, 2), (8, 2), (6, 2), (4, 2), (2, 2)]);
        assert!(heat.backfill_schedule().is_sequential());
    }

    #[test]
    fn read_chunks_come_first_the_most_read_before_all() {
        let mut heat = heat(9, 2, 100);
        for block in [8, 8, 8, 4, 4] {
            heat.access(Op::Read, BlockRange::new(block, 1));
        }
        assert_eq!(ranges(&heat.backfill_schedule()), [(8, 1), (4, 2)]);
    }

    #[test]
    fn an_access_counts_its_blocks_in_every_chunk_it_touches() {
        let mut heat = heat(100, 4, 100);
        heat.access(Op::Write, BlockRange::new(3, 6));
        let counted: Vec<_> = [0, 4, 8, 12].map(|b| heat.frequency(Op::Write, b)).into();
        assert_eq!(counted, [1.0, 4.0, 1.0, 0.0]);
        heat.access(Op::Write, BlockRange::new(99, u64::MAX - 99));
        heat.access(Op::Write, BlockRange::new(u64::MAX, 0));
        assert_eq!(heat.frequency(Op::Write, 99), 1.0);
    }

    #[test]
    fn schedules_are_made_of_the_previous_round() {
        let mut heat = heat(8, 2, 4);
        for block in [0, 0, 2, 2] {
            heat.access(Op::Write, BlockRange::new(block, 1));
        }
        heat.access(Op::Write, BlockRange::new(7, 1));
        assert_eq!(ranges(&heat.copy_schedule()), [(4, 4), (2, 2), (0, 2)]);
        assert_eq!(heat.frequency(Op::Write, 7), 0.0);
    }

    #[test]
    fn a_grown_image_has_cold_chunks_behind() {
        let mut heat = heat(4, 2, 100);
        heat.access(Op::Write, BlockRange::new(0, 1));
        heat.grow(7);
        heat.grow(3);
        assert_eq!(ranges(&heat.copy_schedule()), [(2, 5), (0, 2)]);
    }
}
