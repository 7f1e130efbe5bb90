//! [`DrainPause`]: how long a log of accesses may fill before it is drained again.

use std::time::Duration;

/// So much of the log's room, one part in four, is meant to be taken when it is drained: the guest may
/// become four times as fast in between, and nothing is lost.
const MEANT: f64 = 0.25;
/// Draining more often than this costs more wake-ups than it saves room: a lane of 2048 places then
/// takes 400 thousand accesses a second.
const SHORTEST: Duration = Duration::from_millis(5);
/// What anyone who asks for a schedule may have to wait for the latest accesses, where counting them
/// costs little.
const LONGEST: Duration = Duration::from_millis(200);
/// Counting takes at most one part in so many of the machine's time, as that is time that a busy machine
/// does not have for its guests. What does not fit is not counted.
const SHARE: f64 = 200.0;
/// The longest pause that what was counted may ask for; what it cost beyond that makes the next ones
/// longer too.
const DEAREST: f64 = 1.0;
/// No more than this is asked for later, in seconds: a history of which the order took long to make
/// has its price soon behind it.
const MOST_OWED: f64 = 60.0;

/// The pause between two drains, as the guest's pace asks for it and the machine can afford.
///
/// A guest at rest is looked at five times a second; a fast one so often that its accesses fit into
/// the log. A guest that does more than can be counted in a 200th of the machine's time is counted
/// in samples, each as many accesses one after the other as the log holds.
#[derive(Clone, Copy, Debug)]
pub struct DrainPause {
    /// The pause that the guest's pace asks for.
    pace: Duration,
    /// Time in seconds that must still pass for what was counted.
    owed: f64,
    /// Cores of the machine.
    cores: f64,
}

impl Default for DrainPause {
    /// For a machine of one core.
    fn default() -> Self {
        Self::new(1)
    }
}

impl DrainPause {
    /// On a machine of so many cores, at least one.
    pub fn new(cores: usize) -> Self {
        Self { pace: LONGEST, owed: 0.0, cores: cores.max(1) as f64 }
    }

    /// The pause after a drain that found the share `used` of the log's room taken, at least 1 when
    /// accesses were dropped, and `took` so long.
    pub fn after(&mut self, used: f64, took: Duration) -> Duration {
        let next = self.pace.as_secs_f64() * MEANT / used.max(1e-6);
        let bounds = SHORTEST.as_secs_f64()..=LONGEST.as_secs_f64();
        self.pace = Duration::from_secs_f64(next.clamp(*bounds.start(), *bounds.end()));
        self.owed += took.as_secs_f64() * SHARE / self.cores;
        let pause = self.pace.as_secs_f64().max(self.owed.min(DEAREST));
        self.owed = (self.owed - pause).clamp(0.0, MOST_OWED);
        Duration::from_secs_f64(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AccessLog, Op};
    use dray_types::BlockRange;

    const NOTHING: Duration = Duration::ZERO;

    /// A guest with so many accesses a second for a while, each counted in `each`: those dropped, the
    /// share of the time that went into counting, and the last pause.
    fn counted(
        pause: &mut DrainPause,
        rate: f64,
        each: Duration,
        drains: u32,
    ) -> (u64, f64, Duration) {
        let log = AccessLog::new(2048);
        let (mut next, mut spent, mut passed) = (pause.pace, NOTHING, NOTHING);
        for _ in 0..drains {
            for nth in 0..(rate * next.as_secs_f64()) as u64 {
                log.push(Op::Write, BlockRange::new(nth, 1));
            }
            let used = log.used();
            let mut took = NOTHING;
            log.drain(|_, _| took += each);
            next = pause.after(used, took);
            (spent, passed) = (spent + took, passed + next);
        }
        (log.dropped(), spent.as_secs_f64() / passed.as_secs_f64(), next)
    }

    #[test]
    fn the_pause_follows_the_guest_and_nothing_is_dropped_for_long() {
        let mut pause = DrainPause::default();
        let mut dropped = |rate, drains| {
            let (dropped, _, now) = counted(&mut pause, rate, NOTHING, drains);
            (dropped, now)
        };
        assert_eq!(dropped(100.0, 10), (0, LONGEST));
        // From rest to a hundred thousand a second: some are lost before it is noticed, then none.
        assert!(dropped(100_000.0, 4).0 > 0);
        let (lost, now) = dropped(100_000.0, 100);
        assert!(lost == 0 && now < LONGEST / 8, "{lost} lost, {now:?}");
        assert_eq!(dropped(350_000.0, 100).0, 0, "it may become faster");
        assert_eq!(dropped(1e7, 20).1, SHORTEST);
        assert_eq!(dropped(0.0, 4), (0, LONGEST));
    }

    #[test]
    fn counting_takes_no_more_of_the_machine_than_its_share() {
        let each = Duration::from_nanos(400);
        for cores in [1, 2, 64] {
            let share = cores as f64 / SHARE;
            for rate in [1000.0, 20_000.0, 1e6] {
                let (dropped, spent, _) = counted(&mut DrainPause::new(cores), rate, each, 2000);
                assert!(spent <= share * 1.001, "{rate} a second on {cores}: {spent}");
                let wanted = rate * each.as_secs_f64();
                let fits = wanted < share * 0.9 && rate < 100_000.0;
                assert!(!fits || dropped < 8000, "{rate} a second on {cores}: {dropped} lost");
            }
        }
    }

    #[test]
    fn what_cost_much_at_once_is_paid_for_over_several_pauses() {
        let mut pause = DrainPause::new(2);
        let after = |pause: &mut DrainPause, took| pause.after(0.1, Duration::from_millis(took));
        assert_eq!(after(&mut pause, 30).as_secs_f64(), DEAREST);
        assert_eq!(after(&mut pause, 0).as_secs_f64(), DEAREST);
        assert_eq!(after(&mut pause, 0).as_secs_f64(), DEAREST);
        assert_eq!(after(&mut pause, 0), LONGEST);
        assert_eq!(after(&mut pause, 3_600_000).as_secs_f64(), DEAREST);
        assert!((0..61).all(|_| after(&mut pause, 0).as_secs_f64() <= DEAREST));
        assert_eq!(after(&mut pause, 0), LONGEST, "and not for ever");
    }
}
