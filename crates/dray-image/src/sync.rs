//! Where the lock-free parts get their atomics, locks and threads from.
//!
//! [`gate`](crate::gate), [`blockmap`](crate::blockmap), [`tracker`](crate::tracker) and
//! [`waiters`](crate::waiters) name only this module, so that the interleaving tests can compile
//! the same sources against a scheduler that tries every order of steps.

pub use std::sync::atomic;
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
pub use std::thread;

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Which of `count` shards the calling thread uses.
pub fn shard(count: usize) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    MINE.with(|mine| {
        if mine.get() == usize::MAX {
            mine.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        mine.get() % count
    })
}
