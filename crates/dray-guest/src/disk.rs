//! One disk as the guest sees it: the device, and the table of what was last written to each
//! block. A range is claimed while it is being written or read, so that the table is always right
//! for unclaimed blocks.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;
use std::sync::{Condvar, Mutex, MutexGuard};

use dray_guest::content::{
    BLOCK, Base, SEQ_BASE, SEQ_LIMIT, SEQ_TRIMMED, SEQ_UNKNOWN, SEQ_ZERO, Written, block_is,
};

/// Blocks that are read at a time when a disk is learnt.
const LEARNT_BLOCKS: u64 = 64;

/// A buffer that `O_DIRECT` accepts: it starts at a multiple of the block size.
pub struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// A zeroed buffer of `len` bytes.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + BLOCK];
        let start = bytes.as_ptr().align_offset(BLOCK);
        Self { bytes, start, len }
    }

    /// The first `len` bytes.
    pub fn slice(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.len);
        &mut self.bytes[self.start..self.start + len]
    }
}

/// Some blocks in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The first block.
    pub first: u64,
    /// How many.
    pub count: u64,
}

impl Blocks {
    fn overlaps(&self, other: &Blocks) -> bool {
        self.first < other.first + other.count && other.first < self.first + self.count
    }

    fn indices(&self) -> std::ops::Range<usize> {
        self.first as usize..(self.first + self.count) as usize
    }
}

struct Table {
    seq: Vec<u32>,
    next_seq: u32,
    claimed: Vec<Blocks>,
    /// Blocks written since the last mark.
    fresh: Vec<bool>,
    fresh_count: u64,
}

/// A disk and what the guest knows about it.
pub struct Disk {
    /// The device's name, `vda`.
    pub name: String,
    /// The image's number in block headers.
    pub image: u64,
    seeded_blocks: u64,
    file: File,
    table: Mutex<Table>,
    released: Condvar,
}

/// Exclusive use of some blocks.
pub struct Claim<'a> {
    disk: &'a Disk,
    blocks: Blocks,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.disk.table().claimed.retain(|c| *c != self.blocks);
        self.disk.released.notify_all();
    }
}

