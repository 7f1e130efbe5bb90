//! An image in a raw file or on a block device.
//!
//! A file may be shorter than the image it holds (`export_len`): what lies past its end reads as
//! zeros, a write there extends it, a zero or discard there does nothing. Whether two programs may
//! use a file at once is the business of [`locks`](crate::locks), not of this module.

mod durable;
mod zeroing;

use crate::backend::ImageFile;
use crate::backend::bulk::Bulk;
use crate::backend::direct::Direct;
use crate::backend::write_back::{LossLog, Past, WriteBack};
use crate::image::WriteBackError;
use crate::sys;
use crate::{
    Attempt, Client, Error, ErrorKind, Extent, ExtentKind, FileId, Geometry, Image, Result,
    ZeroMode,
};
use rustix::fs::{Advice, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::io::IoSliceMut;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How to open a [`FileImage`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FileOptions {
    /// Writes are allowed.
    pub write: bool,
    /// Bypass the page cache.
    pub direct: bool,
    /// Length of the image, in bytes: that of the file or device when absent. A file may be shorter, for
    /// images that grow; what is longer is an image at its beginning.
    pub export_len: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    File,
    Device,
}

/// An image in a raw file or on a block device.
pub struct FileImage {
    file: File,
    /// The same file without the page cache, when direct I/O was asked for.
    direct: Option<Direct>,
    bulk: Bulk,
    write_back: WriteBack,
    path: PathBuf,
    kind: Kind,
    len: u64,
    write: bool,
    /// The file system or device said that it cannot; asked once.
    cannot_punch: AtomicBool,
    cannot_zero_range: AtomicBool,
    cannot_nowait: AtomicBool,
}

/// Opens what is at `path`. A device may be behind a link, as LVM makes them; a file is where it is said to be.
fn open(path: &Path, write: bool, flags: i32) -> std::io::Result<File> {
    let open = |more| {
        let flags = libc::O_CLOEXEC | flags | more;
        File::options().read(true).write(write).custom_flags(flags).open(path)
    };
    match open(libc::O_NOFOLLOW) {
        Err(link) if link.raw_os_error() == Some(libc::ELOOP) => {
            match path.metadata()?.file_type().is_block_device() {
                true => open(0),
                false => Err(link),
            }
        }
        opened => opened,
    }
}

impl FileImage {
    /// Opens the file or device at `path`.
    ///
    /// # Errors
    /// What the system reports; `Invalid` for something that is neither file nor block device.
    pub fn open(path: &Path, options: FileOptions) -> Result<Self> {
        let file = open(path, options.write, 0);
        let file = file.map_err(|e| Error::io(format!("opening image {}", path.display()), e))?;
        Self::from_file(file, path, options)
    }

    /// Opens the block device at `path` and claims it: as long as it is open nothing else can claim
    /// it (a mount, LVM, another agent).
    ///
    /// # Errors
    /// As [`open`](Self::open); `InUse` when something has claimed it.
    pub fn claim(path: &Path, options: FileOptions) -> Result<Self> {
        let context = || format!("opening device {}", path.display());
        let file = open(path, options.write, libc::O_EXCL).map_err(|e| match e.kind() {
            std::io::ErrorKind::ResourceBusy => Error::new(
                ErrorKind::InUse,
                context(),
                "it is in use: it is mounted, part of another device, or open in another program",
            ),
            _ => Error::io(context(), e),
        })?;
        let image = Self::from_file(file, path, options)?;
        if image.kind != Kind::Device {
            return Err(Error::new(ErrorKind::Invalid, context(), "it is not a block device"));
        }
        Ok(image)
    }

    /// An image in a file that is open already; `path` names it in errors.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_file(file: File, path: &Path, options: FileOptions) -> Result<Self> {
        let context = || format!("opening image {}", path.display());
        let kind_of = file.metadata().map_err(|e| Error::io(context(), e))?.file_type();
        let kind = if kind_of.is_file() {
            Kind::File
        } else if kind_of.is_block_device() {
            Kind::Device
        } else {
            return Err(Error::new(
                ErrorKind::Invalid,
                context(),
                "it is neither a regular file nor a block device",
            ));
        };
        let direct =
            options.direct.then(|| Direct::open(&file, path, options.write)).transpose()?;
        let mut image = Self {
            file,
            direct,
            bulk: Bulk::default(),
            write_back: WriteBack::default(),
            path: path.to_owned(),
            kind,
            len: 0,
            write: options.write,
            cannot_punch: AtomicBool::new(false),
            cannot_zero_range: AtomicBool::new(false),
            cannot_nowait: AtomicBool::new(false),
        };
        let end = image.end()?;
        let wanted = options.export_len.unwrap_or(end);
        if kind == Kind::Device && wanted > end {
            return Err(Error::new(ErrorKind::Invalid, context(), "a block device cannot grow"));
        }
        image.len = wanted;
        Ok(image)
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Which file it is; none when the system does not tell.
    pub fn id(&self) -> Option<FileId> {
        self.file.metadata().ok().map(|meta| FileId::of(&meta))
    }

    /// The file has at least `len` bytes from now on, durably, also more than is exported: who opens it anew exports
    /// them. A block device keeps its length.
    ///
    /// # Errors
    /// What the system reports.
    pub fn lengthen(&self, len: u64) -> Result<()> {
        let failed = |why| Error::io(self.context("lengthening", len, 0), why);
        let found = self.file.metadata().map_err(failed)?;
        if self.kind != Kind::Device && found.len() < len {
            self.file.set_len(len).map_err(failed)?;
        }
        self.file.sync_all().map_err(failed)
    }

    fn advise(&self, offset: u64, len: u64, advice: Advice) -> Result<()> {
        let Some(nonzero) = NonZeroU64::new(len) else { return Ok(()) };
        rustix::fs::fadvise(&self.file, offset, Some(nonzero), advice)
            .map_err(|e| self.fail("advising", offset, len, e.into()))
    }

    fn context(&self, what: &str, offset: u64, len: u64) -> String {
        format!("{what} image {} ({len} bytes at {offset})", self.path.display())
    }

    fn fail(&self, what: &str, offset: u64, len: u64, source: std::io::Error) -> Error {
        Error::io(self.context(what, offset, len), source)
    }

    /// Where the file or device ends now.
    fn end(&self) -> Result<u64> {
        if self.kind == Kind::Device {
            return rustix::fs::seek(&self.file, SeekFrom::End(0))
                .map_err(|e| self.fail("measuring", 0, 0, e.into()));
        }
        Ok(self.file.metadata().map_err(|e| self.fail("measuring", 0, 0, e))?.len())
    }

    fn check(&self, what: &str, offset: u64, len: u64) -> Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        let why = format!("the image ends at {}", self.len);
        Err(Error::new(ErrorKind::OutOfRange, self.context(what, offset, len), &why))
    }

    fn check_write(&self, what: &str, offset: u64, len: u64) -> Result<()> {
        self.check(what, offset, len)?;
        if self.write {
            return Ok(());
        }
        let why = "it is open for reading only";
        Err(Error::new(ErrorKind::ReadOnly, self.context(what, offset, len), why))
    }

    /// Fills what a read that met the end of the file did not fill.
    fn pad(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        if self.kind == Kind::Device {
            let source = std::io::ErrorKind::UnexpectedEof.into();
            return Err(self.fail("reading", offset, buf.len() as u64, source));
        }
        buf.fill(0);
        Ok(())
    }

    fn read_buffered(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            match self.file.read_at(&mut buf[done..], at) {
                Ok(0) => return self.pad(&mut buf[done..], at),
                Ok(count) => done += count,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.fail("reading", offset, buf.len() as u64, e)),
            }
        }
        Ok(())
    }

    /// End of the extent that begins at `at`, and what it is.
    fn extent_at(&self, at: u64, end: u64) -> Result<(u64, ExtentKind)> {
        match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
            Ok(data) if data > at => return Ok((data.min(end), ExtentKind::Hole)),
            Ok(_) => {}
            Err(Errno::NXIO) => return Ok((end, ExtentKind::Hole)),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((end, ExtentKind::Data)),
            Err(e) => return Err(self.fail("mapping", at, end - at, e.into())),
        }
        match rustix::fs::seek(&self.file, SeekFrom::Hole(at)) {
            // A hole that begins where data was found a moment ago: someone punched in between.
            Ok(hole) if hole <= at => Ok((end, ExtentKind::Data)),
            Ok(hole) => Ok((hole.min(end), ExtentKind::Data)),
            Err(Errno::NXIO) => Ok((end, ExtentKind::Hole)),
            Err(e) => Err(self.fail("mapping", at, end - at, e.into())),
        }
    }
}

