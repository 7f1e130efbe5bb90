//! [`Jumps`]: what it costs a disk that a run does not follow the one read before.
//!
//! An order of blocks may have as many jumps as the disk does not mind. On a hard disk a jump takes
//! ten milliseconds, on flash or in the page cache next to nothing, and no file says reliably on
//! which of them it lies; so it is measured on the reads of the migration itself. A read that
//! follows its predecessor tells what a block takes, one that does not tells what the jump adds.

use dray_types::{BLOCK_SIZE, BlockRange, ImageIndex};
use std::time::Duration;

/// Seconds that a jump is taken to cost until enough were measured: a hard disk's.
const ASSUMED: f64 = 0.010;
/// So many jumps are enough.
const ENOUGH: u32 = 16;
/// Weight of a new measurement in the mean.
const NEWER: f64 = 1.0 / 16.0;
/// A read that takes longer waits for something else than the disk's head, in seconds.
const LONGEST: f64 = 0.050;

/// Learns from reads; see the module.
#[derive(Debug, Default)]
pub struct Jumps {
    /// Where the last read ended.
    ended: Option<(ImageIndex, u64)>,
    /// Seconds that a block takes which follows.
    block: Option<f64>,
    /// Seconds that a jump adds, and how many were measured.
    jump: f64,
    measured: u32,
}

impl Jumps {
    /// A read of `range` begins; whether it follows the one before.
    pub fn begins(&mut self, image: ImageIndex, range: BlockRange) -> bool {
        self.ended.replace((image, range.end())) == Some((image, range.start))
    }

    /// A read of `blocks` blocks took so long.
    pub fn took(&mut self, follows: bool, blocks: u64, time: Duration) {
        let time = time.as_secs_f64().min(LONGEST);
        let mix = |old: f64, new: f64| old + (new - old) * NEWER;
        if follows {
            let block = time / blocks.max(1) as f64;
            self.block = Some(self.block.map_or(block, |old| mix(old, block)));
        } else if let Some(block) = self.block {
            let added = (time - block * blocks as f64).max(0.0);
            self.measured = self.measured.saturating_add(1);
            self.jump = if self.measured == 1 { added } else { mix(self.jump, added) };
        }
    }

    /// Seconds that a jump costs, as far as is known.
    fn seconds(&self) -> f64 {
        if self.measured >= ENOUGH { self.jump } else { ASSUMED }
    }

    /// The same in nanoseconds.
    pub fn nanos(&self) -> u64 {
        (self.seconds() * 1e9) as u64
    }

    /// Blocks that a link of `rate` bytes a second carries in the time of a jump, at least one; 0 when
    /// the rate is not known.
    pub fn blocks(&self, rate: f64) -> u64 {
        if rate <= 0.0 {
            return 0;
        }
        ((rate * self.seconds() / BLOCK_SIZE as f64).round() as u64).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: ImageIndex = ImageIndex(0);
    /// 10 ms are 64 blocks.
    const RATE: f64 = 6400.0 * BLOCK_SIZE as f64;

    /// Pairs of reads of 32 blocks, the second of which follows the first: 10 µs a block, and a jump.
    fn measured(pairs: u64, jump: Duration) -> Jumps {
        let mut jumps = Jumps::default();
        for n in 0..pairs {
            for (part, jump) in [(0, jump), (1, Duration::ZERO)] {
                let follows = jumps.begins(IMAGE, BlockRange::new(n * 1000 + part * 32, 32));
                assert_eq!(follows, part == 1);
                jumps.took(follows, 32, Duration::from_micros(320) + jump);
            }
        }
        jumps
    }

    #[test]
    fn a_hard_disk_is_assumed_until_enough_is_known() {
        assert_eq!(Jumps::default().blocks(0.0), 0);
        assert_eq!(Jumps::default().blocks(RATE), 64);
        assert_eq!(Jumps::default().nanos(), 10_000_000);
        assert_eq!(measured(10, Duration::ZERO).blocks(RATE), 64);
    }

    #[test]
    fn what_jumps_cost_is_learnt() {
        assert_eq!(measured(20, Duration::ZERO).blocks(RATE), 1);
        assert_eq!(measured(20, Duration::from_millis(5)).blocks(RATE), 32);
        let mut jumps = measured(20, Duration::from_millis(10));
        assert_eq!(jumps.blocks(RATE), 64);
        // The rest of the image is in the page cache.
        for _ in 0..100 {
            jumps.took(false, 32, Duration::from_micros(300));
        }
        assert_eq!(jumps.blocks(RATE), 1);
    }

    #[test]
    fn another_image_is_another_place() {
        let mut jumps = Jumps::default();
        jumps.begins(IMAGE, BlockRange::new(0, 8));
        assert!(!jumps.begins(ImageIndex(1), BlockRange::new(8, 8)));
        assert!(jumps.begins(ImageIndex(1), BlockRange::new(16, 8)));
    }
}
