//! Whether what lies at an image's path is the file that was there before: another one may have been put there
//! while no agent ran.

use super::lines::line_path;
use super::{Entry, Registry};
use crate::folder::log::{End, Folder};
use crate::folder::standing;
use crate::heartbeat::{self, Heartbeat};
use crate::lineage::{ImageLineage, file_at};
use crate::record::{CopyState, ImageRecord, NameKind};
use crate::store::Store;
use dray_engine::lineage::FileIdentity;
use dray_files::StatePath;
use std::io;
use std::sync::Arc;

/// Where the image's file would be opened: under the first of the names that it may have.
pub(super) fn found_at(store: &Store, record: &ImageRecord) -> Option<StatePath> {
    let places = std::iter::once(record.place).chain(record.other_places());
    let paths =
        places.filter_map(|place| ImageRecord { place, ..record.clone() }.current_path().ok());
    paths.map(|path| store.beside(&path)).find(|path| path.exists().unwrap_or(true))
}

/// Whether an image has a file of its own that dray writes.
fn has_own_file(record: &ImageRecord) -> bool {
    !record.read_only && !record.device && record.flat.is_none() && record.in_place.is_none()
}

/// Whether the time at which its file was changed tells who has changed it.
fn has_heartbeat(record: &ImageRecord) -> bool {
    !record.device && record.flat.is_none() && record.in_place.is_none()
}

/// The names that its file may have while it is open, first the one that it has.
fn names_of(store: &Store, record: &ImageRecord) -> Vec<StatePath> {
    let places =
        [record.place, NameKind::Partial, NameKind::Named, NameKind::Replica(record.epoch)];
    let paths =
        places.into_iter().map(|place| ImageRecord { place, ..record.clone() }.current_path());
    paths.filter_map(|path| Some(store.beside(&path.ok()?))).collect()
}

pub(super) fn heartbeat_path(store: &Store, name: &str) -> StatePath {
    store.images().join(format!("{name}.beat"))
}

/// Whether another file lies at an image's path than the one that comes, that its line is of, or that a copy was
/// left behind in.
pub(super) fn is_other_file(store: &Store, record: &ImageRecord) -> bool {
    let comes = record.state == CopyState::Incoming;
    let is_only_read = record.read_only && record.arriving.is_some();
    if !comes && !is_only_read && !has_own_file(record) {
        return false;
    }
    let Some(path) = found_at(store, record) else { return false };
    match (&record.replica, record.arriving) {
        (_, known) if comes || is_only_read => known.is_some_and(|known| is_another(known, &path)),
        (Some(copy), _) => is_another(copy.stamp.file, &path),
        (None, _) => ImageLineage::is_of_another(&line_path(store, &record.name), &path),
    }
}

/// Whether the file that comes to an image is the one at `path`.
pub(super) fn has_arrived(record: &ImageRecord, path: &StatePath) -> bool {
    let found = file_at(path).zip(record.arriving);
    found.is_some_and(|(now, known)| now.is_same(&known))
}

fn is_another(known: FileIdentity, path: &StatePath) -> bool {
    file_at(path).is_some_and(|now| !now.is_same(&known))
}

impl Registry {
    /// Another file lies where that of an image was. An owner's may have been replaced while no agent ran, as by
    /// a restored one. It is not opened where it would be taken for what it is not.
    pub(super) fn refuse_other_file(&self, record: &ImageRecord) -> io::Result<()> {
        if !is_other_file(&self.store, record) {
            return Ok(());
        }
        // Where it lies, which may be under a copy's name.
        let path = found_at(&self.store, record);
        let path = path.as_ref().map_or(&*record.path, StatePath::path).display();
        let than = if self.a_client_runs(&record.name) {
            // Its guest would go on with what is in the other one.
            "the one that a program which was attached still uses"
        } else if self.moves_by_blocks(record)? {
            "the one that its migration moves"
        } else if record.is_on_other_file_system() {
            "before, on another file system: is that of its pool mounted?"
        } else {
            return Ok(());
        };
        let name = &record.name;
        let or = match record.migration {
            None => {
                format!(" (if it is the right one: `dray images remove {name}`, then add it again)")
            }
            Some(_) => String::new(),
        };
        Err(io::Error::other(format!("another file is at {path} than {than}{or}")))
    }

    /// Whether a migration that was handed over still needs what is in the image's file, and nothing else.
    fn moves_by_blocks(&self, record: &ImageRecord) -> io::Result<bool> {
        let Some(migration) = record.migration else { return Ok(false) };
        let folder = Folder::of(&self.store, migration);
        let comes = folder.holds(End::Target)?
            || folder.lacks_intent()? && folder.end_without_intent() == End::Target;
        if record.state == CopyState::Replica || comes {
            return Ok(true);
        }
        // The record may not say so yet.
        standing::is_handed_over(&folder)
    }

    /// Whether only agents have written to the file of an image that is not open here.
    ///
    /// # Errors
    /// What the file system reports.
    pub(super) fn is_left(&self, record: &ImageRecord) -> io::Result<bool> {
        match found_at(&self.store, record) {
            Some(path) if has_heartbeat(record) => {
                heartbeat::is_left(&heartbeat_path(&self.store, &record.name), &path.look()?)
            }
            _ => Ok(true),
        }
    }

    /// Whether the file of an image that is not open here is, or may be, an older one than agents have seen.
    pub(crate) fn is_put_back(&self, record: &ImageRecord) -> bool {
        self.is_older(record).unwrap_or(true)
    }