impl Image for FileImage {
    fn geometry(&self) -> Geometry {
        // Requests that do not fit direct I/O go through the page cache: none has to be refused.
        Geometry { len: self.len, min_block: 1, preferred_block: 4096, read_only: !self.write }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let len = buf.len() as u64;
        self.check("reading", offset, len)?;
        if let Some(direct) = self.direct.as_ref().filter(|d| d.takes(offset, len)) {
            let done =
                direct.read(buf, offset).map_err(|e| self.fail("reading", offset, len, e))?;
            return if done < buf.len() {
                self.read_buffered(&mut buf[done..], offset + done as u64)
            } else {
                Ok(())
            };
        }
        self.read_buffered(buf, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        let len = data.len() as u64;
        self.check_write("writing", offset, len)?;
        if fua {
            return self.write_through(data, offset);
        }
        let written = match &self.direct {
            None => self.write_all(data, offset, false),
            Some(direct) if direct.takes(offset, len) => direct.write(data, offset, false),
            Some(direct) => {
                let _alone = direct.exclude_all();
                self.write_all(data, offset, false)
            }
        };
        written.map_err(|e| self.fail("writing", offset, len, e))
    }

    fn zero(&self, offset: u64, len: u64, mode: ZeroMode, fua: bool) -> Result<()> {
        self.check_write("zeroing", offset, len)?;
        self.clear(offset, len, mode == ZeroMode::MayUnmap, fua)
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.check_write("discarding", offset, len)?;
        self.clear(offset, len, true, fua)
    }

    fn flush(&self) -> Result<()> {
        self.write_back.guest(&self.path, || self.sync_data(0, self.len))
    }

    fn flush_with_time(&self) -> Result<()> {
        self.write_back.guest(&self.path, || self.sync_all(0, self.len))
    }

    fn sync(&self) -> Result<()> {
        self.own_sync(0, self.len)
    }

    fn look_at(&self, client: &Arc<Client>) {
        self.write_back.look_at(&self.path, client);
    }

    fn write_back_error(&self) -> Option<WriteBackError> {
        self.write_back.error()
    }

    fn notes_begin_anew(&self) {
        self.write_back.notes_begin_anew();
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        self.check("mapping", offset, len)?;
        if len == 0 || max == 0 {
            return Ok(Vec::new());
        }
        if self.kind == Kind::Device {
            return Ok(vec![Extent { len, kind: ExtentKind::Data }]);
        }
        let mut found: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < offset + len {
            let (stop, kind) = self.extent_at(at, offset + len)?;
            let full = found.len() == max;
            match found.last_mut() {
                Some(last) if last.kind == kind => last.len += stop - at,
                _ if full => break,
                _ => found.push(Extent { len: stop - at, kind }),
            }
            at = stop;
        }
        Ok(found)
    }

    fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        self.check("prefetching", offset, len)?;
        if self.direct.is_some() {
            return Ok(());
        }
        self.advise(offset, len, Advice::WillNeed)
    }

