//! Whether what lies at an image's path is the file that was there before: another one may have been put there
//! while no agent ran.

use super::lines::line_path;
use super::{CopyState, ImageRecord, Registry};
use crate::lineage::{Line, file_at, is_left_by};
use crate::migration::log::{End, Folder};
use crate::migration::standing;
use crate::store::Store;
use dray_engine::lineage::FileIdentity;
use dray_files::StatePath;
use dray_files::files::Kind;
use std::io;

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

/// Whether another file lies at an image's path than the one that comes, that its line is of, or that a copy was
/// left behind in.
pub(super) fn is_other_file(store: &Store, record: &ImageRecord) -> bool {
    let comes = record.state == CopyState::Incoming;
    if !comes && !has_own_file(record) {
        return false;
    }
    let Some(path) = found_at(store, record) else { return false };
    match (&record.replica, record.arriving) {
        (_, known) if comes => known.is_some_and(|known| is_another(known, &path)),
        (Some(copy), _) => is_another(copy.stamp.file, &path),
        (None, _) => Line::is_of_another(&line_path(store, &record.name), &path),
    }
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

    /// Whether nobody has written to a file since the last of the agents that had it, as far as that can be told:
    /// `note` is written anew by each of them. To be asked before this agent does that.
    pub fn is_left_by_its_agent(&self, note: &StatePath, file: &StatePath) -> bool {
        is_left_by(self.agents.as_ref(), note, file)
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
            Some(path) => is_other_file(&self.store, record) || self.was_changed_by_others(&path),
        }
    }

    /// Whether a file was changed while no agent ran here, as far as that can be told.
    pub fn was_changed_by_others(&self, path: &StatePath) -> bool {
        let Some(agents) = &self.agents else { return false };
        path.look().is_ok_and(|look| look.kind == Kind::File && !agents.ran_at(&look))
    }

    /// Whether somebody has changed the file of an image that comes, or that was just handed over, while no agent
    /// ran: which of its blocks are as they were received, or are to be sent, nobody knows.
    pub(super) fn is_no_longer_known(&self, record: &ImageRecord) -> io::Result<bool> {
        let moves = match record.state {
            CopyState::Incoming => record.arriving.is_some() && self.moves_by_blocks(record)?,
            CopyState::Owner => has_own_file(record) && self.is_handed_over(record)?,
            CopyState::Replica => false,
        };
        let path = found_at(&self.store, record).filter(|_| moves);
        Ok(path.is_some_and(|path| self.was_changed_by_others(&path)))
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
