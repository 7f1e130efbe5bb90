//! Errors of making an image's writes durable, kept until a guest's flush has reported them.
//!
//! The kernel reports a lost write once to each open file that is synced. dray syncs the files of
//! guests for reasons of its own (a checkpoint, a handover), and what such a sync was told the
//! guest's next flush would no longer hear. Nor would it after a restart of the agent: a file that
//! is opened later is not told of what another one was told.

use crate::image::WriteBackError;
use crate::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Remembers across restarts that writes of an image may be lost.
pub trait LossLog: Send + Sync {
    /// Writes may be lost because of `why`, and no flush has succeeded since. Must survive this
    /// process, and need not survive the host.
    ///
    /// # Errors
    /// When it cannot be written down.
    fn lost(&self, why: &str) -> Result<()>;

    /// The guest has been told, and a flush of its has succeeded since.
    ///
    /// # Errors
    /// When that cannot be written down; it is tried again at the next flush.
    fn settled(&self) -> Result<()>;
}

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
    log: OnceLock<Arc<dyn LossLog>>,
    /// The log says that writes are lost.
    logged: AtomicBool,
}

impl WriteBack {
    fn last(&self) -> MutexGuard<'_, Option<WriteBackError>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on losses are written down in `log`, in which an earlier process has left `owed`.
    pub(crate) fn keep(&self, log: Arc<dyn LossLog>, owed: Option<&str>) {
        if let Some(why) = owed {
            let why = format!("{why}, before the agent was restarted");
            let (kind, count, told) = (ErrorKind::Io, 1, false);
            *self.last() = Some(WriteBackError { why, kind, count, told });
            self.logged.store(true, Ordering::SeqCst);
            self.owed.store(true, Ordering::SeqCst);
        }
        // The first one stays.
        let _ = self.log.set(log);
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
            Ok(()) => {
                self.settle(image);
                Ok(())
            }
        }
    }

    fn note(&self, image: &Path, why: &Error, told: bool) {
        tracing::error!(image = %image.display(), %why, "writes of a guest may be lost");
        let mut last = self.last();
        let count = last.as_ref().map_or(0, |last| last.count) + 1;
        let text = why.to_string();
        if let Some(Err(why)) = self.log.get().map(|log| log.lost(&text)) {
            tracing::error!(image = %image.display(), %why, "a restart will forget that");
        }
        *last = Some(WriteBackError { why: text, kind: why.kind, count, told });
        self.logged.store(self.log.get().is_some(), Ordering::SeqCst);
        if !told {
            self.owed.store(true, Ordering::SeqCst);
        }
    }

    /// A flush has succeeded: what was lost before is told. Not earlier, because an answer may be
    /// lost with the process that gives it.
    fn settle(&self, image: &Path) {
        if !self.logged.load(Ordering::SeqCst) {
            return;
        }
        let _no_new_one = self.last();
        if self.owed.load(Ordering::SeqCst) {
            return;
        }
        match self.log.get().map_or(Ok(()), |log| log.settled()) {
            Ok(()) => self.logged.store(false, Ordering::SeqCst),
            Err(why) => {
                tracing::warn!(image = %image.display(), %why, "a loss that was told stays written down");
            }
        }
    }

    /// The error that was owed; told now.
    fn report(&self, image: &Path) -> Error {
        let mut last = self.last();
        let kind = last.as_ref().map_or(ErrorKind::Io, |last| last.kind);
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

    /// What is written down.
    #[derive(Default)]
    struct Written(Mutex<Option<String>>);

    impl LossLog for Written {
        fn lost(&self, why: &str) -> Result<()> {
            *self.0.lock().unwrap() = Some(why.to_owned());
            Ok(())
        }

        fn settled(&self) -> Result<()> {
            *self.0.lock().unwrap() = None;
            Ok(())
        }
    }

    #[test]
    fn a_restart_forgets_no_loss_before_a_flush_has_succeeded_after_the_guest_was_told() {
        let (log, image) = (Arc::new(Written::default()), Path::new("disk"));
        let start = || {
            let back = WriteBack::default();
            back.keep(Arc::clone(&log) as _, log.0.lock().unwrap().as_deref());
            back
        };
        // dray's own sync fails, a guest's flush fails: each before a restart.
        start().own(image, lost).unwrap_err();
        start().guest(image, lost).unwrap_err();
        let back = start();
        let told = back.guest(image, || Ok(())).unwrap_err().to_string();
        assert!(told.contains("before the agent was restarted"), "{told}");
        // Perhaps nobody has heard the answer.
        let back = start();
        back.guest(image, || Ok(())).unwrap_err();
        back.guest(image, || Ok(())).unwrap();
        start().guest(image, || Ok(())).unwrap();
        assert!(log.0.lock().unwrap().is_none());
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
