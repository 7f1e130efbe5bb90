//! Copies that were left behind by handovers: when one can be brought up to date, and what becomes
//! of it while a migration back does so.
//!
//! A migration back makes the incomplete image of the replica's own file, by a rename. The record
//! keeps what the replica held, so that a migration that comes to nothing makes it a replica again,
//! without the regions that it wrote into.

use crate::config::Pool;
use crate::lineage::{ReplicaNote, stamp_of};
use crate::migration::log::Folder;
use crate::registry::{CopyState, Entry, ImageRecord, Place, Registry};
use crate::store;
use dray_engine::lineage::fits;
use dray_image::ImageNames;
use dray_types::{Ancestor, MigrationId};
use dray_wire::request::WantedImage;
use std::io;
use std::sync::{Arc, PoisonError};

/// A replica that can be used distrusts this many regions at most: half a terabyte. Of one that
/// distrusts more, a copy tells as much.
pub const MAX_DISTRUSTED: usize = 8192;

impl ImageRecord {
    /// What the replica in this record holds, if the wanted image can begin with it. It gets its own
    /// old path again, which is in `pool` (I7).
    ///
    /// # Errors
    /// What stands against it, for the operator.
    pub fn base_for(
        &self,
        wanted: &WantedImage,
        ancestors: &[Ancestor],
        pool: &Pool,
    ) -> Result<ReplicaNote, String> {
        if self.flat.is_some() {
            return Err("it left this host flattened and holds a chain of images".to_owned());
        }
        let note = self.replica.as_ref().ok_or("it is not known which generation it holds")?;
        fits(ancestors, note.generation).map_err(|why| why.to_string())?;
        if self.len != wanted.len {
            return Err(format!("it has {} bytes and the image {}", self.len, wanted.len));
        }
        let Place::Replica(epoch) = self.place else {
            return Err("it is not a file of its own".to_owned());
        };
        let file = ImageNames::of(&self.path).map_err(|why| why.to_string())?.replica(epoch);
        if !pool.contains(&file) {
            return Err(format!("it is not in pool '{}'", pool.name));
        }
        if self.path.exists() {
            return Err(format!("{} exists already", self.path.display()));
        }
        match stamp_of(&file) {
            Ok(stamp) if stamp == note.stamp => {}
            Ok(_) => return Err("its file was changed since it was left there".to_owned()),
            Err(why) => return Err(why.to_string()),
        }
        if note.distrusted.len() > MAX_DISTRUSTED {
            return Err("earlier migrations have written to most of it".to_owned());
        }
        Ok(note.clone())
    }
}

impl Registry {
    /// The replica becomes the incomplete image of `migration`. Its regions that hold something
    /// else stay on record.
    ///
    /// # Errors
    /// What the file system or the store reports; a restart then makes it a replica again.
    pub fn begin_return(&self, entry: &Entry, migration: MigrationId) -> io::Result<Arc<Entry>> {
        let _taking = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        let (CopyState::Replica, Place::Replica(epoch)) =
            (entry.record().state, entry.record().place)
        else {
            return Err(io::Error::other("it is not a replica any more"));
        };
        self.update(entry, |record| {
            record.state = CopyState::Incoming;
            record.place = Place::Partial;
            record.migration = Some(migration);
        })?;
        let record = entry.record();
        let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
        names.begin_return(epoch).map_err(io::Error::other)?;
        self.exchange(record)
    }

    /// The incomplete image that was made of a replica becomes one again; `written` are the regions
    /// in which it no longer holds its generation. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn end_return(&self, entry: &Entry, written: &[u64]) -> io::Result<Arc<Entry>> {
        if entry.record().state != CopyState::Incoming {
            return self.exchange(entry.record());
        }
        // Distrusted before the file has a replica's name.
        self.update(entry, |record| {
            if let Some(note) = &mut record.replica {
                note.distrusted.extend(written);
                note.distrusted.sort_unstable();
                note.distrusted.dedup();
            }
        })?;
        let record = entry.record();
        let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
        names.end_return(record.epoch).map_err(io::Error::other)?;
        let stamp = stamp_of(&names.replica(record.epoch))?;
        self.update(entry, |record| {
            record.state = CopyState::Replica;
            record.place = Place::Replica(record.epoch);
            record.migration = None;
            if let Some(note) = &mut record.replica {
                note.stamp = stamp;
            }
        })?;
        self.exchange(entry.record())
    }

    /// A replica that is of no use for an image that comes gives the name up and stays, under a name
    /// with its epoch.
    ///
    /// # Errors
    /// When that name is taken, or what the store reports.
    pub fn set_aside(&self, entry: &Entry) -> io::Result<String> {
        let mut record = entry.record();
        let old = record.name.clone();
        record.name = format!("{old}.replica-{}", record.epoch.0);
        let name = record.name.clone();
        // A crash may have come between the two steps of an earlier try.
        let same = |other: &Entry| {
            let other = other.record();
            (&other.path, other.place) == (&record.path, record.place)
        };
        match self.get(&name) {
            Some(other) if same(&other) => {}
            Some(_) => {
                let why = format!("'{old}' cannot be set aside: there is a '{name}' already");
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
            }
            None => drop(self.add(record.clone(), Arc::clone(&entry.file))?),
        }
        self.forget(&old)?;
        Ok(name)
    }

    /// A new entry over the file that the record names takes the place of the old one: its disk is
    /// not the one that guests knew.
    fn exchange(&self, record: ImageRecord) -> io::Result<Arc<Entry>> {
        let file = Arc::new(self.open_file(&record).map_err(io::Error::other)?);
        Ok(self.replace(record, file))
    }
}

/// Replicas that were taken for migrations back which never began, because the agent died, become
/// replicas again; files that were to be used in place are left alone.
///
/// # Errors
/// What the file system or the store reports.
pub(crate) fn undo_unbegun(
    registry: &Registry,
    store: &store::Store,
    intent: &str,
) -> io::Result<()> {
    for entry in registry.all() {
        let record = entry.record();
        let (CopyState::Incoming, Some(migration)) = (record.state, record.migration) else {
            continue;
        };
        let folder = Folder::of(store, migration);
        let begun = folder.file(intent).exists() || folder.is_void();
        if !begun && record.in_place.is_some() {
            registry.remove_partial(&entry)?;
        } else if !begun && record.replica.is_some() {
            tracing::info!(image = record.name, "is a replica again: no migration back began");
            registry.end_return(&entry, &[])?;
        } else if !begun && is_empty(&entry) {
            tracing::info!(image = record.name, "goes again: no migration of it began");
            registry.remove_partial(&entry)?;
        }
    }
    Ok(())
}

/// Whether nothing has ever been written to an image that was to come.
fn is_empty(entry: &Entry) -> bool {
    let record = entry.record();
    let file = record.place == Place::Partial && !record.device;
    file && entry.file.allocated_bytes().is_ok_and(|bytes| bytes == 0)
}
