//! Errors of making an image's writes durable, kept until a guest's flush has reported them.
//!
//! The kernel reports a lost write once to each open file that is synced. dray syncs the files of
//! guests for reasons of its own (a checkpoint, a handover), and what such a sync was told the
//! guest's next flush would no longer hear. Nor would it after a restart of the agent: a file that
//! is opened later is not told of what another one was told.

use crate::error::EarlierLoss;
use crate::image::WriteBackError;
use crate::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// What is added when a loss of an earlier process is told.
const EARLIER: &str = ", before the agent was restarted";

/// A loss as it is written down.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loss {
    /// Why writes may be lost; the end of a long text may be cut off.
    pub why: String,
    /// The notes of present blocks that lie beside it may be of the process that it came to. Of later ones
    /// they are once a process has begun them anew.
    pub notes_in_doubt: bool,
}

/// Remembers across restarts that writes of an image may be lost.
pub trait LossLog: Send + Sync {
    /// Writes may be lost, and no flush has succeeded since. Must survive this process, and need not
    /// survive the host.
    ///
    /// # Errors
    /// When it cannot be written down.
    fn lost(&self, loss: &Loss) -> Result<()>;

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
    /// The last error is one of an earlier process; changed only while `last` is held.
    inherited: AtomicBool,
    /// QEMU may be stopping the guest: a flush may be QEMU's own. Changed only while `last` is held, as the
    /// next one.
    guest_stops: AtomicBool,
    /// A flush that may have been QEMU's own was told of the last error.
    told_in_stop: AtomicBool,
    log: OnceLock<Arc<dyn LossLog>>,
    /// The log says that writes are lost.
    logged: AtomicBool,
}

impl WriteBack {
    fn last(&self) -> MutexGuard<'_, Option<WriteBackError>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on losses are written down in `log`, in which an earlier process has left `owed`.
    pub(crate) fn keep(&self, log: Arc<dyn LossLog>, owed: Option<&Loss>) {
        if let Some(Loss { why, notes_in_doubt }) = owed {
            let (why, notes_in_doubt) = (format!("{why}{EARLIER}"), *notes_in_doubt);
            let (kind, count, told) = (ErrorKind::Io, 1, false);
            let mut last = self.last();
            *last = Some(WriteBackError { why, kind, count, told, notes_in_doubt });
            self.inherited.store(true, Ordering::SeqCst);
            self.logged.store(true, Ordering::SeqCst);
            self.owed.store(true, Ordering::SeqCst);
        }
        // The first one stays.
        let _ = self.log.set(log);
    }

    /// What was lost so far was no guest's: nobody is told.
    pub(crate) fn forget(&self, image: &Path) {
        let mut last = self.last();
        *last = None;
        for flag in [&self.inherited, &self.owed, &self.guest_stops, &self.told_in_stop] {
            flag.store(false, Ordering::SeqCst);
        }
        drop(last);
        self.settle(image);
    }

    /// Whether QEMU may stop the guest: a flush that is told of a loss then may be QEMU's own, which fails
    /// and tells the guest nothing. When the guest goes on, such a loss is owed to it again.
    pub(crate) fn guest_stops(&self, stops: bool) {
        let mut last = self.last();
        self.guest_stops.store(stops, Ordering::SeqCst);
        if stops || !self.told_in_stop.swap(false, Ordering::SeqCst) {
            return;
        }
        if let Some(last) = last.as_mut() {
            last.told = false;
        }
        self.owed.store(true, Ordering::SeqCst);
    }

