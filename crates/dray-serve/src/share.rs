//! What the connections of one export have under way together, and those of all exports: whoever opens many
//! connections, and takes no answers, must not take the memory and the threads of all.

use crate::limits::{BYTES_OF_ALL, BYTES_OF_EXPORT, THREADS_OF_ALL, THREADS_OF_EXPORT};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};

/// What is under way.
#[derive(Default, Debug)]
struct Use {
    threads: AtomicUsize,
    bytes: AtomicU64,
}

/// Those of all exports.
#[derive(Default, Debug)]
pub(crate) struct Shares {
    all: Arc<Use>,
    by_export: Mutex<HashMap<String, Weak<Share>>>,
}

impl Shares {
    /// That of the export `name`, of which all its connections have the same.
    pub(crate) fn of(&self, name: &str) -> Arc<Share> {
        let mut shares = self.by_export.lock();
        if let Some(share) = shares.get(name).and_then(Weak::upgrade) {
            return share;
        }
        shares.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(Share { all: Arc::clone(&self.all), own: Use::default() });
        shares.insert(name.to_owned(), Arc::downgrade(&share));
        share
    }
}

/// What an export has of the memory and the threads of all.
#[derive(Default, Debug)]
pub struct Share {
    all: Arc<Use>,
    own: Use,
}

impl Share {
    /// Whether there is room for so many bytes more.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        self.own.bytes.load(Relaxed) + bytes <= BYTES_OF_EXPORT
            && self.all.bytes.load(Relaxed) + bytes <= BYTES_OF_ALL
    }

    /// These bytes are under way.
    pub(crate) fn take(&self, bytes: u64) {
        self.own.bytes.fetch_add(bytes, Relaxed);
        self.all.bytes.fetch_add(bytes, Relaxed);
    }

    /// They are not any more.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.own.bytes.fetch_sub(bytes, Relaxed);
        self.all.bytes.fetch_sub(bytes, Relaxed);
    }

    /// One thread more, if there is room for it, or if it is the `first` of its connection.
    pub(crate) fn thread(self: &Arc<Self>, first: bool) -> Option<ThreadPlace> {
        let has_room = self.own.threads.load(Relaxed) < THREADS_OF_EXPORT
            && self.all.threads.load(Relaxed) < THREADS_OF_ALL;
        if !first && !has_room {
            return None;
        }
        self.own.threads.fetch_add(1, Relaxed);
        self.all.threads.fetch_add(1, Relaxed);
        Some(ThreadPlace(Arc::clone(self)))
    }
}

/// A thread's place in a share; it is free when this is dropped.
pub(crate) struct ThreadPlace(Arc<Share>);

impl Drop for ThreadPlace {
    fn drop(&mut self) {
        self.0.own.threads.fetch_sub(1, Relaxed);
        self.0.all.threads.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_has_its_share_and_all_together_theirs() {
        let shares = Shares::default();
        let one = shares.of("a");
        assert!(Arc::ptr_eq(&one, &shares.of("a")) && !Arc::ptr_eq(&one, &shares.of("b")));
        one.take(BYTES_OF_EXPORT);
        assert!(!one.has_room(1) && shares.of("b").has_room(1));
        let others: Vec<_> = (1..BYTES_OF_ALL / BYTES_OF_EXPORT)
            .map(|number| shares.of(&number.to_string()))
            .inspect(|share| share.take(BYTES_OF_EXPORT))
            .collect();
        assert!(!shares.of("b").has_room(1));
        one.give_back(BYTES_OF_EXPORT);
        assert!(shares.of("b").has_room(BYTES_OF_EXPORT) && one.has_room(BYTES_OF_EXPORT));
        drop(others);

        let threads: Vec<_> = (0..THREADS_OF_EXPORT).map(|_| one.thread(false).unwrap()).collect();
        assert!(one.thread(false).is_none() && shares.of("b").thread(false).is_some());
        drop(one.thread(true).expect("each connection has one"));
        drop(threads);
        assert!(one.thread(false).is_some());
    }
}
