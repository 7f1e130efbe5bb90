//! What an image is called while it comes, while it is here and after it has left (I1): the names
//! of files, the markers of devices, and the records that follow them.

use super::lines::begin_line;
use super::{CopyState, Entry, Place, Registry, is_device};
use crate::lineage::{ReplicaNote, stamp_of};
use crate::migration::source::unix_ms;
use dray_image::{DeviceMark, DeviceState, ImageNames};
use dray_types::{Ancestor, Epoch};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, PoisonError};

impl Registry {
    /// The copy left behind by a handover loses the image's name, so that nothing opens it by
    /// accident (I1); a block device is marked and made read-only. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn retire(&self, entry: &Entry, epoch: Epoch) -> io::Result<()> {
        entry.drop_locks();
        let record = entry.record();
        if record.device {
            self.mark(&record.path).set(DeviceState::Replica(epoch)).map_err(io::Error::other)?;
        } else if record.place != Place::Replica(epoch) {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            let named = match &entry.flat {
                Some(_) => names.retire_chain(epoch),
                None => names.make_replica(epoch),
            };
            named.map_err(io::Error::other)?;
        }
        if let Some(flat) = &entry.flat {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            flat.chain.moved(&names.replica(epoch));
        }
        let note = self.note_of(entry, epoch)?;
        self.update(entry, |record| {
            record.state = CopyState::Replica;
            if !record.device {
                record.place = Place::Replica(epoch);
            }
            record.epoch = epoch;
            record.replica = note;
        })
    }

    /// What the copy left behind in `epoch` holds: the generation that was open. The file is at rest;
    /// what was noted before a restart stays, whatever the file looks like by now.
    fn note_of(&self, entry: &Entry, epoch: Epoch) -> io::Result<Option<ReplicaNote>> {
        let record = entry.record();
        if record.state == CopyState::Replica || is_device(&record.path) {
            return Ok(record.replica);
        }
        let generation = match (entry.line(), &entry.flat) {
            (Some(line), _) => line.lineage().open(),
            // One that no line knows: for its age only, nothing can begin with it.
            (None, Some(_)) => Ancestor { id: crate::lineage::random_generation()?, number: 0 },
            (None, None) => return Ok(None),
        };
        let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
        Ok(Some(ReplicaNote {
            generation,
            stamp: stamp_of(&names.replica(epoch))?,
            since_unix_ms: unix_ms(),
            distrusted: Vec::new(),
        }))
    }

    /// Undoes [`retire`](Self::retire): this host owns the image again. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn restore(&self, entry: &Entry, epoch: Epoch) -> io::Result<()> {
        let record = entry.record();
        if record.device {
            self.mark(&record.path).clear().map_err(io::Error::other)?;
        } else if let Place::Replica(replica) = record.place {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            let named = match &entry.flat {
                Some(_) => names.restore_chain(replica),
                None => names.restore_replica(replica, record.mode),
            };
            named.map_err(io::Error::other)?;
            if let Some(flat) = &entry.flat {
                flat.chain.moved(&names.chain());
            }
        }
        self.update(entry, |record| {
            record.state = CopyState::Owner;
            record.place = if record.flat.is_some() { Place::Chain } else { Place::Named };
            record.epoch = epoch;
            record.replica = None;
        })?;
        // After a restart there is none yet: what was open then is not trusted.
        if entry.line().is_none() { begin_line(&self.store, entry) } else { Ok(()) }
    }

    /// The marker of the block device at `path`.
    pub fn mark(&self, path: &Path) -> DeviceMark {
        DeviceMark::of(&self.store.images(), path)
    }

    /// An image that was on its way is complete: its file gets its name, a device loses its marker.
    /// Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn finish_partial(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        if record.place == Place::Partial {
            if record.device {
                self.mark(&record.path).clear().map_err(io::Error::other)?;
            } else {
                let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
                names.finish_partial(record.mode).map_err(io::Error::other)?;
            }
        }
        self.update(entry, |record| {
            record.place = Place::Named;
            record.state = CopyState::Owner;
        })?;
        // A line that could not be begun when the guest came: what it wrote since is in no set.
        if entry.line().is_none() { self.end_line(entry) } else { Ok(()) }
    }

    /// Deletes an incomplete image and forgets it. A block device stays, with contents that nobody
    /// may rely on. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn remove_partial(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        entry.drop_locks();
        if record.in_place.is_some() {
            // It was here before, and others may use it.
        } else if record.device {
            self.mark(&record.path).clear().map_err(io::Error::other)?;
        } else {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            names.remove_partial().map_err(io::Error::other)?;
        }
        self.forget(&record.name)
    }

    /// The image on this device, whatever path it is known by.
    pub fn on_device(&self, device: &File) -> Option<Arc<Entry>> {
        let number = device.metadata().ok()?.rdev();
        let same = |entry: &Arc<Entry>| {
            let meta = entry.file.file().metadata();
            meta.is_ok_and(|meta| meta.file_type().is_block_device() && meta.rdev() == number)
        };
        self.all().into_iter().find(same)
    }

    /// What the markers say of this device, and where the marker is.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn marked(&self, device: &File) -> dray_image::Result<Option<(DeviceMark, DeviceState)>> {
        let Some(mark) = DeviceMark::find(&self.store.images(), device)? else { return Ok(None) };
        Ok(mark.get()?.map(|state| (mark, state)))
    }

    /// Deletes the file of a replica and forgets it. A block device is only forgotten: it stays
    /// marked and read-only.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn remove_replica(&self, entry: &Entry) -> io::Result<()> {
        let _taking = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        let record = entry.record();
        if record.state != CopyState::Replica {
            return Err(io::Error::other("it is not a replica any more"));
        }
        if record.migration.is_some() {
            return Err(io::Error::other("it may be the only copy: its migration is not over"));
        }
        if let Place::Replica(epoch) = record.place {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            if let Some(flat) = &entry.flat {
                flat.chain.close();
                names.remove_overlay(record.overlay_id()).map_err(io::Error::other)?;
            }
            names.remove_replica(epoch).map_err(io::Error::other)?;
        }
        self.forget(&record.name)
    }
}
