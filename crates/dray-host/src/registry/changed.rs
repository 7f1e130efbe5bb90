//! Files that another program has written to while no agent had them open: copies that were handed over, and images
//! that come or were just handed over.
//!
//! The target fetches what it lacks out of the copy that its source has left behind, and dray never writes to
//! one: a file that was changed later than it was left is not what was handed over. Its image waits for the file
//! then, as if there were none. An earlier time, or another length, says nothing: a power cut may take back what
//! was not made durable, such as the length after a sync that failed. Of a copy whose migration is over nobody reads; whether a migration back can begin with it is
//! found out then ([`ReplicaNote::as_found`](crate::lineage::ReplicaNote::as_found)).

use super::closed::Reason;
use super::identity::found_at;
use super::{Registry, left};
use crate::folder::intent;
use crate::folder::log::Folder;
use crate::lineage::{ReplicaNote, stamp_of};
use crate::record::{CopyState, ImageRecord};
use dray_engine::lineage::Stamp;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// The file of a copy is not as it was left.
#[derive(Debug)]
pub(super) struct Changed {
    path: PathBuf,
    when: &'static str,
    hint: String,
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        write!(f, "{path} was changed {}", self.when)
    }
}

impl std::error::Error for Changed {}

impl Changed {
    fn of(path: PathBuf, way_out: Option<String>, [then, now]: [&Stamp; 2]) -> Self {
        let mut hint =
            "put the file back as it was: its migration goes on by itself then".to_owned();
        way_out.iter().for_each(|out| hint.push_str(&format!("; or {out}")));
        // Somebody has only touched it, perhaps: who knows that can say so.
        if then.len == now.len && then.file.is_same(&now.file) {
            let ((seconds, nanos), path) = (then.changed, path.display());
            hint.push_str(&format!(
                "; or, if it holds what it held: `touch -d @{seconds}.{nanos:09} {path}`"
            ));
        }
        Self { path, when: "after the image was handed over", hint }
    }

    /// Of an image that comes, or that was just handed over: nothing tells what was changed.
    fn since_known(record: &ImageRecord, path: PathBuf, peer: Option<String>) -> Self {
        let hint = match record.migration.filter(|_| record.state == CopyState::Owner) {
            Some(migration) => left::way_out(peer.as_deref(), &record.name, migration),
            None => {
                let peer = peer.as_deref().unwrap_or("its source");
                format!(
                    "what was received cannot be told from what was changed: `dray cancel --discard` at {peer}, then \
                     migrate again"
                )
            }
        };
        Self { path, when: "by another program while no agent had it open", hint }
    }

    /// What is said of its image.
    pub(super) fn reason(&self) -> Reason {
        Reason::passing(self.to_string(), self.hint.clone())
    }
}

/// Whether that is why an image cannot be opened.
pub(super) fn of(why: &io::Error) -> Option<&Changed> {
    why.get_ref().and_then(|inner| inner.downcast_ref())
}

/// What was noted of a copy, if another host may still read from it and it is in a file of its own.
fn note_of(record: &ImageRecord) -> Option<&ReplicaNote> {
    let is_read = record.state == CopyState::Replica && record.migration.is_some();
    let is_own = !record.device && record.flat.is_none() && record.in_place.is_none();
    record.replica.as_ref().filter(|_| is_read && is_own)
}

/// Refuses the file of a copy that another host still reads from, if somebody has written to it, and of an image
/// that comes, or was just handed over, if that was while no agent had it open.
///
/// # Errors
/// That, as a [`Changed`], or what the file system reports.
pub(super) fn refuse(registry: &Registry, record: &ImageRecord) -> io::Result<()> {
    let store = &registry.store;
    let Some(path) = found_at(store, record) else { return Ok(()) };
    let peer = || record.migration.and_then(|of| intent::peer(&Folder::of(store, of)));
    if registry.is_no_longer_known(record)? {
        let path = path.path().to_owned();
        return Err(io::Error::other(Changed::since_known(record, path, peer())));
    }
    let Some(note) = note_of(record) else { return Ok(()) };
    let now = stamp_of(&path)?;
    if now.changed <= note.stamp.changed {
        return Ok(());
    }
    let way_out = left::way_out_of(store, record);
    let looks = [&note.stamp, &now];
    Err(io::Error::other(Changed::of(path.path().to_owned(), way_out, looks)))
}

#[cfg(test)]
mod tests;
