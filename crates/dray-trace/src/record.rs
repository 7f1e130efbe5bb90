//! One access of a guest.

use dray_types::BlockRange;

/// Accesses end below this byte: 1 PiB. What lies beyond is a damaged trace.
pub const MAX_END: u64 = 1 << 50;
/// Longest access, in bytes: 1 GiB, more than any device takes in one request.
pub const MAX_LENGTH: u64 = 1 << 30;
/// Latest time, in nanoseconds: 100 years, so that sums of times cannot overflow.
pub const MAX_TIME: u64 = 100 * 365 * 86_400 * 1_000_000_000;

/// What a guest did.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Op {
    /// It read.
    Read,
    /// It wrote.
    Write,
}

/// One access of a guest to its disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// When it was issued: nanoseconds since the trace's own zero.
    pub time_ns: u64,
    /// Read or write.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Bytes; never zero in a record that came from a reader or generator.
    pub length: u64,
}

impl Record {
    /// One past its last byte.
    pub const fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// The blocks of 4 KiB that it touches.
    pub const fn blocks(&self) -> BlockRange {
        BlockRange::covering(self.offset, self.length)
    }
}