    fn start_writeback(&self, offset: u64, len: u64) -> Result<()> {
        let started = sys::start_writeback(&self.file, offset, len)
            .map_err(|e| self.fail("writing back", offset, len, e));
        started.inspect_err(|why| self.write_back.owe(&self.path, why))
    }

    fn forget_cached(&self, offset: u64, len: u64) -> Result<()> {
        self.advise(offset, len, Advice::DontNeed)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<Attempt> {
        self.check("reading", offset, buf.len() as u64)?;
        if buf.is_empty() {
            return Ok(Attempt::Done);
        }
        if self.direct.is_some() || self.cannot_nowait.load(Ordering::Relaxed) {
            return Ok(Attempt::WouldWait);
        }
        let wanted = buf.len();
        let mut target = [IoSliceMut::new(buf)];
        match rustix::io::preadv2(&self.file, &mut target, offset, ReadWriteFlags::NOWAIT) {
            Ok(count) if count == wanted => Ok(Attempt::Done),
            // Short: either the rest is not in memory or the file ends there.
            Ok(count) if offset + count as u64 >= self.end()? => {
                self.pad(&mut buf[count..], offset + count as u64)?;
                Ok(Attempt::Done)
            }
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(Attempt::WouldWait),
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                self.cannot_nowait.store(true, Ordering::Relaxed);
                Ok(Attempt::WouldWait)
            }
            Err(e) => Err(self.fail("reading", offset, wanted as u64, e.into())),
        }
    }

