//! Images that QEMU takes back as plain files, and adopts again: the registry's side of
//! [their notes](crate::released).

use super::{Entry, Registry};
use crate::abort;
use crate::lineage::{self, ImageLineage};
use crate::process::QemuProcess;
use crate::record::{Adopted, CopyState, ImageRecord};
use crate::released::{FileId, Released};
use dray_engine::lineage::Lineage;
use dray_types::BlockSet;
use std::io;
use std::path::Path;

impl Registry {
    /// The disk of a note is on its file, and its bitmap is `tracked` there: the line of generations is
    /// written beside the note, with what was changed while dray served it, and then the note says so.
    ///
    /// # Errors
    /// What the store reports.
    pub fn end_release(&self, entry: &Entry, note: Released, tracked: bool) -> io::Result<()> {
        abort::step("ReleaseLine");
        let id = note.image.id;
        if let Some(line) = entry.line().filter(|_| note.has_line()) {
            ImageLineage::create(
                &self.released.line_path(id),
                line.lineage(),
                entry.disk.history(),
            )?;
        }
        abort::step("ReleaseDone");
        let bitmap = note.bitmap.clone().filter(|_| tracked);
        self.released.put(&Released { bitmap, done: true, ..note })?;
        self.released.remove_others(&entry.record().path, id)?;
        abort::step("ReleaseForget");
        Ok(())
    }

    /// The QEMU `qemu` has let a disk go: it has ended, or has the disk on something else. Whoever starts the VM
    /// next opens the file itself, and dray does not stand in its way: the image is released, and everything in
    /// it counts as changed from here on, as nobody sees what is written. Can be repeated.
    ///
    /// # Errors
    /// What the store reports; nothing is locked any more by then.
    pub fn give_back(
        &self,
        entry: &Entry,
        qemu: &QemuProcess,
        since_unix_ms: u64,
    ) -> io::Result<()> {
        entry.drop_locks();
        let record = entry.record();
        let has_past = entry.line().is_some_and(|line| line.lineage().has_past());
        let known = self.released.of(record.id).map(|note| note.plan);
        let plan = record.adopted.as_ref().map(|adopted| adopted.splice.clone()).or(known);
        if !has_past {
            self.released.remove(record.id)?;
        } else if let Some(plan) = plan {
            entry.line().inspect(|line| line.suspect());
            let path = record.current_path().map_err(io::Error::other)?;
            let note = Released {
                file: FileId::of(&path)?,
                len: std::fs::metadata(&path)?.len(),
                plan,
                qemu: qemu.clone(),
                bitmap: None,
                mark: None,
                done: false,
                since_unix_ms,
                made: false,
                image: ImageRecord { adopted: None, migration: None, ..record.clone() },
            };
            self.released.put(&note)?;
            self.end_release(entry, note, false)?;
        }
        self.forget(&record.name)
    }

    /// The disk of an image is on dray: if it was adopted, that has come to its end.
    ///
    /// # Errors
    /// What the store reports.
    pub fn end_adoption(&self, entry: &Entry) -> io::Result<()> {
        let under_way = |adopted: &Adopted| !adopted.done;
        if !entry.record().adopted.as_ref().is_some_and(under_way) {
            return Ok(());
        }
        self.update(entry, |record| {
            record.adopted.iter_mut().for_each(|adopted| adopted.done = true);
        })
    }

    /// The disk of an image that was adopted may be on its file from here on.
    ///
    /// # Errors
    /// What the store reports; nothing is changed then.
    pub fn doubt_adoption(&self, entry: &Entry) -> io::Result<()> {
        if entry.record().adopted.is_none() {
            return Ok(());
        }
        self.update(entry, |record| {
            record.adopted.iter_mut().for_each(|adopted| adopted.done = false);
        })
    }

    /// The disk is still on dray, and was all the time: what dray tracked is everything.
    ///
    /// # Errors
    /// What the store reports.
    pub fn undo_release(&self, entry: &Entry) -> io::Result<()> {
        self.released.remove(entry.record().id)?;
        if let Some(line) = entry.line() {
            line.trust();
        }
        Ok(())
    }

    /// The released image whose file is at `path`, with its line and what dray knows to be changed in the
    /// open generation; none while it is served here.
    pub fn known_at(&self, path: &Path) -> Option<(Released, Lineage, BlockSet)> {
        let note = self.released.at(path).filter(Released::has_line)?;
        let line = self.released.line_path(note.image.id);
        let (lineage, changed) = lineage::last_state(&line).ok()??;
        let served = self.get(&note.image.name).is_some_and(|e| e.record().id == note.image.id);
        (!served && note.image.state == CopyState::Owner).then_some((note, lineage, changed))
    }
}

#[cfg(test)]
mod tests;
