//! A disk whose blocks are version numbers, each with a live and a durable state.
//!
//! A write changes the live state; only a sync that began after it makes it durable. A power cut
//! keeps any subset of what was not durable, block by block: that is a torn disk.

use crate::rng::Rng;
use dray_types::{BlockRange, BlockSet};
use std::collections::BTreeSet;

/// The content of a block that reads as zeros.
pub(crate) const ZERO: u64 = 0;

#[derive(Clone, Copy, Default)]
struct Cell {
    live: u64,
    live_seq: u64,
    durable: u64,
    durable_seq: u64,
}

/// One image on one host.
pub(crate) struct Disk {
    cells: Vec<Cell>,
    unsynced: BTreeSet<u64>,
    /// Blocks whose writes were lost: they read as written, and no sync makes them durable any more.
    lost: BTreeSet<u64>,
    seq: u64,
}

/// What a sync covers: everything written before it began.
pub(crate) struct Snapshot(Vec<(u64, u64, u64)>);

impl Disk {
    pub(crate) fn new(blocks: u64, mut content: impl FnMut(u64) -> u64) -> Self {
        let cell = |value| Cell { live: value, live_seq: 0, durable: value, durable_seq: 0 };
        let cells = (0..blocks).map(|block| cell(content(block))).collect();
        Self { cells, unsynced: BTreeSet::new(), lost: BTreeSet::new(), seq: 0 }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.cells.len() as u64
    }

    pub(crate) fn read(&self, block: u64) -> u64 {
        self.cells[block as usize].live
    }

    pub(crate) fn write(&mut self, block: u64, version: u64) {
        self.seq += 1;
        let cell = &mut self.cells[block as usize];
        cell.live = version;
        cell.live_seq = self.seq;
        self.unsynced.insert(block);
        self.lost.remove(&block);
    }

    /// The sync that began with `snapshot` has failed: any part of what it covered is lost.
    pub(crate) fn lose(&mut self, snapshot: &Snapshot, rng: &mut Rng) {
        for &(block, _, seq) in &snapshot.0 {
            let is_same = self.cells[block as usize].live_seq == seq;
            if is_same && self.unsynced.contains(&block) && rng.chance(0.5) {
                self.unsynced.remove(&block);
                self.lost.insert(block);
            }
        }
    }

    /// Nothing is cached any more: blocks whose writes were lost read as they were before.
    pub(crate) fn evict(&mut self) {
        for block in std::mem::take(&mut self.lost) {
            let cell = &mut self.cells[block as usize];
            (cell.live, cell.live_seq) = (cell.durable, cell.durable_seq);
        }
    }

    /// The file is begun anew: all of it reads as zeros, durably.
    pub(crate) fn begin_anew(&mut self) {
        (0..self.blocks()).for_each(|block| self.write(block, ZERO));
        let zeros = self.snapshot();
        self.settle(&zeros);
    }

    /// Blocks that hold data.
    pub(crate) fn data(&self) -> BlockSet {
        let some = (0..self.blocks()).filter(|&block| self.read(block) != ZERO);
        some.map(|block| BlockRange::new(block, 1)).collect()
    }

    /// A sync begins.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let cell = |&block: &u64| {
            let cell = self.cells[block as usize];
            (block, cell.live, cell.live_seq)
        };
        Snapshot(self.unsynced.iter().map(cell).collect())
    }

    /// The sync that began with `snapshot` is over.
    pub(crate) fn settle(&mut self, snapshot: &Snapshot) {
        for &(block, version, seq) in &snapshot.0 {
            let cell = &mut self.cells[block as usize];
            if seq > cell.durable_seq {
                cell.durable = version;
                cell.durable_seq = seq;
            }
            if cell.durable_seq == cell.live_seq {
                self.unsynced.remove(&block);
            }
        }
    }

    /// The power fails: of what was not durable any part may remain.
    pub(crate) fn power_cut(&mut self, rng: &mut Rng) {
        self.evict();
        for block in std::mem::take(&mut self.unsynced) {
            let cell = &mut self.cells[block as usize];
            if rng.chance(0.5) {
                cell.durable = cell.live;
            }
            cell.live = cell.durable;
            cell.live_seq = 0;
            cell.durable_seq = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_written_before_a_sync_is_safe() {
        let mut kept = 0;
        for seed in 0..64 {
            let mut disk = Disk::new(2, |_| 1);
            disk.write(0, 2);
            let snapshot = disk.snapshot();
            disk.write(1, 3);
            disk.settle(&snapshot);
            disk.power_cut(&mut Rng::new(seed));
            assert_eq!(disk.read(0), 2);
            kept += u64::from(disk.read(1) == 3);
        }
        assert!(kept > 0 && kept < 64, "a torn block is sometimes old and sometimes new");
    }

    #[test]
    fn what_a_failed_sync_has_lost_no_later_one_makes_durable() {
        let mut lost = 0;
        for seed in 0..64 {
            let mut disk = Disk::new(1, |_| 1);
            disk.write(0, 2);
            let snapshot = disk.snapshot();
            disk.lose(&snapshot, &mut Rng::new(seed));
            let snapshot = disk.snapshot();
            disk.settle(&snapshot);
            assert_eq!(disk.read(0), 2, "it is still to be seen");
            disk.evict();
            lost += u64::from(disk.read(0) == 1);
            disk.begin_anew();
            assert_eq!(disk.read(0), ZERO);
        }
        assert!(lost > 0 && lost < 64);
    }
}