    fn try_write_at(&self, data: &[u8], offset: u64) -> Result<Attempt> {
        if self.direct.is_some() {
            return Ok(Attempt::WouldWait);
        }
        self.write_at(data, offset, false)?;
        Ok(Attempt::Done)
    }
}

impl ImageFile for FileImage {
    fn path(&self) -> &Path {
        &self.path
    }

    fn file_len(&self) -> Result<u64> {
        if self.kind == Kind::Device { Ok(self.len) } else { self.end() }
    }

    fn set_len(&self, len: u64) -> Result<()> {
        if len > self.len {
            return Err(Error::new(
                ErrorKind::OutOfRange,
                self.context("resizing", len, 0),
                "the length is more than the image exports",
            ));
        }
        if self.kind == Kind::Device {
            return Ok(());
        }
        self.file.set_len(len).map_err(|e| Error::io(self.context("resizing", len, 0), e))
    }

    fn write_bulk(&self, data: &[u8], offset: u64) -> Result<()> {
        let len = data.len() as u64;
        self.check_write("writing", offset, len)?;
        if self.direct.is_some() {
            return self.write_at(data, offset, false);
        }
        let done = self
            .bulk
            .write(&self.file, &self.path, data, offset)
            .map_err(|e| self.fail("writing", offset, len, e))?;
        let rest = &data[done..];
        if rest.is_empty() {
            return Ok(());
        }
        self.write_at(rest, offset + done as u64, false)?;
        // So that a sync soon after finds little left to do.
        self.start_writeback(offset + done as u64, rest.len() as u64)
    }

    fn allocated_bytes(&self) -> Result<u64> {
        if self.kind == Kind::Device {
            return self.end();
        }
        const STAT_UNIT: u64 = 512;
        let meta = self.file.metadata().map_err(|e| self.fail("examining", 0, 0, e))?;
        Ok(meta.blocks() * STAT_UNIT)
    }

    fn keep_losses(&self, log: Arc<dyn LossLog>, past: &Past) {
        self.write_back.keep(log, past);
    }

    fn lost_writes(&self) -> Option<String> {
        self.write_back.lost()
    }

    fn begin_anew(&self) -> Result<()> {
        self.set_len(0)?;
        self.sync()?;
        self.write_back.begin_anew(&self.path)
    }

    fn owe_loss(&self, why: &Error) -> bool {
        self.write_back.owe_earlier(&self.path, why)
    }

    fn forget_losses(&self) {
        self.write_back.forget(&self.path);
    }

    fn guest_stops(&self, stops: bool) {
        self.write_back.guest_stops(stops);
    }

    fn untold_loss(&self) -> Option<WriteBackError> {
        self.write_back.untold()
    }

    fn as_file(&self) -> Option<&FileImage> {
        Some(self)
    }
}
