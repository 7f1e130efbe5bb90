//! The line of generations that each owned image has.

use super::{CopyState, Entry, ImageRecord, Registry};
use crate::lineage::{Line, stamp_of};
use crate::store::Store;
use dray_files::StatePath;
use std::io;

impl Registry {
    /// Where the line of the image called `name` is kept.
    pub fn line_path(&self, name: &str) -> StatePath {
        line_path(&self.store, name)
    }

    /// The image was changed in a way that its line does not show, or is another one from now on:
    /// a new line begins.
    ///
    /// # Errors
    /// What the store reports.
    pub fn end_line(&self, entry: &Entry) -> io::Result<()> {
        line_path(&self.store, &entry.record().name).remove()?;
        entry.disk.stop_history();
        entry.set_line(None);
        begin_line(&self.store, entry)
    }
}

pub(super) fn line_path(store: &Store, name: &str) -> StatePath {
    store.images().join(format!("{name}.line"))
}

/// Whether another file lies at an image's path than the one that its line, or what is known of a copy, is of.
pub(super) fn is_other_file(store: &Store, record: &ImageRecord) -> bool {
    let Ok(path) = record.current_path() else { return false };
    let file =
        !record.read_only && record.flat.is_none() && !record.device && record.in_place.is_none();
    if !file || record.state == CopyState::Incoming {
        return false;
    }
    let path = store.beside(&path);
    match &record.replica {
        Some(copy) => stamp_of(&path).is_ok_and(|now| now.inode != copy.stamp.inode),
        None => Line::is_of_another(&line_path(store, &record.name), &path),
    }
}

/// An owner goes on with its line, or begins one.
pub(super) fn begin_line(store: &Store, entry: &Entry) -> io::Result<()> {
    let record = entry.record();
    // A line is of one file's contents; a flattened image is in several.
    if record.state != CopyState::Owner || record.read_only || record.flat.is_some() {
        return Ok(());
    }
    let path = store.beside(&record.current_path().map_err(io::Error::other)?);
    let at = line_path(store, &record.name);
    match Line::go_on(&at, &path) {
        Ok((line, changed)) => {
            line.track(&entry.disk, &changed);
            entry.set_line(Some(line));
            Ok(())
        }
        Err(why) => {
            // Without it every migration is a full one. An old one would be believed some day.
            tracing::warn!(image = record.name, %why, "cannot keep an image's line of generations");
            at.remove()
        }
    }
}
