//! The locks of [`sync`](crate::sync) without poisoning: a thread that panics with a lock in its hand leaves what
//! is behind the lock as it is. Every other lock of dray is parking_lot's, which are like that by themselves; the
//! interleaving tests have none of these.

use crate::sync::{Condvar, Mutex, MutexGuard};
use std::sync::PoisonError;
use std::time::Duration;

/// Takes the lock.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives the lock away until there is news.
pub fn wait<'a, T>(news: &Condvar, held: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    news.wait(held).unwrap_or_else(PoisonError::into_inner)
}

/// The same for a time at most.
pub fn wait_for<'a, T>(
    news: &Condvar,
    held: MutexGuard<'a, T>,
    time: Duration,
) -> MutexGuard<'a, T> {
    news.wait_timeout(held, time).unwrap_or_else(PoisonError::into_inner).0
}
