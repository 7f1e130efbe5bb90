//! Copies that were left behind by handovers: when one can be brought up to date, and what becomes
//! of it while a migration back does so.
//!
//! A migration back makes the incomplete image of the replica's own file, by a rename. The record
//! keeps what the replica held, so that a migration that comes to nothing makes it a replica again,
//! without the regions that it wrote into.

use crate::folder::log::{End, Folder};
use crate::lineage::{LostWrites, ReplicaNote, Written, stamp_of};
use crate::pool::Pool;
use crate::record::{CopyState, ImageRecord, NameKind};
use crate::registry::{Entry, Registry};
use crate::store::Store;
use dray_engine::lineage::{Unfit, fits};
use dray_files::StatePath;
use dray_image::ImageNames;
use dray_types::{Ancestor, MigrationId};
use dray_wire::request::WantedImage;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// A replica that can be used distrusts this many regions at most: half a terabyte. Of one that
/// distrusts more, a copy tells as much.
pub const MAX_DISTRUSTED: usize = 8192;

/// Why a replica cannot be brought up to date.
#[derive(Debug, thiserror::Error)]
pub enum Useless {
    /// It is no image of its own.
    #[error("it left this host flattened and holds a chain of images")]
    Flattened,
    /// Nobody noted what it holds.
    #[error("its generation is unknown")]
    Unknown,
    /// What it holds is not in the image's past.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// The image has another length now.
    #[error("it has {here} bytes, and the image has {there}")]
    Length {
        /// The replica's.
        here: u64,
        /// The image's.
        there: u64,
    },
    /// It lies on a device, or nowhere.
    #[error("it is not a file")]
    NoFile,
    /// Its file has no name that it could get back.
    #[error(transparent)]
    Name(#[from] dray_image::Error),
    /// Its file is not where the image shall be.
    #[error("it is not in pool '{0}'")]
    Elsewhere(String),
    /// Something has its name.
    #[error("{} exists already", .0.display())]
    Taken(PathBuf),
    /// Its file cannot be looked at.
    #[error(transparent)]
    Unseen(#[from] io::Error),
    /// Somebody has written to it.
    #[error(transparent)]
    Written(#[from] Written),
    /// Its file has lost writes.
    #[error(transparent)]
    Lost(#[from] LostWrites),
    /// It is hardly known to hold anything.
    #[error("too many of its regions would have to be compared")]
    Distrusted,
}

impl ImageRecord {
    /// What the replica in this record holds, if the wanted image can begin with it. It gets its own
    /// old path again, which is in `pool` (I7).
    ///
    /// # Errors
    /// What stands against it.
    pub fn base_for(
        &self,
        wanted: &WantedImage,
        ancestors: &[Ancestor],
        pool: &Pool,
    ) -> Result<ReplicaNote, Useless> {
        if self.flat.is_some() {
            return Err(Useless::Flattened);
        }
        let note = self.replica.as_ref().ok_or(Useless::Unknown)?;
        fits(ancestors, note.generation)?;
        note.check_kept()?;
        if self.len != wanted.len {
            return Err(Useless::Length { here: self.len, there: wanted.len });
        }
        let NameKind::Replica(epoch) = self.place else { return Err(Useless::NoFile) };
        let file = ImageNames::of(&self.path)?.replica(epoch);
        if !pool.contains(&file) {
            return Err(Useless::Elsewhere(pool.name.clone()));
        }
        if self.path.exists() {
            return Err(Useless::Taken(self.path.clone()));
        }
        let note = note.as_found(&stamp_of(&StatePath::real(&file))?)?;
        if note.distrusted.len() > MAX_DISTRUSTED {
            return Err(Useless::Distrusted);
        }
        Ok(note)
    }
}

impl Registry {
    /// The replica becomes the incomplete image of `migration`. Its regions that hold something
    /// else stay on record.
    ///
    /// # Errors
    /// What the file system or the store reports; a restart then makes it a replica again.
    pub fn begin_return(&self, entry: &Entry, migration: MigrationId) -> io::Result<Arc<Entry>> {
        let _taking = self.taking.lock();
        let (CopyState::Replica, NameKind::Replica(epoch)) =
            (entry.record().state, entry.record().place)
        else {
            return Err(io::Error::other("it is not a replica any more"));
        };
        if !self.is_current(entry) {
            return Err(io::Error::other("another image has its name now"));
        }
        let path = entry.record().current_path().map_err(io::Error::other)?;
        let now = stamp_of(&self.at(&path))?;
        let found = entry.record().replica.map(|note| note.as_found(&now)).transpose();
        let found = found.map_err(io::Error::other)?;
        found.iter().try_for_each(ReplicaNote::check_kept).map_err(io::Error::other)?;
        self.update(entry, |record| {
            record.state = CopyState::Incoming;
            // What is not trusted is known also when the migration comes to nothing.
            record.replica = found;
            record.arriving = Some(now.file);
            record.place = NameKind::Partial;
            record.migration = Some(migration);
            // It gets the length that its source has.
            record.whole = false;
            // How it was adopted when it was here before is of a VM that has left.
            record.adopted = None;
        })?;
        let record = entry.record();
        let names = self.names(&record)?;
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
        // Nobody is let in to what is no longer owned, also if the file cannot be opened as a replica.
        entry.disk.park_now();
        // Distrusted before the file has a replica's name.
        self.update(entry, |record| {
            if let Some(note) = &mut record.replica {
                note.distrusted.extend(written);
                note.distrusted.sort_unstable();
                note.distrusted.dedup();
                note.lost = note.lost.take().or_else(|| entry.file.lost_writes());
            }
        })?;
        let record = entry.record();
        let names = self.names(&record)?;
        names.end_return(record.epoch).map_err(io::Error::other)?;
        let stamp = stamp_of(&self.at(&names.replica(record.epoch)))?;
        self.update(entry, |record| {
            record.state = CopyState::Replica;
            record.place = NameKind::Replica(record.epoch);
            record.migration = None;
            // It stays whose it was.
            record.owner = None;
            let arrived = record.arriving.take();
            // Of another file that lies there nobody knows what it holds.
            let is_it = |_: &ReplicaNote| arrived.is_none_or(|of| of.is_same(&stamp.file));
            record.replica = record.replica.take().filter(is_it);
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
        let _taking = self.taking.lock();
        let mut record = entry.record();
        if record.state != CopyState::Replica || !self.is_current(entry) {
            return Err(io::Error::other("it is not a replica any more"));
        }
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
                let why = format!("'{old}' cannot be set aside: '{name}' exists already");
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
            }
            None => drop(self.add_instead(record.clone(), Arc::clone(&entry.file), entry)?),
        }
        self.forget(&old)?;
        Ok(name)
    }

    /// A new entry over the file that the record names takes the place of the old one: its disk is
    /// not the one that guests knew.
    fn exchange(&self, record: ImageRecord) -> io::Result<Arc<Entry>> {
        let file = self.open_file(&record).map_err(io::Error::other)?;
        self.replace(record, file)
    }
}

/// Replicas that were taken for migrations back which never began, because the agent died, become
/// replicas again; files that were to be used in place are left alone.
///
/// # Errors
/// What the file system or the store reports.
pub(crate) fn undo_unbegun(registry: &Registry, store: &Store, intent: &str) -> io::Result<()> {
    let undone = registry.all().into_iter().map(|entry| undo_one(registry, store, intent, &entry));
    // Each is tried, whatever becomes of the others.
    undone.fold(Ok(()), Result::and)
}

fn undo_one(
    registry: &Registry,
    store: &Store,
    intent: &str,
    entry: &Arc<Entry>,
) -> io::Result<()> {
    let record = entry.record();
    let (CopyState::Incoming, Some(migration)) = (record.state, record.migration) else {
        return Ok(());
    };
    let folder = Folder::of(store, migration);
    let begun = folder.file(intent).exists()? || folder.is_void()? || folder.lacks_intent()?;
    let held = record.in_place.is_some() || record.replica.is_some();
    if begun || !held && !is_empty(entry) {
        return Ok(());
    }
    tracing::info!(image = record.name, "is as before: its migration to this host never began");
    take_room_back(registry, entry)
}

/// Takes back what was made for a migration to here that does not begin after all. Its intent goes first,
/// durably, once it is the only thing in its folder: a restart that finds one goes on with the images as they
/// are, and one that finds anything else without it takes it for lost.
///
/// # Errors
/// What the file system or the store reports: the next restart does the rest.
pub fn undo_prepared(registry: &Registry, folder: &Folder, names: &[String]) -> io::Result<()> {
    folder.remove_all_but_intents()?;
    folder.remove_intents(End::Target)?;
    undo_room(registry, folder, names)?;
    folder.remove(End::Target)
}

/// Takes back the room that was made for images of the folder's migration, which has no intent. An image of
/// another migration stays.
///
/// # Errors
/// What the file system or the store reports.
pub fn undo_room(registry: &Registry, folder: &Folder, names: &[String]) -> io::Result<()> {
    let entries = names.iter().filter_map(|name| registry.get(name));
    let ours = entries.filter(|entry| entry.record().migration.is_some_and(|of| folder.is_of(of)));
    // Each is tried, whatever becomes of the others.
    ours.map(|entry| take_room_back(registry, &entry)).fold(Ok(()), Result::and)
}

/// An image that was to come is what it was before: a replica, a file that lay here, or nothing.
fn take_room_back(registry: &Registry, entry: &Entry) -> io::Result<()> {
    let record = entry.record();
    match record.replica {
        Some(_) if record.in_place.is_none() => registry.end_return(entry, &[]).map(drop),
        _ => registry.remove_partial(entry),
    }
}

/// Whether nothing has ever been written to an image that was to come.
fn is_empty(entry: &Entry) -> bool {
    let record = entry.record();
    let file = record.place == NameKind::Partial && !record.device;
    file && entry.file.allocated_bytes().is_ok_and(|bytes| bytes == 0)
}
