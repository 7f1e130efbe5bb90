//! One bandwidth for several migrations: each gets an equal share of what is sent, and what one
//! leaves the others use.
//!
//! [`Split`] is the arithmetic, with the time as an argument: start-time fair queuing. Whoever was
//! sent least goes first among those that wait, and whoever did not wait has no claim on what was
//! sent meanwhile. [`Budget`] puts a clock and a lock round it; a migration's
//! [`Pacer`](crate::pace::Pacer) asks it after its own limit. Guest memory, blocks and demand reads
//! of a migration count together, also those of Backfill: its source sends them, so that one budget
//! at the source holds everything.

use crate::bucket::{Bucket, Class, MAX_URGENT_DEBT};
use dray_types::BitRate;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long somebody who was told to wait counts as waiting, beyond that: a few times what a timer
/// is late on a busy host. It is less than what a bucket saves up, so that nothing is lost when he
/// does not come back.
const PATIENCE: Duration = Duration::from_millis(5);
/// How long those before their turn wait until they ask again.
const TURN: Duration = Duration::from_millis(1);

/// The arithmetic of a shared budget. Times are durations since any fixed moment.
#[derive(Debug)]
pub struct Split {
    bucket: Bucket,
    limit: Option<BitRate>,
    members: BTreeMap<u64, Member>,
    /// Bytes that the member which was served last had been sent before: nobody who begins to wait
    /// now is owed more.
    reached: f64,
}

/// One migration's part.
#[derive(Debug, Default, Clone, Copy)]
struct Member {
    /// Bytes sent, and those that it had no claim on.
    served: f64,
    /// Until when it counts as waiting.
    waits_until: Duration,
}

impl Split {
    /// A budget of `limit`, or none.
    pub fn new(limit: Option<BitRate>) -> Self {
        Self { bucket: Bucket::new(limit), limit, members: BTreeMap::new(), reached: 0.0 }
    }

    /// Changes the budget.
    pub fn set_limit(&mut self, now: Duration, limit: Option<BitRate>) {
        self.limit = limit;
        self.bucket.set_limit(now, limit);
    }

    /// How long the member must wait before it may send; zero when it may send now.
    pub fn ready_in(&mut self, now: Duration, id: u64) -> Duration {
        let wait = self.bucket.ready_in(now, Class::Bulk);
        let member = self.arrived(now, id);
        if wait.is_zero() && !self.is_anothers_turn(now, id, member.served) {
            return Duration::ZERO;
        }
        let wait = wait.max(TURN);
        self.members.insert(id, Member { waits_until: now + wait + PATIENCE, ..member });
        wait
    }

    /// The member as it stands now. What was sent while it did not wait is not owed to it.
    fn arrived(&self, now: Duration, id: u64) -> Member {
        let mut member = self.members.get(&id).copied().unwrap_or_default();
        if member.waits_until < now {
            member.served = member.served.max(self.reached);
        }
        member
    }

    fn is_anothers_turn(&self, now: Duration, id: u64, served: f64) -> bool {
        self.members.iter().any(|(&other, member)| {
            other != id && member.waits_until >= now && member.served < served
        })
    }

    /// Pays for bytes that the member sends.
    pub fn charge(&mut self, now: Duration, id: u64, bytes: u64) {
        self.bucket.charge(now, Class::Bulk, bytes);
        self.serve(now, id, bytes as f64);
    }

    /// Pays for bytes that did not wait. They are the member's own, so the others come first until
    /// they had as many; but not for longer than a bucket remembers urgent bytes.
    pub fn charge_urgent(&mut self, now: Duration, id: u64, bytes: u64) {
        self.bucket.charge_urgent(now, bytes);
        let most = self.limit.map_or(0.0, |limit| limit.bytes_per_second as f64 * MAX_URGENT_DEBT);
        let ahead = self.arrived(now, id).served - self.reached;
        self.serve(now, id, (bytes as f64).min((most - ahead).max(0.0)));
    }

    fn serve(&mut self, now: Duration, id: u64, bytes: f64) {
        let mut member = self.arrived(now, id);
        self.reached = self.reached.max(member.served);
        member.served += bytes;
        self.members.insert(id, member);
    }

    /// Forgets a member that has left.
    pub fn leave(&mut self, id: u64) {
        self.members.remove(&id);
    }

    /// Measured bytes a second of all members.
    pub fn rate(&mut self, now: Duration) -> f64 {
        self.bucket.rate(now)
    }
}

/// A budget that several migrations share.
#[derive(Debug)]
pub struct Budget {
    split: Mutex<Split>,
    began: Instant,
}

impl Budget {
    /// A budget of `limit` for all together, or none.
    pub fn new(limit: Option<BitRate>) -> Arc<Self> {
        Arc::new(Self { split: Mutex::new(Split::new(limit)), began: Instant::now() })
    }

    fn split(&self) -> MutexGuard<'_, Split> {
        self.split.lock()
    }

    /// Changes it; who waits sees it within a few hundredths of a second.
    pub fn set_limit(&self, limit: Option<BitRate>) {
        let now = self.began.elapsed();
        self.split().set_limit(now, limit);
    }

    /// Measured bytes a second of all members.
    pub fn rate(&self) -> u64 {
        let now = self.began.elapsed();
        self.split().rate(now) as u64
    }
}

/// A migration's place in a budget; it leaves when this is dropped.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    id: u64,
}

