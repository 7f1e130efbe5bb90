//! Counters of a disk, spread over shards so that counting does not slow requests down.

use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::shard;

/// Counters of a disk since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskStats {
    /// Guest reads.
    pub reads: u64,
    /// Guest writes.
    pub writes: u64,
    /// Guest zeroes and discards.
    pub zeroes: u64,
    /// Guest flushes.
    pub flushes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Reads that had to wait for a missing block.
    pub remote_reads: u64,
    /// Writes, zeroes and discards that had to wait for a partly overwritten missing block.
    pub remote_writes: u64,
    /// Nanoseconds that reads and writes waited for missing blocks, summed.
    pub remote_wait_nanos: u64,
    /// Missing blocks that arrived.
    pub filled_blocks: u64,
    /// Missing blocks that the guest overwrote before they were fetched.
    pub cancelled_blocks: u64,
}

const SHARDS: usize = 16;

/// What is counted.
#[derive(Clone, Copy)]
pub(crate) enum Counter {
    Reads,
    Writes,
    Zeroes,
    Flushes,
    ReadBytes,
    WriteBytes,
    RemoteReads,
    RemoteWrites,
    RemoteWaitNanos,
    FilledBlocks,
}

const COUNTERS: usize = Counter::FilledBlocks as usize + 1;

#[repr(align(128))]
#[derive(Default)]
struct Shard([AtomicU64; COUNTERS]);

#[derive(Default)]
pub(crate) struct Counters {
    shards: [Shard; SHARDS],
}

impl Counters {
    pub(crate) fn add(&self, counter: Counter, amount: u64) {
        self.shards[shard(SHARDS)].0[counter as usize].fetch_add(amount, Ordering::Relaxed);
    }

    fn sum(&self, counter: Counter) -> u64 {
        self.shards.iter().map(|shard| shard.0[counter as usize].load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn total(&self) -> DiskStats {
        DiskStats {
            reads: self.sum(Counter::Reads),
            writes: self.sum(Counter::Writes),
            zeroes: self.sum(Counter::Zeroes),
            flushes: self.sum(Counter::Flushes),
            read_bytes: self.sum(Counter::ReadBytes),
            write_bytes: self.sum(Counter::WriteBytes),
            remote_reads: self.sum(Counter::RemoteReads),
            remote_writes: self.sum(Counter::RemoteWrites),
            remote_wait_nanos: self.sum(Counter::RemoteWaitNanos),
            filled_blocks: self.sum(Counter::FilledBlocks),
            cancelled_blocks: 0,
        }
    }
}
