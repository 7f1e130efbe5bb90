//! An image with its disk.

use super::closed::Absent;
use super::contest::Contender;
use super::past::PastImage;
use super::used::wanted_hold;
use crate::flat::peeks::Whereabouts;
use crate::flat::{ChainImage, Flat};
use crate::heartbeat::Heartbeat;
use crate::heat::ImageHeat;
use crate::lineage::ImageLineage;
use crate::record::{CopyState, ImageRecord, NameKind};
use dray_image::locks::probe_file;
use dray_image::{Disk, Hold, Image, ImageFile, InUse, QemuLocks};
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// An image with its disk.
pub struct Entry {
    record: Mutex<ImageRecord>,
    /// The locks by which QEMU knows that the file is in use. Never held while a QEMU has the file
    /// itself: a lock in the middle of a splice aborts it.
    locks: Mutex<Option<QemuLocks>>,
    /// Somebody else had locked the file when its locks were to be taken, and they are not here yet.
    locked_out: AtomicBool,
    /// Locks that were wanted back could not be had.
    lacks_locks: AtomicBool,
    /// Tells the next agent until when this one had the file open.
    heartbeat: Mutex<Option<Arc<Heartbeat>>>,
    /// The line of generations, at the owner.
    line: Mutex<Option<Arc<ImageLineage>>>,
    /// What is known of its guest's accesses.
    pub heat: ImageHeat,
    /// What guests are served from.
    pub disk: Arc<Disk>,
    /// The file below it; of a flattened image only what was written since it is one.
    pub file: Arc<dyn ImageFile>,
    /// A flattened image's parts.
    pub flat: Option<Flat>,
    pub(super) past: Arc<PastImage>,
    /// What the processes are served from that may have it since it was claimed.
    pub(super) contenders: Mutex<Vec<Weak<Contender>>>,
}

impl Entry {
    /// An entry over an open file, without locks and without a line. Its disk is the one that
    /// clients `waits` for it at, if they do.
    pub(super) fn new(
        record: ImageRecord,
        file: Arc<dyn ImageFile>,
        heat: ImageHeat,
        flat: Option<Flat>,
        waits: Option<&Absent>,
    ) -> Self {
        let disk = match waits {
            Some(absent) => Arc::clone(&absent.disk),
            None => Disk::new(content(&file, flat.as_ref())),
        };
        // Only an owner's disk is open by itself (I1, I8). A copy that was left behind stays parked until
        // the image is owned here again; one that comes is shut until its loop vouches for it.
        match record.state {
            CopyState::Owner => {}
            CopyState::Incoming => disk.shut(),
            CopyState::Replica => {
                disk.park_now();
                // It is open for reading only, and a QEMU that had it for writing is to come back.
                if !record.read_only {
                    disk.tell_writable();
                }
            }
        }
        if record.has_left() {
            disk.fail_parked();
        }
        // Until it has its locks. There are none on a simulated disk.
        disk.set_unlocked(file.as_file().is_some() && wanted_hold(&record).is_some());
        Self {
            flat,
            record: Mutex::new(record),
            locks: Mutex::default(),
            locked_out: AtomicBool::new(false),
            lacks_locks: AtomicBool::new(false),
            heartbeat: Mutex::default(),
            line: Mutex::default(),
            heat,
            past: Arc::new(PastImage(Arc::clone(&disk))),
            contenders: Mutex::default(),
            disk,
            file,
        }
    }

    /// What is touched for as long as the file is open, if anything is.
    pub(super) fn heartbeat(&self) -> Option<Arc<Heartbeat>> {
        self.heartbeat.lock().clone()
    }

    /// This is touched from now on.
    pub(super) fn set_heartbeat(&self, heartbeat: Option<Arc<Heartbeat>>) {
        *self.heartbeat.lock() = heartbeat;
    }

