//! [`Bucket`]: the arithmetic of a limit, with the time as an argument.

use dray_types::BitRate;
use std::time::Duration;

/// Balance that may be saved up, as time at the limit: a few times the oversleeping of a timer on
/// a busy host, and short enough that a link never sees more than that as a burst.
const BURST: Duration = Duration::from_millis(20);
/// Least balance that may be saved up, so that small limits do not stop at every packet.
const MIN_BURST: f64 = 64.0 * 1024.0;
/// How far urgent bytes may push the balance down, as time at the limit. Without an end, a minute
/// of demand reads would stop the bulk for as long as it takes to pay for them.
pub(crate) const MAX_URGENT_DEBT: f64 = 2.0;
/// Time over which the measured rate is averaged.
const METER_TAU: f64 = 1.0;
/// Time that a rate is measured over at least; less says nothing.
const METER_MIN: f64 = 0.02;

/// Who wants to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// Runs of disk blocks.
    Bulk,
    /// Guest memory. Its pieces are small and runs are large, so while it waits it is let through
    /// until it had as many bytes as the bulk since.
    Memory,
}

/// The arithmetic of a limit. Times are durations since any fixed moment.
#[derive(Debug, Clone)]
pub struct Bucket {
    /// Bytes a second.
    rate: Option<f64>,
    balance: f64,
    at: Duration,
    meter: Meter,
    memory_waiting: u32,
    /// Bytes of bulk minus bytes of memory since memory began to wait.
    bulk_ahead: f64,
}

/// Bytes a second as an exponentially fading average.
#[derive(Debug, Clone, Default)]
struct Meter {
    faded: f64,
    at: Duration,
    began: Option<Duration>,
}

impl Meter {
    fn add(&mut self, now: Duration, bytes: f64) {
        self.began.get_or_insert(now);
        self.fade(now);
        self.faded += bytes;
    }

    fn fade(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.faded *= (-passed / METER_TAU).exp();
        self.at = self.at.max(now);
    }

    fn rate(&mut self, now: Duration) -> f64 {
        let Some(began) = self.began else { return 0.0 };
        self.fade(now);
        let age = now.saturating_sub(began).as_secs_f64().max(METER_MIN);
        self.faded / (METER_TAU * (1.0 - (-age / METER_TAU).exp()))
    }
}

impl Bucket {
    /// A bucket with this limit.
    pub fn new(limit: Option<BitRate>) -> Self {
        let rate = limit.map(|limit| limit.bytes_per_second as f64);
        Self {
            rate,
            balance: 0.0,
            at: Duration::ZERO,
            meter: Meter::default(),
            memory_waiting: 0,
            bulk_ahead: 0.0,
        }
    }

