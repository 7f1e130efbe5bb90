//! Pace: one budget of bytes a second for everything a migration sends, disks and guest memory.
//!
//! [`Bucket`] is the arithmetic, with the time as an argument; [`Pacer`] puts a clock, threads and
//! tasks round it. A sender may send while the balance is not negative and pays afterwards, so
//! nothing needs to know the size of a run before it was read and compressed, and oversleeping is
//! made good from the balance: the average is exact. What is measured is what was paid.

use crate::bucket::{Bucket, Class};
use crate::budget::{Budget, Share};
use dray_types::BitRate;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// The budget of one migration, shared by its threads and tasks.
#[derive(Debug)]
pub struct Pacer {
    bucket: Mutex<Bucket>,
    /// The budget that is shared with other migrations, besides the own one.
    share: Mutex<Option<Arc<Share>>>,
    began: Instant,
    changed: Condvar,
    changed_async: Notify,
}

impl Pacer {
    /// A budget of `limit`, or none.
    pub fn new(limit: Option<BitRate>) -> Arc<Self> {
        Arc::new(Self {
            bucket: Mutex::new(Bucket::new(limit)),
            share: Mutex::default(),
            began: Instant::now(),
            changed: Condvar::new(),
            changed_async: Notify::new(),
        })
    }

    fn bucket(&self) -> MutexGuard<'_, Bucket> {
        self.bucket.lock()
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn share(&self) -> Option<Arc<Share>> {
        self.share.lock().clone()
    }

    /// From now on what is sent counts in `budget` too, under this number.
    pub fn join(&self, budget: &Arc<Budget>, number: u64) {
        let share = Arc::new(Share::new(Arc::clone(budget), number));
        *self.share.lock() = Some(share);
    }

    /// Leaves the shared budget.
    pub fn leave(&self) {
        *self.share.lock() = None;
    }

    /// Whether a budget is shared: what is sent says nothing about the link then.
    pub fn is_shared(&self) -> bool {
        self.share().is_some()
    }

    /// How long to wait for both budgets. The shared one is asked when the own one is ready, so that
    /// nobody waits for a migration which its own limit holds.
    fn ask(&self, bucket: &mut Bucket, now: Duration, class: Class) -> Duration {
        let own = bucket.ready_in(now, class);
        match self.share() {
            Some(share) if own.is_zero() => share.ready_in(),
            _ => own,
        }
    }

    /// Changes the limit; whoever waits sees it at once.
    pub fn set_limit(&self, limit: Option<BitRate>) {
        let now = self.now();
        self.bucket().set_limit(now, limit);
        self.changed.notify_all();
        self.changed_async.notify_waiters();
    }

    /// How long `class` must wait before it may send; zero when it may send now.
    pub fn ready_in(&self, class: Class) -> Duration {
        let now = self.now();
        self.ask(&mut self.bucket(), now, class)
    }

    /// Pays for bulk bytes that are about to be sent, after [`ready_in`](Self::ready_in) was zero.
    pub fn charge(&self, bytes: u64) {
        let now = self.now();
        self.pay(&mut self.bucket(), now, Class::Bulk, bytes);
    }

    fn pay(&self, bucket: &mut Bucket, now: Duration, class: Class, bytes: u64) {
        bucket.charge(now, class, bytes);
        if let Some(share) = self.share() {
            share.charge(bytes);
        }
    }

    /// Pays for bytes that do not wait.
    pub fn charge_urgent(&self, bytes: u64) {
        let now = self.now();
        self.bucket().charge_urgent(now, bytes);
        if let Some(share) = self.share() {
            share.charge_urgent(bytes);
        }
    }

    /// Waits on this thread until bulk bytes may be sent, and pays for them.
    pub fn take(&self, bytes: u64) {
        let mut bucket = self.bucket();
        loop {
            let wait = self.ask(&mut bucket, self.now(), Class::Bulk);
            if wait.is_zero() {
                return self.pay(&mut bucket, self.now(), Class::Bulk, bytes);
            }
            self.changed.wait_for(&mut bucket, wait);
        }
    }

    /// Waits in a task until guest memory may be sent, and pays for it.
    pub async fn take_async(&self, bytes: u64) {
        let mut waiting = None;
        loop {
            let changed = self.changed_async.notified();
            let wait = {
                let now = self.now();
                let mut bucket = self.bucket();
                let wait = self.ask(&mut bucket, now, Class::Memory);
                if wait.is_zero() {
                    return self.pay(&mut bucket, now, Class::Memory, bytes);
                }
                if waiting.is_none() {
                    bucket.memory_waits();
                }
                wait
            };
            waiting.get_or_insert(MemoryWaits(self));
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = changed => {}
            }
        }
    }

    /// Measured bytes a second.
    pub fn rate(&self) -> u64 {
        let now = self.now();
        self.bucket().rate(now) as u64
    }
}

/// Counts a task that waits with guest memory, also when the task is dropped.
struct MemoryWaits<'a>(&'a Pacer);

impl Drop for MemoryWaits<'_> {
    fn drop(&mut self) {
        let mut bucket = self.0.bucket();
        bucket.memory_waits_no_longer();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GBIT: u64 = 125_000_000;

    fn limit(bytes_per_second: u64) -> Option<BitRate> {
        Some(BitRate { bytes_per_second })
    }

    #[test]
    fn threads_are_held_to_the_limit() {
        let pacer = Pacer::new(limit(GBIT));
        let began = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..200).for_each(|_| pacer.take(65_536)));
            }
        });
        let wanted = 400.0 * 65_536.0 / GBIT as f64;
        let took = began.elapsed().as_secs_f64();
        // Never faster. How much slower is the machine's affair, which may be busy.
        assert!(took > wanted * 0.98 && took < wanted + 2.0, "{took} instead of {wanted}");
    }
}