    /// Whether the file of an image that is not open here is an older one than agents have seen.
    ///
    /// # Errors
    /// What the file system reports.
    pub(super) fn is_older(&self, record: &ImageRecord) -> io::Result<bool> {
        match found_at(&self.store, record) {
            Some(path) if has_heartbeat(record) => {
                heartbeat::is_put_back(&heartbeat_path(&self.store, &record.name), &path.look()?)
            }
            _ => Ok(false),
        }
    }

    /// Whether the file of an image of which blocks are still missing here, and which this host serves, is an older one:
    /// what has arrived since is not in it.
    ///
    /// # Errors
    /// What the file system reports.
    pub(super) fn lacks_what_arrived(&self, record: &ImageRecord) -> io::Result<bool> {
        let fills = record.state == CopyState::Owner && record.place == NameKind::Partial;
        Ok(fills && self.is_older(record)?)
    }

    /// When the file of an image that comes or is handed over was changed. What is written from here on may have a later time.
    pub fn time_of(&self, entry: &Entry) -> Option<(i64, i64)> {
        entry.heartbeat()?.changed()
    }

    /// The file of an image that comes or is handed over was synced since it was [looked at](Self::time_of): an older one is not taken for
    /// it from now on.
    pub fn keep_time(&self, entry: &Entry, at: Option<(i64, i64)>) {
        let (Some(heartbeat), Some(at)) = (entry.heartbeat(), at) else { return };
        if let Err(why) = heartbeat.keep(at) {
            let image = entry.record().name;
            tracing::debug!(image, %why, "cannot note when the file of an image was changed");
        }
    }

    /// Another program may have written to the file of an image that was about to return. Whatever becomes of its
    /// migration, nothing of the copy is trusted, durably.
    pub(super) fn distrust_return(&self, mut record: ImageRecord) -> io::Result<ImageRecord> {
        let returns = record.returns();
        let note = record.replica.as_mut().filter(|note| returns && !note.unproved);
        let Some(note) = note else { return Ok(record) };
        note.unproved = true;
        tracing::warn!(image = record.name, "another program has changed the copy that returns");
        self.path_of(&record.name).put(&record)?;
        Ok(record)
    }

    /// The image is new here, and its file as it should be.
    pub(super) fn make_heartbeat(&self, entry: &Entry) -> io::Result<()> {
        self.set_heartbeat(entry, |path, names| self.heartbeats.make(path, names))
    }

    /// The image's file is open from now on. What another program may have done to it before, it was seen.
    pub(super) fn begin_heartbeat(&self, entry: &Entry) -> io::Result<()> {
        self.set_heartbeat(entry, |path, names| match self.heartbeats.begin(path, names) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => self.heartbeats.make(path, names),
            begun => begun,
        })
    }

    /// An agent is about to change the name of an image's file.
    pub(super) fn touch_heartbeat(&self, record: &ImageRecord) -> io::Result<()> {
        self.heartbeats.begin(&heartbeat_path(&self.store, &record.name), &[]).map(drop)
    }

    fn set_heartbeat(
        &self,
        entry: &Entry,
        begin: impl FnOnce(&StatePath, &[StatePath]) -> io::Result<Arc<Heartbeat>>,
    ) -> io::Result<()> {
        let record = entry.record();
        if !has_heartbeat(&record) {
            return Ok(());
        }
        let names = names_of(&self.store, &record);
        match begin(&heartbeat_path(&self.store, &record.name), &names) {
            Ok(heartbeat) => entry.set_heartbeat(Some(heartbeat)),
            // The next agent trusts no line of it, and nothing else depends on it.
            Err(why) if !self.moves_by_blocks(&record)? => {
                tracing::warn!(image = record.name, %why, "cannot touch an image's heartbeat");
            }
            Err(why) => return Err(why),
        }
        Ok(())
    }

    /// Whether the file of an image that comes is lost: none is there, or another one, in the folder that it was
    /// made in. One whose file system is not mounted may come back.
    pub fn has_lost_arriving(&self, record: &ImageRecord) -> bool {
        let comes = record.state == CopyState::Incoming && record.arriving.is_some();
        let folder = record.path.parent().map(|folder| self.at(folder));
        let is_there = folder.is_some_and(|folder| folder.exists().unwrap_or(false));
        if !comes || !is_there || record.is_on_other_file_system() {
            return false;
        }
        match found_at(&self.store, record) {
            None => true,
            Some(_) => is_other_file(&self.store, record) || !self.is_left(record).unwrap_or(true),
        }
    }

    /// Whether another program has changed the file of an image that comes, or that was just handed over, while no
    /// agent had it open: which of its blocks are as they were received, or are to be sent, nobody knows.
    pub(super) fn is_no_longer_known(&self, record: &ImageRecord) -> io::Result<bool> {
        let moves = match record.state {
            CopyState::Incoming => self.moves_by_blocks(record)?,
            CopyState::Owner => has_own_file(record) && self.is_handed_over(record)?,
            CopyState::Replica => false,
        };
        Ok(moves && (!self.is_left(record)? || self.is_older(record)?))
    }

    fn is_handed_over(&self, record: &ImageRecord) -> io::Result<bool> {
        match record.migration {
            Some(migration) => standing::is_handed_over(&Folder::of(&self.store, migration)),
            None => Ok(false),
        }
    }

    /// Forgets an image that comes, and whose file [is lost](Self::has_lost_arriving), with what is left of that: also
    /// a copy that was to come back, as nobody knows what it holds any more. Another file that lies there stays.
    ///
    /// # Errors
    /// What the file system or the store reports. Can be repeated.
    pub fn forget_arriving(&self, record: &ImageRecord) -> io::Result<()> {
        let ours = found_at(&self.store, record).is_some() && !is_other_file(&self.store, record);
        if ours {
            self.names(record)?.remove_partial().map_err(io::Error::other)?;
        }
        self.forget(&record.name)
    }
}
