//! A disk with missing blocks against plain memory, while blocks arrive from other threads.
//!
//! `DRAY_SEED=n cargo test -p dray-image --test model` repeats one seed.

use dray_image::{
    Attempt, Disk, Fetcher, FileImage, FileOptions, Fill, Image, PresentLog, Result, ZeroMode,
};
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

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

fn source_byte(offset: u64) -> u8 {
    let block = offset / BLOCK_SIZE;
    if block.is_multiple_of(5) { 0 } else { (block * 7 + offset % 251) as u8 }
}

struct Demands(Mutex<Sender<BlockRange>>);

impl Fetcher for Demands {
    fn demand(&self, range: BlockRange) {
        // The other end is gone once nothing is missing.
        let _ = self.0.lock().unwrap().send(range);
    }

    fn peek(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        (offset..).zip(buf).for_each(|(at, byte)| *byte = source_byte(at));
        Ok(())
    }
}

#[derive(Default)]
struct Log(Mutex<BlockSet>);

impl PresentLog for Log {
    fn note(&self, _run: dray_types::BlockRange) -> Result<()> {
        Ok(())
    }

    fn record(&self, present: &BlockSet) -> Result<()> {
        self.0.lock().unwrap().union_with(present);
        Ok(())
    }
}

fn send(disk: &Disk, range: BlockRange) {
    let first = range.byte_offset();
    let data: Vec<u8> = (first..first + range.byte_len()).map(source_byte).collect();
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

/// Works on its own part of the disk, the parts meeting inside a block.
fn guest(disk: &Disk, from: u64, to: u64, mut random: Random, label: &str) -> Vec<u8> {
    let mut model: Vec<u8> = (from..to).map(source_byte).collect();
    for _ in 0..OPERATIONS {
        let at = if random.below(2) == 0 {
            from + random.below(to - from)
        } else {
            (from + random.below(to - from)).next_multiple_of(BLOCK_SIZE).min(to - 1)
        };
        let len = [random.below(5000), BLOCK_SIZE * random.below(20)][random.below(2) as usize];
        let len = len.min(to - at);
        let part = &mut model[(at - from) as usize..(at - from + len) as usize];
        match random.below(8) {
            0..=2 => {
                let data = vec![random.below(256) as u8; part.len()];
                let attempt = disk.try_write_at(&data, at).unwrap();
                if attempt == Attempt::WouldWait {
                    disk.write_at(&data, at, random.below(4) == 0).unwrap();
                }
                part.copy_from_slice(&data);
            }
            3 => {
                disk.zero(at, len, ZeroMode::MayUnmap, false).unwrap();
                part.fill(0);
            }
            4 => {
                disk.discard(at, len, false).unwrap();
                part.fill(0);
            }
            5 => disk.flush().unwrap(),
            _ => {
                let mut buf = vec![0; part.len()];
                if disk.try_read_at(&mut buf, at).unwrap() == Attempt::WouldWait {
                    disk.read_at(&mut buf, at).unwrap();
                }
                assert!(buf == part, "{label}: {len} bytes at {at} differ");
            }
        }
    }
    model
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
    disk.serve_with_missing(all.clone(), fetcher, Arc::clone(&log) as _);
    let label = format!("DRAY_SEED={seed}");
    let expected: Vec<u8> = thread::scope(|scope| {
        let served = &disk;
        scope.spawn(move || source(served, &demands, Random(seed ^ 0x5eed)));
        let guests: Vec<_> = (0..GUESTS)
            .map(|nth| {
                let (from, to) = (LEN * nth / GUESTS, LEN * (nth + 1) / GUESTS);
                let (disk, label) = (&disk, &label);
                scope.spawn(move || guest(disk, from, to, Random(seed * GUESTS + nth), label))
            })
            .collect();
        guests.into_iter().flat_map(|guest| guest.join().unwrap()).collect()
    });
    disk.checkpoint().unwrap();
    assert!(*log.0.lock().unwrap() == all, "{label}: not all is recorded");
    assert!(std::fs::read(&path).unwrap() == expected, "{label}: the image differs");
}

#[test]
fn a_disk_with_missing_blocks_reads_as_if_none_were() {
    match std::env::var("DRAY_SEED") {
        Ok(seed) => run(seed.parse().expect("DRAY_SEED is a number")),
        Err(_) => (0..SEEDS).for_each(run),
    }
}
