//! How long an image is: as its record says, whatever becomes of its file.
//!
//! What a guest is let write is what a migration moves and a backup keeps. So a file that has become longer
//! changes nothing by itself; a record gets another length in one step.

use super::lines::{begin_line, line_path};
use super::{Entry, Registry, of_fair_len, put_in_place};
use crate::record::{Adopted, CopyState, ImageRecord};
use dray_image::ImageFile;
use std::io;
use std::sync::Arc;

impl Registry {
    /// The image whose file has grown has `len` bytes from now on, was adopted as `adopted` if it was, and has
    /// a line of its own. Nothing is written to the old disk meanwhile. The record says so
    /// in one step: an agent that dies meanwhile, or has no room for it, knows the image as it was. The locks
    /// are never let go, and where a QEMU has the file with its own, none are taken.
    ///
    /// # Errors
    /// That another file lies at its path by now, or what opening the file or the store reports.
    pub fn regrow(
        &self,
        old: &Arc<Entry>,
        len: u64,
        adopted: Option<Adopted>,
    ) -> io::Result<Arc<Entry>> {
        let record = of_fair_len(ImageRecord { len, adopted, ..old.record() })?;
        let file = self.open_again(&record, &*old.file)?;
        // Whether there is room for it.
        self.update(old, |_| {})?;
        // No copy of the shorter image is a base of the longer one.
        self.end_line(old)?;
        self.update(old, |old| *old = record)?;
        let new = self.entry_over(old.record(), file);
        new.inherit_locks(old);
        self.cut_off_clients(&new.record().name);
        put_in_place(&mut self.entries.write(), &new);
        begin_line(&self.store, &new)?;
        Ok(new)
    }

    /// The record and the file of an image that grows, when another program has made the file longer than the
    /// record says: a format driver needs all of it, so that what is exported, moved and backed up is all of
    /// it as well. What follows an image that does not grow is none of it.
    pub(super) fn with_all_of_it(
        &self,
        record: ImageRecord,
        file: Arc<dyn ImageFile>,
    ) -> io::Result<(ImageRecord, Arc<dyn ImageFile>)> {
        let is_owned = record.state == CopyState::Owner && record.flat.is_none();
        if !is_owned || !record.growable || record.device {
            return Ok((record, file));
        }
        let (known, len) = (record.len, file.file_len().map_err(io::Error::other)?);
        if len <= known {
            return Ok((record, file));
        }
        let (path, name) = (record.path.display(), &record.name);
        if record.migration.is_some() {
            return Err(io::Error::other(format!(
                "{path} has {len} bytes by now, and its migration moves {known}: another program has \
                 made it longer"
            )));
        }
        tracing::warn!(image = name, known, len, "another program has made an image's file longer");
        let record = of_fair_len(ImageRecord { len, ..record })?;
        line_path(&self.store, &record.name).remove()?;
        self.path_of(&record.name).put(&record)?;
        let file = self.open_again(&record, &*file)?;
        Ok((record, file))
    }
}
