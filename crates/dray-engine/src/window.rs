//! How many bytes may be under way: enough to fill the link, too few to queue on it for long.
//!
//! The window grows while acknowledgements return about as fast as they ever did and shrinks when
//! they come later than that by more than the allowed queueing delay (the idea of TCP Vegas). A
//! demand read, the guest's memory and other traffic then wait behind that delay at most.

use crate::capacity::{Capacity, FILLING};
use crate::{MILLISECOND, SECOND, Time};

/// Bounds of a [`Window`].
#[derive(Clone, Copy, Debug)]
pub struct WindowLimits {
    /// Never smaller than this, in bytes.
    pub min: u64,
    /// Never larger than this, in bytes.
    pub max: u64,
    /// Queueing delay that is still accepted, in nanoseconds.
    pub delay: u64,
}

/// For the first pass: throughput counts, nobody waits for a single block.
pub const COPY_WINDOW: WindowLimits =
    WindowLimits { min: 8 << 20, max: 32 << 20, delay: 60 * MILLISECOND };
/// For Backfill: a demand read waits behind what is under way.
pub const BACKFILL_WINDOW: WindowLimits =
    WindowLimits { min: 1 << 20, max: 16 << 20, delay: 25 * MILLISECOND };

/// Time constant of the measured rate.
const RATE_WINDOW: u64 = SECOND / 2;

/// Bytes under way and how many there may be.
#[derive(Debug)]
pub struct Window {
    limits: WindowLimits,
    size: u64,
    under_way: u64,
    min_rtt: u64,
    adjusted_at: Time,
    rate: f64,
    rate_at: Option<Time>,
    rate_bytes: u64,
    capacity: Capacity,
}

impl Window {
    /// An empty window between `limits`.
    pub fn new(limits: WindowLimits) -> Self {
        Self {
            limits,
            size: limits.min,
            under_way: 0,
            min_rtt: u64::MAX,
            adjusted_at: Time(0),
            rate: 0.0,
            rate_at: None,
            rate_bytes: 0,
            capacity: Capacity::default(),
        }
    }

    /// Whether another run may start.
    pub fn open(&self) -> bool {
        self.under_way < self.size
    }

    /// Bytes that may be under way.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes under way.
    pub fn under_way(&self) -> u64 {
        self.under_way
    }

    /// Measured delivery rate in bytes a second; zero until something was delivered.
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// What the link carries in bytes a second, as far as it was seen: unlike [`Self::rate`], it does
    /// not fall when less is sent. Zero until enough was delivered.
    pub fn capacity(&self) -> f64 {
        self.capacity.bytes_per_second()
    }

    /// `bytes` have been sent or asked for.
    pub fn sent(&mut self, bytes: u64) {
        self.under_way += bytes;
        self.capacity.sent();
    }

    /// `bytes` are no longer under way and did not arrive.
    pub fn lost(&mut self, bytes: u64) {
        self.under_way = self.under_way.saturating_sub(bytes);
        if self.under_way == 0 {
            self.capacity.drained();
        }
    }

    /// A new session: the route may be another one, so the shortest round trip is forgotten.
    pub fn new_route(&mut self) {
        self.min_rtt = u64::MAX;
    }

    /// `bytes` sent at `sent_at` have arrived.
    pub fn arrived(&mut self, now: Time, sent_at: Time, bytes: u64) {
        let was_full = !self.open();
        let rtt = now.since(sent_at);
        self.min_rtt = self.min_rtt.min(rtt);
        let enough = self.under_way >= self.filling();
        self.capacity.arrived(now, sent_at, bytes, enough);
        self.lost(bytes);
        self.measure(now, bytes);
        // One adjustment per round trip: the effect of the last one must be visible first.
        if now.since(self.adjusted_at) < rtt {
            return;
        }
        self.adjusted_at = now;
        let delay = (rtt - self.min_rtt).saturating_sub(self.own_time(bytes));
        if delay > self.limits.delay {
            self.size = (self.size / 8 * 7).max(self.limits.min);
        } else if was_full {
            self.size = (self.size + self.size / 4).min(self.limits.max);
        }
    }

