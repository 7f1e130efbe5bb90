//! A file without a name in which a snapshot's old blocks are kept: it is gone with the process.

use crate::snapshot::Spill;
use crate::{Error, ErrorKind, Result};
use dray_types::{BLOCK_SIZE, BlockRange};
use rustix::fs::{FallocateFlags, Mode, OFlags, StatVfs};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// A twentieth of a file system, at most this many bytes, stays free: the guests there need room
/// more than a backup does.
const LEAVES_FREE: u64 = 1 << 30;
const LEAVES_SHARE: u64 = 20;
/// Kept bytes between two looks at how much is free.
const LOOK_EVERY: u64 = 1 << 20;
const WHAT: &str = "keeping a block aside";

/// A nameless sparse file, each block in its own place.
#[derive(Debug)]
pub struct SpillFile {
    file: File,
    /// Bytes to keep before the next look.
    until_look: AtomicU64,
}

impl SpillFile {
    /// A file in folder `dir` for an image of `len` bytes.
    ///
    /// # Errors
    /// What the file system reports, also that it has no files without names.
    pub fn create(dir: &Path, len: u64) -> Result<Self> {
        let fail = |why| Error::io(format!("making a file in {}", dir.display()), why);
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file: File = rustix::fs::open(dir, flags, Mode::from_raw_mode(0o600))
            .map_err(|why| fail(why.into()))?
            .into();
        file.set_len(BlockRange::whole(len).byte_len()).map_err(fail)?;
        Ok(Self { file, until_look: AtomicU64::new(0) })
    }

    /// Whether guests keep enough room when some more is kept.
    fn look(&self, len: u64) -> Result<()> {
        let left = self.until_look.load(Ordering::Relaxed);
        if left >= len {
            self.until_look.store(left - len, Ordering::Relaxed);
            return Ok(());
        }
        let stat = rustix::fs::fstatvfs(&self.file).map_err(|why| Error::io(WHAT, why.into()))?;
        refuse_full(&stat, LOOK_EVERY, WHAT)?;
        self.until_look.store(LOOK_EVERY, Ordering::Relaxed);
        Ok(())
    }
}

/// Whether guests keep enough room in the file system of `dir` when `more` bytes are taken there, for
/// `what`.
///
/// # Errors
/// `NoSpace` when they do not, or what the file system reports.
pub fn leave_room(dir: &Path, more: u64, what: &str) -> Result<()> {
    let stat = rustix::fs::statvfs(dir).map_err(|why| Error::io(what, why.into()))?;
    refuse_full(&stat, more, what)
}

/// Length to export for an image under a format driver: files grow, exports do not, so there is
/// room for a quarter more than the guest can see, and for a gigabyte of the format's own.
pub fn growable_len(file: u64, guest: u64) -> u64 {
    let room = guest + guest / 4 + (1 << 30);
    file.max(room).next_multiple_of(BLOCK_SIZE)
}

fn refuse_full(stat: &StatVfs, more: u64, what: &str) -> Result<()> {
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let all = stat.f_blocks.saturating_mul(stat.f_frsize);
    if free < (all / LEAVES_SHARE).min(LEAVES_FREE).saturating_add(more) {
        let why = "the pool is nearly full, and its images need the free space";
        return Err(Error::new(ErrorKind::NoSpace, what, why));
    }
    Ok(())
}

impl Spill for SpillFile {
    fn keep(&self, run: BlockRange, data: &[u8]) -> Result<()> {
        self.look(data.len() as u64)?;
        self.file.write_all_at(data, run.byte_offset()).map_err(|why| Error::io(WHAT, why))
    }

    fn read(&self, run: BlockRange, buf: &mut [u8]) -> Result<()> {
        let fail = |why| Error::io("reading a block that was kept aside", why);
        self.file.read_exact_at(buf, run.byte_offset()).map_err(fail)
    }

    fn forget(&self, run: BlockRange) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, len) = (run.start * BLOCK_SIZE, run.byte_len());
        // Where that is not possible the space comes back with the file's end.
        let _ = rustix::fs::fallocate(&self.file, flags, offset, len);
    }
}
