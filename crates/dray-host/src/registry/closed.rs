//! Images that nobody vouches for (I8).
//!
//! An export is closed until a live loop says that its image may be used, or until its record knows
//! no unfinished operation and its file is there. The disk's gate keeps requests out; what is kept
//! here says why, what to do about it, and what stands in for a disk whose file is not there yet.

use super::{Entry, Registry, changed, left, losses, short};
use crate::record::{CopyState, ImageRecord};
use crate::store::Store;
use dray_files::folders::Exchangeable;
use dray_image::{Disk, ErrorKind, Geometry, Image, Late};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// The usual request of an image whose file is not there yet; there is no smallest one.
const BLOCK: u32 = 4096;

/// What to do about a file that somebody else has locked.
const LOCKED_HINT: &str = "stop what uses its file; it is served as soon as nobody else does. If a vm is to keep \
                           the file: `dray images remove NAME` forgets the image and leaves its file, \
                           which `dray adopt` takes again";

/// What to do about a record that the system does not give out.
const UNREAD_HINT: &str =
    "see what is wrong with the state directory; the record is read again by itself";

/// Why an export is closed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reason {
    /// What nobody can vouch for, and why.
    pub why: String,
    /// The one thing that an operator can do about it.
    pub hint: String,
    /// The cause may pass by itself: new clients wait for a while instead of being refused.
    pub passes: bool,
}

impl Reason {
    /// A cause that may pass by itself.
    pub(crate) fn passing(why: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { why: why.into(), hint: hint.into(), passes: true }
    }

    /// A cause that stays until somebody does something.
    pub(crate) fn lasting(why: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { why: why.into(), hint: hint.into(), passes: false }
    }
}

/// What stands in for an image whose file is not there.
#[derive(Clone)]
pub struct Absent {
    /// What is durable of it.
    pub record: ImageRecord,
    /// What its clients wait at; the file is put below it when it is there.
    pub disk: Arc<Disk>,
    pub(super) late: Arc<Late>,
}

impl Absent {
    pub(super) fn new(record: ImageRecord) -> Self {
        let geometry = Geometry {
            len: record.len,
            min_block: 1,
            preferred_block: BLOCK,
            read_only: record.read_only,
        };
        let late = Late::new(geometry);
        let disk = Disk::new_shut(Arc::clone(&late) as Arc<dyn Image>);
        Self { record, disk, late }
    }
}

/// An image whose export is closed.
#[derive(Clone)]
pub struct Closed {
    /// Why.
    pub reason: Reason,
    /// What stands in for it, when its file is not there; absent too when its record cannot be read.
    pub absent: Option<Absent>,
}

/// All of them, by name.
#[derive(Default)]
pub(super) struct ClosedImages(Mutex<BTreeMap<String, Closed>>);

impl ClosedImages {
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Closed>> {
        self.0.lock()
    }
}

impl Registry {
    /// Nobody vouches for the image called `name` from now on: what its clients ask waits.
    pub fn close(&self, name: &str, reason: Reason) {
        let mut closed = self.closed.lock();
        // Shut while it is listed: whoever sees it open sees no reason either.
        if let Some(entry) = self.get(name) {
            entry.disk.shut();
        }
        match closed.get_mut(name) {
            Some(known) if known.absent.is_some() => {}
            Some(known) => known.reason = reason,
            None => drop(closed.insert(name.to_owned(), Closed { reason, absent: None })),
        }
    }

    /// Somebody vouches for the image: what its clients ask is served. An image whose file is not
    /// there stays closed.
    pub fn vouch(&self, name: &str) {
        let mut closed = self.closed.lock();
        // One that is not open here stays closed, whoever vouches.
        let Some(entry) = self.get(name) else { return };
        // And one that somebody else has locked, until its locks can be taken.
        if entry.is_locked_out()
            && let Err(why) = entry.take_locks()
        {
            let reason = file_is_locked(&why.to_string());
            closed.insert(name.to_owned(), Closed { reason, absent: None });
            return;
        }
        closed.remove(name);
        entry.disk.unshut();
    }

    /// Why the image's export is closed; none when it is open, or when there is no such image.
    pub fn closed(&self, name: &str) -> Option<Closed> {
        self.closed.lock().get(name).cloned()
    }

    /// Every image whose export is closed, in name order.
    pub fn all_closed(&self) -> Vec<(String, Closed)> {
        let closed = self.closed.lock();
        closed.iter().map(|(name, known)| (name.clone(), known.clone())).collect()
    }

    /// Whether an image that is not open here has this name.
    pub fn waits_for_file(&self, name: &str) -> bool {
        let closed = self.closed.lock();
        closed.contains_key(name) && self.get(name).is_none()
    }

    /// The record of every image of this host, also of those whose file is not there.
    pub fn all_records(&self) -> Vec<ImageRecord> {
        let mut records: Vec<_> = self.all().into_iter().map(|entry| entry.record()).collect();
        records.extend(self.absent_records());
        records
    }

    /// Serves what was closed for its locks alone, as soon as they can be taken.
    fn open_locked(&self) {
        for (name, known) in self.all_closed() {
            if known.reason.hint == LOCKED_HINT && known.absent.is_none() {
                self.vouch(&name);
            }
        }
    }

