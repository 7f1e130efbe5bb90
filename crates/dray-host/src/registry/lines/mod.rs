//! The line of generations that each owned image has.

use super::{Entry, Registry};
use crate::folder::intent::{SourceImage, SourceIntent};
use crate::folder::intents::{Intents, SOURCE_INTENTS};
use crate::folder::log::{Folder, SOURCE_INTENT};
use crate::lineage::Known;
use crate::record::{CopyState, ImageRecord};
use crate::settle::File;
use crate::store::Store;
use dray_files::StatePath;
use std::io;
use std::time::Duration;

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

impl Registry {
    /// Closes the regions of all images that are not in use.
    pub fn close_idle_lines(&self) {
        for entry in self.all() {
            let Some(line) = entry.line() else { continue };
            if let Err(why) = line.close_idle(&entry.disk) {
                tracing::warn!(image = entry.record().name, %why, "cannot close write intents");
            }
        }
    }

    /// Writes down what was written to the images that this host owns: a restart then need not
    /// distrust anything. No guest can write any more after this.
    pub fn stop_lines(&self, grace: Duration) {
        for entry in self.all() {
            let Some(line) = entry.line() else { continue };
            let record = entry.record();
            let name = &record.name;
            // Another file has its name: what is written to this one from here on nobody sees.
            if self.seen(&entry).file != File::AsRecorded {
                tracing::warn!(name, "its file is not at its path: its replicas cannot be used");
                if let Err(why) = self.line_path(name).remove() {
                    tracing::error!(name, %why, "cannot end an image's line");
                }
                continue;
            }
            // What arrives later would look like somebody else's writing.
            if record.state != CopyState::Owner || entry.disk.missing_count() > 0 {
                continue;
            }
            let Ok(guard) = entry.disk.quiesce(grace) else {
                tracing::debug!(
                    name,
                    "writes are in flight at the end of the agent: their regions stay open"
                );
                continue;
            };
            let stopped = record
                .current_path()
                .and_then(|path| entry.disk.checkpoint().map(|()| path))
                .map_err(io::Error::other)
                .and_then(|path| line.stop(&entry.disk, &self.at(&path), grace));
            if let Err(why) = stopped {
                tracing::warn!(name, %why, "cannot record an image's line");
            }
            entry.disk.park(guard);
        }
    }
}

pub(super) fn line_path(store: &Store, name: &str) -> StatePath {
    store.images().join(format!("{name}.line"))
}

/// Nobody can say what another program has written to an image since the last agent: a migration that takes
/// it away sends all of it again, also when the agent is started once more before it has.
fn send_again(store: &Store, record: &ImageRecord) -> io::Result<()> {
    let Some(migration) = record.migration else { return Ok(()) };
    let folder = Folder::of(store, migration);
    let list = folder.file(SOURCE_INTENTS);
    let intent: SourceIntent = match folder.file(SOURCE_INTENT).get() {
        Ok(intent) => intent,
        // The image comes, or nothing is left of its migration.
        Err(why) if why.kind() == io::ErrorKind::NotFound && !list.exists()? => return Ok(()),
        // Who brings it back some day finds no list, and trusts nothing.
        Err(_) => return list.remove(),
    };
    let is_it = |image: &SourceImage| image.name == record.name && image.offer.id == record.id;
    let Some(ix) = intent.images.iter().position(is_it) else { return Ok(()) };
    tracing::warn!(image = record.name, %migration, "its migration sends all of it again");
    let lens: Vec<_> = intent.images.iter().map(|image| image.offer.len).collect();
    Intents::shared(&list, &lens, false).distrust(ix).map_err(|why| {
        io::Error::other(format!("cannot note that all of it has to be sent again: {why}"))
    })
}

/// An owner goes on with its line, or begins one.
pub(super) fn begin_line(store: &Store, entry: &Entry) -> io::Result<()> {
    begin_line_after(store, entry, true)
}

/// The same, of an image that this agent has not opened before. Only agents have written to it, or another program has
/// as well.
pub(super) fn begin_line_after(store: &Store, entry: &Entry, is_left: bool) -> io::Result<()> {
    let record = entry.record();
    // A line is of one file's contents; a flattened image is in several.
    if record.state != CopyState::Owner || record.read_only || record.flat.is_some() {
        return Ok(());
    }
    let path = store.beside(&record.current_path().map_err(io::Error::other)?);
    let at = line_path(store, &record.name);
    let known = Known::look_up(&at, &path, is_left);
    if !known.is_trusted() {
        // First: once there is a new line, nobody sees any more that there was a change.
        send_again(store, &record)?;
    }
    match known.go_on() {
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

#[cfg(test)]
mod tests;
