//! How fast the streams go.

use std::time::{Duration, Instant};

/// Shortest time that is averaged over.
const SPAN: Duration = Duration::from_secs(1);

/// The rate of a counter of bytes that only grows.
pub struct Rate {
    since: Instant,
    /// What the counter said then.
    bytes: u64,
    rate: u64,
}

impl Rate {
    /// Begins now, with what the counter says now: bytes of an earlier process are no rate.
    pub fn new(bytes: u64) -> Self {
        Self { since: Instant::now(), bytes, rate: 0 }
    }

    /// Looks at the counter again: bytes a second over the last second or so.
    pub fn measure(&mut self, bytes: u64) -> u64 {
        self.measure_at(Instant::now(), bytes)
    }

    /// The same at a given time.
    fn measure_at(&mut self, now: Instant, bytes: u64) -> u64 {
        let span = now.saturating_duration_since(self.since);
        if span >= SPAN {
            let more = bytes.saturating_sub(self.bytes) as f64;
            *self = Self { since: now, bytes, rate: (more / span.as_secs_f64()) as u64 };
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
    }
}
