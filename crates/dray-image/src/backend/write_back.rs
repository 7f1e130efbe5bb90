//! Errors of making an image's writes durable, kept until a guest's flush has reported them.
//!
//! The kernel reports a lost write once to each open file that is synced. dray syncs the files of
//! guests for reasons of its own (a checkpoint, a handover), and what such a sync was told the
//! guest's next flush would no longer hear.

use crate::image::WriteBackError;
use crate::{Error, Result};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is known of an image's lost writes.
#[derive(Default)]
pub(crate) struct WriteBack {
    /// Syncs of dray's own that are under way: their errors are about to be remembered.
    own: AtomicUsize,
    /// Held by each of them.
    syncing: Mutex<()>,
    /// A guest's flush is still to report an error.
    owed: AtomicBool,
    last: Mutex<Option<WriteBackError>>,
}

impl WriteBack {
    fn last(&self) -> MutexGuard<'_, Option<WriteBackError>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sync of dray's own.
    ///
    /// # Errors
    /// What `sync` reports, which is remembered.
    pub(crate) fn own(&self, image: &Path, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        self.own.fetch_add(1, Ordering::SeqCst);
        let one = self.syncing.lock().unwrap_or_else(PoisonError::into_inner);
        let done = sync().inspect_err(|why| self.owe(image, why));
        drop(one);
        self.own.fetch_sub(1, Ordering::SeqCst);
        done
    }

    /// Writes of `image` may be lost, and no flush of its guest has said so.
    pub(crate) fn owe(&self, image: &Path, why: &Error) {
        self.note(image, why, false);
        self.owed.store(true, Ordering::SeqCst);
    }

    /// A guest's flush, of which `sync` is the part that the system does.
    ///
    /// # Errors
    /// What `sync` reports, or a sync of dray's own did since the last flush.
    pub(crate) fn guest(&self, image: &Path, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        let done = sync();
        if self.own.load(Ordering::SeqCst) > 0 {
            // It may have taken the error that this sync was not told any more.
            drop(self.syncing.lock().unwrap_or_else(PoisonError::into_inner));
        }
        let owed = self.owed.load(Ordering::SeqCst) && self.owed.swap(false, Ordering::SeqCst);
        match done {
            Err(why) => {
                self.note(image, &why, true);
                Err(why)
            }
            Ok(()) if owed => Err(self.report(image)),
            Ok(()) => Ok(()),
        }
    }

    fn note(&self, image: &Path, why: &Error, told: bool) {
        tracing::error!(image = %image.display(), %why, "writes of a guest may be lost");
        let mut last = self.last();
        let count = last.as_ref().map_or(0, |last| last.count) + 1;
        *last = Some(WriteBackError { why: why.to_string(), kind: why.kind, count, told });
    }

    /// The error that was owed; told now.
    fn report(&self, image: &Path) -> Error {
        let mut last = self.last();
        let kind = last.as_ref().map_or(crate::ErrorKind::Io, |last| last.kind);
        let why = last.as_mut().map_or("a sync failed", |last| {
            last.told = true;
            &last.why
        });
        let context = format!("flushing image {}", image.display());
        Error::new(kind, context, &format!("earlier writes may be lost: {why}"))
    }

    /// The last error.
    pub(crate) fn error(&self) -> Option<WriteBackError> {
        self.last().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use std::sync::mpsc::channel;

    fn lost() -> Result<()> {
        Err(Error::new(ErrorKind::NoSpace, "syncing", "the pool is full"))
    }

    #[test]
    fn an_error_is_reported_to_one_flush_whoever_met_it() {
        let (back, image) = (WriteBack::default(), Path::new("disk"));
        assert!(back.guest(image, || Ok(())).is_ok() && back.error().is_none());
        // A guest's own.
        back.guest(image, lost).unwrap_err();
        back.guest(image, || Ok(())).unwrap();
        assert!(back.error().is_some_and(|last| last.told && last.count == 1));
        // dray's, twice: one error is owed.
        back.own(image, lost).unwrap_err();
        back.own(image, lost).unwrap_err();
        back.own(image, || Ok(())).unwrap();
        assert!(back.error().is_some_and(|last| !last.told && last.count == 3));
        let told = back.guest(image, || Ok(())).unwrap_err();
        assert_eq!(told.kind, ErrorKind::NoSpace);
        assert!(told.to_string().contains("the pool is full"), "{told}");
        assert!(back.error().is_some_and(|last| last.told));
        back.guest(image, || Ok(())).unwrap();
        // Both at once are one.
        back.own(image, lost).unwrap_err();
        back.guest(image, lost).unwrap_err();
        back.guest(image, || Ok(())).unwrap();
    }

    #[test]
    fn a_flush_waits_for_what_a_sync_under_way_is_told() {
        let (back, image) = (WriteBack::default(), Path::new("disk"));
        let ((begun, begins), (go, goes)) = (channel(), channel());
        std::thread::scope(|scope| {
            let back = &back;
            let own = scope.spawn(move || {
                back.own(image, || {
                    begun.send(()).unwrap();
                    goes.recv().unwrap();
                    lost()
                })
            });
            begins.recv().unwrap();
            // The kernel has told the other one, which goes on only now.
            back.guest(image, || {
                go.send(()).unwrap();
                Ok(())
            })
            .unwrap_err();
            own.join().unwrap().unwrap_err();
        });
    }
}
