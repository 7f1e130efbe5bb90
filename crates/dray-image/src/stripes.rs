//! Locks on ranges of blocks, between a guest overwriting missing blocks and their arrival.
//!
//! A fixed number of locks is shared by all groups of blocks; two ranges in groups that share one
//! wait for each other without need, which costs time, never correctness.

use crate::sync::{Mutex, MutexGuard};
use crate::unpoisoned::lock;
use dray_types::BlockRange;

/// Blocks in a group: a run of the largest size takes a handful of locks.
const GROUP_BLOCKS: u64 = 64;
/// Locks: so many that the requests of a guest with a deep queue seldom meet.
const LOCKS: usize = 256;

/// The locks.
pub struct Stripes {
    locks: [Mutex<()>; LOCKS],
}

/// A locked range.
pub struct Held<'a>(#[expect(dead_code, reason = "held, never looked at")] Vec<MutexGuard<'a, ()>>);

impl Default for Stripes {
    fn default() -> Self {
        Self { locks: std::array::from_fn(|_| Mutex::new(())) }
    }
}

/// The locks of a range, in the one order in which locks are taken.
fn places(range: BlockRange) -> Vec<usize> {
    if range.is_empty() {
        return Vec::new();
    }
    let (first, last) = (range.start / GROUP_BLOCKS, (range.end() - 1) / GROUP_BLOCKS);
    if last - first >= LOCKS as u64 {
        return (0..LOCKS).collect();
    }
    let mut places: Vec<_> = (first..=last).map(|group| (group % LOCKS as u64) as usize).collect();
    places.sort_unstable();
    places
}

impl Stripes {
    /// Locks a range.
    pub fn lock(&self, range: BlockRange) -> Held<'_> {
        let take = |place: usize| lock(&self.locks[place]);
        Held(places(range).into_iter().map(take).collect())
    }

    /// Locks a range, if nobody holds any part of it.
    pub fn try_lock(&self, range: BlockRange) -> Option<Held<'_>> {
        let take = |place: usize| self.locks[place].try_lock().ok();
        places(range).into_iter().map(take).collect::<Option<Vec<_>>>().map(Held)
    }
}
