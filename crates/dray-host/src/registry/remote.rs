//! Clients of other hosts. They go on running when the power of this one fails, or when a file system here is mounted
//! anew, and what they had written and not flushed is lost then: their next flush has to say so.
//!
//! A small file of an image names the boot in which such a client was attached last, and the one in which a loss was owed
//! to it. It is made before a client is let in, and durable before the client's first request; it is all zeros once the
//! last one has gone and all that was written is durable. Who is told is whoever flushes first.

use super::{Entry, Registry, loss_path, losses};
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

/// What the file says: boots, or zeros.
#[derive(Clone, Copy)]
struct Mark {
    /// A client was attached in this one.
    attached: [u8; BOOT_LEN],
    /// In this one the image was found to owe its clients a loss.
    owed: [u8; BOOT_LEN],
}

const NO_BOOT: [u8; BOOT_LEN] = [0; BOOT_LEN];
/// No boot has this id.
const UNKNOWN: [u8; BOOT_LEN] = [u8::MAX; BOOT_LEN];
const LEN: usize = 2 * BOOT_LEN;
const NOBODY: Mark = Mark { attached: NO_BOOT, owed: NO_BOOT };

impl Mark {
    /// Writes the file in place, so that its room stays.
    fn put(&self, path: &StatePath) -> io::Result<()> {
        let file = path.open_or_create()?;
        file.write_at(&[self.attached, self.owed].concat(), 0)?;
        file.sync()
    }

    /// What the file says; nothing where there is none.
    fn read(path: &StatePath) -> io::Result<Self> {
        let bytes = match path.read() {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(NOBODY),
            read => read?,
        };
        let (mut mark, len) = (NOBODY, bytes.len().min(LEN));
        let (attached, owed) = bytes[..len].split_at(len.min(BOOT_LEN));
        mark.attached[..attached.len()].copy_from_slice(attached);
        mark.owed[..owed.len()].copy_from_slice(owed);
        Ok(mark)
    }
}

impl Registry {
    /// There is room for what has to be noted of a client of another host.
    ///
    /// # Errors
    /// What the file system reports: such a client could not be told what it loses.
    pub fn make_room_for_remote(&self, entry: &Entry) -> io::Result<()> {
        let path = mark_path(&self.store, &entry.record().name);
        match path.look() {
            Ok(look) if look.len == LEN as u64 => Ok(()),
            _ => Mark::read(&path)?.put(&path),
        }
    }

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
        let boot = path.files().boot();
        let put = boot.and_then(|attached| Mark { attached, owed: NO_BOOT }.put(&path));
        if let Err(why) = put {
            tracing::warn!(image = record.name, %why,
                "a client of another host will not be told what a power cut loses");
        }
    }

    /// Such a client has gone, and none of its requests is under way.
    pub fn detached_remotely(&self, entry: &Entry) {
        let record = entry.record();
        if !self.was_last(&record.name) {
            return;
        }
        // It may only have lost its link, and come back after a power cut. The storage may hang: nobody else waits for it.
        let is_durable = entry.disk.backing().sync().is_ok() && entry.file.untold_loss().is_none();
        let remote = self.remote_clients.lock();
        if !is_durable || remote.contains_key(&record.name) {
            return;
        }
        if let Err(why) = NOBODY.put(&mark_path(&self.store, &record.name)) {
            tracing::debug!(image = record.name, %why, "cannot note that its last client has gone");
        }
    }

    /// Whether such a client is still to be told of a loss of this boot.
    pub fn owes_remote_client(&self, entry: &Entry) -> bool {
        let path = mark_path(&self.store, &entry.record().name);
        let owed = Mark::read(&path).map(|mark| mark.owed);
        owed.is_ok_and(|owed| owed != NO_BOOT && path.files().boot().is_ok_and(|now| owed == now))
            && entry.file.untold_loss().is_some()
    }

    /// Counts one connection less; whether it was the last one.
    fn was_last(&self, name: &str) -> bool {
        let mut remote = self.remote_clients.lock();
        let Some(count) = remote.get_mut(name) else { return false };
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            remote.remove(name);
        }
        is_last
    }

    /// What such a client of an image had written before its host was booted, or its file system was mounted anew, may be
    /// lost: the next flush says so. False when a restart would forget that.
    pub(super) fn tell_remote_clients(&self, record: &ImageRecord, file: &dyn ImageFile) -> bool {
        let path = mark_path(&self.store, &record.name);
        let now = path.files().boot().unwrap_or(NO_BOOT);
        // What cannot be read may name a client.
        let mark = Mark::read(&path).unwrap_or(Mark { attached: UNKNOWN, owed: NO_BOOT });
        if mark.attached == NO_BOOT || record.state != CopyState::Owner {
            return true;
        }
        let was_here = mark.attached == now;
        // What says the rest of it may be lost or damaged since.
        let says = || losses::says_something(&loss_path(&self.store, &record.name));
        let is_found = !was_here && mark.owed == now && says();
        let is_kept = was_here && !record.was_mounted_anew(&**self.store.images().files());
        if is_found || is_kept {
            return true;
        }
        let of_earlier_boot = mark.owed != NO_BOOT && mark.owed != now;
        if of_earlier_boot && losses::is_settled(&loss_path(&self.store, &record.name)) {
            // It was told in an earlier boot, and nobody was attached since.
            return NOBODY.put(&path).is_ok();
        }
        let why = "the host was started anew, or the file system mounted anew, while a client of another host was \
                   attached";
        let why = dray_image::Error::new(ErrorKind::Io, "keeping what was written", why);
        file.owe_loss(&why) && Mark { owed: now, ..mark }.put(&path).is_ok()
    }
}
