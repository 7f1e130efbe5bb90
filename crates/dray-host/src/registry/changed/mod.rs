//! Files that another program has written to while no agent had them open: copies that were handed over, and images
//! that come or were just handed over.
//!
//! The target fetches what it lacks out of the copy that its source has left behind, and dray never writes to
//! one: a file that was changed later than it was left is not what was handed over. Its image waits for the file
//! then, as if there were none. An earlier time of the data, or another length, says nothing: a power cut may
//! take back what was not made durable, such as the length after a sync that failed. But the time of change was made
//! durable before the handover, and its heartbeat keeps it: an older file is one of before. Of a copy whose migration is over nobody reads; whether a migration back can begin with it is
//! found out then ([`ReplicaNote::as_found`](crate::lineage::ReplicaNote::as_found)).

use super::closed::Reason;
use super::identity::found_at;
use super::{Entry, Registry, left};
use crate::folder::doubt::Doubt;
use crate::folder::intent;
use crate::folder::log::Folder;
use crate::folder::standing;
use crate::lineage::{ReplicaNote, stamp_of};
use crate::record::{CopyState, ImageRecord};
use crate::store::Store;
use dray_engine::lineage::Stamp;
use std::fmt;
use std::io;
use std::path::PathBuf;

const BY_ANOTHER: &str = "was changed by another program, or put back, while no agent had it open";

/// The file of a copy is not as it was left.
#[derive(Debug)]
pub(super) struct Changed {
    path: PathBuf,
    what: String,
    hint: String,
}

impl fmt::Display for Changed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        write!(f, "{path} {}", self.what)
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
        Self { path, what: "was changed after the image was handed over".to_owned(), hint }
    }

    /// Of an image that comes, or that was just handed over: nothing tells what was changed.
    fn since_known(record: &ImageRecord, path: PathBuf, folder: &Folder) -> Self {
        let peer = intent::peer(folder);
        let hint = match record.migration.filter(|_| record.state == CopyState::Owner) {
            Some(migration) => left::way_out(peer.as_deref(), &record.name, migration),
            None => {
                let peer = peer.as_deref().unwrap_or("its source");
                let out = match standing::promised_nothing(folder) {
                    Ok(true) => format!("`dray cancel --discard` at {peer}, then migrate again"),
                    _ => left::way_back(peer, &record.name),
                };
                format!("what was received cannot be told from what was changed: {out}")
            }
        };
        Self { path, what: BY_ANOTHER.to_owned(), hint }
    }

    /// Of an image of which blocks are still missing: those that are noted as here are not all in the file.
    fn put_back(store: &Store, record: &ImageRecord, path: PathBuf) -> Self {
        let peer = record.migration.and_then(|id| intent::peer(&Folder::of(store, id)));
        let back = left::way_back(peer.as_deref().unwrap_or("its source"), &record.name);
        let hint = format!("put the newest state of the storage back, if there is one; or {back}");
        let what = "is older than what was noted of it: its storage was put back while blocks of the \
                    image were still to come";
        Self { path, what: what.to_owned(), hint }
    }

    /// Of a copy that another host still reads from: it is not what was handed over.
    fn put_back_copy(path: PathBuf, way_out: Option<String>) -> Self {
        let mut hint =
            "put the newest state of the storage back: the migration goes on by itself then"
                .to_owned();
        way_out.iter().for_each(|out| hint.push_str(&format!("; or {out}")));
        let what =
            "is older than when the image was handed over: its storage was put back".to_owned();
        Self { path, what, hint }
    }

    /// Of an image that comes: all of it would be received again, and that cannot be noted.
    fn unnoted(path: PathBuf, why: &io::Error) -> Self {
        let what = format!("{BY_ANOTHER}, and the agent cannot note that: {why}");
        let hint = "see to it that the state directory and the file can be written; the agent tries again by itself, \
                    and then receives the image anew";
        Self { path, what, hint: hint.to_owned() }
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
/// that comes, or was just handed over, if that was while no agent had it open. An image that can be received anew is
/// not refused: what is to be done about it first.
///
/// # Errors
/// That, as a [`Changed`], or what the file system reports.
pub(super) fn refuse(registry: &Registry, record: &ImageRecord) -> io::Result<Option<Doubt>> {
    let store = &registry.store;
    let Some(path) = found_at(store, record) else { return Ok(None) };
    if let Some(migration) = record.migration
        && registry.is_no_longer_known(record)?
    {
        let folder = Folder::of(store, migration);
        let comes = record.state == CopyState::Incoming;
        return match if comes { Doubt::of(&folder, record)? } else { None } {
            Some(doubt) => Ok(Some(doubt)),
            None => {
                let path = path.path().to_owned();
                Err(io::Error::other(Changed::since_known(record, path, &folder)))
            }
        };
    }
    if registry.lacks_what_arrived(record)? {
        return Err(io::Error::other(Changed::put_back(store, record, path.path().to_owned())));
    }
    let Some(note) = note_of(record) else { return Ok(None) };
    let now = stamp_of(&path)?;
    let older = registry.is_older(record)?;
    if now.changed <= note.stamp.changed && !older {
        return Ok(None);
    }
    let way_out = left::way_out_of(store, record);
    if older {
        return Err(io::Error::other(Changed::put_back_copy(path.path().to_owned(), way_out)));
    }
    let looks = [&note.stamp, &now];
    Err(io::Error::other(Changed::of(path.path().to_owned(), way_out, looks)))
}

/// All of an image that comes is received anew into its file, which this agent has open and locked, and whose heartbeat
/// it has not touched yet: the next agent sees the same until that is durable.
///
/// # Errors
/// That it cannot be made durable, as a [`Changed`].
pub(super) fn begin_anew(entry: &Entry, doubt: &Doubt) -> io::Result<()> {
    let record = entry.record();
    let image = &record.name;
    tracing::warn!(
        image,
        "another program has changed its file, or put it back: the agent receives all of the image anew"
    );
    let done = doubt.record().and_then(|()| match doubt.promised {
        true => Ok(()),
        false => entry.file.begin_anew().map_err(io::Error::other),
    });
    done.map_err(|why| {
        let path = record.current_path().unwrap_or_else(|_| record.path.clone());
        io::Error::other(Changed::unnoted(path, &why))
    })
}

#[cfg(test)]
mod tests;
