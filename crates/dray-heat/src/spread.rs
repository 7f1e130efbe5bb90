//! [`Spread`]: the hash of block and chunk numbers.

use std::hash::{BuildHasherDefault, Hasher};

/// Spreads numbers over a hash table. The tables are bounded and never iterated, so a guest that
/// aims for collisions slows only the counting of its own accesses.
pub(crate) type Spread = BuildHasherDefault<SpreadHasher>;

#[derive(Default)]
pub(crate) struct SpreadHasher(u64);

impl Hasher for SpreadHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0 ^ u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = spread(value);
    }
}

/// A number whose every bit depends on many bits of `value`.
pub(crate) fn spread(value: u64) -> u64 {
    let mixed = (value ^ (value >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}
