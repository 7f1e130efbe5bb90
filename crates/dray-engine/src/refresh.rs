//! [`Refresh`]: when the orders in which blocks move are made anew.
//!
//! An order is made of all that is known of a guest and costs milliseconds, of an image with a long
//! history some ten. It matters for the blocks that move until the next one: so a new one is due when a
//! share of the images has moved, however fast the link is, and now and then where little moves.

use crate::{SECOND, Time};

/// One part in so many of the images moves by one order.
const SHARE: u64 = 64;
/// Pauses between two orders, in nanoseconds: what a guest does changes more slowly than the first.
const SHORTEST: u64 = SECOND;
/// What is hot is another place by then.
const LONGEST: u64 = 60 * SECOND;
/// The longest while the guest may stop at any moment: what it reads next goes by the latest order.
const LONGEST_AT_THE_END: u64 = 5 * SECOND;

/// When the latest order was made; see the module.
#[derive(Clone, Copy, Default, Debug)]
pub struct Refresh {
    made: Option<(Time, u64)>,
    ends: bool,
}

impl Refresh {
    /// Whether a new order is due, when `sent` blocks of `all` were sent by now, those sent again
    /// counted.
    pub fn is_due(&self, now: Time, sent: u64, all: u64) -> bool {
        let Some((at, before)) = self.made else { return true };
        let passed = now.since(at);
        let longest = if self.ends { LONGEST_AT_THE_END } else { LONGEST };
        let moved = sent.saturating_sub(before).saturating_mul(SHARE) >= all.max(1);
        passed >= longest || moved && passed >= SHORTEST
    }

    /// Orders were made.
    pub fn made(&mut self, now: Time, sent: u64) {
        self.made = Some((now, sent));
    }

    /// The guest may stop at any moment from here on: a new order is due at once.
    pub fn ends(&mut self) {
        (self.made, self.ends) = (None, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Orders made while `blocks` go over a link that carries so many a second.
    fn orders(blocks: u64, rate: u64) -> u64 {
        let (mut refresh, mut made) = (Refresh::default(), 0);
        for tenth in 0..=blocks * 10 / rate {
            let (now, sent) = (Time(tenth * SECOND / 10), tenth * rate / 10);
            if refresh.is_due(now, sent, blocks) {
                refresh.made(now, sent);
                made += 1;
            }
        }
        made
    }

    #[test]
    fn a_copy_of_any_length_has_about_as_many_orders() {
        assert_eq!(orders(10_000, 1000), 11, "no more than one a second");
        assert!((50..=65).contains(&orders(1 << 20, 1 << 12)));
        assert!((50..=69).contains(&orders(1 << 23, 1 << 11)));
        assert!((200..=210).contains(&orders(12_200, 1)), "and one a minute");
    }

    #[test]
    fn the_end_asks_for_one_at_once_and_for_more_of_them() {
        let mut refresh = Refresh::default();
        refresh.made(Time(0), 0);
        assert!(!refresh.is_due(Time(5 * SECOND), 0, 1000));
        refresh.ends();
        assert!(refresh.is_due(Time(5 * SECOND), 0, 1000));
        refresh.made(Time(5 * SECOND), 0);
        assert!(!refresh.is_due(Time(9 * SECOND), 0, 1000));
        assert!(refresh.is_due(Time(10 * SECOND), 0, 1000));
        assert!(refresh.is_due(Time(6 * SECOND), 16, 1000), "a 64th has moved");
        assert!(!refresh.is_due(Time(5 * SECOND + SECOND / 2), 1000, 1000));
    }
}