    /// The image below the disk.
    pub(super) fn content(&self) -> Arc<dyn Image> {
        content(&self.file, self.flat.as_ref())
    }

    /// A copy of the record.
    pub fn record(&self) -> ImageRecord {
        self.lock().clone()
    }

    /// Takes the locks that QEMU respects, for as long as this host serves the file or relies on it: those
    /// that the record asks for.
    ///
    /// # Errors
    /// `InUse` with who has the file open, when that stands against it.
    pub fn take_locks(&self) -> dray_image::Result<()> {
        let record = self.record();
        let Some(hold) = wanted_hold(&record) else { return Ok(()) };
        self.lock_as(hold, &record)
    }

    /// The same, before the record says that this host owns the image.
    pub(super) fn take_owners_locks(&self) -> dray_image::Result<()> {
        let record = self.record();
        if record.flat.is_some() { Ok(()) } else { self.lock_as(Hold::Owner, &record) }
    }

    fn lock_as(&self, hold: Hold, record: &ImageRecord) -> dray_image::Result<()> {
        // There are no locks on a simulated disk.
        let Some(image) = self.file.as_file() else { return Ok(()) };
        let mut locks = self.lock_locks();
        let taken = match &mut *locks {
            Some(locks) => locks.change(hold),
            None => {
                let path = record.current_path().unwrap_or_else(|_| record.path.clone());
                QemuLocks::take(image.file(), &path, hold).map(|taken| *locks = Some(taken))
            }
        };
        self.locked_out.store(taken.is_err(), Ordering::SeqCst);
        self.disk.set_unlocked(locks.is_none());
        taken
    }

    /// Takes the locks of a disk that a QEMU has just had, or is still letting go. A lock that is not to be
    /// had is told in the log: QEMU may hold its own, and its guest is served all the same.
    pub fn regain_locks(&self) {
        self.regain(self.take_locks());
    }

    /// The same, while QEMU is still asked what it has written to the file: [`Hold::Successor`].
    pub fn succeed_locks(&self) {
        let record = self.record();
        if wanted_hold(&record) == Some(Hold::Owner) {
            self.regain(self.lock_as(Hold::Successor, &record));
        }
    }

    fn regain(&self, taken: dray_image::Result<()>) {
        self.lacks_locks.store(false, Ordering::SeqCst);
        if let Err(why) = taken {
            self.locked_out.store(false, Ordering::SeqCst);
            self.lacks_locks.store(true, Ordering::SeqCst);
            tracing::warn!(image = self.record().name, %why, "cannot lock an image");
            // Who has the file may write to it.
            let settled = self.line().map_or(Ok(()), |line| line.settle(&self.disk, None));
            if let Err(why) = settled {
                tracing::warn!(image = self.record().name, %why, "cannot note that it counts as changed");
                self.line().inspect(|line| line.suspect());
            }
        }
    }

    /// Whether locks that were wanted back could not be had, and are still wanted.
    pub(super) fn lacks_locks(&self) -> bool {
        self.lacks_locks.load(Ordering::SeqCst)
    }

    /// Tries once more to get them. Whether they are there now.
    pub(super) fn try_locks(&self) -> bool {
        let taken = self.take_locks().is_ok();
        self.locked_out.store(false, Ordering::SeqCst);
        if taken {
            self.lacks_locks.store(false, Ordering::SeqCst);
        }
        taken
    }

    /// Who else has the file locked, so that an owner could not have it beside them; none when dray has its own
    /// locks. An adopted disk is its file again, and its VM writes to it unseen, when that is so.
    ///
    /// # Errors
    /// What the system reports when it does not tell.
    pub fn used_elsewhere(&self) -> std::io::Result<Option<InUse>> {
        if wanted_hold(&self.record()).is_none() {
            return Ok(None);
        }
        let locks = self.lock_locks();
        match self.file.as_file().filter(|_| locks.is_none()) {
            Some(image) => Ok(probe_file(image.file())?.filter(InUse::excludes_owner)),
            None => Ok(None),
        }
    }