impl Share {
    /// A place in `budget`, numbered by whatever tells its members apart.
    pub fn new(budget: Arc<Budget>, id: u64) -> Self {
        Self { budget, id }
    }

    /// How long to wait before sending; zero when it may be done now.
    pub fn ready_in(&self) -> Duration {
        let now = self.budget.began.elapsed();
        self.budget.split().ready_in(now, self.id)
    }

    /// Pays for bytes that are about to be sent.
    pub fn charge(&self, bytes: u64) {
        let now = self.budget.began.elapsed();
        self.budget.split().charge(now, self.id, bytes);
    }

    /// Pays for bytes that do not wait.
    pub fn charge_urgent(&self, bytes: u64) {
        let now = self.budget.began.elapsed();
        self.budget.split().charge_urgent(now, self.id, bytes);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.split().leave(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GBIT: u64 = 125_000_000;
    /// Between two looks of a sender: a timer that is a little late.
    const STEP: Duration = Duration::from_micros(300);

    /// What senders get of 1 Gbit/s in `seconds`, each with runs of its own size, from and until
    /// its own moment.
    fn sent(senders: &[(u64, f64, f64)], seconds: u64) -> Vec<u64> {
        let mut split = Split::new(Some(BitRate { bytes_per_second: GBIT }));
        let mut sent = vec![0; senders.len()];
        let mut next = vec![Duration::ZERO; senders.len()];
        let mut now = Duration::ZERO;
        while now < Duration::from_secs(seconds) {
            for (id, &(run, from, until)) in senders.iter().enumerate() {
                if now.as_secs_f64() < from || now.as_secs_f64() >= until || now < next[id] {
                    continue;
                }
                let mut wait = split.ready_in(now, id as u64);
                while wait.is_zero() {
                    split.charge(now, id as u64, run);
                    sent[id] += run;
                    wait = split.ready_in(now, id as u64);
                }
                next[id] = now + wait;
            }
            now += STEP;
        }
        sent
    }

    #[track_caller]
    fn near(found: u64, wanted: f64, by: f64) {
        let error = found as f64 / wanted - 1.0;
        assert!(error.abs() < by, "{found} in place of {wanted}: {error}");
    }

    #[test]
    fn those_that_wait_get_the_same_whatever_their_runs_are() {
        // Runs of 1 MiB against pieces of guest memory.
        let sent = sent(&[(1 << 20, 0.0, 9.0), (65_536, 0.0, 9.0), (4096, 0.0, 9.0)], 4);
        near(sent.iter().sum(), 4.0 * GBIT as f64, 0.01);
        for one in sent {
            near(one, 4.0 * GBIT as f64 / 3.0, 0.03);
        }
    }

    #[test]
    fn what_one_leaves_the_others_use_and_nothing_is_owed_for_it() {
        // The second sends only in the middle third.
        let sent = sent(&[(1 << 20, 0.0, 9.0), (65_536, 2.0, 4.0)], 6);
        near(sent[0], 5.0 * GBIT as f64, 0.02);
        near(sent[1], GBIT as f64, 0.05);
    }

    #[test]
    fn a_member_that_needs_little_gets_it_at_once() {
        let mut split = Split::new(Some(BitRate { bytes_per_second: GBIT }));
        let (mut now, mut longest) = (Duration::ZERO, Duration::ZERO);
        let (mut asked, mut big) = (None, Duration::ZERO);
        while now < Duration::from_secs(4) {
            if now >= big {
                let wait = split.ready_in(now, 0);
                if wait.is_zero() {
                    split.charge(now, 0, 1 << 20);
                }
                big = now + wait;
            }
            // 64 KiB each 100 ms.
            if asked.is_none() && now.as_millis() % 100 == 0 {
                asked = Some(now);
            }
            if let Some(since) = asked
                && split.ready_in(now, 1).is_zero()
            {
                split.charge(now, 1, 65_536);
                longest = longest.max(now - since);
                asked = None;
            }
            now += STEP;
        }
        // Two runs of the other: one that has been sent, and one that was begun before it asked.
        assert!(longest < Duration::from_millis(20), "{longest:?}");
    }

    #[test]
    fn urgent_bytes_are_the_members_own_but_not_for_ever() {
        let mut split = Split::new(Some(BitRate { bytes_per_second: GBIT }));
        split.charge_urgent(Duration::ZERO, 0, 1000 * GBIT);
        let mut now = Duration::ZERO;
        let mut other = 0;
        // Both wait; the other goes first until it had what the budget remembers.
        loop {
            let (zero, one) = (split.ready_in(now, 0), split.ready_in(now, 1));
            if zero.is_zero() {
                break;
            }
            if one.is_zero() {
                split.charge(now, 1, 65_536);
                other += 65_536;
            }
            now += STEP;
            assert!(now < Duration::from_secs(10), "the first waits for ever");
        }
        near(other, GBIT as f64 * MAX_URGENT_DEBT, 0.05);
    }

    #[test]
    fn a_budget_can_be_changed_and_lifted() {
        let budget = Budget::new(Some(BitRate { bytes_per_second: 1000 }));
        let share = Share::new(Arc::clone(&budget), 1);
        assert!(share.ready_in().is_zero());
        share.charge(1_000_000);
        assert!(share.ready_in() > Duration::from_secs(900));
        budget.set_limit(None);
        assert!(share.ready_in().is_zero());
        assert!(budget.rate() > 0);
    }
}
