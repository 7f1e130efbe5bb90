//! Slowing the migration before the guest feels it (I6): a pure controller of its rate.
//!
//! The shell measures the guest's latency now and then and knows what it was before the migration
//! began. The controller answers with the most bytes a second that the migration may move, blocks,
//! demand reads excepted. It works as congestion control does (additive increase, multiplicative
//! decrease; Chiu and Jain, 1989), which is fair to whatever else loads the disk and needs no model
//! of it:
//!
//! * added latency over ¾ of the goal: the rate becomes 0.7 × what was really moved, at once. Acting
//!   at ¾ is what keeps the guest under the goal while the reaction takes effect;
//! * added latency under ½ of the goal: the rate grows by 1/20 of the best rate seen;
//! * between the two it stays; once it is 1.25 × the best rate seen it is no limit any more.
//!
//! After each change half a second passes before the next one, so that its effect can be seen.

use crate::{MILLISECOND, Time};

/// The migration never goes slower than this, in bytes a second: it would never end.
pub const MIN_RATE: u64 = 1 << 20;
/// A change is judged no earlier than this, in nanoseconds.
const SETTLE: u64 = 500 * MILLISECOND;

/// What was measured since the last time.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// What the guest's requests take, in nanoseconds (a high percentile tells more than the mean).
    pub latency: u64,
    /// The same before the migration began.
    pub baseline: u64,
    /// What the migration moved, in bytes a second.
    pub rate: u64,
}

/// The controller.
#[derive(Clone, Debug)]
pub struct Pace {
    goal: u64,
    limit: Option<u64>,
    best: u64,
    changed_at: Option<Time>,
}

impl Pace {
    /// A controller for at most `max_added_latency` nanoseconds, without a limit yet.
    pub fn new(max_added_latency: u64) -> Self {
        Self { goal: max_added_latency, limit: None, best: 0, changed_at: None }
    }

    /// The most bytes a second that the migration may move; none: as many as it can.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Takes a measurement and answers with the limit that holds from now on.
    pub fn observe(&mut self, now: Time, sample: Sample) -> Option<u64> {
        self.best = self.best.max(sample.rate);
        if self.changed_at.is_some_and(|at| now.since(at) < SETTLE) {
            return self.limit;
        }
        let added = sample.latency.saturating_sub(sample.baseline);
        let before = self.limit;
        if added > self.goal - self.goal / 4 {
            let moved = self.limit.unwrap_or(u64::MAX).min(sample.rate);
            self.limit = Some((moved / 10 * 7).max(MIN_RATE));
        } else if added < self.goal / 2 || added == 0 {
            self.limit = self.limit.map(|limit| limit + (self.best / 20).max(MIN_RATE / 8));
            self.limit = self.limit.filter(|&limit| limit < self.best + self.best / 4);
        }
        if self.limit != before {
            self.changed_at = Some(now);
        }
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SECOND;

    const MIB: u64 = 1 << 20;

    /// A guest whose requests take `1 ms + rate × slope` while the migration moves at `rate`; the
    /// link carries 100 MiB/s. Returns the mean rate and the worst added latency after 20 s.
    fn settle(goal: u64, slope_per_mib: u64) -> (u64, u64, Pace) {
        let mut pace = Pace::new(goal);
        let (mut sum, mut worst, mut samples) = (0, 0, 0);
        for step in 0..600u64 {
            let rate = pace.limit().unwrap_or(u64::MAX).min(100 * MIB);
            let latency = MILLISECOND + rate / MIB * slope_per_mib;
            let sample = Sample { latency, baseline: MILLISECOND, rate };
            pace.observe(Time(step * SECOND / 10), sample);
            if step > 200 {
                sum += rate;
                samples += 1;
                worst = worst.max(latency - MILLISECOND);
            }
        }
        (sum / samples, worst, pace)
    }

    #[test]
    fn a_guest_that_does_not_suffer_costs_nothing() {
        let (rate, _, pace) = settle(2 * MILLISECOND, 1_000);
        assert_eq!((rate, pace.limit()), (100 * MIB, None));
    }

    #[test]
    fn the_guest_stays_under_the_goal_and_the_migration_goes_on() {
        // 2 ms would be reached at 40 MiB/s.
        let (rate, worst, _) = settle(2 * MILLISECOND, 50_000);
        assert!(worst <= 2 * MILLISECOND, "{worst}");
        assert!(rate > 16 * MIB, "{} MiB/s", rate / MIB);
    }

    #[test]
    fn a_limit_goes_away_with_its_cause() {
        let (_, _, mut pace) = settle(2 * MILLISECOND, 50_000);
        let sample = |rate| Sample { latency: MILLISECOND, baseline: MILLISECOND, rate };
        for step in 0..100 {
            let rate = pace.limit().unwrap_or(u64::MAX).min(100 * MIB);
            pace.observe(Time((100 + step) * SECOND), sample(rate));
        }
        assert_eq!(pace.limit(), None);
    }

    #[test]
    fn a_hopeless_goal_does_not_stop_the_migration() {
        let (rate, _, _) = settle(0, 50_000);
        assert_eq!(rate, MIN_RATE);
    }

    #[test]
    fn a_change_is_given_time_to_show() {
        let mut pace = Pace::new(MILLISECOND);
        let bad = Sample { latency: 9 * MILLISECOND, baseline: 0, rate: 100 * MIB };
        let first = pace.observe(Time(SECOND), bad);
        assert_eq!(pace.observe(Time(SECOND + 100 * MILLISECOND), bad), first);
        assert!(pace.observe(Time(2 * SECOND), bad) < first);
    }
}
