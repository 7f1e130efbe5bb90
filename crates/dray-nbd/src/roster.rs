//! The live connections of a listener: so that they can be counted, closed and waited for.

use crate::channel::{Channel, Socket};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The live connections of one listener.
#[derive(Default)]
pub(crate) struct Roster {
    live: Mutex<Live>,
    ended: Condvar,
}

#[derive(Default)]
struct Live {
    next: u64,
    entries: HashMap<u64, Entry>,
    closed: bool,
}

struct Entry {
    socket: Arc<Socket>,
    closing: Arc<AtomicBool>,
    export: Option<String>,
}

impl Entry {
    fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.socket.stop_receiving();
    }
}

/// A connection's place in the roster.
pub(crate) struct Place {
    roster: Arc<Roster>,
    id: u64,
    /// Set when the connection shall end.
    pub closing: Arc<AtomicBool>,
}

impl Roster {
    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a connection, unless there are `max` already or the roster is closed.
    pub(crate) fn enter(self: &Arc<Self>, socket: &Arc<Socket>, max: usize) -> Option<Place> {
        let mut live = self.live();
        if live.closed || live.entries.len() >= max {
            return None;
        }
        let id = live.next;
        live.next += 1;
        let closing = Arc::new(AtomicBool::new(false));
        let entry =
            Entry { socket: Arc::clone(socket), closing: Arc::clone(&closing), export: None };
        live.entries.insert(id, entry);
        Some(Place { roster: Arc::clone(self), id, closing })
    }

    /// Connections of any kind, also those still negotiating.
    pub(crate) fn len(&self) -> usize {
        self.live().entries.len()
    }

    /// Lets nobody in any more and ends all connections as [`end`](Self::end) does.
    pub(crate) fn close(&self, grace: Duration) -> usize {
        self.live().closed = true;
        self.end(|_| true, grace)
    }

    /// Ends the connections to `export`.
    pub(crate) fn disconnect(&self, export: &str, grace: Duration) -> usize {
        self.end(|entry| entry.export.as_deref() == Some(export), grace)
    }

    /// Ends every connection that `which` chooses: requests under way are finished for at most
    /// `grace`, then the connection is cut. Returns how many had to be cut.
    fn end(&self, which: impl Fn(&Entry) -> bool, grace: Duration) -> usize {
        let deadline = Instant::now() + grace;
        let mut live = self.live();
        let chosen: Vec<u64> = {
            let entries = live.entries.iter().filter(|(_, entry)| which(entry));
            entries.inspect(|(_, entry)| entry.close()).map(|(id, _)| *id).collect()
        };
        loop {
            let left: Vec<&u64> =
                chosen.iter().filter(|id| live.entries.contains_key(id)).collect();
            let time = deadline.saturating_duration_since(Instant::now());
            if left.is_empty() {
                return 0;
            }
            if time.is_zero() {
                left.iter().filter_map(|id| live.entries.get(id)).for_each(|e| e.socket.cut());
                return left.len();
            }
            let wait = self.ended.wait_timeout(live, time);
            live = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Place {
    /// Notes which export the connection uses.
    pub(crate) fn uses(&self, export: &str) {
        if let Some(entry) = self.roster.live().entries.get_mut(&self.id) {
            entry.export = Some(export.to_owned());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.roster.live().entries.remove(&self.id);
        self.roster.ended.notify_all();
    }
}
