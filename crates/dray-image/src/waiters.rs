//! Threads that wait for blocks to arrive, each woken only for its own.

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::thread::{self, Thread};
use crate::sync::{Mutex, MutexGuard};
use crate::unpoisoned::lock;
use dray_types::BlockRange;

/// The threads that wait, and for what.
#[derive(Default)]
pub struct Waiters {
    /// How many there are, so that an arrival nobody waits for takes no lock.
    count: AtomicUsize,
    list: Mutex<Vec<(Thread, BlockRange)>>,
}

/// A thread's place in the list.
pub struct Waiting<'a> {
    waiters: &'a Waiters,
    range: BlockRange,
}

impl Waiters {
    fn list(&self) -> MutexGuard<'_, Vec<(Thread, BlockRange)>> {
        lock(&self.list)
    }

    /// Puts the calling thread on the list. It must look whether the blocks are there *after*
    /// this, and before each [`sleep`](Waiting::sleep).
    pub fn register(&self, range: BlockRange) -> Waiting<'_> {
        self.list().push((thread::current(), range));
        self.count.fetch_add(1, Ordering::SeqCst);
        Waiting { waiters: self, range }
    }

    /// Wakes who waits for any block of `range`; to be called after the blocks are marked present.
    pub fn wake(&self, range: BlockRange) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        for (thread, wanted) in self.list().iter() {
            if !wanted.intersect(range).is_empty() {
                thread.unpark();
            }
        }
    }

    /// Wakes everyone, to look at something other than blocks.
    pub fn wake_all(&self) {
        self.list().iter().for_each(|(thread, _)| thread.unpark());
    }

    /// What is being waited for.
    pub fn ranges(&self) -> Vec<BlockRange> {
        self.list().iter().map(|&(_, range)| range).collect()
    }
}

impl Waiting<'_> {
    /// Waits to be woken; may return early.
    pub fn sleep(&self) {
        thread::park();
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let me = thread::current().id();
        let mut list = self.waiters.list();
        let mine = list.iter().position(|(t, range)| t.id() == me && *range == self.range);
        if let Some(place) = mine {
            list.swap_remove(place);
            self.waiters.count.fetch_sub(1, Ordering::SeqCst);
        }
    }
}
