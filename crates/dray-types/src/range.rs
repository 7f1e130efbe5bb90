//! Runs of blocks, and the one place where bytes become blocks.

use serde::{Deserialize, Serialize};

/// Size of a block in bytes: the unit in which dray tracks dirty and present data.
pub const BLOCK_SIZE: u64 = 4096;

/// Longest run that moves in one frame: 1 MiB. Long enough that per-run costs vanish, short enough
/// that a demand read never waits behind more than a few milliseconds of bulk data.
pub const MAX_RUN_BLOCKS: u64 = 256;

/// Consecutive blocks `start .. start + len`, counted in [`BLOCK_SIZE`] units from the image's start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct BlockRange {
    /// First block.
    pub start: u64,
    /// Number of blocks; zero makes an empty range.
    pub len: u64,
}

impl BlockRange {
    /// The range of `len` blocks that begins at block `start`.
    pub const fn new(start: u64, len: u64) -> Self {
        Self { start, len }
    }

    /// One past the last block.
    pub const fn end(self) -> u64 {
        self.start + self.len
    }

    /// True when it holds no block.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// First byte.
    pub const fn byte_offset(self) -> u64 {
        self.start * BLOCK_SIZE
    }

    /// Length in bytes.
    pub const fn byte_len(self) -> u64 {
        self.len * BLOCK_SIZE
    }

    /// Every block that `len` bytes at `offset` touch, even if only in part.
    pub const fn covering(offset: u64, len: u64) -> Self {
        if len == 0 {
            return Self::new(offset / BLOCK_SIZE, 0);
        }
        let start = offset / BLOCK_SIZE;
        Self::new(start, (offset + len - 1) / BLOCK_SIZE + 1 - start)
    }

    /// Every block that lies entirely inside `len` bytes at `offset`.
    pub const fn inside(offset: u64, len: u64) -> Self {
        let start = offset.div_ceil(BLOCK_SIZE);
        let end = (offset + len) / BLOCK_SIZE;
        Self::new(start, end.saturating_sub(start))
    }

    /// All blocks of an image of `bytes` bytes; a last part block counts as a block.
    pub const fn whole(bytes: u64) -> Self {
        Self::new(0, bytes.div_ceil(BLOCK_SIZE))
    }

    /// The blocks in both.
    pub fn intersect(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        Self::new(start, end.saturating_sub(start))
    }

    /// True when every block of `other` is in this range.
    pub const fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end() <= self.end()
    }

    /// Cuts off at most `max` blocks from the front and returns them and the rest.
    pub fn split_at_most(self, max: u64) -> (Self, Self) {
        let head = self.len.min(max);
        (Self::new(self.start, head), Self::new(self.start + head, self.len - head))
    }

    /// The range cut into pieces of at most `max` blocks.
    pub fn pieces(self, max: u64) -> impl Iterator<Item = Self> {
        let mut rest = self;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (head, tail) = rest.split_at_most(max);
            rest = tail;
            Some(head)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_touch_and_fill_blocks() {
        assert_eq!(BlockRange::covering(4095, 2), BlockRange::new(0, 2));
        assert_eq!(BlockRange::inside(4095, 2), BlockRange::new(1, 0));
        assert_eq!(BlockRange::covering(4096, 4096), BlockRange::new(1, 1));
        assert_eq!(BlockRange::inside(4096, 4096), BlockRange::new(1, 1));
        assert_eq!(BlockRange::covering(8192, 0).len, 0);
        assert_eq!(BlockRange::inside(1, 3 * 4096), BlockRange::new(1, 2));
        assert_eq!(BlockRange::whole(4097), BlockRange::new(0, 2));
    }

    #[test]
    fn pieces_cover_the_range_once() {
        let pieces: Vec<_> = BlockRange::new(10, 600).pieces(MAX_RUN_BLOCKS).collect();
        assert_eq!(pieces.iter().map(|r| r.len).sum::<u64>(), 600);
        assert!(pieces.iter().all(|r| r.len <= MAX_RUN_BLOCKS));
        assert_eq!(pieces[0].start, 10);
        assert_eq!(pieces.last().unwrap().end(), 610);
    }
}
