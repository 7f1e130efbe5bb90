//! What a migration cost.

use super::Picture;

/// Reads or writes at the target that had to wait for blocks from the source.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Waits {
    /// How many.
    pub count: u64,
    /// Bytes of the blocks that were missing.
    pub bytes: u64,
    /// What they waited in all, in nanoseconds.
    pub total: u64,
    /// The longest wait, in nanoseconds.
    pub longest: u64,
}

impl Waits {
    /// Mean wait in nanoseconds; zero when none waited.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.total as f64 / self.count as f64 }
    }

    pub(super) fn begins(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes += bytes;
    }

    pub(super) fn ends(&mut self, wait: u64) {
        self.total += wait;
        self.longest = self.longest.max(wait);
    }
}

/// What a migration cost. Times are nanoseconds from its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Why it did not come to its end; none when it did.
    pub failed: Option<String>,
    /// Until every block was at the target.
    pub total: u64,
    /// When the guest ran at the target; none when it never did.
    pub handover: Option<u64>,
    /// From the guest's stop to its start at the target.
    pub downtime: u64,
    /// Bytes of blocks sent for the first time.
    pub first_bytes: u64,
    /// Extra traffic: bytes of blocks that were sent before.
    pub extra_bytes: u64,
    /// Of all that: bytes of blocks for which the guest waited.
    pub urgent_bytes: u64,
    /// Bytes of guest memory.
    pub memory_bytes: u64,
    /// Bytes of blocks that the target missed at the handover.
    pub missing_bytes: u64,
    /// Bytes of blocks never sent because the guest overwrote them at the target.
    pub cancelled_bytes: u64,
    /// Bytes still missing at the end (a deferred migration).
    pub left_bytes: u64,
    /// Degraded operations: reads that waited for blocks from the source.
    pub reads: Waits,
    /// Writes of parts of blocks that waited for them.
    pub writes: Waits,
    /// Operations that came while the guest was stopped.
    pub stopped: u64,
    /// Writes that were throttled.
    pub throttled: u64,
    /// What they waited in all, in nanoseconds.
    pub throttled_for: u64,
    /// Rounds of Sync.
    pub rounds: u32,
    /// Runs that did not follow their predecessor and were charged for it.
    pub seeks: u64,
    /// Records of the trace that were read, the history included.
    pub records: u64,
    /// Events of the simulation.
    pub events: u64,
    /// Chunk sizes in bytes that the orders were made of: of writes and of reads; zero without.
    pub chunks: (u64, u64),
    /// The picture, if it was asked for.
    pub picture: Option<Picture>,
}

impl Outcome {
    /// Every byte that crossed the link from the source to the target.
    pub fn wire_bytes(&self) -> u64 {
        self.first_bytes + self.extra_bytes + self.memory_bytes
    }
}
