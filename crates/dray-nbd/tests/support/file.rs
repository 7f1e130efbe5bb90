//! A file as an [`Image`], as plain as can be: what the server's tests and benchmark serve.

use dray_image::{
    Attempt, Error, ErrorKind, Extent, ExtentKind, Geometry, Image, Result, ZeroMode,
};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::{File, OpenOptions};
use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;

pub struct PlainFile {
    file: File,
    len: u64,
    read_only: bool,
    /// SEEK_DATA and SEEK_HOLE move the file's one position.
    position: Mutex<()>,
}

impl PlainFile {
    pub fn open(path: &Path, read_only: bool) -> std::io::Result<Self> {
        let file = OpenOptions::new().read(true).write(!read_only).open(path)?;
        let len = file.metadata()?.len();
        Ok(Self { file, len, read_only, position: Mutex::new(()) })
    }

    fn within(&self, offset: u64, len: u64) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(Error::new(ErrorKind::OutOfRange, "request", "past the end")),
        }
    }

    fn writable(&self, offset: u64, len: u64) -> Result<()> {
        if self.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "write", "the file is read-only"));
        }
        self.within(offset, len)
    }

    fn punch(&self, offset: u64, len: u64, flags: FallocateFlags, fua: bool) -> Result<()> {
        self.writable(offset, len)?;
        let flags = flags | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, offset, len).map_err(|e| Error::io("punch", e.into()))?;
        if fua { self.flush() } else { Ok(()) }
    }

    fn seek_from(&self, from: SeekFrom, end: u64) -> u64 {
        seek(&self.file, from).unwrap_or(end).min(end)
    }
}

impl Image for PlainFile {
    fn geometry(&self) -> Geometry {
        let read_only = self.read_only;
        Geometry { len: self.len, min_block: 1, preferred_block: 4096, read_only }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.within(offset, buf.len() as u64)?;
        self.file.read_exact_at(buf, offset).map_err(|e| Error::io("read", e))
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        self.writable(offset, data.len() as u64)?;
        self.file.write_all_at(data, offset).map_err(|e| Error::io("write", e))?;
        if fua { self.flush() } else { Ok(()) }
    }

    fn zero(&self, offset: u64, len: u64, mode: ZeroMode, fua: bool) -> Result<()> {
        let flags = match mode {
            ZeroMode::MayUnmap => FallocateFlags::PUNCH_HOLE,
            ZeroMode::KeepAllocated => FallocateFlags::ZERO_RANGE,
        };
        self.punch(offset, len, flags, fua)
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.punch(offset, len, FallocateFlags::PUNCH_HOLE, fua)
    }

    fn flush(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("flush", e))
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        self.within(offset, len)?;
        let _position = self.position.lock().unwrap();
        let end = offset + len;
        let mut at = offset;
        let mut found = Vec::new();
        while at < end && found.len() < max {
            let data = self.seek_from(SeekFrom::Data(at), end);
            let (kind, next) = if data > at {
                (ExtentKind::Hole, data)
            } else {
                (ExtentKind::Data, self.seek_from(SeekFrom::Hole(at), end))
            };
            found.push(Extent { len: next - at, kind });
            at = next;
        }
        Ok(found)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<Attempt> {
        self.within(offset, buf.len() as u64)?;
        let len = buf.len();
        let flags = ReadWriteFlags::NOWAIT;
        match preadv2(&self.file, &mut [IoSliceMut::new(buf)], offset, flags) {
            Ok(got) if got == len => Ok(Attempt::Done),
            Ok(_) | Err(Errno::AGAIN | Errno::OPNOTSUPP) => Ok(Attempt::WouldWait),
            Err(error) => Err(Error::io("read", error.into())),
        }
    }

    fn try_write_at(&self, data: &[u8], offset: u64) -> Result<Attempt> {
        self.write_at(data, offset, false).map(|()| Attempt::Done)
    }
}
