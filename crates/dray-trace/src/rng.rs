//! The only source of chance in simulations and generated loads: a seed determines everything.

/// SplitMix64 (Steele, Lea and Flood, 2014): tiny, and good enough to pick delays, places and
/// faults.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x6a09_e667_f3bc_c908)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which must not be zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.bits() % limit
    }

    /// A number in `low ..= high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// A number in `0.0 .. 1.0`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / ((1u64 << 53) as f64)
    }

    /// True with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        p > 0.0 && self.unit() < p
    }

    /// A waiting time with the given mean: exponential, so events come as a Poisson process.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// One of the items, of which there must be some.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_numbers_and_means_are_right() {
        let (mut one, mut two) = (Rng::new(7), Rng::new(7));
        assert!((0..100).all(|_| one.bits() == two.bits()));
        let mean = (0..100_000).map(|_| one.exponential(3.0)).sum::<f64>() / 100_000.0;
        assert!((mean - 3.0).abs() < 0.05, "{mean}");
        assert!((0..1000).all(|_| (5..=9).contains(&one.between(5, 9))));
    }
}
