//! An image that was claimed, and two that may want it: the QEMU that the VM had before it left, whose guest is as it was
//! at the handover, and whoever starts the VM anew. The one that changes the image first has it.

use super::past::Shut;
use super::{Entry, Process, Registry};
use crate::record::ImageRecord;
use dray_image::{
    Attempt, Client, Error, ErrorKind, Extent, Geometry, Image, Result, WriteBackError, ZeroMode,
};
use dray_types::MigrationId;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// An image as one of the processes sees it that may have it.
pub(super) struct Contender {
    image: Arc<dyn Image>,
    entry: Arc<Entry>,
    registry: Arc<Registry>,
    migration: MigrationId,
    process: Option<Process>,
    /// It has the image.
    has_it: AtomicBool,
}

impl Contender {
    /// Before each change.
    fn may_change(&self) -> Result<()> {
        if self.has_it.load(Ordering::Acquire) {
            return Ok(());
        }
        // A VM that was started on the file while no agent ran.
        let is_taken = !matches!(self.entry.used_elsewhere(), Ok(None));
        let may = self.registry.may_change(self.migration, self.process, is_taken);
        may.map_err(|why| {
            let why = match why {
                Shut::HasLeft => {
                    "another process has changed the claimed image; end this qemu".to_owned()
                }
                Shut::GoesOn(Process { pid, .. }) => {
                    format!("the vm goes on in its old qemu, process {pid}")
                }
                Shut::Unnoted(why) => {
                    format!("it cannot be noted who has the claimed image: {why}")
                }
            };
            Error::new(ErrorKind::Unavailable, "serving the image", &why)
        })?;
        self.has_it.store(true, Ordering::Release);
        Ok(())
    }
}

impl Image for Contender {
    fn geometry(&self) -> Geometry {
        self.image.geometry()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.image.read_at(buf, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        self.may_change()?;
        self.image.write_at(data, offset, fua)
    }

    fn zero(&self, offset: u64, len: u64, mode: ZeroMode, fua: bool) -> Result<()> {
        self.may_change()?;
        self.image.zero(offset, len, mode, fua)
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.may_change()?;
        self.image.discard(offset, len, fua)
    }

    fn flush(&self) -> Result<()> {
        self.image.flush()
    }

    fn flush_with_time(&self) -> Result<()> {
        self.image.flush_with_time()
    }

    fn sync(&self) -> Result<()> {
        self.image.sync()
    }

    fn is_withdrawn(&self) -> bool {
        self.image.is_withdrawn()
    }

    fn look_at(&self, client: &Arc<Client>) {
        self.image.look_at(client);
    }

    fn write_back_error(&self) -> Option<WriteBackError> {
        self.image.write_back_error()
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        self.image.extents(offset, len, max)
    }

    fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        self.image.prefetch(offset, len)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<Attempt> {
        self.image.try_read_at(buf, offset)
    }

    fn try_write_at(&self, data: &[u8], offset: u64) -> Result<Attempt> {
        match self.has_it.load(Ordering::Acquire) {
            true => self.image.try_write_at(data, offset),
            // It is written down who has it.
            false => Ok(Attempt::WouldWait),
        }
    }
}

impl Registry {
    /// The migration from which the image was claimed, if its VM's old QEMU could go on and somebody has changed the
    /// file since an agent wrote the image's record. While nobody has the image no agent changes it.
    pub(super) fn claim_overtaken(&self, record: &ImageRecord) -> Option<MigrationId> {
        let migration = self.contested(record)?;
        let times = || {
            let path = record.current_path().map_err(std::io::Error::other)?;
            let image = self.store.beside(&path).look()?.changed;
            std::io::Result::Ok((image, self.path_of(&record.name).look()?.changed))
        };
        times().map_or(true, |(image, noted)| image > noted).then_some(migration)
    }

    /// What a process gets of an image, or somebody of whom nobody knows the process. Its connections get the same.
    pub fn served_to(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        process: Option<Process>,
    ) -> Arc<dyn Image> {
        let Some(migration) = self.contested(&entry.record()) else {
            return Arc::clone(&entry.disk) as _;
        };
        let mut contenders = entry.contenders.lock();
        contenders.retain(|one| one.strong_count() > 0);
        let mut known = contenders.iter().filter_map(std::sync::Weak::upgrade);
        if let Some(known) = known.find(|one| (one.process, one.migration) == (process, migration))
        {
            return known;
        }
        let new = Arc::new(Contender {
            image: Arc::clone(&entry.disk) as _,
            entry: Arc::clone(entry),
            registry: Arc::clone(self),
            migration,
            process,
            has_it: AtomicBool::new(false),
        });
        contenders.push(Arc::downgrade(&new));
        new
    }
}
