//! A disk of limited throughput: reads and writes together move so many bytes a second.

use super::{Layer, Op, Request};
use crate::Result;
use dray_types::BitRate;
use parking_lot::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// How far requests may run ahead of the rate: enough to keep a queue busy, too little to notice.
const BURST: Duration = Duration::from_millis(10);

/// A layer that spaces requests out.
#[derive(Debug)]
pub struct Rate {
    rate: BitRate,
    /// When everything let through so far would be done at the rate.
    busy_until: Mutex<Option<Instant>>,
}

impl Rate {
    /// Lets `rate` through.
    pub fn new(rate: BitRate) -> Self {
        Self { rate, busy_until: Mutex::new(None) }
    }

    /// How long a request of `len` bytes that comes at `now` has to wait.
    fn wait(&self, len: u64, now: Instant) -> Duration {
        let nanos = u128::from(len) * 1_000_000_000 / u128::from(self.rate.bytes_per_second);
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let mut busy_until = self.busy_until.lock();
        let begin = busy_until.map_or(now, |busy| busy.max(now));
        *busy_until = Some(begin + cost);
        (begin + cost).saturating_duration_since(now + BURST)
    }
}

impl Layer for Rate {
    fn before(&self, request: Request) -> Result<()> {
        if matches!(request.op, Op::Read | Op::Write) {
            thread::sleep(self.wait(request.len, Instant::now()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_wait_as_long_as_the_rate_says() {
        let rate = Rate::new(BitRate { bytes_per_second: 1_000_000 });
        let now = Instant::now();
        assert_eq!(rate.wait(10_000, now), Duration::ZERO);
        assert_eq!(rate.wait(90_000, now), Duration::from_millis(90));
        assert_eq!(rate.wait(100_000, now), Duration::from_millis(190));
        // An idle second is not saved up.
        let later = now + Duration::from_secs(1);
        assert_eq!(rate.wait(1_000_000, later), Duration::from_millis(990));
    }
}
