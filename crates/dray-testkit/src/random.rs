//! Random choices that a seed repeats.

use crate::numbered::next;
use std::time::Duration;

/// A source of choices.
pub struct Random(u64);

impl Random {
    /// The choices of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        next(&mut self.0) % end
    }

    /// True in so many of a hundred cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// A time up to `most`, short ones more often than long ones.
    pub fn time(&mut self, most: Duration) -> Duration {
        let part = self.below(1001) as f64 / 1000.0;
        most.mul_f64(part * part)
    }
}
