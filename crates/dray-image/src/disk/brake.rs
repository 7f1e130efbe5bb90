//! Slowing a guest's changes: they wait in front of the gate, so that a quiesce need not wait for
//! them, and outside the thread that reads a client's requests.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Says how long a guest's change waits before it is carried out.
pub trait WriteDelay: Send + Sync {
    /// A change comes now that makes `new_dirty` bytes dirty which are clean; never zero. Must not
    /// block.
    fn delay(&self, new_dirty: u64) -> Duration;

    /// A change has waited for `time`; less than it was told to when the waiting was ended.
    fn waited(&self, time: Duration);
}

/// Where changes wait.
#[derive(Default)]
pub(super) struct Brake {
    on: AtomicBool,
    rule: Mutex<Option<Arc<dyn WriteDelay>>>,
    changed: Condvar,
}

impl Brake {
    fn rule(&self) -> MutexGuard<'_, Option<Arc<dyn WriteDelay>>> {
        self.rule.lock()
    }

    /// From now on changes wait as `rule` says, or not at all: then those that wait go on at once.
    pub(super) fn set(&self, rule: Option<Arc<dyn WriteDelay>>) {
        let mut held = self.rule();
        self.on.store(rule.is_some(), Ordering::Release);
        *held = rule;
        drop(held);
        self.changed.notify_all();
    }

    /// Whether changes may have to wait: one load.
    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Waits as long as a change must that makes `new_dirty` clean bytes dirty.
    pub(super) fn wait(&self, new_dirty: u64) {
        let mut held = self.rule();
        let Some(rule) = held.clone().filter(|_| new_dirty > 0) else { return };
        let delay = rule.delay(new_dirty);
        if delay.is_zero() {
            return;
        }
        let began = Instant::now();
        while held.is_some() {
            let left = delay.saturating_sub(began.elapsed());
            if left.is_zero() {
                break;
            }
            self.changed.wait_for(&mut held, left);
        }
        drop(held);
        rule.waited(began.elapsed());
    }
}
