//! Random numbers that a seed decides.

/// splitmix64.
pub struct Random(pub u64);

impl Random {
    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// The first `most` seeds, or the one that `DRAY_SEED` names.
pub fn seeds(most: u64) -> std::ops::Range<u64> {
    match std::env::var("DRAY_SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("DRAY_SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..most,
    }
}
