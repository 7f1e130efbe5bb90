//! Calls under way in which the system may tell of lost writes.
//!
//! It tells one of several calls that run at once. The others succeed, and must not be believed before the one
//! that was told has written down what it was told.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeSet;

/// The calls that are under way.
#[derive(Default)]
pub(super) struct UnderWay {
    calls: Mutex<Calls>,
    ended: Condvar,
}

#[derive(Default)]
struct Calls {
    next: u64,
    running: BTreeSet<u64>,
}

/// A call; it ends when this is dropped.
pub(super) struct Call<'a> {
    all: &'a UnderWay,
    number: u64,
}

impl UnderWay {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock()
    }

    /// A call begins.
    pub(super) fn begin(&self) -> Call<'_> {
        let mut calls = self.calls();
        let number = calls.next;
        calls.next += 1;
        calls.running.insert(number);
        Call { all: self, number }
    }

    /// Waits for all calls that are under way now.
    pub(super) fn wait(&self) {
        let mut calls = self.calls();
        let next = calls.next;
        while calls.running.first().is_some_and(|&first| first < next) {
            self.ended.wait(&mut calls);
        }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.all.calls().running.remove(&self.number);
        self.all.ended.notify_all();
    }
}
