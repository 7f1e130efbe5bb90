//! Where notes go: a raw partition of the logged disk, past every cache. They are not flushed: their
//! place in the log says when they were written, and a flush would make durable what an agent has
//! forgotten to.

use dray_guest::note::Note;
use dray_guest::script::SECTOR;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// A buffer of this size holds a sector at an address that `O_DIRECT` takes.
const ALIGN: usize = 4096;

/// The place for notes.
pub struct Notes {
    file: File,
    next: Mutex<u64>,
}

impl Notes {
    /// Opens the partition; what was there is written over.
    pub fn open(path: &Path) -> io::Result<Self> {
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        let file = OpenOptions::new().write(true).custom_flags(direct).open(path)?;
        Ok(Self { file, next: Mutex::new(0) })
    }

    /// Writes a note down.
    pub fn write(&self, note: &Note) -> io::Result<()> {
        let mut bytes = vec![0; ALIGN + SECTOR as usize];
        let start = bytes.as_ptr().align_offset(ALIGN);
        let sector = &mut bytes[start..start + SECTOR as usize];
        sector.copy_from_slice(&note.encode());
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        self.file.write_all_at(sector, *next * SECTOR)?;
        *next += 1;
        Ok(())
    }
}
