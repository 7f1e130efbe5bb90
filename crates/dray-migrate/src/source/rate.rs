//! The rate of the data streams.

use std::time::{Duration, Instant};

/// Shortest time that is averaged over.
const SPAN: Duration = Duration::from_secs(1);

/// The rate of a counter of bytes that only grows.
pub struct Rate {
    since: Instant,
    /// What the counter said then.
    bytes: u64,
    rate: u64,
    /// The most that two spans in turn have reached.
    steady: u64,
}

impl Rate {
    /// Begins now, with what the counter says now: bytes of an earlier process are no rate.
    pub fn new(bytes: u64) -> Self {
        Self { since: Instant::now(), bytes, rate: 0, steady: 0 }
    }

    /// Looks at the counter again: bytes a second over the last second or so.
    pub fn measure(&mut self, bytes: u64) -> u64 {
        self.measure_at(Instant::now(), bytes)
    }

    /// The highest rate that lasted: one that two spans in turn have reached, so that a burst into
    /// buffers does not count.
    pub fn steady(&self) -> u64 {
        self.steady
    }

    /// The same at a given time.
    fn measure_at(&mut self, now: Instant, bytes: u64) -> u64 {
        let span = now.saturating_duration_since(self.since);
        if span >= SPAN {
            let more = bytes.saturating_sub(self.bytes) as f64;
            let rate = (more / span.as_secs_f64()) as u64;
            let steady = self.steady.max(rate.min(self.rate));
            *self = Self { since: now, bytes, rate, steady };
        }
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_comes_after_the_beginning_counts() {
        let mut rate = Rate::new(1 << 30);
        let begun = rate.since;
        let after = |ms| begun + Duration::from_millis(ms);
        assert_eq!(rate.measure_at(after(500), (1 << 30) + 500), 0);
        assert_eq!(rate.measure_at(after(2000), (1 << 30) + 2000), 1000);
        assert_eq!(rate.measure_at(after(2500), (1 << 30) + 9000), 1000);
        assert_eq!(rate.measure_at(after(4000), (1 << 30) + 2000), 0);
        assert_eq!(rate.steady(), 0, "it did not last");
        rate.measure_at(after(5000), (1 << 30) + 9000);
        rate.measure_at(after(6000), (1 << 30) + 14_000);
        rate.measure_at(after(7000), (1 << 30) + 14_000);
        assert_eq!(rate.steady(), 5000);
    }
}
