//! Making writes to a file or device durable, for a guest and for dray.

use super::FileImage;
use crate::Result;
use rustix::io::{Errno, ReadWriteFlags};
use std::io::IoSlice;
use std::os::unix::fs::FileExt;

impl FileImage {
    pub(super) fn sync_data(&self, offset: u64, len: u64) -> Result<()> {
        self.file.sync_data().map_err(|e| self.fail("flushing", offset, len, e))
    }

    /// The same, and the time at which the file was changed is durable as well: an older file is told by that.
    pub(super) fn sync_all(&self, offset: u64, len: u64) -> Result<()> {
        self.file.sync_all().map_err(|e| self.fail("flushing", offset, len, e))
    }

    /// A sync that is not a guest's flush.
    pub(super) fn own_sync(&self, offset: u64, len: u64) -> Result<()> {
        self.watched(|| self.sync_all(offset, len))
    }

    /// A write that is durable on return. What the system says of one may be about others: it tells
    /// an open file of lost writes once, with whatever syncs it next.
    pub(super) fn write_through(&self, data: &[u8], offset: u64) -> Result<()> {
        let len = data.len() as u64;
        let error = |e| self.fail("writing", offset, len, e);
        let Some(direct) = &self.direct else {
            return self.watched(|| self.write_all(data, offset, true).map_err(error));
        };
        if !direct.takes(offset, len) {
            let _alone = direct.exclude_all();
            return self.watched(|| self.write_all(data, offset, true).map_err(error));
        }
        if direct.write(data, offset, true).is_ok() {
            return Ok(());
        }
        // The same file is open twice, and each is told of a loss. When the other one knows of
        // nothing new this was about a loss that is remembered already, or about this write: the
        // next try says which.
        self.own_sync(offset, len)?;
        self.watched(|| direct.write(data, offset, true).map_err(error))
    }

    /// A call that is no flush and may be told of lost writes.
    pub(super) fn watched(&self, call: impl FnOnce() -> Result<()>) -> Result<()> {
        self.write_back.own(&self.path, call)
    }

    pub(super) fn write_all(&self, data: &[u8], offset: u64, fua: bool) -> std::io::Result<()> {
        if !fua {
            return self.file.write_all_at(data, offset);
        }
        let mut done = 0;
        while done < data.len() {
            let rest = [IoSlice::new(&data[done..])];
            let at = offset + done as u64;
            match rustix::io::pwritev2(&self.file, &rest, at, ReadWriteFlags::DSYNC) {
                Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP) => {
                    self.file.write_all_at(&data[done..], at)?;
                    return self.file.sync_data();
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}