    /// A flush is told; `last` is held. While QEMU may stop the guest, the next one is told as well: the
    /// guest may go on before anybody has said so.
    fn tell(&self) {
        if self.guest_stops.load(Ordering::SeqCst) {
            self.told_in_stop.store(true, Ordering::SeqCst);
            self.owed.store(true, Ordering::SeqCst);
        }
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
    /// What `sync` reports, or a sync of dray's own did since the last flush; an
    /// [earlier loss](Error::is_earlier_loss) when `sync` succeeded and only another process failed.
    pub(crate) fn guest(&self, image: &Path, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        let done = sync();
        // It may have taken the error that this sync was not told any more.
        self.await_own();
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

    /// Waits for a sync of dray's own that is under way.
    fn await_own(&self) {
        if self.own.load(Ordering::SeqCst) > 0 {
            drop(self.syncing.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn note(&self, image: &Path, why: &Error, told: bool) {
        tracing::error!(image = %image.display(), %why, "writes of a guest may be lost");
        let mut last = self.last();
        let count = last.as_ref().map_or(0, |last| last.count) + 1;
        let loss = Loss { why: why.to_string(), notes_in_doubt: true };
        if let Some(Err(why)) = self.log.get().map(|log| log.lost(&loss)) {
            tracing::error!(image = %image.display(), %why, "a restart will forget that");
        }
        let (kind, notes_in_doubt) = (why.kind, false);
        *last = Some(WriteBackError { why: loss.why, kind, count, told, notes_in_doubt });
        self.inherited.store(false, Ordering::SeqCst);
        self.logged.store(self.log.get().is_some(), Ordering::SeqCst);
        if told {
            self.tell();
        } else {
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
        if self.owed.load(Ordering::SeqCst) || self.told_in_stop.load(Ordering::SeqCst) {
            return;
        }
        match self.log.get().map_or(Ok(()), |log| log.settled()) {
            Ok(()) => self.logged.store(false, Ordering::SeqCst),
            Err(why) => {
                tracing::warn!(image = %image.display(), %why, "a loss that is over stays written down");
            }
        }
    }

    /// The error that was owed; told now.
    fn report(&self, image: &Path) -> Error {
        let mut last = self.last();
        self.tell();
        let kind = last.as_ref().map_or(ErrorKind::Io, |last| last.kind);
        let text = last.as_mut().map_or("a sync failed", |last| {
            last.told = true;
            &last.why
        });
        let context = format!("flushing image {}", image.display());
        let why = format!("earlier writes may be lost: {text}");
        if self.inherited.load(Ordering::SeqCst) {
            return Error { kind, context, source: Box::new(EarlierLoss(why)) };
        }
        Error::new(kind, context, &why)
    }

    /// The next process need not doubt the notes of this one, which has lost nothing. If that cannot be
    /// written down it asks for a restart where it need not.
    pub(crate) fn notes_begin_anew(&self) {
        let last = self.last();
        if let Some(last) = last.as_ref().filter(|last| last.notes_in_doubt) {
            let why = last.why.strip_suffix(EARLIER).unwrap_or(&last.why).to_owned();
            let _ = self.log.get().map(|log| log.lost(&Loss { why, notes_in_doubt: false }));
        }
    }

    /// The last error.
    pub(crate) fn error(&self) -> Option<WriteBackError> {
        let last = self.last();
        let only_in_stop = self.told_in_stop.load(Ordering::SeqCst);
        last.clone().map(|last| WriteBackError { told: last.told && !only_in_stop, ..last })
    }

    /// The loss that the guest is still to be told, also one that a sync under way is about to meet.
    pub(crate) fn untold(&self) -> Option<WriteBackError> {
        self.await_own();
        self.error().filter(|last| !last.told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::PresentLog;
    use crate::unrecorded::Unrecorded;
    use dray_types::{BlockRange, BlockSet};
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

    /// QEMU flushes its disks when it stops a guest for a migration, and an error ends that one.
    #[test]
    fn a_loss_that_qemu_itself_was_told_while_it_stopped_the_guest_is_told_again() {
        let (log, image) = (Arc::new(Written::default()), Path::new("disk"));
        let back = WriteBack::default();
        back.keep(Arc::clone(&log) as _, None);
        back.own(image, lost).unwrap_err();
        back.guest_stops(true);
        // The guest may go on before `guest_stops(false)`.
        back.guest(image, || Ok(())).unwrap_err();
        back.guest(image, || Ok(())).unwrap_err();
        assert!(log.0.lock().unwrap().is_some(), "a restart must tell the guest");
        back.guest_stops(false);
        assert!(back.error().is_some_and(|last| !last.told));
        back.guest(image, || Ok(())).unwrap_err();
        back.guest(image, || Ok(())).unwrap();
        assert!(log.0.lock().unwrap().is_none());
        // The device told QEMU itself.
        back.guest_stops(true);
        back.guest(image, lost).unwrap_err();
        back.guest(image, || Ok(())).unwrap_err();
        back.guest_stops(false);
        back.guest(image, || Ok(())).unwrap_err();
        // Nothing was told while the guest was being stopped.
        back.guest_stops(true);
        back.guest_stops(false);
        back.guest(image, || Ok(())).unwrap();
    }

    #[test]
    fn a_loss_is_untold_until_a_flush_that_must_be_the_guests_has_reported_it() {
        let (back, image) = (WriteBack::default(), Path::new("disk"));
        assert!(back.untold().is_none());
        back.guest(image, lost).unwrap_err();
        assert!(back.untold().is_none());
        back.own(image, lost).unwrap_err();
        assert!(back.untold().is_some());
        for told in [back.guest(image, || Ok(())), back.guest(image, lost)] {
            told.unwrap_err();
        }
        assert!(back.untold().is_none());
        back.guest_stops(true);
        back.guest(image, lost).unwrap_err();
        assert!(back.untold().is_some_and(|last| !last.told), "QEMU may have asked");
        back.guest_stops(false);
        assert!(back.untold().is_some());
        back.guest(image, || Ok(())).unwrap_err();
        assert!(back.untold().is_none());
    }

    #[test]
    fn who_asks_for_a_loss_waits_for_a_sync_under_way() {
        let (back, image) = (WriteBack::default(), Path::new("disk"));
        let (begun, begins) = channel();
        std::thread::scope(|scope| {
            let back = &back;
            let own = scope.spawn(move || {
                back.own(image, || {
                    begun.send(()).unwrap();
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    lost()
                })
            });
            begins.recv().unwrap();
            assert!(back.untold().is_some());
            own.join().unwrap().unwrap_err();
        });
    }

    /// What is written down.
    #[derive(Default)]
    struct Written(Mutex<Option<Loss>>);

    impl LossLog for Written {
        fn lost(&self, loss: &Loss) -> Result<()> {
            *self.0.lock().unwrap() = Some(loss.clone());
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
            back.keep(Arc::clone(&log) as _, log.0.lock().unwrap().as_ref());
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

    /// Which blocks are present.
    #[derive(Default)]
    struct Present {
        recorded: Mutex<BlockSet>,
        noted: Mutex<BlockSet>,
        stuck: AtomicBool,
    }

    impl PresentLog for Present {
        fn record(&self, present: &BlockSet) -> Result<()> {
            self.recorded.lock().unwrap().union_with(present);
            self.noted.lock().unwrap().subtract(present);
            Ok(())
        }

        fn note(&self, run: BlockRange) -> Result<()> {
            self.noted.lock().unwrap().insert(run);
            Ok(())
        }

        fn forget_notes(&self) -> Result<()> {
            if self.stuck.load(Ordering::SeqCst) {
                return lost();
            }
            *self.noted.lock().unwrap() = BlockSet::new();
            Ok(())
        }
    }

    /// A process that serves an image to which blocks come.
    struct Process<'a> {
        back: WriteBack,
        unrecorded: Unrecorded,
        present: &'a Present,
    }

    impl<'a> Process<'a> {
        fn start(losses: &Arc<Written>, present: &'a Present) -> Self {
            let (back, unrecorded) = (WriteBack::default(), Unrecorded::new(8));
            back.keep(Arc::clone(losses) as _, losses.0.lock().unwrap().as_ref());
            if unrecorded.inherit(&present.noted.lock().unwrap(), back.error()) {
                back.notes_begin_anew();
            }
            Self { back, unrecorded, present }
        }

        fn add(&self, block: u64) -> Result<()> {
            self.unrecorded.add(Some(self.present), BlockRange::new(block, 1))
        }

        fn flush(&self, sync: fn() -> Result<()>) -> Result<()> {
            let sync = || self.back.guest(Path::new("disk"), sync);
            self.unrecorded.record("flushing", Some(self.present), sync)
        }
    }

    fn blocks(blocks: &[u64]) -> BlockSet {
        blocks.iter().map(|&block| BlockRange::new(block, 1)).collect()
    }

    #[test]
    fn a_restart_tells_a_loss_once_and_the_image_is_usable() {
        let (losses, present) = (Arc::new(Written::default()), Present::default());
        let start = || Process::start(&losses, &present);
        let first = start();
        first.add(1).unwrap();
        first.flush(lost).unwrap_err();
        first.add(2).unwrap_err();
        let second = start();
        second.add(3).unwrap();
        let told = second.flush(|| Ok(())).unwrap_err();
        assert!(told.is_earlier_loss() && told.to_string().contains("the pool is full"), "{told}");
        assert_eq!(*present.recorded.lock().unwrap(), blocks(&[3]), "it was durable");
        second.unrecorded.check_usable("writing").unwrap();
        second.add(4).unwrap();
        second.flush(|| Ok(())).unwrap();
        assert_eq!(*present.recorded.lock().unwrap(), blocks(&[3, 4]));
        assert!(losses.0.lock().unwrap().is_none());
        start().flush(|| Ok(())).unwrap();
        // What fails now is no earlier loss, whatever there was before.
        second.flush(lost).unwrap_err();
        let third = start();
        third.back.own(Path::new("disk"), lost).unwrap_err();
        assert!(!third.flush(|| Ok(())).unwrap_err().is_earlier_loss());
        third.add(5).unwrap_err();
    }

    /// The guest has not flushed yet when its host's agent is restarted a second time.
    #[test]
    fn right_notes_of_a_later_process_are_believed_before_the_guest_was_told() {
        let (losses, present) = (Arc::new(Written::default()), Present::default());
        let start = || Process::start(&losses, &present);
        start().flush(lost).unwrap_err();
        start().add(1).unwrap();
        let third = start();
        assert!(third.back.error().is_some_and(|loss| !loss.told));
        third.unrecorded.check_usable("writing").unwrap();
        assert!(third.flush(|| Ok(())).unwrap_err().is_earlier_loss());
        assert_eq!(*present.recorded.lock().unwrap(), blocks(&[1]));
    }

    #[test]
    fn notes_that_a_failed_sync_has_left_behind_are_not_believed() {
        let (losses, present) = (Arc::new(Written::default()), Present::default());
        let start = || Process::start(&losses, &present);
        let first = start();
        first.add(1).unwrap();
        present.stuck.store(true, Ordering::SeqCst);
        first.flush(lost).unwrap_err();
        present.stuck.store(false, Ordering::SeqCst);
        let second = start();
        second.add(2).unwrap_err();
        let own = || second.back.own(Path::new("disk"), || Ok(()));
        second.unrecorded.record("a checkpoint", Some(&present), own).unwrap_err();
        assert_eq!(*present.noted.lock().unwrap(), BlockSet::new());
        let third = start();
        third.add(2).unwrap();
        third.flush(|| Ok(())).unwrap_err();
        third.flush(|| Ok(())).unwrap();
        assert_eq!(*present.recorded.lock().unwrap(), blocks(&[2]));
    }

    #[test]
    fn notes_of_a_process_that_lost_nothing_are_believed() {
        let (losses, present) = (Arc::new(Written::default()), Present::default());
        let start = || Process::start(&losses, &present);
        start().flush(lost).unwrap_err();
        let second = start();
        second.flush(|| Ok(())).unwrap_err();
        second.add(1).unwrap();
        // Killed: what it told may not have been heard.
        let third = start();
        third.add(2).unwrap();
        let told = third.flush(|| Ok(())).unwrap_err();
        assert_eq!(told.to_string().matches(EARLIER).count(), 1, "{told}");
        third.flush(|| Ok(())).unwrap();
        assert_eq!(*present.recorded.lock().unwrap(), blocks(&[1, 2]));
        assert!(losses.0.lock().unwrap().is_none());
    }

    #[test]
    fn a_loss_that_was_no_guests_is_told_to_nobody() {
        let (log, image) = (Arc::new(Written::default()), Path::new("disk"));
        let back = WriteBack::default();
        back.keep(Arc::clone(&log) as _, None);
        back.own(image, lost).unwrap_err();
        back.forget(image);
        assert!(log.0.lock().unwrap().is_none() && back.error().is_none());
        back.guest(image, || Ok(())).unwrap();
        back.own(image, lost).unwrap_err();
        assert!(!back.guest(image, || Ok(())).unwrap_err().is_earlier_loss());
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
