//! [`Round`]: accesses counted at one chunk size.

use crate::frequency::FrequencyList;
use dray_types::BlockRange;

/// What one counted access weighs. Halving at the end of a round then forgets a single access
/// after five rounds and not at once.
pub(crate) const WEIGHT: u64 = 16;

/// Frequencies of chunks, and how many operations they come from.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) chunk_blocks: u64,
    /// Operations since the round began.
    pub(crate) operations: u32,
    /// Operations in units of 1 / [`WEIGHT`], halved as the frequencies are.
    pub(crate) weight: u64,
    /// Frequencies in units of 1 / [`WEIGHT`].
    pub(crate) list: FrequencyList,
}

impl Round {
    pub(crate) fn new(chunk_blocks: u64) -> Self {
        Self { chunk_blocks, operations: 0, weight: 0, list: FrequencyList::default() }
    }

    /// Counts one operation: each chunk it touches gains its blocks there, or one when
    /// `by_blocks` is not set.
    pub(crate) fn access(&mut self, range: BlockRange, by_blocks: bool, max_chunks: usize) {
        self.operations += 1;
        self.weight = self.weight.saturating_add(WEIGHT);
        if range.is_empty() {
            return;
        }
        let mut id = range.start / self.chunk_blocks;
        let mut rest = range;
        while !rest.is_empty() {
            let (here, others) = rest.split_at_most((id + 1) * self.chunk_blocks - rest.start);
            let count = if by_blocks { here.len } else { 1 };
            self.list.add(id, count * WEIGHT);
            (id, rest) = (id + 1, others);
        }
        self.shrink_to(max_chunks);
    }

    /// Doubles the chunk size until at most `max_chunks` have a count.
    pub(crate) fn shrink_to(&mut self, max_chunks: usize) {
        while self.list.len() > max_chunks {
            self.chunk_blocks *= 2;
            self.list = self.list.paired();
        }
    }

    /// Begins the next round on top of this one: everything known counts half.
    pub(crate) fn age(&mut self) {
        self.operations = 0;
        self.weight /= 2;
        self.list = self.list.halved(WEIGHT);
    }

    /// The chunks with a count, in address order.
    pub(crate) fn touched(&self) -> Vec<u64> {
        let mut ids: Vec<u64> = self.list.ids().collect();
        ids.sort_unstable();
        ids
    }

    pub(crate) fn memory(&self) -> usize {
        self.list.memory()
    }
}
