//! [`Track`]: the rounds of one kind of operation.

use crate::chunks::ChunkSet;
use crate::config::{Count, HeatConfig};
use crate::coverage::{CandidateCoverage, Coverage};
use crate::frequency::FrequencyList;
use dray_types::BlockRange;

/// The accesses of up to N operations, counted at one chunk size.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) chunk_blocks: u64,
    pub(crate) operations: u32,
    pub(crate) list: FrequencyList,
    /// The chunks in `list`, in address order.
    pub(crate) touched: ChunkSet,
}

impl Round {
    fn new(chunk_blocks: u64) -> Self {
        Self {
            chunk_blocks,
            operations: 0,
            list: FrequencyList::default(),
            touched: ChunkSet::default(),
        }
    }

    fn access(&mut self, range: BlockRange, count: Count) {
        self.operations += 1;
        if range.is_empty() {
            return;
        }
        for id in range.start / self.chunk_blocks..=(range.end() - 1) / self.chunk_blocks {
            let chunk = BlockRange::new(id * self.chunk_blocks, self.chunk_blocks);
            if !self.list.contains(id) {
                self.touched.insert(id);
            }
            self.list.add(
                id,
                match count {
                    Count::Blocks => chunk.intersect(range).len,
                    Count::Operations => 1,
                },
            );
        }
    }
}

/// The previous and the current round of one kind of operation.
#[derive(Clone, Debug)]
pub(crate) struct Track {
    config: HeatConfig,
    current: Round,
    coverage: Coverage,
    previous: Option<Round>,
    /// What the candidates of the previous round covered.
    covered: Vec<CandidateCoverage>,
}

impl Track {
    pub(crate) fn new(config: HeatConfig) -> Self {
        Self {
            config,
            current: Round::new(config.smallest_chunk_blocks),
            coverage: Coverage::new(config.smallest_chunk_blocks, config.candidates),
            previous: None,
            covered: Vec::new(),
        }
    }

    /// Counts one operation on an image of `blocks` blocks, `range` inside it.
    pub(crate) fn access(&mut self, range: BlockRange, blocks: u64) {
        let second_half = self.current.operations >= self.config.round_operations / 2;
        self.coverage.access(range, second_half);
        self.current.access(range, self.config.count);
        if self.current.operations >= self.config.round_operations {
            self.end_round(blocks);
        }
    }

    fn end_round(&mut self, blocks: u64) {
        let size = self.coverage.choose(blocks).unwrap_or(self.current.chunk_blocks);
        self.covered = self.coverage.candidates(blocks).collect();
        self.coverage = Coverage::new(self.config.smallest_chunk_blocks, self.config.candidates);
        self.previous = Some(std::mem::replace(&mut self.current, Round::new(size)));
    }

    /// The round that schedules are made of: the previous one, or the current one while it is the
    /// first.
    pub(crate) fn scheduled(&self) -> &Round {
        self.previous.as_ref().unwrap_or(&self.current)
    }

    pub(crate) fn covered(&self) -> &[CandidateCoverage] {
        &self.covered
    }

    pub(crate) fn memory(&self) -> usize {
        let round = |round: &Round| round.list.memory() + round.touched.memory();
        round(&self.current) + self.previous.as_ref().map_or(0, round) + self.coverage.memory()
    }
}
