//! An image in memory whose requests can be made to wait, fail and be counted.

use dray_image::{
    Attempt, Error, ErrorKind, Extent, ExtentKind, Geometry, Image, Result, ZeroMode,
};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};

pub struct Memory {
    bytes: Mutex<Vec<u8>>,
    geometry: Geometry,
    /// Below this offset reads and writes wait until it is lowered.
    wall: Mutex<u64>,
    moved: Condvar,
    /// What the next requests fail with; none for those that succeed.
    failures: Mutex<VecDeque<Option<ErrorKind>>>,
    /// Requests never succeed without waiting.
    pub always_wait: bool,
    /// Requests never say beforehand that they would wait; they wait.
    pub never_warn: bool,
    pub flushes: AtomicUsize,
    /// Requests that wait behind the wall now.
    pub waiting: AtomicUsize,
    /// Bytes of the longest read or write so far.
    pub longest: AtomicUsize,
}

impl Memory {
    pub fn new(len: usize) -> Self {
        let geometry =
            Geometry { len: len as u64, min_block: 1, preferred_block: 4096, read_only: false };
        Self {
            bytes: Mutex::new(vec![0; len]),
            geometry,
            wall: Mutex::new(0),
            moved: Condvar::new(),
            failures: Mutex::default(),
            always_wait: false,
            never_warn: false,
            longest: AtomicUsize::new(0),
            flushes: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
        }
    }

    pub fn read_only(mut self) -> Self {
        self.geometry.read_only = true;
        self
    }

    pub fn min_block(mut self, bytes: u32) -> Self {
        self.geometry.min_block = bytes;
        self
    }

    pub fn always_waiting(mut self) -> Self {
        self.always_wait = true;
        self
    }

    pub fn never_warning(mut self) -> Self {
        self.never_warn = true;
        self
    }

    /// Requests below `offset` wait from now on; those at or above it go on.
    pub fn set_wall(&self, offset: u64) {
        *self.wall.lock().unwrap() = offset;
        self.moved.notify_all();
    }

    pub fn fail_next(&self, kind: ErrorKind) {
        self.fail_after(0, kind);
    }

    /// The request after the next `good` ones fails.
    pub fn fail_after(&self, good: usize, kind: ErrorKind) {
        let mut failures = self.failures.lock().unwrap();
        failures.extend(std::iter::repeat_n(None, good));
        failures.push_back(Some(kind));
    }

    pub fn contents(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    fn wait_for(&self, offset: u64) {
        let mut wall = self.wall.lock().unwrap();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        while offset < *wall {
            wall = self.moved.wait(wall).unwrap();
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    fn must_wait(&self, offset: u64) -> bool {
        self.always_wait || (!self.never_warn && offset < *self.wall.lock().unwrap())
    }

    fn check(&self, offset: u64, len: u64) -> Result<()> {
        if let Some(Some(kind)) = self.failures.lock().unwrap().pop_front() {
            return Err(Error::new(kind, "test", "told to fail"));
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.geometry.len => Ok(()),
            _ => Err(Error::new(ErrorKind::OutOfRange, "test", "past the end")),
        }
    }

    fn change(&self, offset: u64, len: u64, with: impl FnOnce(&mut [u8])) -> Result<()> {
        self.check(offset, len)?;
        with(&mut self.bytes.lock().unwrap()[offset as usize..(offset + len) as usize]);
        Ok(())
    }
}

impl Image for Memory {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.longest.fetch_max(buf.len(), Ordering::SeqCst);
        self.wait_for(offset);
        self.change(offset, buf.len() as u64, |bytes| buf.copy_from_slice(bytes))
    }

    fn write_at(&self, data: &[u8], offset: u64, _fua: bool) -> Result<()> {
        self.longest.fetch_max(data.len(), Ordering::SeqCst);
        self.wait_for(offset);
        self.change(offset, data.len() as u64, |bytes| bytes.copy_from_slice(data))
    }

    fn zero(&self, offset: u64, len: u64, _mode: ZeroMode, _fua: bool) -> Result<()> {
        self.wait_for(offset);
        self.change(offset, len, |bytes| bytes.fill(0))
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.zero(offset, len, ZeroMode::MayUnmap, fua)
    }

    fn flush(&self) -> Result<()> {
        self.check(0, 0)?;
        self.flushes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.flush()
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        self.check(offset, len)?;
        let bytes = self.bytes.lock().unwrap();
        let mut found: Vec<Extent> = Vec::new();
        for byte in &bytes[offset as usize..(offset + len) as usize] {
            let kind = if *byte == 0 { ExtentKind::Hole } else { ExtentKind::Data };
            let full = found.len() == max;
            match found.last_mut() {
                Some(last) if last.kind == kind => last.len += 1,
                _ if full => break,
                _ => found.push(Extent { len: 1, kind }),
            }
        }
        Ok(found)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<Attempt> {
        if self.must_wait(offset) {
            return Ok(Attempt::WouldWait);
        }
        self.read_at(buf, offset).map(|()| Attempt::Done)
    }

    fn try_write_at(&self, data: &[u8], offset: u64) -> Result<Attempt> {
        if self.must_wait(offset) {
            return Ok(Attempt::WouldWait);
        }
        self.write_at(data, offset, false).map(|()| Attempt::Done)
    }
}
