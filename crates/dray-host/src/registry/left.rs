//! Copies that a migration away has left behind, which an operator ends here because it cannot be brought back:
//! also those whose files cannot be opened.

use super::closed::Closed;
use super::identity::{found_at, is_other_file};
use super::{Entry, Registry};
use crate::folder::intent;
use crate::folder::log::Folder;
use crate::record::{CopyState, ImageRecord, NameKind};
use crate::store::Store;
use dray_image::DeviceState;
use dray_types::{Epoch, ImageId, MigrationId};
use parking_lot::MutexGuard;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// How long somebody else may look for files before an image that waits for its own cannot be changed.
const LOOKS: Duration = Duration::from_secs(5);

/// What has handed its images over, and is to be over for this host.
pub(crate) struct Left {
    /// Which migration.
    pub migration: MigrationId,
    /// The images that it moved and that a guest may write, as far as its intent is there.
    pub names: BTreeMap<String, ImageId>,
    /// The epoch in which its target owns them.
    pub epoch: Epoch,
    /// Since when the copies lie here that are none yet: milliseconds since 1970.
    pub unix_ms: u64,
}

impl Left {
    fn binds(&self, record: &ImageRecord) -> bool {
        record.migration == Some(self.migration)
    }

    /// Whether it has left this copy, or image of which the record does not say yet that it is one.
    fn has(&self, record: &ImageRecord) -> bool {
        let named = || self.names.get(&record.name) == Some(&record.id);
        let its = self.binds(record) || record.migration.is_none() && named();
        its && !record.outlives_migration() && record.in_place.is_none()
    }
}

/// What an operator can do when the file of a copy is lost from which another host still reads, or may.
pub(crate) fn way_out(peer: Option<&str>, name: &str, migration: MigrationId) -> String {
    let peer = peer.unwrap_or("the host that serves it");
    format!(
        "`dray claim {name}` at {peer}, without what it does not have, and then `dray cancel {migration}` here"
    )
}

/// What an operator can do when a host has promised to serve an image, or serves it, and the file that it has is lost or
/// was changed.
pub(crate) fn way_back(peer: &str, name: &str) -> String {
    format!(
        "`dray cancel --discard` at {peer}; if that says that the image is handed over: `dray claim {name} \
         --source-is-fenced --accept-loss` at {peer}, which brings it back as it was at the handover, \
         without what was written since"
    )
}

/// The same when a host serves it and has everything: what the other one has is of no use but when the file is lost.
pub(crate) fn from_before(peer: &str, name: &str) -> String {
    format!(
        "keep its file, which has everything. Only if the file is lost: `dray claim {name} \
         --source-is-fenced --accept-loss` at {peer} brings it back as it was at the handover, without \
         what was written since"
    )
}

/// The same as [`way_out`] for the image of `record`, if it is such a copy.
pub(super) fn way_out_of(store: &Store, record: &ImageRecord) -> Option<String> {
    let migration = record.migration.filter(|_| record.state == CopyState::Replica)?;
    let peer = intent::peer(&Folder::of(store, migration));
    Some(way_out(peer.as_deref(), &record.name, migration))
}

