//! Recording a guest's accesses one by one, for a trace of them.
//!
//! Unlike the log that heat is made of, which holds blocks and may lose accesses without telling,
//! this one holds bytes and times, and counts what it had no room for. It costs one load while
//! nobody records.

use dray_heat::Op;
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Accesses that a recording holds until they are taken; more are only counted. They take 2 MiB,
/// and are the accesses of a third of a second of a very fast disk.
pub const RECORDING_PLACES: usize = 65_536;

/// An access of a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// Since the recording began. Never less than that of the access before.
    pub time: Duration,
    /// Zeroes and discards are writes.
    pub op: Op,
    /// In bytes.
    pub offset: u64,
    /// In bytes, not zero.
    pub len: u64,
}

/// What came since the last time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Accesses {
    /// In order of time.
    pub accesses: Vec<Access>,
    /// Everything until then is in this or an earlier answer, or was missed.
    pub until: Duration,
    /// Accesses missed since the recording began, because nobody took those before them.
    pub missed: u64,
}

struct Log {
    began: Instant,
    held: Mutex<Accesses>,
}

impl Log {
    fn held(&self) -> MutexGuard<'_, Accesses> {
        self.held.lock()
    }
}

/// The place in a disk where a recording is put.
#[derive(Default)]
pub(super) struct Recorder {
    on: AtomicBool,
    log: RwLock<Option<Arc<Log>>>,
}

impl Recorder {
    /// Begins; none while another recording goes on.
    pub(super) fn begin(self: &Arc<Self>) -> Option<Recording> {
        let mut place = self.log.write();
        if place.is_some() {
            return None;
        }
        let log = Arc::new(Log { began: Instant::now(), held: Mutex::default() });
        *place = Some(Arc::clone(&log));
        self.on.store(true, Ordering::SeqCst);
        Some(Recording { log, recorder: Arc::clone(self) })
    }

    /// An access of the guest.
    #[inline]
    pub(super) fn note(&self, op: Op, offset: u64, len: u64) {
        if self.on.load(Ordering::Relaxed) {
            self.add(op, offset, len);
        }
    }

    #[cold]
    fn add(&self, op: Op, offset: u64, len: u64) {
        let place = self.log.read();
        let Some(log) = place.as_ref().filter(|_| len > 0) else { return };
        let mut held = log.held();
        if held.accesses.len() == RECORDING_PLACES {
            held.missed += 1;
            return;
        }
        // The time is taken under the lock, so that times never go back.
        held.accesses.push(Access { time: log.began.elapsed(), op, offset, len });
    }
}

/// A recording that goes on until it is dropped.
pub struct Recording {
    log: Arc<Log>,
    recorder: Arc<Recorder>,
}

impl Recording {
    /// Takes what has come since the last time.
    pub fn take(&self) -> Accesses {
        let mut held = self.log.held();
        let accesses = std::mem::take(&mut held.accesses);
        Accesses { accesses, until: self.log.began.elapsed(), missed: held.missed }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.recorder.on.store(false, Ordering::SeqCst);
        *self.recorder.log.write() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_is_held_in_order_and_what_has_no_room_is_counted() {
        let recorder = Arc::new(Recorder::default());
        recorder.note(Op::Read, 0, 512);
        let recording = recorder.begin().unwrap();
        assert!(recorder.begin().is_none(), "one at a time");
        recorder.note(Op::Write, 4096, 512);
        recorder.note(Op::Read, 8192, 0);
        recorder.note(Op::Read, 1024, 1024);
        let taken = recording.take();
        let of = |access: &Access| (access.op, access.offset, access.len);
        let seen: Vec<_> = taken.accesses.iter().map(of).collect();
        assert_eq!(seen, [(Op::Write, 4096, 512), (Op::Read, 1024, 1024)]);
        let times: Vec<_> = taken.accesses.iter().map(|access| access.time).collect();
        assert!(times.is_sorted() && *times.last().unwrap() <= taken.until);
        (0..RECORDING_PLACES as u64 + 3).for_each(|n| recorder.note(Op::Write, n, 1));
        let full = recording.take();
        assert_eq!((full.accesses.len(), full.missed), (RECORDING_PLACES, 3));
        recorder.note(Op::Write, 7, 1);
        let after = recording.take();
        assert_eq!((after.accesses.len(), after.missed), (1, 3));
        drop(recording);
        recorder.note(Op::Write, 9, 1);
        assert_eq!(recorder.begin().unwrap().take().accesses, []);
    }
}