    /// Changes the limit; what was overspent stays to be paid at the new one.
    pub fn set_limit(&mut self, now: Duration, limit: Option<BitRate>) {
        self.refill(now);
        self.rate = limit.map(|limit| limit.bytes_per_second as f64);
        self.balance = self.balance.min(0.0);
        if self.rate.is_none() {
            self.balance = 0.0;
        }
    }

    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        if let Some(rate) = self.rate {
            let most = (rate * BURST.as_secs_f64()).max(MIN_BURST);
            self.balance = (self.balance + passed * rate).min(most);
        }
    }

    /// How long `class` must wait before it may send; zero when it may send now.
    pub fn ready_in(&mut self, now: Duration, class: Class) -> Duration {
        self.refill(now);
        if let Some(rate) = self.rate.filter(|_| self.balance < 0.0) {
            // Rounded up, so that whoever sleeps this long finds the balance paid.
            return Duration::from_secs_f64(-self.balance / rate) + Duration::from_nanos(1);
        }
        // Without a limit memory only waits where the budget is shared.
        if class == Class::Bulk && self.memory_waiting > 0 && self.bulk_ahead > 0.0 {
            return Duration::from_millis(1);
        }
        Duration::ZERO
    }

    /// Pays for bytes that `class` sends.
    pub fn charge(&mut self, now: Duration, class: Class, bytes: u64) {
        self.refill(now);
        let bytes = bytes as f64;
        self.meter.add(now, bytes);
        if self.rate.is_some() {
            self.balance -= bytes;
        }
        match class {
            Class::Bulk if self.memory_waiting > 0 => self.bulk_ahead += bytes,
            Class::Bulk => {}
            Class::Memory => self.bulk_ahead = (self.bulk_ahead - bytes).max(0.0),
        }
    }

    /// Pays for bytes that did not wait.
    pub fn charge_urgent(&mut self, now: Duration, bytes: u64) {
        self.refill(now);
        self.meter.add(now, bytes as f64);
        if let Some(rate) = self.rate {
            let floor = self.balance.min(-rate * MAX_URGENT_DEBT);
            self.balance = (self.balance - bytes as f64).max(floor);
        }
    }

    /// Measured bytes a second.
    pub fn rate(&mut self, now: Duration) -> f64 {
        self.meter.rate(now)
    }

    /// Memory waits from now on; each is ended by [`Self::memory_waits_no_longer`].
    pub fn memory_waits(&mut self) {
        self.memory_waiting += 1;
    }

    /// One that waited with memory is through.
    pub fn memory_waits_no_longer(&mut self) {
        self.memory_waiting = self.memory_waiting.saturating_sub(1);
        if self.memory_waiting == 0 {
            self.bulk_ahead = self.bulk_ahead.min(MIN_BURST * 16.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GBIT: u64 = 125_000_000;

    fn limit(bytes_per_second: u64) -> Option<BitRate> {
        Some(BitRate { bytes_per_second })
    }

    /// Sends runs of `run` bytes for `seconds`, each sleep `late` longer than asked.
    fn bytes_sent(rate: u64, run: u64, seconds: u64, late: Duration) -> u64 {
        let mut bucket = Bucket::new(limit(rate));
        let (mut now, mut sent) = (Duration::ZERO, 0);
        while now < Duration::from_secs(seconds) {
            let wait = bucket.ready_in(now, Class::Bulk);
            if wait.is_zero() {
                bucket.charge(now, Class::Bulk, run);
                sent += run;
            } else {
                now += wait + late;
            }
        }
        sent
    }

    #[test]
    fn the_average_is_the_limit_even_with_late_timers() {
        for (run, late) in [(1 << 20, 0), (1 << 20, 5), (65_536, 1), (4176, 1), (65_536, 10)] {
            let sent = bytes_sent(GBIT, run, 10, Duration::from_millis(late)) as f64;
            let error = sent / (10.0 * GBIT as f64) - 1.0;
            assert!(error.abs() < 0.01, "run {run}, {late} ms late: {error}");
        }
        let slow = bytes_sent(125_000, 1 << 20, 100, Duration::ZERO) as f64;
        assert!((slow / 12_500_000.0 - 1.0).abs() < 0.09, "{slow}");
    }

    #[test]
    fn idle_time_is_not_saved_up() {
        let mut bucket = Bucket::new(limit(GBIT));
        let late = Duration::from_secs(60);
        let mut sent = 0;
        while bucket.ready_in(late, Class::Bulk).is_zero() {
            bucket.charge(late, Class::Bulk, 65_536);
            sent += 65_536;
        }
        assert!(sent <= 2_500_000 + 65_536, "{sent}");
    }

    #[test]
    fn urgent_bytes_are_paid_by_the_bulk_but_not_for_ever() {
        let mut bucket = Bucket::new(limit(GBIT));
        bucket.charge_urgent(Duration::ZERO, GBIT);
        let wait = bucket.ready_in(Duration::ZERO, Class::Bulk).as_secs_f64();
        assert!((wait - 1.0).abs() < 0.001, "{wait}");
        bucket.charge_urgent(Duration::ZERO, 100 * GBIT);
        let wait = bucket.ready_in(Duration::ZERO, Class::Bulk).as_secs_f64();
        assert!((wait - MAX_URGENT_DEBT).abs() < 0.001, "{wait}");
    }

    #[test]
    fn a_new_limit_counts_at_once() {
        let mut bucket = Bucket::new(limit(1000));
        bucket.charge(Duration::ZERO, Class::Bulk, 100_000);
        assert!(bucket.ready_in(Duration::ZERO, Class::Bulk) > Duration::from_secs(99));
        bucket.set_limit(Duration::ZERO, limit(1_000_000));
        assert!(bucket.ready_in(Duration::ZERO, Class::Bulk) < Duration::from_millis(101));
        bucket.set_limit(Duration::ZERO, None);
        assert_eq!(bucket.ready_in(Duration::ZERO, Class::Bulk), Duration::ZERO);
    }

    #[test]
    fn the_measured_rate_follows() {
        let mut bucket = Bucket::new(None);
        for tick in 0..500u64 {
            bucket.charge(Duration::from_millis(tick * 10), Class::Bulk, 1_250_000);
        }
        let rate = bucket.rate(Duration::from_secs(5));
        assert!((rate / GBIT as f64 - 1.0).abs() < 0.02, "{rate}");
        assert!(bucket.rate(Duration::from_secs(15)) < GBIT as f64 / 1000.0);
    }

    #[test]
    fn memory_that_waits_gets_its_half() {
        let mut bucket = Bucket::new(limit(GBIT));
        bucket.memory_waiting = 1;
        let (mut memory, mut bulk, mut now) = (0u64, 0u64, Duration::ZERO);
        while now < Duration::from_secs(1) {
            // Bulk asks first every time: the worst case for memory.
            if bucket.ready_in(now, Class::Bulk).is_zero() {
                bucket.charge(now, Class::Bulk, 1 << 20);
                bulk += 1 << 20;
            }
            if bucket.ready_in(now, Class::Memory).is_zero() {
                bucket.charge(now, Class::Memory, 65_536);
                memory += 65_536;
            }
            now += Duration::from_micros(100);
        }
        let share = memory as f64 / (memory + bulk) as f64;
        assert!(share > 0.45, "{share}");
    }
}
