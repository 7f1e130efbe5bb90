//! Slowing a guest's writes while they are sent again (Scheduling, section 6.1).
//!
//! In the rounds of Sync the rate of new dirty blocks is held to at most half of the migration's
//! speed, so that all rounds together are at most twice as long as the first. A block that is dirty
//! already costs nothing more when it is written again: only new dirty bytes count, and a write that
//! brings none passes at once. (The paper lets it wait as well; the round would not be shorter for
//! it.)
//!
//! * **aggressive**: a write at `t0` that brings `n` new dirty bytes keeps the next one waiting until
//!   `t0 + n ÷ limit`.
//! * **soft**: a write waits only when the average since the rounds began is over the limit, until it
//!   no longer is. The average is the paper's, over all rounds: after `t` at most `limit · t` were
//!   made dirty, and twice that was sent, so that what the first round had to send still bounds the
//!   rounds together, while a guest that writes less than the limit waits at most in the first
//!   moments of them.
//!
//! The engine says when and how much ([`WriteLimit`] in `SourceEffect::Throttle`); the gate of the
//! agent and the replay of traces both ask [`Throttle::delay`], so that what is simulated is what a
//! guest feels.

use crate::{SECOND, Time};
use serde::{Deserialize, Serialize};

/// No single write waits longer than this, in nanoseconds: guests give up on a disk after some tens
/// of seconds, and a limit that was set in a bad moment must not get near that.
pub const MAX_WAIT: u64 = SECOND;

/// Whether a guest's writes are slowed during Sync, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Not at all.
    #[default]
    None,
    /// When the average since the rounds began is over the limit.
    Soft,
    /// When the new dirty blocks of the write before could not have been sent again yet.
    Aggressive,
}

/// What a gate is to hold the guest's writes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteLimit {
    /// How; never [`Mode::None`].
    pub mode: Mode,
    /// New dirty bytes a second; never zero.
    pub bytes_per_second: u64,
}

/// Decides how long each write waits, and counts.
#[derive(Clone, Debug, Default)]
pub struct Throttle {
    limit: Option<WriteLimit>,
    began: Time,
    /// Time that all new dirty bytes since then take at the limit, in nanoseconds.
    owed: u64,
    free_at: Time,
    delayed: u64,
    added: u64,
}

impl Throttle {
    /// A throttle without a limit.
    pub fn new() -> Self {
        Self::default()
    }

    /// From now on this limit holds, or none. The average goes on when one limit follows another, and
    /// begins anew after a time without. Waits that were already given are not taken back.
    pub fn set(&mut self, now: Time, limit: Option<WriteLimit>) {
        if self.limit.is_none() {
            self.began = now;
            self.owed = 0;
            self.free_at = now;
        }
        self.limit = limit;
    }

    /// Whether writes may have to wait: a gate need not ask otherwise.
    pub fn active(&self) -> bool {
        self.limit.is_some()
    }

    /// How long a write that comes now and makes `new_dirty` bytes dirty that were clean must wait
    /// before it is carried out, in nanoseconds.
    pub fn delay(&mut self, now: Time, new_dirty: u64) -> u64 {
        let Some(limit) = self.limit else { return 0 };
        if new_dirty == 0 {
            return 0;
        }
        let wait = match limit.mode {
            Mode::None => 0,
            Mode::Aggressive => self.free_at.since(now),
            Mode::Soft => self.owed.saturating_sub(now.since(self.began)),
        };
        let wait = wait.min(MAX_WAIT);
        let takes = nanoseconds(new_dirty, limit.bytes_per_second);
        self.owed = self.owed.saturating_add(takes);
        let starts = now.0.saturating_add(wait).max(self.free_at.0);
        self.free_at = Time(starts.saturating_add(takes));
        if wait > 0 {
            self.delayed += 1;
            self.added += wait;
        }
        wait
    }

    /// Writes that had to wait.
    pub fn delayed_operations(&self) -> u64 {
        self.delayed
    }

    /// Waits of all writes together, in nanoseconds.
    pub fn added_latency(&self) -> u64 {
        self.added
    }
}

