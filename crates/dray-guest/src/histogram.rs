//! Latencies in buckets of about 6 % width, so that percentiles cost no memory per sample.

use std::time::Duration;

/// Each power of two is divided into this many buckets.
const STEPS: usize = 16;
const BUCKETS: usize = 64 * STEPS;

/// Counts of latencies.
#[derive(Clone)]
pub struct Histogram {
    counts: Vec<u32>,
    total: u64,
    max_us: u64,
}

impl Histogram {
    /// Nothing counted.
    pub fn new() -> Self {
        Self { counts: vec![0; BUCKETS], total: 0, max_us: 0 }
    }

    /// Counts one latency.
    pub fn add(&mut self, latency: Duration) {
        let us = latency.as_micros() as u64;
        self.counts[bucket(us)] += 1;
        self.total += 1;
        self.max_us = self.max_us.max(us);
    }

    /// The latency that `per_mille` of the samples do not exceed, in microseconds.
    pub fn percentile_us(&self, per_mille: u64) -> u64 {
        let wanted = (self.total * per_mille).div_ceil(1000);
        let mut seen = 0;
        for (i, count) in self.counts.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= wanted {
                return upper_bound(i).min(self.max_us);
            }
        }
        self.max_us
    }

    /// The largest latency, in microseconds.
    pub fn max_us(&self) -> u64 {
        self.max_us
    }
}

fn bucket(us: u64) -> usize {
    if us < STEPS as u64 {
        return us as usize;
    }
    let power = us.ilog2() as usize;
    let step = ((us >> (power - 4)) & 15) as usize;
    (power - 3) * STEPS + step
}

fn upper_bound(bucket: usize) -> u64 {
    if bucket < STEPS {
        return bucket as u64;
    }
    let (power, step) = (bucket / STEPS + 3, bucket % STEPS);
    let width = 1u64 << (power - 4);
    (STEPS as u64 + step as u64) * width + width - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_close() {
        let mut h = Histogram::new();
        for us in 1..=10_000u64 {
            h.add(Duration::from_micros(us));
        }
        for (per_mille, exact) in [(500, 5_000), (990, 9_900), (999, 9_990)] {
            let got = h.percentile_us(per_mille);
            assert!(got >= exact && got <= exact + exact / 15, "{per_mille}: {got}");
        }
        assert_eq!(h.max_us(), 10_000);
        assert_eq!(Histogram::new().percentile_us(990), 0);
    }

    #[test]
    fn a_value_lies_in_its_bucket() {
        for us in (0..5_000).chain([1 << 20, (1 << 33) + 17]) {
            let b = bucket(us);
            assert!(upper_bound(b) >= us && (b == 0 || upper_bound(b - 1) < us), "{us}");
        }
    }
}
