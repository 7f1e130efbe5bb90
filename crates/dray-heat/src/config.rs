//! [`HeatConfig`]: how accesses are counted, and which rule makes schedules of the counts.

/// What one access adds to the frequency of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// One for each of its blocks in the chunk, so that the frequency of a chunk is the sum of the
    /// frequencies of its blocks (Scheduling paper, section 4.2 and figure 7).
    Blocks,
    /// One, however many of its blocks lie in the chunk (the paper's section 5).
    Operations,
}

/// Settings of [`Heat`](crate::Heat). Sizes are blocks of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeatConfig {
    /// Operations in a round, N; reads and writes have rounds of their own. At least 2.
    pub round_operations: u32,
    /// Smallest candidate chunk size, and the size in use before the first round has ended. At
    /// least 1.
    pub smallest_chunk_blocks: u64,
    /// Number of candidate sizes, each twice the one before; 1 fixes the size. 1 to 32.
    pub candidates: u32,
    /// What an access adds to a chunk's frequency.
    pub count: Count,
}

impl HeatConfig {
    /// The Scheduling paper's section 5: rounds of 20,000 operations, nine chunk sizes from 4 MiB
    /// to 1 GiB, schedules made of the previous round alone.
    pub const fn paper() -> Self {
        Self {
            round_operations: 20_000,
            smallest_chunk_blocks: 1024,
            candidates: 9,
            count: Count::Blocks,
        }
    }
}

impl Default for HeatConfig {
    fn default() -> Self {
        Self::paper()
    }
}