    /// Reads the records again that the system did not give out.
    fn read_again(&self) {
        for (name, known) in self.all_closed() {
            if known.reason.hint != UNREAD_HINT {
                continue;
            }
            match self.path_of(&name).get() {
                Err(why) if why.kind() != io::ErrorKind::InvalidData => {}
                read => self.load_one(&name, read),
            }
        }
    }

    /// Looks for the files that were not there. Returns the names of the images that have theirs
    /// now; those without an unfinished operation are served.
    pub fn open_absent(&self) -> Vec<String> {
        self.open_locked();
        self.retry_locks();
        self.read_again();
        let mut opened = Vec::new();
        for (name, known) in self.all_closed() {
            let Some(absent) = known.absent else { continue };
            let _opening = self.opening.lock();
            if !self.waits_for_file(&name) {
                continue;
            }
            // Who had the file may have written to it: its line has to be gone before it is read.
            let ended = match known.reason.hint == LOCKED_HINT {
                true => self.line_path(&name).remove(),
                false => Ok(()),
            };
            let found = ended.and_then(|()| self.open_known(absent.record.clone(), Some(&absent)));
            let found = found.and_then(|entry| {
                absent.late.attach(entry.content()).map_err(io::Error::other)?;
                Ok(entry)
            });
            match found {
                Ok(entry) => {
                    self.admit(&name, entry);
                    opened.push(name);
                }
                Err(why) => {
                    self.still_absent(&name, cannot_open(&self.store, &absent.record, &why))
                }
            }
        }
        opened
    }

    /// The file of a closed image is there: it becomes an image like any other.
    pub(super) fn admit(&self, name: &str, entry: Arc<Entry>) {
        let unfinished = entry.record().is_unfinished();
        self.entries.write().insert(name.to_owned(), Arc::clone(&entry));
        self.closed.lock().remove(name);
        self.finish_claim_of(&entry);
        match unfinished {
            true => self.close(name, being_brought_back()),
            false => entry.disk.unshut(),
        }
        tracing::info!(image = name, "its file is there");
    }

    fn still_absent(&self, name: &str, reason: Reason) {
        if let Some(known) = self.closed.lock().get_mut(name) {
            known.reason = reason;
        }
    }
}

/// What is said of an image from when its record was read until its migration goes on.
pub(super) fn being_brought_back() -> Reason {
    Reason::passing(
        "its migration is being brought back",
        "wait; `dray status` shows what it waits for",
    )
}

/// What is said of an image that cannot be opened: its file is not there or too short, was changed, or somebody else has
/// locked it.
pub(super) fn cannot_open(store: &Store, record: &ImageRecord, why: &io::Error) -> Reason {
    let way_out = left::way_out_of(store, record);
    if let Some(short) = short::of(why) {
        return short.reason(way_out.as_deref());
    }
    if let Some(changed) = changed::of(why) {
        return changed.reason();
    }
    let inner = why.get_ref();
    if let Some(open) = inner.and_then(|inner| inner.downcast_ref::<Exchangeable>()) {
        return Reason::passing(open.to_string(), open.hint());
    }
    if let Some(unread) = inner.and_then(|inner| inner.downcast_ref::<losses::Unread>()) {
        let hint = format!(
            "see to it that the file can be read; if the vm has been shut down since the agent wrote it, its guest \
             needs not to be told any more: remove {}",
            unread.path
        );
        return Reason::passing(why.to_string(), hint);
    }
    match inner.and_then(|inner| inner.downcast_ref::<dray_image::Error>()) {
        Some(error) if error.kind == ErrorKind::InUse => file_is_locked(&why.to_string()),
        _ => file_is_missing(record, way_out.as_deref(), &why.to_string()),
    }
}

/// What is said of an image whose file somebody else has locked.
pub(super) fn file_is_locked(why: &str) -> Reason {
    Reason::passing(why, LOCKED_HINT)
}

fn file_is_missing(record: &ImageRecord, way_out: Option<&str>, why: &str) -> Reason {
    let name = &record.name;
    let then = match (record.state, way_out) {
        (CopyState::Incoming, _) => {
            ", and its migration goes on; if it is lost: `dray cancel --discard` at its source"
                .to_owned()
        }
        (_, Some(way_out)) => format!(", and its migration goes on; if it is lost: {way_out}"),
        (CopyState::Replica, None) => format!("; if it is lost: `dray images remove {name}`"),
        (CopyState::Owner, None) => "; it is served as soon as it can be opened".to_owned(),
    };
    Reason::passing(why, format!("bring its file back, or mount what it lies on{then}"))
}

/// What is said of an image whose record cannot be read: it is damaged, or the system does not give it out.
pub(super) fn record_is_unread(why: &io::Error) -> Reason {
    let told = format!("its record cannot be read: {why}");
    match why.kind() {
        io::ErrorKind::InvalidData => Reason::lasting(
            told,
            "restore the record from a copy of the state directory, then restart the agent",
        ),
        _ => Reason::passing(told, UNREAD_HINT),
    }
}
