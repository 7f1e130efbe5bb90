//! The guest of a simulated migration.

use super::NAMES;
use super::model::{Model, SECTOR, bytes_of};
use dray_files::files::sim::SimDisk;
use dray_image::{Attempt, Disk, Image};
use dray_types::{BLOCK_SIZE, BlockRange};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Sectors of a block.
const PER_BLOCK: u64 = BLOCK_SIZE / SECTOR;

/// A guest with its disks.
pub struct Guest {
    /// What it may find.
    pub disks: Vec<Model>,
    /// The host that it was served by last.
    pub at: usize,
    next: u64,
    /// The disks of both hosts.
    below: [Arc<SimDisk>; 2],
    /// Failed syncs that are known, of each host, and by host and file.
    seen: [u64; 2],
    failed: BTreeMap<(usize, u64), usize>,
    /// Of each disk, the block that is missing and that it waits for.
    pub waits_for: Vec<Option<u64>>,
    /// Blocks that it got after it had waited for them.
    pub waited: u64,
}

impl Guest {
    /// A guest at host 0.
    pub fn new(disks: Vec<Model>, below: [Arc<SimDisk>; 2]) -> Self {
        let waits_for = vec![None; disks.len()];
        Self {
            disks,
            at: 0,
            next: 1 << 32,
            below,
            seen: [0; 2],
            failed: BTreeMap::new(),
            waits_for,
            waited: 0,
        }
    }

    /// It is served by this host from now on. What its disks held when it came to the target.
    pub fn come(&mut self, at: usize, who: &str) -> Option<Vec<Model>> {
        let moved = at != self.at;
        self.at = at;
        moved.then(|| {
            self.disks.iter_mut().for_each(|disk| disk.moved(who));
            self.waits_for.fill(None);
            self.disks.clone()
        })
    }

    /// Looks whether syncs have failed below it. What fails at the other host is no matter of its.
    pub fn look_below(&mut self) {
        for host in 0..2 {
            let count = self.below[host].failed_sync_count();
            if count == std::mem::replace(&mut self.seen[host], count) {
                continue;
            }
            for (ix, name) in NAMES.iter().enumerate() {
                let files = self.below[host].failed_syncs(|path| is_image(path, name));
                for (file, failed) in files {
                    let known = self.failed.insert((host, file), failed.len()).unwrap_or(0);
                    for lost in failed[known..].iter().filter(|_| host == self.at) {
                        tracing::debug!(ix, host, ?lost, "a sync has failed");
                        self.disks[ix].sync_failed(lost);
                    }
                }
            }
        }
    }

    /// Does something with each disk that is open, if it is not held back.
    pub fn act(&mut self, disks: &[Arc<Disk>], random: &mut u64) {
        for (ix, disk) in disks.iter().enumerate() {
            if !disk.is_open() {
                continue;
            }
            self.try_again(ix, disk);
            let blocks = disk.geometry().len / BLOCK_SIZE;
            let block = draw(random) % blocks;
            match draw(random) % 8 {
                0..3 => self.write(ix, disk, block * PER_BLOCK, PER_BLOCK),
                3 | 4 if !is_missing(disk, block) => {
                    self.write(ix, disk, block * PER_BLOCK + draw(random) % PER_BLOCK, 1);
                }
                5 | 6 => drop(self.flush(ix, disk, "the guest")),
                _ if is_missing(disk, block) => self.waits_for[ix] = Some(block),
                _ => self.read(ix, disk, block, "the guest"),
            }
            self.look_below();
        }
    }

    fn write(&mut self, ix: usize, disk: &Disk, at: u64, count: u64) {
        self.next += 1;
        let written = disk.write_at(&bytes_of(self.next, count), at * SECTOR, false);
        tracing::debug!(ix, at, count, value = self.next, ?written, "the guest writes");
        self.disks[ix].written(at, count, self.next, written.is_ok());
    }

    fn flush(&mut self, ix: usize, disk: &Disk, who: &str) -> bool {
        let flushed = disk.flush();
        tracing::debug!(ix, ?flushed, "the guest flushes");
        // It may be this very flush whose sync has failed.
        self.look_below();
        if flushed.as_ref().is_err_and(|why| !why.is_earlier_loss()) {
            // It may be told of a sync that failed before these were written, which are given up as well.
            self.disks[ix].sync_failed(&[]);
        }
        self.disks[ix].flushed(flushed.is_ok(), &format!("{who}, disk {ix}"));
        flushed.is_ok()
    }

    fn read(&mut self, ix: usize, disk: &Disk, block: u64, who: &str) {
        let mut bytes = vec![0; BLOCK_SIZE as usize];
        if !is_missing(disk, block) && disk.read_at(&mut bytes, block * BLOCK_SIZE).is_ok() {
            self.disks[ix].found(block * PER_BLOCK, &bytes, &format!("{who}, disk {ix}"));
        }
    }

    /// Looks whether the block that it waits for has come.
    fn try_again(&mut self, ix: usize, disk: &Disk) {
        let Some(block) = self.waits_for[ix] else { return };
        let mut bytes = vec![0; BLOCK_SIZE as usize];
        let read = disk.try_read_at(&mut bytes, block * BLOCK_SIZE);
        if matches!(read, Ok(Attempt::WouldWait)) {
            return;
        }
        self.waits_for[ix] = None;
        if read.is_ok() {
            self.waited += 1;
            let who = format!("the guest, disk {ix}, after it has waited");
            self.disks[ix].found(block * PER_BLOCK, &bytes, &who);
        }
    }

    /// Reads everything, and makes it durable: false when a flush says that something may be lost.
    pub fn settle(&mut self, disks: &[Arc<Disk>], who: &str) -> bool {
        let mut ok = true;
        for (ix, disk) in disks.iter().enumerate() {
            (0..disk.geometry().len / BLOCK_SIZE).for_each(|block| self.read(ix, disk, block, who));
            // A loss of before is told once.
            ok &= self.flush(ix, disk, who) || self.flush(ix, disk, who);
        }
        ok
    }
}

/// Whether the file at a path is the image of this name, under whatever name it has just now.
fn is_image(path: &std::path::Path, name: &str) -> bool {
    let file = path.file_name().is_some_and(|file| file.to_string_lossy().contains(name));
    file && path.parent().is_some_and(|folder| folder.ends_with("pool"))
}

fn is_missing(disk: &Disk, block: u64) -> bool {
    disk.next_missing(block, 1).is_some_and(|run: BlockRange| run.start == block)
}

/// SplitMix64.
pub fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *state;
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}
