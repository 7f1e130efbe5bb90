//! The latency of a guest's changes: a histogram to which many threads add at the same time.

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Steps of an octave: a step is 19 % wide.
const STEPS: u32 = 4;
/// Up to 2⁴⁰ ns, 18 minutes.
const BUCKETS: usize = 40 * STEPS as usize;

/// The histogram of a disk, and whether it is filled.
pub(crate) struct Meter {
    on: AtomicBool,
    buckets: [AtomicU64; BUCKETS],
}

/// What it held at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latencies([u64; BUCKETS]);

impl Default for Latencies {
    fn default() -> Self {
        Self([0; BUCKETS])
    }
}

/// The step that a time falls into: `STEPS` to the power of two, by the bits below its highest.
fn step(nanos: u64) -> usize {
    let nanos = nanos.max(STEPS.into());
    let octave = nanos.ilog2();
    let within = (nanos >> (octave - STEPS.ilog2())) as u32 - STEPS;
    ((octave * STEPS + within) as usize).min(BUCKETS - 1)
}

/// The longest time of a step, in nanoseconds.
fn end(step: usize) -> u64 {
    let (octave, within) = (step as u32 / STEPS, u64::from(step as u32 % STEPS));
    ((u64::from(STEPS) + within + 1) << octave >> STEPS.ilog2()).saturating_sub(1)
}

impl Default for Meter {
    fn default() -> Self {
        let buckets = std::array::from_fn(|_| AtomicU64::new(0));
        Self { on: AtomicBool::new(false), buckets }
    }
}

impl Meter {
    pub(crate) fn switch(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[step(nanos)].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Latencies {
        Latencies(std::array::from_fn(|at| self.buckets[at].load(Ordering::Relaxed)))
    }
}

impl Latencies {
    /// Number of changes.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Those of two disks.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] + other.0[at]))
    }

    /// Those that came after `earlier` was read.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at].saturating_sub(earlier.0[at])))
    }

    /// The time that `share` (0 to 1) of them did not exceed, to a fifth; none when there are none.
    pub fn percentile(&self, share: f64) -> Option<Duration> {
        let wanted = (self.count() as f64 * share.clamp(0.0, 1.0)).ceil().max(1.0) as u64;
        let mut seen = 0;
        let at = self.0.iter().position(|count| {
            seen += count;
            seen >= wanted
        })?;
        Some(Duration::from_nanos(end(at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_a_fifth_and_none_is_left_out() {
        for nanos in [4, 5, 100, 4095, 4096, 123_456, 999_999_999, 1 << 38] {
            let longest = end(step(nanos));
            assert!(longest >= nanos && longest - nanos <= nanos / 4, "{nanos} {longest}");
        }
        assert_eq!(step(u64::MAX), BUCKETS - 1);
        assert_eq!(step(0), step(4));
    }

    #[test]
    fn percentiles_are_those_of_what_came_since() {
        let meter = Meter::default();
        assert_eq!(meter.read().percentile(0.9), None);
        (0..100).for_each(|_| meter.add(Duration::from_secs(1)));
        let before = meter.read();
        (1..=100).for_each(|n| meter.add(Duration::from_micros(n * 10)));
        let since = meter.read().since(&before);
        assert_eq!(since.count(), 100);
        let p90 = since.percentile(0.9).unwrap();
        assert!((900..=1125).contains(&p90.as_micros()), "{p90:?}");
        assert_eq!(since.plus(&before).count(), 200);
    }
}