    /// What the link takes for these bytes alone, in nanoseconds: the shortest round trip is that of
    /// the smallest run, and a larger one that takes longer has not queued.
    fn own_time(&self, bytes: u64) -> u64 {
        let capacity = self.capacity();
        if capacity > 0.0 { (bytes as f64 / capacity * SECOND as f64) as u64 } else { 0 }
    }

    /// Bytes that keep the link busy while they are under way: half a window, or less where the link is
    /// so slow that it takes long for less.
    fn filling(&self) -> u64 {
        let time = self.min_rtt.saturating_mul(2).max(FILLING);
        (self.size / 2).min((self.capacity() * time as f64 / SECOND as f64) as u64)
    }

    fn measure(&mut self, now: Time, bytes: u64) {
        let Some(began) = self.rate_at else {
            self.rate_at = Some(now);
            return;
        };
        self.rate_bytes += bytes;
        let span = now.since(began);
        if span < RATE_WINDOW / 5 {
            return;
        }
        let current = self.rate_bytes as f64 * SECOND as f64 / span as f64;
        let weight =
            if self.rate == 0.0 { 1.0 } else { (span as f64 / RATE_WINDOW as f64).min(1.0) };
        self.rate += (current - self.rate) * weight;
        self.rate_at = Some(now);
        self.rate_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link that delivers `rate` bytes a second after `delay` ns, fed as fast as the window lets.
    fn settle(rate: u64, delay: u64, limits: WindowLimits) -> (Window, u64) {
        const RUN: u64 = 256 << 10;
        let mut window = Window::new(limits);
        let mut queue = std::collections::VecDeque::new();
        let (mut now, mut link_free, mut worst) = (Time(1), 0u64, 0u64);
        for _ in 0..20_000 {
            while window.open() {
                window.sent(RUN);
                link_free = link_free.max(now.0) + RUN * SECOND / rate;
                queue.push_back((now, link_free + delay));
            }
            let (sent_at, arrives) = queue.pop_front().unwrap();
            now = Time(now.0.max(arrives));
            if now.0 > 5 * SECOND {
                worst = worst.max(now.since(sent_at) - delay);
            }
            window.arrived(now, sent_at, RUN);
        }
        (window, worst)
    }

    /// A small run that goes before the others, as a guest's demand does, has a shorter round trip; a
    /// pause of the disk now and then is no reason to leave the link idle.
    #[test]
    fn a_pause_now_and_then_leaves_the_link_busy() {
        const RATE: u64 = 12_500_000;
        const DELAY: u64 = 100 * MILLISECOND;
        const RUN: u64 = 256 << 10;
        let mut window = Window::new(BACKFILL_WINDOW);
        window.sent(4096);
        window.arrived(Time(1 + DELAY), Time(1), 4096);
        let mut queue = std::collections::VecDeque::new();
        let (mut now, mut link_free, mut runs, mut paused) = (Time(1 + DELAY), 0u64, 0u64, 0u64);
        while runs < 4000 {
            while window.open() {
                window.sent(RUN);
                let pause = if runs % 20 == 19 { 10 * MILLISECOND } else { 0 };
                paused += pause;
                runs += 1;
                link_free = link_free.max(now.0 + DELAY / 2) + RUN * SECOND / RATE + pause;
                queue.push_back((now, link_free + DELAY / 2));
            }
            let (sent_at, arrives) = queue.pop_front().unwrap();
            now = Time(now.0.max(arrives));
            window.arrived(now, sent_at, RUN);
        }
        let busy = runs * RUN * SECOND / RATE + paused;
        assert!(now.0 < busy + busy / 100, "{} s instead of {}", now.0 / SECOND, busy / SECOND);
    }

    #[test]
    fn fills_the_link_without_a_long_queue() {
        for (rate, delay) in
            [(25 << 20, MILLISECOND), (120 << 20, MILLISECOND), (120 << 20, 50 * MILLISECOND)]
        {
            let (window, worst) = settle(rate, delay, BACKFILL_WINDOW);
            assert!(window.rate() > 0.9 * rate as f64, "rate {} of {rate}", window.rate());
            assert!(worst < 80 * MILLISECOND, "queued {} ms at {rate}", worst / MILLISECOND);
        }
    }

    /// A link that carries a block of 4 KiB a millisecond, and then is given one in eight.
    #[test]
    fn what_the_sender_leaves_unused_is_no_smaller_link() {
        let mut window = Window::new(WindowLimits { min: 32768, max: 32768, delay: SECOND });
        let mut at = Time(0);
        for step in 0..10_000u64 {
            at = Time(at.0 + MILLISECOND);
            let fills = step < 5000;
            while window.open() && (fills || (step % 8 == 0 && window.under_way() == 0)) {
                window.sent(4096);
            }
            if window.under_way() > 0 {
                window.arrived(at, Time(at.0 - MILLISECOND), 4096);
            }
        }
        let full = 4096.0 * 1000.0;
        assert!(window.rate() < full / 4.0, "delivered: {}", window.rate());
        assert!((window.capacity() / full - 1.0).abs() < 0.05, "carried: {}", window.capacity());
        for _ in 0..5000 {
            at = Time(at.0 + 2 * MILLISECOND);
            while window.open() {
                window.sent(4096);
            }
            window.arrived(at, at, 4096);
        }
        assert!((window.capacity() / full - 0.5).abs() < 0.05, "slower: {}", window.capacity());
    }

    /// A link behind a limit as the agent's budget is one: two streams each send a run while nothing is
    /// owed, and what was sent is owed afterwards.
    struct Limited {
        rate: u64,
        now: Time,
        /// When everything that was sent is paid.
        paid: Time,
    }

    impl Limited {
        const STREAMS: usize = 2;

        fn new(rate: u64) -> Self {
            Self { rate, now: Time(SECOND), paid: Time(SECOND) }
        }

        /// Sends these runs at once; ends when the last of them has arrived.
        fn round(&mut self, window: &mut Window, runs: &[u64]) {
            let sent_at = self.now;
            runs.iter().for_each(|&run| window.sent(run));
            for pair in runs.chunks(Self::STREAMS) {
                self.now = Time(self.now.0.max(self.paid.0) + MILLISECOND);
                for &run in pair {
                    window.arrived(self.now, sent_at, run);
                    self.paid = Time(self.paid.0.max(self.now.0) + run * SECOND / self.rate);
                }
            }
        }
    }

    /// What a guest leaves dirty: small runs, more of them in some rounds, and then a few long ones.
    fn scattered(round: usize) -> Vec<u64> {
        [vec![48 << 10; 16 + round % 8], vec![1 << 20, 1 << 20, 64 << 10]].concat()
    }

    /// Each round is less than half of the smallest window, and the limit lets its last runs through
    /// in no time.
    #[test]
    fn a_run_that_is_paid_afterwards_makes_no_larger_link() {
        const RATE: u64 = 4 << 20;
        let (mut window, mut link) = (Window::new(COPY_WINDOW), Limited::new(RATE));
        link.round(&mut window, &[64 << 10, 340 << 10, 480 << 10]);
        for round in 0..40 {
            link.round(&mut window, &scattered(round));
            let share = window.capacity() / RATE as f64;
            assert!(share < 1.5, "carried after round {round}: {share} of the limit");
            assert!(share > 0.6 || round < 5, "carried after round {round}: {share} of the limit");
        }
    }

    /// What a limit has saved up in a pause goes through at once, and is no more than it carries.
    #[test]
    fn a_pause_makes_no_larger_link() {
        const RATE: u64 = 4 << 20;
        let (mut window, mut link) = (Window::new(COPY_WINDOW), Limited::new(RATE));
        (0..10).for_each(|round| link.round(&mut window, &scattered(round)));
        for round in 0..100 {
            link.now = Time(link.now.0 + SECOND);
            link.round(&mut window, &[1 << 20, 1 << 20]);
            let share = window.capacity() / RATE as f64;
            assert!((0.8..1.5).contains(&share), "carried after round {round}: {share}");
        }
    }

    #[test]
    fn short_rounds_tell_of_a_link_that_has_become_slower() {
        let (mut window, mut link) = (Window::new(COPY_WINDOW), Limited::new(16 << 20));
        (0..40).for_each(|round| link.round(&mut window, &scattered(round)));
        link.rate = 4 << 20;
        (0..10).for_each(|round| link.round(&mut window, &scattered(round)));
        let share = window.capacity() / link.rate as f64;
        assert!(share < 1.5, "carried: {share} of the limit");
    }

    /// A window that a link has filled and that drains: a block of 4 KiB a millisecond until `at(2048)`,
    /// when one is left.
    fn draining() -> Window {
        let mut window = Window::new(WindowLimits { min: 8 << 20, max: 8 << 20, delay: SECOND });
        (0..2048).for_each(|_| window.sent(4096));
        (1..2048).for_each(|ms| window.arrived(at(ms), at(0), 4096));
        window
    }

    fn at(ms: u64) -> Time {
        Time(SECOND + ms * MILLISECOND)
    }

    /// One is sent every 4 ms, and as each takes 5 ms, something is under way at all times.
    #[test]
    fn a_trickle_into_what_drains_is_no_smaller_link() {
        let mut window = draining();
        for ms in (2048..20_000).step_by(4) {
            window.sent(4096);
            window.arrived(at(ms + 1), at(ms - 4), 4096);
        }
        let share = window.capacity() / 4_096_000.0;
        assert!((share - 1.0).abs() < 0.05, "carried: {share} of what it does");
    }

    /// Now each takes the link a tenth of the time, and few are under way.
    #[test]
    fn what_arrives_was_carried_however_little_is_under_way() {
        let mut window = draining();
        for ms in 2048..20_000 {
            (0..10).for_each(|_| window.sent(4096));
            (0..10).for_each(|_| window.arrived(at(ms + 1), at(ms), 4096));
        }
        let share = window.capacity() / 40_960_000.0;
        assert!((share - 1.0).abs() < 0.05, "carried: {share} of what it does");
    }

    /// A block of 4 KiB a millisecond fills the link. Then every other one is sent, and for 400 ms of
    /// each second nobody gets to acknowledge any.
    #[test]
    fn acknowledgements_that_come_late_and_together_make_no_larger_link() {
        let mut window = Window::new(WindowLimits { min: 8 << 20, max: 8 << 20, delay: SECOND });
        let full = 4096.0 * 1000.0;
        let mut queue = std::collections::VecDeque::new();
        for ms in 0..10_000 {
            let now = Time(ms * MILLISECOND);
            while ms < 5000 && window.open() {
                window.sent(4096);
                queue.push_back(now);
            }
            if ms < 5000 {
                window.arrived(now, queue.pop_front().unwrap(), 4096);
            }
        }
        window.lost(window.under_way());
        queue.clear();
        for ms in 10_000..30_000 {
            let now = Time(ms * MILLISECOND);
            let stalled = ms % 1000 < 400;
            let come = if stalled { 0 } else { queue.len() };
            queue.drain(..come).for_each(|sent_at| window.arrived(now, sent_at, 4096));
            if ms % 2 == 0 {
                window.sent(4096);
                queue.push_back(now);
            }
            let share = window.capacity() / full;
            assert!(share < 1.2, "carried after {ms} ms: {share} of what it does");
        }
    }
}