/// Time that `bytes` take at `rate` bytes a second.
fn nanoseconds(bytes: u64, rate: u64) -> u64 {
    (u128::from(bytes) * u128::from(SECOND) / u128::from(rate.max(1))).min(u64::MAX.into()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MILLISECOND;

    const BLOCK: u64 = 4096;

    /// One block a millisecond.
    fn limited(mode: Mode) -> Throttle {
        let mut throttle = Throttle::new();
        let limit = WriteLimit { mode, bytes_per_second: BLOCK * 1000 };
        throttle.set(Time(0), Some(limit));
        throttle
    }

    #[test]
    fn without_a_limit_nothing_waits() {
        let mut throttle = Throttle::new();
        assert_eq!(throttle.delay(Time(5), 1 << 30), 0);
        assert_eq!(throttle.delay(Time(5), 1 << 30), 0);
        assert!(!throttle.active());
    }

    #[test]
    fn aggressive_holds_the_next_write_until_the_last_could_be_sent() {
        let mut throttle = limited(Mode::Aggressive);
        let at = |ms: u64| Time(ms * MILLISECOND);
        assert_eq!(throttle.delay(at(10), 4 * BLOCK), 0);
        assert_eq!(throttle.delay(at(11), 0), 0, "nothing new: nothing to send again");
        assert_eq!(throttle.delay(at(12), BLOCK), 2 * MILLISECOND, "until 10 + 4 ms");
        assert_eq!(throttle.delay(at(16), BLOCK), 0, "from 15 ms on it may");
        assert_eq!((throttle.delayed_operations(), throttle.added_latency()), (1, 2 * MILLISECOND));
    }

    #[test]
    fn soft_forgives_a_burst_after_a_pause() {
        let mut throttle = limited(Mode::Soft);
        let at = |ms: u64| Time(ms * MILLISECOND);
        assert_eq!(throttle.delay(at(100), 50 * BLOCK), 0);
        assert_eq!(throttle.delay(at(100), 60 * BLOCK), 0, "50 in 100 ms is under the limit");
        assert_eq!(throttle.delay(at(100), BLOCK), 10 * MILLISECOND, "110 in 100 ms is over it");
        assert_eq!(limited(Mode::Aggressive).delay(at(100), 50 * BLOCK), 0);
        let faster = WriteLimit { bytes_per_second: 2 * BLOCK * 1000, ..throttle.limit.unwrap() };
        throttle.set(at(101), Some(faster));
        assert_eq!(throttle.delay(at(111), 20 * BLOCK), 0, "111 blocks in 111 ms");
        assert_eq!(throttle.delay(at(120), BLOCK), MILLISECOND, "20 more take 10 ms by now");
        throttle.set(at(121), None);
        throttle.set(at(122), Some(faster));
        assert_eq!(throttle.delay(at(122), BLOCK), 0, "a new average after a time without limit");
    }

    /// A guest that writes as fast as it is let gets what the limit says, in either mode.
    #[test]
    fn the_dirty_rate_stays_under_the_limit() {
        for mode in [Mode::Soft, Mode::Aggressive] {
            let mut throttle = limited(mode);
            let (mut now, mut bytes) = (0, 0);
            while now < 10 * SECOND {
                bytes += 2 * BLOCK;
                now += throttle.delay(Time(now), 2 * BLOCK) + MILLISECOND / 10;
            }
            let limit = BLOCK * 1000 * 10;
            assert!(bytes > limit * 9 / 10 && bytes <= limit + 4 * BLOCK, "{mode:?}: {bytes}");
        }
    }

    #[test]
    fn no_write_waits_for_ever() {
        let mut throttle = Throttle::new();
        let limit = WriteLimit { mode: Mode::Aggressive, bytes_per_second: 1 };
        throttle.set(Time(0), Some(limit));
        throttle.delay(Time(0), u64::MAX);
        assert_eq!(throttle.delay(Time(1), BLOCK), MAX_WAIT);
        throttle.set(Time(2), None);
        assert_eq!(throttle.delay(Time(3), BLOCK), 0);
    }
}