    /// Whether dray has locks of the file.
    pub(super) fn has_locks(&self) -> bool {
        self.lock_locks().is_some()
    }

    /// Whether the image may not be served because its locks could not be taken.
    pub(super) fn is_locked_out(&self) -> bool {
        self.locked_out.load(Ordering::SeqCst)
    }

    /// Lets go what the record no longer asks for. Nothing is locked that was not.
    pub(super) fn loosen_locks(&self, record: &ImageRecord) {
        let mut locks = self.lock_locks();
        match wanted_hold(record) {
            None => *locks = None,
            Some(Hold::Owner | Hold::Successor) => {}
            Some(Hold::Reader) => {
                let loosened = locks.as_mut().map_or(Ok(()), |locks| locks.change(Hold::Reader));
                if let Err(why) = loosened {
                    tracing::warn!(image = record.name, %why, "cannot lock an image");
                }
            }
        }
    }

    /// The locks of another entry of the same file become this one's, without a moment in which there are
    /// none.
    pub(super) fn inherit_locks(&self, other: &Self) {
        self.put_locks(other.give_up_locks());
    }

    /// The locks that it has, for another entry of the same file.
    pub(super) fn give_up_locks(&self) -> Option<QemuLocks> {
        let mut locks = self.lock_locks();
        if locks.is_some() {
            // First: what comes from now on is looked at.
            self.disk.set_unlocked(true);
        }
        locks.take()
    }

    /// Locks that were taken for it before, or none.
    pub(super) fn put_locks(&self, locks: Option<QemuLocks>) {
        let mut own = self.lock_locks();
        if locks.is_some() {
            self.disk.set_unlocked(false);
        }
        *own = locks;
    }

    fn lock_locks(&self) -> MutexGuard<'_, Option<QemuLocks>> {
        self.locks.lock()
    }

    /// The line of generations; none where this host does not own the image.
    pub fn line(&self) -> Option<Arc<ImageLineage>> {
        self.line.lock().clone()
    }

    /// From now on this is its line.
    pub fn set_line(&self, line: Option<Arc<ImageLineage>>) {
        *self.line.lock() = line;
    }

    /// The image has left for good. A QEMU that had the disk may still come back, and must be able to quit: it is
    /// let in, and everything that it asks but a flush fails.
    pub fn depart(&self) {
        self.disk.fail_parked();
    }

    /// What waits at the disk goes on, unless only QEMU can say where the disk is: whoever asks QEMU opens it.
    pub fn unpark(&self) {
        if !self.record().is_between_places() {
            self.disk.unpark();
        }
    }

    /// Where the active image of `chain` is, when this is the same one, flattened.
    pub(super) fn whereabouts(&self, chain: &dyn ChainImage) -> Option<Whereabouts> {
        let record = self.record();
        let flat = record.flat.as_ref()?;
        if !flat.layers.first().is_some_and(|layer| chain.is_of(&layer.path)) {
            return None;
        }
        let at_rest = flat.turn.is_none() && record.place != NameKind::Named;
        Some(match record.current_path() {
            Ok(path) if at_rest => Whereabouts::At(path),
            _ => Whereabouts::Turning,
        })
    }

    /// Gives the locks back, before QEMU opens the file itself.
    pub fn drop_locks(&self) {
        self.lacks_locks.store(false, Ordering::SeqCst);
        drop(self.give_up_locks());
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ImageRecord> {
        self.record.lock()
    }
}

/// What a guest sees of an image: its file, or of a flattened one the overlay over its chain.
fn content(file: &Arc<dyn ImageFile>, flat: Option<&Flat>) -> Arc<dyn Image> {
    match flat {
        Some(flat) => Arc::clone(&flat.overlay) as Arc<dyn Image>,
        None => Arc::clone(file) as Arc<dyn Image>,
    }
}
