//! Bulk writes: long runs that nobody reads soon go round the page cache.
//!
//! A migration writes more than the memory of its target holds. Through the page cache every byte
//! costs a page that must be found, filled and thrown away again, pushes out what guests need, and
//! waits there for the sync that a handover pays for. Short runs stay buffered: there the cache
//! gathers what would be one small request each.

use crate::Result;
use crate::backend::direct::Direct;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Shortest write that goes round the cache, in bytes.
const SHORTEST: usize = 64 << 10;
/// Direct I/O in units of a page never shares a page with a buffered write of other blocks.
const UNIT: u64 = 4096;

/// The way round the page cache, opened at the first bulk write.
#[derive(Default)]
pub(crate) struct Bulk {
    direct: OnceLock<Option<Direct>>,
    /// The file system said that it cannot after all.
    refused: AtomicBool,
}

impl Bulk {
    /// Writes as much of the front of `data` as can go directly; the number of bytes written, zero
    /// where the file system has no direct I/O. No other write to the same blocks may be under way.
    pub(crate) fn write(
        &self,
        file: &File,
        path: &Path,
        data: &[u8],
        offset: u64,
    ) -> io::Result<usize> {
        let len = data.len() & !(UNIT as usize - 1);
        let fits = offset.is_multiple_of(UNIT) && len >= SHORTEST;
        if !fits || self.refused.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let open = || Self::open(file, path).ok();
        let Some(direct) = self.direct.get_or_init(open) else { return Ok(0) };
        match direct.write(&data[..len], offset, false) {
            Ok(()) => Ok(len),
            Err(why) if why.kind() == io::ErrorKind::InvalidInput => {
                self.refused.store(true, Ordering::Relaxed);
                Ok(0)
            }
            Err(why) => Err(why),
        }
    }

    fn open(file: &File, path: &Path) -> Result<Direct> {
        Direct::open(file, path, true)
    }
}