impl Registry {
    /// No file of a closed image is opened until the answer is dropped.
    ///
    /// # Errors
    /// That one is being opened all the time.
    pub(crate) fn hold_files(&self) -> io::Result<MutexGuard<'_, ()>> {
        self.opening.try_lock_for(LOOKS).ok_or_else(|| {
            let why = "its file is being looked for, and the file system does not answer";
            io::Error::new(io::ErrorKind::TimedOut, why)
        })
    }

    /// Every image that was handed over is a copy by its record, which no limit removes: it may be the only one.
    /// Who calls [holds the files](Self::hold_files). Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports, or that the record of an image cannot be read.
    pub(crate) fn retire_left(&self, left: &Left) -> io::Result<()> {
        if let Some((name, _)) = self
            .all_closed()
            .into_iter()
            .find(|(name, known)| known.absent.is_none() && self.get(name).is_none())
        {
            let why = format!("the record of image '{name}' cannot be read, and may tell of it");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        for record in self.all_records().into_iter().filter(|record| left.has(record)) {
            match self.get(&record.name) {
                _ if record.state == CopyState::Replica => {}
                Some(entry) => {
                    entry.disk.park_now();
                    self.retire(&entry, left.epoch, left.unix_ms)?;
                }
                None => self.retire_absent(&record, left.epoch)?,
            }
            self.change_record(&record.name, |record| {
                record.replica.iter_mut().for_each(|note| note.stays = true);
            })?;
        }
        Ok(())
    }

    /// The image was handed over, and its file cannot be opened: what lies there gets a copy's name if it is the
    /// image's.
    fn retire_absent(&self, record: &ImageRecord, epoch: Epoch) -> io::Result<()> {
        let is_there = found_at(&self.store, record).is_some();
        if record.device {
            self.mark(&record.path).set(DeviceState::Replica(epoch)).map_err(io::Error::other)?;
        } else if is_there && !is_other_file(&self.store, record) {
            let names = self.names(record)?;
            let named = match record.flat {
                Some(_) => names.retire_chain(epoch),
                None => names.make_replica(epoch),
            };
            named.map_err(io::Error::other)?;
        }
        self.change_record(&record.name, |record| {
            record.state = CopyState::Replica;
            if !record.device {
                record.place = NameKind::Replica(epoch);
            }
            record.epoch = epoch;
        })
    }

    /// No image takes part in the migration any more, and who vouches for what it has closed is its record again. A
    /// QEMU that still has a disk gets errors from now on: it only wants to quit. Who calls [holds the
    /// files](Self::hold_files). Can be repeated.
    ///
    /// # Errors
    /// What the store reports.
    pub(crate) fn let_go_left(&self, left: &Left) -> io::Result<()> {
        let its = |record: &ImageRecord| left.binds(record) || left.has(record);
        for record in self.all_records().into_iter().filter(its) {
            let name = &record.name;
            if left.binds(&record) {
                self.change_record(name, |record| record.migration = None)?;
            }
            if record.in_place.is_some() {
                // The name was its guest's alone; the file stays.
                self.forget_closed(name)?;
            } else if let Some(entry) = self.get(name) {
                leave(&entry);
                self.vouch(name);
            }
        }
        Ok(())
    }

    /// Forgets an image, open or not; its file stays. Clients that wait for it are cut off.
    ///
    /// # Errors
    /// What the store reports.
    pub(super) fn forget_closed(&self, name: &str) -> io::Result<Option<Closed>> {
        let closed = self.closed(name);
        self.forget(name)?;
        let absent = closed.iter().filter_map(|closed| closed.absent.as_ref());
        absent.for_each(|absent| absent.disk.withdraw());
        Ok(closed)
    }

    /// Changes the record of an image, durably, whether it is open or not.
    fn change_record(&self, name: &str, change: impl FnOnce(&mut ImageRecord)) -> io::Result<()> {
        if let Some(entry) = self.get(name) {
            return self.update(&entry, change);
        }
        let Some(absent) = self.closed(name).and_then(|known| known.absent) else { return Ok(()) };
        let mut record = absent.record;
        change(&mut record);
        self.path_of(name).put(&record)?;
        // Nobody else changes it while the files are held.
        let mut closed = self.closed.lock();
        if let Some(absent) = closed.get_mut(name).and_then(|known| known.absent.as_mut()) {
            absent.record = record;
        }
        Ok(())
    }
}

/// All of a copy was durable at the handover, and what was lost before is told.
fn leave(entry: &Arc<Entry>) {
    if entry.record().state == CopyState::Replica {
        entry.file.forget_losses();
        entry.depart();
    }
}
