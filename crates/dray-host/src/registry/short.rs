//! Files that have become shorter than their images while no agent ran.
//!
//! What lies past the end of a file reads as zeros, which is right for an image that grows, and for one that
//! comes. Of any other one a part is missing, and its guest would take the zeros for what it has written: such
//! an image waits for its file as if there were none. Which images have had a file of their full length is
//! in their records: what grew on another host does not say so here.

use super::closed::{Closed, Reason};
use super::identity::{found_at, is_other_file};
use super::{Entry, Registry};
use crate::lineage::stamp_of;
use crate::record::{CopyState, ImageRecord, NameKind};
use dray_image::locks::probe_file;
use dray_image::{FileImage, FileOptions, ImageFile};
use dray_types::BLOCK_SIZE;
use std::fmt;
use std::io;

/// The file of an image, or its device, is shorter than the image.
#[derive(Debug)]
pub(super) struct Short {
    what: &'static str,
    has: u64,
    len: u64,
    hint: String,
}

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, has, len, .. } = self;
        write!(f, "its {what} has {has} bytes, and the image has {len}")
    }
}

impl std::error::Error for Short {}

impl Short {
    fn of(record: &ImageRecord, has: u64) -> io::Error {
        let (name, path) = (&record.name, record.path.display());
        let what = if record.device { "device" } else { "file" };
        let hint = match record.migration {
            Some(_) => {
                format!("put the {what} back as it was: its migration goes on by itself then")
            }
            None => format!(
                "put the {what} back as it was; or, if this is the right {what}, \
                 `dray images remove {name}` and `dray images add {name} {path}`"
            ),
        };
        io::Error::other(Self { what, has, len: record.len, hint })
    }

    /// What is said of its image, with what else can be done about it.
    pub(super) fn reason(&self, way_out: Option<&str>) -> Reason {
        let or = way_out.map_or_else(String::new, |out| format!("; if it is lost: {out}"));
        Reason::passing(self.to_string(), format!("{}{or}", self.hint))
    }
}

/// Whether that is why an image cannot be opened.
pub(super) fn of(why: &io::Error) -> Option<&Short> {
    why.get_ref().and_then(|inner| inner.downcast_ref())
}

/// Whether a file of `has` bytes has all of an image of `len`, which may be rounded up to a block.
fn has_all(has: u64, len: u64) -> bool {
    has.saturating_add(BLOCK_SIZE) > len
}

/// Whether an image is in a file of its own that has all of it, and does not grow.
pub(super) fn is_whole(record: &ImageRecord, file: &dyn ImageFile) -> bool {
    let is_owned = record.state == CopyState::Owner && !record.growable;
    let is_own = record.flat.is_none() && record.in_place.is_none();
    is_owned && is_own && file.file_len().is_ok_and(|has| has_all(has, record.len))
}

/// Refuses a file that has had all of an image, and has not any more.
///
/// # Errors
/// That, as a [`Short`].
pub(super) fn refuse(record: &ImageRecord, file: &dyn ImageFile) -> io::Result<()> {
    // Others read from a replica as long as its migration is not over. What comes has no length yet.
    let is_read = match record.state {
        CopyState::Owner => true,
        CopyState::Replica => record.migration.is_some(),
        CopyState::Incoming => false,
    };
    if !record.whole || record.growable || record.flat.is_some() || !is_read {
        return Ok(());
    }
    let has = file.file_len().map_err(io::Error::other)?;
    if has_all(has, record.len) { Ok(()) } else { Err(Short::of(record, has)) }
}

/// What is said of the device of an image that cannot be opened, if that is because it is too short.
pub(super) fn device(record: &ImageRecord) -> Option<io::Error> {
    let options = FileOptions { write: false, direct: false, export_len: None };
    let device = record.device.then(|| FileImage::open(&record.path, options).ok())??;
    let has = device.file_len().ok().filter(|&has| has < record.len)?;
    Some(Short::of(record, has))
}

/// Whether the length that is seen may be one that was never written down, as the content may be.
fn has_lost(file: &dyn ImageFile) -> bool {
    file.lost_writes().is_some()
}

impl Registry {
    /// The record says from now on that the file has had all of the image, if it has.
    pub(super) fn found_whole(&self, record: ImageRecord, file: &dyn ImageFile) -> ImageRecord {
        // What a power cut can still undo is not relied on.
        if record.whole || !is_whole(&record, file) || file.sync().is_err() || has_lost(file) {
            return record;
        }
        let record = ImageRecord { whole: true, ..record };
        if let Err(why) = self.path_of(&record.name).put(&record) {
            tracing::debug!(image = record.name, %why, "cannot note the length of an image's file");
        }
        record
    }

    /// The record of an image that came and is owned here now says that its file has all of it, if it has:
    /// [`keep`](Self::keep) makes that durable. The length is.
    pub fn note_whole(&self, entry: &Entry) {
        let mut record = entry.lock();
        let file = &*entry.file;
        record.whole = record.whole || is_whole(&record, file) && !has_lost(file);
    }

    /// Forgets an image that is closed because its file is too short, or is another one, or because another program has
    /// it, if it belongs to this host and takes part in no migration; or a copy whose migration is over, also if its
    /// file is gone or was changed. Its file stays as it is, but for a copy's own file if it is to be `deleted`. None
    /// when there is no such image; its clients are cut off.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn forget_unfit(&self, name: &str, deleted: bool) -> io::Result<Option<Closed>> {
        let _opening = self.hold_files()?;
        let Some(closed) = self.closed(name).filter(|_| self.get(name).is_none()) else {
            return Ok(None);
        };
        let Some(record) = closed.absent.map(|absent| absent.record) else { return Ok(None) };
        let is_left = record.has_left() && self.is_unfit_copy(&record);
        if !is_left && (deleted || !self.is_unfit(&record)) {
            return Ok(None);
        }
        if let (NameKind::Replica(epoch), true) = (record.place, deleted)
            && !is_other_file(&self.store, &record)
        {
            self.names(&record)?.remove_replica(epoch).map_err(io::Error::other)?;
        }
        self.forget_closed(name)
    }

    /// Whether its file is too short, or another one, and nobody but this host has to do with it.
    fn is_unfit(&self, record: &ImageRecord) -> bool {
        let is_owned = record.state == CopyState::Owner && record.migration.is_none();
        let is_unfit = match self.open_file(record) {
            _ if self.refuse_other_file(record).is_err() => true,
            Ok(file) => {
                refuse(record, &*file).is_err_and(|why| of(&why).is_some())
                    || self.is_somebody_elses(record, &*file)
            }
            Err(_) => device(record).is_some(),
        };
        is_owned && is_unfit
    }

    /// Whether another program has locked the file, as a VM that was started on it while no agent ran, and no VM waits
    /// here for the image.
    fn is_somebody_elses(&self, record: &ImageRecord, file: &dyn ImageFile) -> bool {
        let user = file.as_file().map(|image| probe_file(image.file()));
        let is_locked =
            user.and_then(Result::ok).flatten().is_some_and(|user| user.excludes_owner());
        is_locked && !self.a_client_runs(&record.name)
    }

    /// Whether the file of a copy is gone, or is not what was left behind.
    fn is_unfit_copy(&self, record: &ImageRecord) -> bool {
        let Some(path) = found_at(&self.store, record) else { return true };
        let seen = record.replica.as_ref().zip(stamp_of(&path).ok());
        let was_changed = seen.is_some_and(|(note, now)| note.as_found(&now).is_err());
        was_changed || is_other_file(&self.store, record) || device(record).is_some()
    }
}
