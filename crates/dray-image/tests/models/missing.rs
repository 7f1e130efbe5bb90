//! A disk with missing blocks against plain memory, while blocks arrive from other threads.

use crate::lane::{Log, first_byte, guest};
use crate::random::{Random, seeds};
use dray_image::{Disk, Fetcher, FileImage, FileOptions, Fill, Result};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

const BLOCKS: u64 = 200;
/// Not a whole number of blocks.
const LEN: u64 = (BLOCKS - 1) * BLOCK_SIZE + 1234;
const SEEDS: u64 = 40;
const OPERATIONS: u64 = 120;
const GUESTS: u64 = 2;

struct Demands(Mutex<Sender<BlockRange>>);

impl Fetcher for Demands {
    fn demand(&self, range: BlockRange) {
        // The other end is gone once nothing is missing.
        let _ = self.0.lock().unwrap().send(range);
    }

    fn peek(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        (offset..).zip(buf).for_each(|(at, byte)| *byte = first_byte(at));
        Ok(())
    }
}

fn send(disk: &Disk, range: BlockRange) {
    let first = range.byte_offset();
    let data: Vec<u8> = (first..first + range.byte_len()).map(first_byte).collect();
    let fill = if dray_image::runs::is_zero(&data) { Fill::Zero } else { Fill::Data(&data) };
    disk.fill(range, fill).unwrap();
}

/// Answers demands and, in between, sends what nobody asked for.
fn source(disk: &Disk, demands: &Receiver<BlockRange>, mut random: Random) {
    while disk.missing_count() > 0 {
        if let Ok(range) = demands.try_recv() {
            send(disk, range);
        }
        if random.below(4) == 0
            && let Some(run) = disk.next_missing(random.below(BLOCKS), random.below(8) + 1)
        {
            send(disk, run);
        }
        thread::yield_now();
    }
}

fn run(seed: u64) {
    let dir = tempfile::Builder::new().prefix("image-model-").tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    std::fs::write(&path, vec![0xee; LEN as usize]).unwrap();
    let options = FileOptions { write: true, direct: false, export_len: None };
    let disk = Disk::new(Arc::new(FileImage::open(&path, options).unwrap()));
    let (sender, demands) = channel();
    let log = Arc::new(Log::default());
    let all: BlockSet = [BlockRange::whole(LEN)].into_iter().collect();
    let fetcher = Arc::new(Demands(Mutex::new(sender)));
    disk.serve_with_missing(all.clone(), &BlockSet::new(), fetcher, Arc::clone(&log) as _);
    let label = format!("DRAY_SEED={seed}");
    let mut expected: Vec<u8> = (0..LEN).map(first_byte).collect();
    thread::scope(|scope| {
        let served = &disk;
        scope.spawn(move || source(served, &demands, Random(seed ^ 0x5eed)));
        let part = LEN.div_ceil(GUESTS);
        for (nth, model) in (0..).zip(expected.chunks_mut(part as usize)) {
            let (disk, label) = (&disk, &label);
            let random = Random(seed * GUESTS + nth);
            scope.spawn(move || guest(disk, nth * part, model, OPERATIONS, random, label));
        }
    });
    disk.checkpoint().unwrap();
    assert!(*log.0.lock().unwrap() == all, "{label}: not all is recorded");
    assert!(std::fs::read(&path).unwrap() == expected, "{label}: the image differs");
}

#[test]
fn a_disk_with_missing_blocks_reads_as_if_none_were() {
    seeds(SEEDS).for_each(run);
}
