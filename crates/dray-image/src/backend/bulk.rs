//! Bulk writes: long runs that are not read soon bypass the page cache.
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
/// Smallest unit of direct writes, in bytes: a block.
const BLOCK: u64 = 4096;

/// Direct writes go in units of a page, so that where the page cache is made of single pages none
/// of them holds blocks of a direct write and of a buffered one. In a large folio both may meet.
/// The kernel then writes back what is dirty in the folio before the direct write and drops the
/// folio after it; file systems note what is dirty in a folio by block, so writing it back never
/// covers other blocks. When a buffered write makes the folio dirty in between it cannot be
/// dropped: the kernel says so in its log and the next sync of the file fails with an error.
fn unit() -> u64 {
    BLOCK.max(crate::sys::page_size())
}

/// The whole units of the front of `len` bytes, in bytes. `unit` is a power of two.
fn whole_units(len: usize, unit: u64) -> usize {
    len & !(unit as usize - 1)
}

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
        let unit = unit();
        let len = whole_units(data.len(), unit);
        let fits = offset.is_multiple_of(unit) && len >= SHORTEST;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_a_block_and_a_page_at_least() {
        let page = crate::sys::page_size();
        assert!(unit().is_power_of_two() && unit().is_multiple_of(BLOCK));
        assert!(unit().is_multiple_of(page));
        assert_eq!(
            [4095, 4096, 9000, 65_536].map(|len| whole_units(len, 4096)),
            [0, 4096, 8192, 65_536]
        );
        assert_eq!(
            [9000, 65_536, 200_000].map(|len| whole_units(len, 65_536)),
            [0, 65_536, 196_608]
        );
    }
}
