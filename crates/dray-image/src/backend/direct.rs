//! Direct I/O: requests that fit the device's alignment go round the page cache.
//!
//! What does not fit goes through the page cache (the kernel then does the read-modify-write), but
//! never at the same time as a direct write: a page that was read before a direct write and
//! written back after it would undo it.

use crate::{Error, ErrorKind, Result};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Alignments in use by devices, smallest first.
const ALIGNMENTS: [usize; 2] = [512, 4096];
/// Alignment of bounce buffers in memory: enough for every device.
const MEMORY_ALIGNMENT: usize = 4096;
/// Longest piece that goes through one bounce buffer.
const BOUNCE_LEN: usize = 1 << 20;

/// A file opened for direct I/O.
pub(crate) struct Direct {
    file: File,
    alignment: usize,
    /// Shared by direct writes, exclusive for writes through the page cache.
    writers: RwLock<()>,
}

/// Memory at an address that direct I/O accepts.
struct Bounce {
    memory: Vec<u8>,
    skip: usize,
    len: usize,
}

impl Bounce {
    fn new(len: usize) -> Self {
        let memory = vec![0; len + MEMORY_ALIGNMENT];
        let skip = memory.as_ptr().align_offset(MEMORY_ALIGNMENT);
        Self { memory, skip, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.skip..self.skip + self.len]
    }
}

impl Direct {
    /// Opens what `file` is once more, for direct I/O.
    pub(crate) fn open(file: &File, path: &Path, write: bool) -> Result<Self> {
        let context = || format!("opening image {} for direct I/O", path.display());
        // Through the descriptor: the path may be renamed, and a partial image has mode 0000.
        let again = File::options()
            .read(true)
            .write(write)
            .custom_flags(libc::O_DIRECT | libc::O_CLOEXEC)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .map_err(|e| refused(context(), e))?;
        let alignment = alignment(&again).map_err(|e| refused(context(), e))?;
        Ok(Self { file: again, alignment, writers: RwLock::new(()) })
    }

    /// Whether a request can go directly.
    pub(crate) fn takes(&self, offset: u64, len: u64) -> bool {
        let alignment = self.alignment as u64;
        offset.is_multiple_of(alignment) && len.is_multiple_of(alignment)
    }

    /// Keeps direct writes out while something changes through the page cache.
    pub(crate) fn exclude_all(&self) -> RwLockWriteGuard<'_, ()> {
        self.writers.write()
    }

    fn share(&self) -> RwLockReadGuard<'_, ()> {
        self.writers.read()
    }

    fn fits(&self, memory: *const u8) -> bool {
        memory.align_offset(self.alignment) == 0
    }

    /// Reads into `buf`; less than all of it only where the file ends.
    pub(crate) fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        if self.fits(buf.as_ptr()) {
            return self.read_aligned(buf, offset);
        }
        let mut bounce = Bounce::new(buf.len().min(BOUNCE_LEN));
        let mut done = 0;
        while done < buf.len() {
            let part = (buf.len() - done).min(BOUNCE_LEN);
            let memory = &mut bounce.bytes()[..part];
            let count = self.read_aligned(memory, offset + done as u64)?;
            buf[done..done + count].copy_from_slice(&memory[..count]);
            done += count;
            if count < part {
                break;
            }
        }
        Ok(done)
    }

    fn read_aligned(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => {
                    done += count;
                    // Only the file's end leaves an odd count, and nothing can follow it.
                    if !count.is_multiple_of(self.alignment) {
                        break;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    /// Writes all of `data`.
    pub(crate) fn write(&self, data: &[u8], offset: u64, fua: bool) -> io::Result<()> {
        let _sharing = self.share();
        if self.fits(data.as_ptr()) {
            return self.write_aligned(data, offset, fua);
        }
        let mut bounce = Bounce::new(data.len().min(BOUNCE_LEN));
        for (nth, part) in data.chunks(BOUNCE_LEN).enumerate() {
            let memory = &mut bounce.bytes()[..part.len()];
            memory.copy_from_slice(part);
            self.write_aligned(memory, offset + (nth * BOUNCE_LEN) as u64, fua)?;
        }
        Ok(())
    }

    fn write_aligned(&self, data: &[u8], offset: u64, fua: bool) -> io::Result<()> {
        let flags = if fua { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
        let mut done = 0;
        while done < data.len() {
            let rest = [IoSlice::new(&data[done..])];
            match rustix::io::pwritev2(&self.file, &rest, offset + done as u64, flags) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}

/// The kernel only says "invalid" of a file system that has no direct I/O.
fn refused(context: String, why: io::Error) -> Error {
    if why.raw_os_error() == Some(libc::EINVAL) {
        return Error::new(ErrorKind::Invalid, context, "its file system has no direct I/O");
    }
    Error::io(context, why)
}

/// The alignment of offsets, lengths and memory that direct I/O to the file needs.
fn alignment(file: &File) -> io::Result<usize> {
    if let Some(told) = told(file) {
        return if told == 0 { Err(Errno::INVAL.into()) } else { Ok(told) };
    }
    if file.metadata()?.file_type().is_block_device() {
        return Ok(rustix::fs::ioctl_blksszget(file)? as usize);
    }
    probe(file)
}

/// What the kernel says of it (Linux 6.1 and newer, not of every file system); 0 where there is no direct I/O.
fn told(file: &File) -> Option<usize> {
    let told = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let known = told.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    let (memory, offset) = (told.stx_dio_mem_align, told.stx_dio_offset_align);
    known.then(|| if offset == 0 { 0 } else { memory.max(offset) as usize })
}

/// The smallest alignment at which a read succeeds. A read behind the end, as of a file that has just been made,
/// succeeds at any.
fn probe(file: &File) -> io::Result<usize> {
    let mut bounce = Bounce::new(MEMORY_ALIGNMENT);
    let mut last = None;
    for alignment in ALIGNMENTS {
        // At `alignment`, not 0: every device accepts offset 0.
        match file.read_at(&mut bounce.bytes()[..alignment], alignment as u64) {
            Ok(0) => last = None,
            Ok(_) => return Ok(alignment),
            Err(e) => last = Some(e),
        }
    }
    last.map_or(Ok(MEMORY_ALIGNMENT), Err)
}
