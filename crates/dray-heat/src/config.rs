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

/// Which accesses schedules are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum History {
    /// Those of the last complete round (the paper's section 5); of the current one while that is
    /// the first.
    PreviousRound,
    /// All, those of each earlier round half as much as those of the next. The chunk size is the
    /// smallest candidate. A chunk is forgotten when less than 1/16 access is left of it.
    Decayed,
}

/// The order among chunks that were not accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColdOrder {
    /// Address order (the paper).
    Address,
    /// The nearer to an access, the hotter: what lies outside every accessed neighbourhood of 512
    /// chunks is coldest, then of 64 chunks, then of 8; address order in each.
    FarFirst,
    /// All chunks, accessed or not, by the density of accesses that a mixture of chunk sizes
    /// and what lies ahead of streams foretell, its weights learnt from the history. Pieces are as
    /// small as the cost of their jumps allows.
    Density,
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
    /// Which accesses schedules are made of.
    pub history: History,
    /// The order among chunks that were not accessed.
    pub cold: ColdOrder,
    /// Whether a history that did not predict is answered with address order (section 4.2).
    pub guard: bool,
    /// What a jump to a block that does not follow its predecessor costs, in blocks that could move
    /// in its time. The guard counts it; with [`ColdOrder::Density`] it bounds the jumps too.
    pub jump_blocks: u64,
    /// With [`ColdOrder::Density`]: one part in so many of the time of a copy may go into the jumps of
    /// a schedule. At least 1. A 56th, with the eighth more that newer schedules in the middle of a copy
    /// may cost in the engine, is 2 % of it.
    pub jump_share: u64,
    /// Most chunks with a count, for each kind of operation; when there are more, the chunk size
    /// doubles and pairs are added up. At least 1.
    pub max_chunks: usize,
}

impl HeatConfig {
    /// The Scheduling paper's section 5: rounds of 20,000 operations, nine chunk sizes from 4 MiB
    /// to 1 GiB, schedules made of the previous round alone, without guards.
    pub const fn paper() -> Self {
        Self {
            round_operations: 20_000,
            smallest_chunk_blocks: 1024,
            candidates: 9,
            count: Count::Blocks,
            history: History::PreviousRound,
            cold: ColdOrder::Address,
            guard: false,
            jump_blocks: 0,
            jump_share: 56,
            max_chunks: 65_536,
        }
    }
}

impl Default for HeatConfig {
    /// What measured best on real traces and generated loads, see the crate's documentation: chunks
    /// of 128 KiB in a mixture with all larger ones, decayed counts, guarded.
    fn default() -> Self {
        Self {
            smallest_chunk_blocks: 32,
            candidates: 1,
            history: History::Decayed,
            cold: ColdOrder::Density,
            guard: true,
            // A seek of 10 ms at 100 MiB/s.
            jump_blocks: 256,
            max_chunks: 16_384,
            ..Self::paper()
        }
    }
}
