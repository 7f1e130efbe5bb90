//! How ranges of a file or device become zeros.

use super::FileImage;
use crate::Result;
use crate::backend::direct::Direct;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

/// Size of one write when zeros have to be written: large enough to be cheap, small enough to be
/// constant data.
const ZEROS_LEN: usize = 256 << 10;
static ZEROS: [u8; ZEROS_LEN] = [0; ZEROS_LEN];

impl FileImage {
    /// Asks the file system to zero a range by `how`; false when it cannot.
    fn fallocate(
        &self,
        how: FallocateFlags,
        cannot: &AtomicBool,
        offset: u64,
        len: u64,
    ) -> Result<bool> {
        if cannot.load(Ordering::Relaxed) {
            return Ok(false);
        }
        loop {
            match rustix::fs::fallocate(&self.file, how | FallocateFlags::KEEP_SIZE, offset, len) {
                Ok(()) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV) => {
                    cannot.store(true, Ordering::Relaxed);
                    return Ok(false);
                }
                // A device refuses what is not aligned to its sectors, however often it is asked.
                Err(Errno::INVAL) => return Ok(false),
                Err(e) => return Err(self.fail("zeroing", offset, len, e.into())),
            }
        }
    }

    fn write_zeros(&self, offset: u64, len: u64) -> Result<()> {
        let mut done = 0;
        while done < len {
            let part = (len - done).min(ZEROS_LEN as u64);
            self.file
                .write_all_at(&ZEROS[..part as usize], offset + done)
                .map_err(|e| self.fail("zeroing", offset, len, e))?;
            done += part;
        }
        Ok(())
    }

    pub(super) fn clear(&self, offset: u64, len: u64, may_unmap: bool, fua: bool) -> Result<()> {
        // Past the end there is nothing but zeros, and writing some would make the file longer.
        let len = len.min(self.end()?.saturating_sub(offset));
        if len == 0 {
            return Ok(());
        }
        let _alone = self.direct.as_ref().map(Direct::exclude_all);
        let punched = may_unmap
            && self.fallocate(FallocateFlags::PUNCH_HOLE, &self.cannot_punch, offset, len)?;
        let done = punched
            || self.fallocate(FallocateFlags::ZERO_RANGE, &self.cannot_zero_range, offset, len)?;
        if !done {
            self.write_zeros(offset, len)?;
        }
        if fua { self.own_sync(offset, len) } else { Ok(()) }
    }
}
