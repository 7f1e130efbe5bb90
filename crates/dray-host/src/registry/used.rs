//! A file is one image's: which files an image has, and which locks tell others so.
//!
//! What counts is the file itself, not its name: an entry keeps its file open, so no other file can
//! have its identity meanwhile. Of an image that waits for its file only the path is known.

use super::{Entry, Registry, closed};
use crate::record::{CopyState, ImageRecord, NameKind};
use dray_image::{FileId, FileImage, Hold, ImageFile, QemuLocks};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The images that are open here, by name.
type Entries = BTreeMap<String, Arc<Entry>>;

/// Which locks a file has while this host has the image as `record` says.
pub(super) fn wanted_hold(record: &ImageRecord) -> Option<Hold> {
    // A chain is kept from others by its name: the daemon that serves it takes locks of its own.
    if record.flat.is_some() || record.is_base() {
        return None;
    }
    match record.state {
        CopyState::Owner | CopyState::Incoming => Some(Hold::Owner),
        // The other host still reads from it.
        CopyState::Replica => record.migration.map(|_| Hold::Reader),
    }
}

/// That a file is another image's already.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Used {
    path: PathBuf,
    name: String,
    state: CopyState,
    place: NameKind,
    /// It takes part in a migration.
    under_way: bool,
}

impl Used {
    fn by(record: &ImageRecord, path: &Path) -> Self {
        let (path, name) = (path.to_owned(), record.name.clone());
        let under_way = record.is_unfinished();
        Self { path, name, state: record.state, place: record.place, under_way }
    }

    /// What an operator can do who wants the file as another image.
    pub fn hint(&self) -> String {
        let name = &self.name;
        if self.under_way {
            return "wait until its migration has ended; `dray status` shows it".into();
        }
        format!("use image '{name}', or `dray images remove {name}` first")
    }
}

impl fmt::Display for Used {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match (self.state, self.place) {
            (CopyState::Replica, _) => "is the copy that was left behind of image",
            (_, NameKind::Partial) => "is the incomplete file of image",
            _ => "is the file of image",
        };
        write!(f, "{} {what} '{}'", self.path.display(), self.name)
    }
}

impl std::error::Error for Used {}

impl From<Used> for io::Error {
    fn from(used: Used) -> Self {
        Self::new(io::ErrorKind::ResourceBusy, used)
    }
}

impl Registry {
    /// Refuses a file that an image of this host has, under whatever name. What is found free here may be
    /// taken the next moment: it is looked at again when the image is added.
    ///
    /// # Errors
    /// Which image it is.
    pub fn check_unused(&self, path: &Path, read_only: bool) -> Result<(), Used> {
        let absent = self.absent_records();
        let ids: Vec<_> = std::fs::metadata(path).iter().map(FileId::of).collect();
        let entries = self.entries.read();
        refuse_wanted(&entries, &absent, &Wanted { ids, path, read_only, old: None })
    }

    /// What is known of the images that wait for their files.
    pub(super) fn absent_records(&self) -> Vec<ImageRecord> {
        let absent = self.all_closed().into_iter().filter_map(|(_, known)| known.absent);
        absent.map(|absent| absent.record).collect()
    }

    /// Takes the locks of an image that this host is to serve from now on. One whose file somebody else has
    /// locked is closed until it can be locked (I8).
    pub fn hold(&self, entry: &Entry) {
        let Err(why) = entry.take_locks() else { return };
        let name = entry.record().name;
        tracing::error!(image = name, %why, "cannot lock an image: it is closed");
        self.close(&name, closed::file_is_locked(&why.to_string()));
    }

    /// The same for an image that a migration has brought, when that is over. QEMU may have the disk of one whose
    /// release began and did not end: a lock of dray's could end that QEMU, so the next look at the VM decides.
    /// One whose locks are being tried already is served meanwhile.
    pub fn hold_arrived(&self, entry: &Entry) {
        let record = entry.record();
        if self.released.knows(record.id) {
            tracing::warn!(image = record.name, "QEMU may have its file: it is not locked");
        } else if !entry.lacks_locks() {
            self.hold(entry);
        }
    }
}

/// A file that is to be an image's.
struct Wanted<'a> {
    ids: Vec<FileId>,
    path: &'a Path,
    /// It is only read, so that it may be shared.
    read_only: bool,
    /// The entry that gives it up.
    old: Option<&'a Entry>,
}

/// Refuses the file of an image that is about to be listed among `entries`, which the caller has locked,
/// unless it is `old` that has it.
///
/// # Errors
/// A [`Used`] when another image has the file.
pub(super) fn refuse(
    entries: &Entries,
    absent: &[ImageRecord],
    record: &ImageRecord,
    (file, old): (&dyn ImageFile, Option<&Entry>),
) -> io::Result<()> {
    let path = record.current_path().unwrap_or_else(|_| record.path.clone());
    let wanted = Wanted { ids: ids_of(record, file), path: &path, read_only: shared(record), old };
    let refused = refuse_wanted(entries, absent, &wanted);
    refused.map_err(io::Error::from)
}

fn refuse_wanted(
    entries: &Entries,
    absent: &[ImageRecord],
    wanted: &Wanted<'_>,
) -> Result<(), Used> {
    let path = wanted.path;
    let shares = |record: &ImageRecord| wanted.read_only && shared(record);
    let is_old = |entry: &Entry| wanted.old.is_some_and(|old| std::ptr::eq(old, entry));
    for entry in entries.values().filter(|entry| !is_old(entry)) {
        let record = entry.record();
        let same = ids_of(&record, &*entry.file).iter().any(|id| wanted.ids.contains(id));
        if same && !shares(&record) {
            return Err(Used::by(&record, path));
        }
    }
    let waits = |record: &&ImageRecord| record.current_path().is_ok_and(|at| at == path);
    let taken = absent.iter().filter(waits).find(|record| !shares(record));
    taken.map_or(Ok(()), |record| Err(Used::by(record, path)))
}

/// The locks of an image that is about to be added. None where a QEMU has the file itself by now, with
/// locks of its own.
///
/// # Errors
/// `InUse` with who has the file open.
pub(super) fn lock_new(
    record: &ImageRecord,
    file: &dyn ImageFile,
) -> io::Result<Option<QemuLocks>> {
    let hold = wanted_hold(record).filter(|_| record.adopted.is_none());
    let (Some(hold), Some(image)) = (hold, file.as_file()) else { return Ok(None) };
    let path = record.current_path().map_err(io::Error::other)?;
    QemuLocks::take(image.file(), &path, hold).map(Some).map_err(io::Error::other)
}

/// Whether the file is only read under the name that it has, so that several images may be of it.
fn shared(record: &ImageRecord) -> bool {
    record.read_only && record.place == NameKind::Named
}

/// The files of an image: the one that is open, and the active one of a chain below it.
pub(super) fn ids_of(record: &ImageRecord, file: &dyn ImageFile) -> Vec<FileId> {
    let open = file.as_file().and_then(FileImage::id);
    let chain = record.flat.as_ref().and_then(|_| chain_file(record));
    open.into_iter().chain(chain.as_ref().map(FileId::of)).collect()
}

fn chain_file(record: &ImageRecord) -> Option<std::fs::Metadata> {
    std::fs::metadata(record.current_path().ok()?).ok()
}
