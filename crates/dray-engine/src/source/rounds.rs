//! [`Rounds`]: whether the rounds of Sync will ever be small enough.
//!
//! A round sends what was written during the one before. A guest that writes the same places again
//! makes no more of them dirty, so what a round brings grows with its length, and less and less: a
//! shorter round brings a share of itself that is as large or larger. If a round of `b` bytes was
//! followed by one of `r · b`, the next ones are at least `r² · b`, `r³ · b`, … as long as the guest
//! goes on as it does. Where the last round there may be is too large by that, no round will do, and
//! each one sent until then is lost.

use crate::{SECOND, Time};

/// Rounds of Sync after which pre-copy gives up: by then it has re-sent enough to know.
pub const MAX_ROUNDS: u32 = 30;
/// Rounds that did not shrink before it does so, however short they were.
const MAX_STALLED: u32 = 8;
/// Rounds in a row that must say that there is no hope: one may have met a burst.
const AGREE: u32 = 2;
/// And how long they must have taken together, in nanoseconds: a guest's kernel writes back what is
/// dirty every 5 s (Linux, `dirty_writeback_centisecs`), so that this is two times.
const WATCHED: u64 = 10 * SECOND;

/// What is to be done about a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// It is the last: what is left fits.
    Fits,
    /// It is sent.
    Another,
    /// None will ever fit if the guest goes on as it does.
    Hopeless,
    /// There were too many, or too many that did not shrink.
    Enough,
}

/// The rounds so far; see the module.
#[derive(Default, Debug)]
pub(crate) struct Rounds {
    /// How many there were.
    pub(super) count: u32,
    /// Bytes of the round that is being sent, and since when.
    sent: Option<(u64, Time)>,
    stalled: u32,
    /// The latest rounds in a row without hope, and when the first of them began.
    hopeless: u32,
    since: Time,
}

impl Rounds {
    /// A round was sent, and so many bytes are the next one; `affordable` are few enough.
    pub(crate) fn judge(&mut self, now: Time, bytes: u64, affordable: u64) -> Verdict {
        self.count += 1;
        let before = self.sent.replace((bytes, now));
        if bytes <= affordable {
            return Verdict::Fits;
        }
        if let Some((sent, began)) = before {
            self.stalled += u32::from(bytes >= sent);
            self.hope(bytes, sent, began, affordable);
        }
        if self.count > MAX_ROUNDS || self.stalled > MAX_STALLED {
            Verdict::Enough
        } else if self.hopeless >= AGREE && now.since(self.since) >= WATCHED {
            Verdict::Hopeless
        } else {
            Verdict::Another
        }
    }

    /// Whether a later round can fit when one of `sent` bytes, begun at `began`, brought `bytes`.
    fn hope(&mut self, bytes: u64, sent: u64, began: Time, affordable: u64) {
        let left = MAX_ROUNDS.saturating_sub(self.count) as i32;
        let share = (bytes as f64 / sent.max(1) as f64).min(1.0);
        if bytes as f64 * share.powi(left) <= affordable as f64 {
            self.hopeless = 0;
            return;
        }
        if self.hopeless == 0 {
            self.since = began;
        }
        self.hopeless += 1;
    }

    /// The link was lost: what was written meanwhile says nothing of rounds.
    pub(super) fn interrupted(&mut self) {
        self.sent = None;
        self.hopeless = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// What is said of rounds of so many MiB over a link that carries one in a second, 2 of which
    /// are few enough, and after how many rounds.
    fn judged(rounds: impl IntoIterator<Item = u64>) -> (Verdict, u32) {
        let (mut all, mut now) = (Rounds::default(), Time(0));
        for mib in rounds {
            let verdict = all.judge(now, mib * MIB, 2 * MIB);
            if verdict != Verdict::Another {
                return (verdict, all.count);
            }
            now = Time(now.0 + mib * SECOND);
        }
        (Verdict::Another, all.count)
    }

    #[test]
    fn two_long_rounds_that_do_not_shrink_are_enough() {
        assert_eq!(judged([100, 100, 100]), (Verdict::Hopeless, 3));
        assert_eq!(judged([50, 70, 90]), (Verdict::Hopeless, 3));
    }

    #[test]
    fn rounds_that_shrink_ever_less_are_told_before_they_stop() {
        // What a server's load at half the link again has been seen to do.
        assert_eq!(judged([323, 120, 78, 70, 66, 65, 66]), (Verdict::Hopeless, 5));
    }

    #[test]
    fn rounds_that_will_fit_go_on() {
        assert_eq!(judged([1000, 700, 490, 343, 240, 168, 118]), (Verdict::Another, 7));
        let slow = (0..30).map(|n| (1000.0 * 0.8f64.powi(n)) as u64);
        assert_eq!(judged(slow), (Verdict::Fits, 28));
    }

    #[test]
    fn a_burst_is_forgiven() {
        let bursts = [400, 500, 100, 90, 20, 30, 4, 1];
        assert_eq!(judged(bursts), (Verdict::Fits, 8));
    }

    #[test]
    fn short_rounds_have_more_of_them() {
        // 3 s each: two take less than ten seconds, three do not.
        assert_eq!(judged([3; 20]), (Verdict::Hopeless, 5));
        assert_eq!(judged([3, 3, 3, 3]), (Verdict::Another, 4));
        let mut all = Rounds::default();
        let brief = |n: u64| all.judge(Time(n * SECOND / 10), 10 * MIB, 2 * MIB);
        let verdicts: Vec<Verdict> = (0..12).map(brief).collect();
        assert_eq!(verdicts.iter().position(|one| *one != Verdict::Another), Some(9));
    }

    #[test]
    fn what_is_written_while_the_link_is_down_does_not_count() {
        let mut all = Rounds::default();
        for n in 1..8 {
            let now = Time(n * 60 * SECOND);
            assert_eq!(all.judge(now, n * 100 * MIB, 2 * MIB), Verdict::Another);
            all.interrupted();
        }
    }
}
