//! Reads what QEMU's `blklogwrites` driver writes (the format of Linux' dm-log-writes).
//!
//! An entry is appended when its request is done. Where the driver's file flushes without waiting
//! (`cache.no-flush=on`), a flush takes its place when it is asked for: what is logged before it was
//! done before it, and nothing else is made durable by it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
/// What the log's own addresses, and the entries', are counted in.
pub const SECTOR: u64 = 512;

const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;

/// One request that was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// What it wrote.
    pub what: What,
    /// All that was logged before is durable.
    pub flush: bool,
    /// This itself is durable.
    pub forced: bool,
    /// The first sector.
    pub first: u64,
    /// Sectors.
    pub count: u64,
}

/// What an entry wrote.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// Bytes, which are at this place of the log.
    Data(u64),
    /// Zeros: it discarded.
    Zeros,
}

/// A log that nobody writes any more.
pub struct Log {
    file: File,
    /// In the order in which they were done.
    pub entries: Vec<Entry>,
}

impl Log {
    /// Reads a log.
    ///
    /// # Errors
    /// When it cannot be read, or is none.
    pub fn open(path: &Path) -> io::Result<Self> {
        let bad = |why: &str| io::Error::other(format!("{}: {why}", path.display()));
        let file = File::open(path)?;
        let mut head = [0; 28];
        file.read_exact_at(&mut head, 0)?;
        if word(&head, 0) != MAGIC || word(&head, 8) != VERSION || word(&head, 24) as u32 != 512 {
            return Err(bad("no log of writes in sectors of 512 bytes"));
        }
        let mut entries = Vec::new();
        let mut at = SECTOR;
        for _ in 0..word(&head, 16) {
            let mut header = [0; 32];
            file.read_exact_at(&mut header, at)?;
            let (first, count, flags) = (word(&header, 0), word(&header, 8), word(&header, 16));
            at += SECTOR;
            let discard = flags & DISCARD != 0;
            let what = if discard { What::Zeros } else { What::Data(at) };
            let (flush, forced) = (flags & FLUSH != 0, flags & FUA != 0);
            entries.push(Entry { what, flush, forced, first, count });
            if !discard {
                at += count * SECTOR;
            }
        }
        Ok(Self { file, entries })
    }

    /// The bytes of one of its entries.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn bytes(&self, entry: &Entry) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; (entry.count * SECTOR) as usize];
        if let What::Data(at) = entry.what {
            self.file.read_exact_at(&mut bytes, at)?;
        }
        Ok(bytes)
    }
}

/// A little-endian word; what lies past the end counts as zero.
fn word(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes[at..].iter().take(8);
    bytes.enumerate().fold(0, |word, (nth, byte)| word | u64::from(*byte) << (8 * nth))
}
