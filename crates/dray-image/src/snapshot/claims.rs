//! The blocks whose old content a thread is keeping at the moment. Only a thread that must keep one
//! of the same blocks waits.

use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::unpoisoned::{lock, wait};
use dray_types::BlockRange;

#[derive(Default)]
struct State {
    /// As many as changes are in flight, at most.
    held: Vec<BlockRange>,
    closed: bool,
}

/// Ranges that are claimed.
#[derive(Default)]
pub(super) struct Claims {
    state: Mutex<State>,
    freed: Condvar,
}

/// A claimed range.
pub(super) struct Claim<'a> {
    claims: &'a Claims,
    range: BlockRange,
}

impl Claims {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        wait(&self.freed, state)
    }

    /// Claims `range`, as soon as nobody holds a part of it; none once closed.
    pub(super) fn claim(&self, range: BlockRange) -> Option<Claim<'_>> {
        let mut state = self.state();
        while state.held.iter().any(|other| !other.intersect(range).is_empty()) {
            state = self.wait(state);
        }
        if state.closed {
            return None;
        }
        state.held.push(range);
        Some(Claim { claims: self, range })
    }

    /// Gives no claim any more and returns when nobody holds one.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        while !state.held.is_empty() {
            state = self.wait(state);
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut state = self.claims.state();
        if let Some(at) = state.held.iter().position(|range| *range == self.range) {
            state.held.swap_remove(at);
        }
        drop(state);
        self.claims.freed.notify_all();
    }
}
