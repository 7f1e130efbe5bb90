//! Clients of other hosts. They go on running when the power of this one fails, or when a file system here is mounted
//! anew, and what they had written and not flushed is lost then: their next flush has to say so.
//!
//! A small file of an image names the boot in which such a client was attached last. It is durable before the client's
//! first request, and all zeros once the last one has gone and all that was written is durable.

use super::{Entry, Registry};
use crate::record::{CopyState, ImageRecord};
use crate::store::Store;
use dray_files::StatePath;
use dray_files::files::BOOT_LEN;
use dray_image::{ErrorKind, ImageFile};
use std::io;

/// The file of the image called `name`.
pub(super) fn mark_path(store: &Store, name: &str) -> StatePath {
    store.images().join(format!("{name}.remote"))
}

/// Writes the file in place, so that its room stays.
fn put(path: &StatePath, boot: &[u8; BOOT_LEN]) -> io::Result<()> {
    let file = path.open_or_create()?;
    file.write_at(boot, 0)?;
    file.sync()
}

/// The boot in which such a client was attached, if one was.
fn marked(path: &StatePath) -> io::Result<Option<Vec<u8>>> {
    match path.read() {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
        read => Ok(read.ok().filter(|boot| boot.iter().any(|&byte| byte != 0))),
    }
}

impl Registry {
    /// A client of another host is about to send requests.
    pub fn attached_remotely(&self, entry: &Entry) {
        let record = entry.record();
        if record.read_only {
            return;
        }
        let mut remote = self.remote_clients.lock();
        let count = remote.entry(record.name.clone()).or_default();
        *count += 1;
        if *count > 1 {
            return;
        }
        let path = mark_path(&self.store, &record.name);
        let put = path.files().boot().and_then(|boot| put(&path, &boot));
        if let Err(why) = put {
            tracing::warn!(image = record.name, %why,
                "a client of another host will not be told what a power cut loses");
        }
    }

    /// Such a client has gone, and none of its requests is under way.
    pub fn detached_remotely(&self, entry: &Entry) {
        let record = entry.record();
        let mut remote = self.remote_clients.lock();
        let Some(count) = remote.get_mut(&record.name) else { return };
        *count = count.saturating_sub(1);
        if *count > 0 {
            return;
        }
        remote.remove(&record.name);
        // It may only have lost its link, and come back after a power cut.
        let is_durable = entry.disk.backing().sync().is_ok() && entry.file.untold_loss().is_none();
        if is_durable && let Err(why) = put(&mark_path(&self.store, &record.name), &[0; BOOT_LEN]) {
            tracing::debug!(image = record.name, %why, "cannot note that its last client has gone");
        }
    }

    /// What such a client of an image had written before its host was booted, or its file system was mounted anew, may be
    /// lost: the next flush says so. False when a restart would forget that.
    pub(super) fn tell_remote_clients(&self, record: &ImageRecord, file: &dyn ImageFile) -> bool {
        let path = mark_path(&self.store, &record.name);
        let Ok(Some(then)) = marked(&path) else { return true };
        let files = self.store.images();
        let is_lost = path.files().boot().map_or(true, |now| then != now)
            || record.was_mounted_anew(&**files.files());
        if record.state != CopyState::Owner || !is_lost {
            return true;
        }
        let why = "the host was started anew, or the file system mounted anew, while a client of another host was \
                   attached";
        let why = dray_image::Error::new(ErrorKind::Io, "keeping what was written", why);
        file.owe_loss(&why) && put(&path, &[0; BOOT_LEN]).is_ok()
    }
}