impl Disk {
    /// Opens a device past the page cache.
    pub fn open(name: &str, image: u64, seeded_blocks: u64) -> io::Result<Self> {
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        let path = format!("/dev/{name}");
        let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(path)?;
        let sectors = std::fs::read_to_string(format!("/sys/block/{name}/size"))?;
        let sectors: u64 = sectors.trim().parse().map_err(io::Error::other)?;
        let blocks = (sectors * 512 / BLOCK as u64) as usize;
        let table = Table {
            seq: vec![SEQ_BASE; blocks],
            next_seq: 1,
            claimed: Vec::new(),
            fresh: vec![false; blocks],
            fresh_count: 0,
        };
        let (table, released) = (Mutex::new(table), Condvar::new());
        Ok(Self { name: name.to_owned(), image, seeded_blocks, file, table, released })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The number of whole blocks.
    pub fn block_count(&self) -> u64 {
        self.table().seq.len() as u64
    }

    /// Waits until nobody else uses `blocks`.
    pub fn claim(&self, blocks: Blocks) -> Claim<'_> {
        let mut table = self.table();
        while table.claimed.iter().any(|c| c.overlaps(&blocks)) {
            table = self.released.wait(table).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        table.claimed.push(blocks);
        Claim { disk: self, blocks }
    }

    fn set(&self, blocks: Blocks, seq: u32) {
        let mut table = self.table();
        for i in blocks.indices() {
            table.seq[i] = seq;
            if !table.fresh[i] {
                table.fresh[i] = true;
                table.fresh_count += 1;
            }
        }
    }

    /// Forgets which blocks are fresh.
    pub fn mark(&self) {
        let mut table = self.table();
        table.fresh.fill(false);
        table.fresh_count = 0;
    }

    /// How many different blocks were written since the last mark.
    pub fn fresh_count(&self) -> u64 {
        self.table().fresh_count
    }

    /// Fills `buf` with the next sequence number's contents for the claimed blocks.
    pub fn prepare(&self, claim: &Claim<'_>, buf: &mut Aligned) -> io::Result<u32> {
        let seq = {
            let mut table = self.table();
            table.next_seq += 1;
            table.next_seq - 1
        };
        if seq >= SEQ_LIMIT {
            return Err(io::Error::other("out of sequence numbers"));
        }
        let bytes = buf.slice(claim.blocks.count as usize * BLOCK);
        for (i, chunk) in bytes.chunks_exact_mut(BLOCK).enumerate() {
            let block = claim.blocks.first + i as u64;
            Written { image: self.image, block, seq }.fill(chunk);
        }
        Ok(seq)
    }

    /// Writes what [`Disk::prepare`] made.
    pub fn write(&self, claim: &Claim<'_>, buf: &mut Aligned, seq: u32) -> io::Result<()> {
        let blocks = claim.blocks;
        let bytes = buf.slice(blocks.count as usize * BLOCK);
        let result = self.file.write_all_at(bytes, blocks.first * BLOCK as u64);
        self.set(blocks, if result.is_ok() { seq } else { SEQ_UNKNOWN });
        result
    }

    /// Reads the claimed blocks and returns those that are not what they must be.
    pub fn verify(&self, claim: &Claim<'_>, buf: &mut Aligned) -> io::Result<Vec<String>> {
        let blocks = claim.blocks;
        let bytes = buf.slice(blocks.count as usize * BLOCK);
        self.file.read_exact_at(bytes, blocks.first * BLOCK as u64)?;
        let expected = self.table().seq[blocks.indices()].to_vec();
        let mut bad = Vec::new();
        for (i, chunk) in bytes.chunks_exact(BLOCK).enumerate() {
            let block = blocks.first + i as u64;
            let base = Base::of(block, self.seeded_blocks);
            if !block_is(chunk, self.image, block, expected[i], base) {
                let found = match Written::identify(chunk) {
                    Some(w) => format!("image={} block={} seq={}", w.image, w.block, w.seq),
                    None if chunk.iter().all(|b| *b == 0) => "zeros".to_owned(),
                    None => "garbage".to_owned(),
                };
                bad.push(format!("block={block} expected_seq={} found: {found}", expected[i]));
            }
        }
        Ok(bad)
    }

    /// Flushes the device's cache.
    pub fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Trims a range with a real discard request.
    pub fn trim(&self, blocks: Blocks) -> io::Result<()> {
        let _claim = self.claim(blocks);
        self.set(blocks, SEQ_TRIMMED);
        let (offset, length) = (blocks.first * BLOCK as u64, blocks.count * BLOCK as u64);
        let status = Command::new("/bin/busybox")
            .args(["blkdiscard", "-o", &offset.to_string(), "-l", &length.to_string()])
            .arg(format!("/dev/{}", self.name))
            .status()?;
        if status.success() { Ok(()) } else { Err(io::Error::other("blkdiscard failed")) }
    }

    /// Zeroes a range with write-zeroes requests.
    pub fn zero(&self, blocks: Blocks) -> io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        let _claim = self.claim(blocks);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, length) = (blocks.first * BLOCK as u64, blocks.count * BLOCK as u64);
        let result = fallocate(&self.file, flags, offset, length);
        self.set(blocks, if result.is_ok() { SEQ_ZERO } else { SEQ_UNKNOWN });
        Ok(result?)
    }

    /// Takes what the disk holds for what was written last: after a reboot the table is lost. Blocks that
    /// nobody can have written are told.
    pub fn learn(&self) -> io::Result<Vec<String>> {
        let mut buf = Aligned::new(LEARNT_BLOCKS as usize * BLOCK);
        let (count, mut bad) = (self.block_count(), Vec::new());
        for first in (0..count).step_by(LEARNT_BLOCKS as usize) {
            let blocks = Blocks { first, count: LEARNT_BLOCKS.min(count - first) };
            let claim = self.claim(blocks);
            let bytes = buf.slice(blocks.count as usize * BLOCK);
            self.file.read_exact_at(bytes, first * BLOCK as u64)?;
            for (block, bytes) in (first..).zip(bytes.chunks_exact(BLOCK)) {
                match self.held(block, bytes) {
                    Some(seq) => self.learnt(block, seq),
                    None => bad.push(format!("block={block} holds nothing that was written")),
                }
            }
            drop(claim);
        }
        Ok(bad)
    }

    /// Which write of a block these bytes are.
    fn held(&self, block: u64, bytes: &[u8]) -> Option<u32> {
        if bytes.iter().all(|b| *b == 0) {
            return Some(if block < self.seeded_blocks { SEQ_ZERO } else { SEQ_BASE });
        }
        let written = Written::identify(bytes)?;
        let here = written.image == self.image && written.block == block && written.matches(bytes);
        here.then_some(written.seq)
    }

    fn learnt(&self, block: u64, seq: u32) {
        let mut table = self.table();
        table.seq[block as usize] = seq;
        if seq < SEQ_LIMIT {
            table.next_seq = table.next_seq.max(seq + 1);
        }
    }

    /// The blocks that no longer have their first content, as (first, count, sequence number).
    pub fn written_runs(&self) -> Vec<(u64, u64, u32)> {
        let table = self.table();
        let mut runs: Vec<(u64, u64, u32)> = Vec::new();
        for (block, seq) in table.seq.iter().enumerate() {
            if *seq == SEQ_BASE {
                continue;
            }
            match runs.last_mut() {
                Some((first, count, s)) if *s == *seq && *first + *count == block as u64 => {
                    *count += 1;
                }
                _ => runs.push((block as u64, 1, *seq)),
            }
        }
        runs
    }
}
