//! [`DrainPause`]: how long a log of accesses may fill before it is drained again.

use std::time::Duration;

/// So much of the log's room, one part in four, is meant to be taken when it is drained: the guest may
/// become four times as fast in between, and nothing is lost.
const MEANT: f64 = 0.25;
/// Draining more often than this costs more wake-ups than it saves room: a lane of 8192 places then
/// takes 1.6 million accesses a second.
const SHORTEST: Duration = Duration::from_millis(5);
/// What anyone who asks for a schedule may have to wait for the latest accesses.
const LONGEST: Duration = Duration::from_millis(200);

/// The pause between two drains, as the guest's pace asks for it.
///
/// A guest at rest is looked at five times a second; a fast one so often that its accesses fit into
/// the log, and that counting them never takes a core from the guest for long.
#[derive(Clone, Copy, Debug)]
pub struct DrainPause(Duration);

impl Default for DrainPause {
    fn default() -> Self {
        Self(LONGEST)
    }
}

impl DrainPause {
    /// The pause after a drain that found the share `used` of the log's room taken; above 1 when
    /// accesses were dropped.
    pub fn after(&mut self, used: f64) -> Duration {
        let next = self.0.as_secs_f64() * MEANT / used.max(1e-6);
        let bounds = SHORTEST.as_secs_f64()..=LONGEST.as_secs_f64();
        self.0 = Duration::from_secs_f64(next.clamp(*bounds.start(), *bounds.end()));
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AccessLog, Op};
    use dray_types::BlockRange;

    /// A guest with so many accesses a second for a while: those dropped, and the last pause.
    fn dropped(log: &AccessLog, pause: &mut DrainPause, rate: f64, drains: u32) -> (u64, Duration) {
        let before = log.dropped();
        for _ in 0..drains {
            for nth in 0..(rate * pause.0.as_secs_f64()) as u64 {
                log.push(Op::Write, BlockRange::new(nth, 1));
            }
            let used = log.used();
            log.drain(|_, _| {});
            pause.after(used);
        }
        (log.dropped() - before, pause.0)
    }

    #[test]
    fn the_pause_follows_the_guest_and_nothing_is_dropped_for_long() {
        let (log, mut pause) = (AccessLog::new(8192), DrainPause::default());
        assert_eq!(dropped(&log, &mut pause, 100.0, 10), (0, LONGEST));
        // From rest to a hundred thousand a second: some are lost before it is noticed, then none.
        assert!(dropped(&log, &mut pause, 100_000.0, 2).0 > 0);
        let (lost, now) = dropped(&log, &mut pause, 100_000.0, 100);
        assert!(lost == 0 && now < LONGEST / 8, "{lost} lost, {now:?}");
        assert_eq!(dropped(&log, &mut pause, 350_000.0, 100).0, 0, "it may become faster");
        assert_eq!(dropped(&log, &mut pause, 1e7, 20).1, SHORTEST);
        assert_eq!(dropped(&log, &mut pause, 0.0, 2), (0, LONGEST));
    }
}
