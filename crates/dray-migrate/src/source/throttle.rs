//! Slowing the guest's writes as the engine says: one [`Throttle`] for all disks of a migration,
//! because it is their sum that is sent again.

use crate::Clock;
use dray_engine::Time;
use dray_engine::throttle::{Throttle, WriteLimit};
use dray_image::{Disk, WriteDelay};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What the disks ask, and how much the guest has waited.
pub struct Limiter {
    clock: Clock,
    throttle: Mutex<Throttle>,
    operations: AtomicU64,
    nanos: AtomicU64,
}

/// Requests that were slowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Slowed {
    /// Number of operations that waited.
    pub operations: u64,
    /// How long they waited, summed, in nanoseconds.
    pub nanos: u64,
}

impl Slowed {
    /// The sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self { operations: self.operations + other.operations, nanos: self.nanos + other.nanos }
    }
}

impl Limiter {
    /// Without a limit.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            clock: Clock::start(),
            throttle: Mutex::default(),
            operations: AtomicU64::new(0),
            nanos: AtomicU64::new(0),
        })
    }

    fn throttle(&self) -> MutexGuard<'_, Throttle> {
        self.throttle.lock()
    }

    fn set(&self, limit: Option<WriteLimit>) {
        let now: Time = self.clock.now();
        self.throttle().set(now, limit);
    }

    /// What was really waited.
    pub fn slowed(&self) -> Slowed {
        Slowed {
            operations: self.operations.load(Ordering::Relaxed),
            nanos: self.nanos.load(Ordering::Relaxed),
        }
    }
}

impl WriteDelay for Limiter {
    fn delay(&self, new_dirty: u64) -> Duration {
        let mut throttle = self.throttle();
        Duration::from_nanos(throttle.delay(self.clock.now(), new_dirty))
    }

    fn waited(&self, time: Duration) {
        self.operations.fetch_add(1, Ordering::Relaxed);
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
    }
}

/// The disks that are held up just now; none any more once this is dropped.
pub struct Brakes {
    limiter: Arc<Limiter>,
    held: Vec<Arc<Disk>>,
}

impl Brakes {
    /// Holds nothing yet.
    pub fn new(limiter: Arc<Limiter>) -> Self {
        Self { limiter, held: Vec::new() }
    }

    /// Holds these disks to the limit from now on, or lets all go.
    pub fn set(&mut self, limit: Option<WriteLimit>, disks: impl Iterator<Item = Arc<Disk>>) {
        self.limiter.set(limit);
        if limit.is_none() {
            return self.lift();
        }
        if self.held.is_empty() {
            self.held = disks.collect();
            for disk in &self.held {
                disk.set_write_delay(Some(Arc::clone(&self.limiter) as Arc<dyn WriteDelay>));
            }
        }
    }

    /// Lets all go.
    pub fn lift(&mut self) {
        self.limiter.set(None);
        self.held.drain(..).for_each(|disk| disk.set_write_delay(None));
    }
}

impl Drop for Brakes {
    fn drop(&mut self) {
        self.lift();
    }
}
