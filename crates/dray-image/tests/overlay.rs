//! An overlay against plain memory: guests write and a merge goes on meanwhile; and with the power
//! cut at every step (I2), with a merge before and after it.
//!
//! `DRAY_SEED=n cargo test -p dray-image --test overlay` repeats one seed.

use dray_image::{
    Attempt, Disk, Error, ErrorKind, Extent, ExtentKind, FileImage, FileOptions, Geometry, Image,
    Overlay, PresentLog, Result, ZeroMode,
};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

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

fn seeds(most: u64) -> std::ops::Range<u64> {
    match std::env::var("DRAY_SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("DRAY_SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..most,
    }
}

const BLOCKS: u64 = 120;
/// Not a whole number of blocks.
const LEN: u64 = (BLOCKS - 1) * BLOCK_SIZE + 1536;
const OPERATIONS: u64 = 150;
const GUESTS: u64 = 2;

fn below_byte(offset: u64) -> u8 {
    let block = offset / BLOCK_SIZE;
    if block.is_multiple_of(5) { 0 } else { (block * 7 + offset % 251) as u8 }
}

#[derive(Default)]
struct Log(Mutex<BlockSet>);

impl PresentLog for Log {
    fn note(&self, run: BlockRange) -> Result<()> {
        self.0.lock().unwrap().insert(run);
        Ok(())
    }

    fn record(&self, present: &BlockSet) -> Result<()> {
        self.0.lock().unwrap().union_with(present);
        Ok(())
    }
}

/// Works on its own part of the disk, the parts meeting inside a block.
fn guest(disk: &Disk, from: u64, model: &mut [u8], mut random: Random, label: &str) {
    let to = from + model.len() as u64;
    for _ in 0..OPERATIONS {
        let at = from + random.below(to - from);
        let at = if random.below(2) == 0 { at } else { (at & !4095).max(from) };
        let len = [random.below(5000), BLOCK_SIZE * random.below(20)][random.below(2) as usize];
        let len = len.min(to - at);
        let part = &mut model[(at - from) as usize..(at - from + len) as usize];
        match random.below(8) {
            0..=2 => {
                let data = vec![random.below(256) as u8; part.len()];
                if disk.try_write_at(&data, at).unwrap() == Attempt::WouldWait {
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
}

/// What the extents call a hole must read as zeros.
fn check_extents(image: &dyn Image, model: &[u8], label: &str) {
    let mut at = 0;
    while at < LEN {
        for Extent { len, kind } in image.extents(at, LEN - at, 7).unwrap() {
            let part = &model[at as usize..(at + len) as usize];
            let zeros = part.iter().all(|&byte| byte == 0);
            assert!(kind == ExtentKind::Data || zeros, "{label}: no hole at {at}");
            at += len;
        }
    }
}

fn open(path: &std::path::Path) -> Arc<dyn Image> {
    let options = FileOptions { write: true, direct: false, export_len: None };
    Arc::new(FileImage::open(path, options).unwrap())
}

fn run(seed: u64) {
    let label = format!("DRAY_SEED={seed}");
    let dir = tempfile::Builder::new().prefix("image-overlay-").tempdir().unwrap();
    let (below, file) = (dir.path().join("below.raw"), dir.path().join("file.raw"));
    let mut model: Vec<u8> = (0..LEN).map(below_byte).collect();
    std::fs::write(&below, &model).unwrap();
    std::fs::File::create(&file).unwrap().set_len(LEN).unwrap();
    let log = Arc::new(Log::default());
    for life in 0..2 {
        let here = log.0.lock().unwrap().clone();
        let overlay = Overlay::new(open(&below), open(&file), &here, Arc::clone(&log) as _);
        let overlay = Arc::new(overlay.unwrap());
        assert_eq!(overlay.unmerged_count(), here.len(), "{label}");
        let disk = Disk::new(Arc::clone(&overlay) as _);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let (overlay, over) = (&overlay, &over);
            scope.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    overlay.merge(0).unwrap();
                    thread::yield_now();
                }
            });
            let parts = model.chunks_mut(LEN.div_ceil(GUESTS) as usize);
            let guests: Vec<_> = parts
                .enumerate()
                .map(|(nth, part)| {
                    let from = nth as u64 * LEN.div_ceil(GUESTS);
                    let random = Random(seed * 8 + life * GUESTS + nth as u64);
                    let (disk, label) = (&disk, &label);
                    scope.spawn(move || guest(disk, from, part, random, label))
                })
                .collect();
            guests.into_iter().for_each(|guest| guest.join().unwrap());
            over.store(true, Ordering::SeqCst);
        });
        check_extents(&*overlay, &model, &label);
        // The merge of one life is lost in the next.
        if life == 1 {
            while overlay.merge(0).unwrap().is_some() {}
            assert_eq!(overlay.unmerged_count(), 0, "{label}");
            assert!(std::fs::read(&below).unwrap() == model, "{label}: not all was merged");
        }
    }
}

#[test]
fn an_overlay_reads_as_what_was_written_and_merges_down_whole() {
    seeds(30).for_each(run);
}

const SECTOR: u64 = 512;
const PER_BLOCK: u64 = BLOCK_SIZE / SECTOR;
/// Four blocks and three sectors: the tail of an image need not be a block.
const SECTORS: u64 = 4 * PER_BLOCK + 3;

/// What a host's power cut treats as one: the steps so far, the overlay's records.
struct Power {
    steps: u64,
    cut_at: u64,
    random: Random,
    records: Vec<BlockSet>,
}

type Host = Arc<Mutex<Power>>;

fn dead() -> Error {
    Error::new(ErrorKind::Io, "using the disk", "the power is gone")
}

/// One step; false when the power goes during it.
fn step(host: &Host) -> Result<bool> {
    let mut power = host.lock().unwrap();
    if power.steps > power.cut_at {
        return Err(dead());
    }
    power.steps += 1;
    Ok(power.steps <= power.cut_at)
}

/// A disk that keeps, for every sector, everything that a power cut may leave; the last is what it
/// holds now.
struct Machine(Host, Mutex<Vec<Vec<u64>>>);

impl Machine {
    fn new(host: &Host, sectors: &[u64]) -> Arc<Self> {
        let sectors = sectors.iter().map(|&value| vec![value]).collect();
        Arc::new(Self(Arc::clone(host), Mutex::new(sectors)))
    }

    fn put(&self, offset: u64, values: impl Iterator<Item = u64>) -> Result<()> {
        let lives = step(&self.0)?;
        let mut sectors = self.1.lock().unwrap();
        for (nth, value) in values.enumerate() {
            sectors[(offset / SECTOR) as usize + nth].push(value);
        }
        if lives { Ok(()) } else { Err(dead()) }
    }

    fn cut(&self) -> Vec<u64> {
        let random = &mut self.0.lock().unwrap().random;
        let sectors = self.1.lock().unwrap();
        sectors.iter().map(|may| may[random.below(may.len() as u64) as usize]).collect()
    }
}

fn value_of(sector: &[u8]) -> u64 {
    u64::from_le_bytes(sector[..8].try_into().unwrap())
}

impl Image for Machine {
    fn geometry(&self) -> Geometry {
        Geometry { len: SECTORS * SECTOR, min_block: 512, preferred_block: 4096, read_only: false }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let sectors = self.1.lock().unwrap();
        for (nth, sector) in buf.chunks_mut(SECTOR as usize).enumerate() {
            let value = sectors[(offset / SECTOR) as usize + nth].last().unwrap();
            sector.fill(0);
            sector[..8].copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        self.put(offset, data.chunks(SECTOR as usize).map(value_of))?;
        if fua { self.flush() } else { Ok(()) }
    }

    fn zero(&self, offset: u64, len: u64, _mode: ZeroMode, fua: bool) -> Result<()> {
        self.put(offset, (0..len / SECTOR).map(|_| 0))?;
        if fua { self.flush() } else { Ok(()) }
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.zero(offset, len, ZeroMode::MayUnmap, fua)
    }

    fn flush(&self) -> Result<()> {
        if !step(&self.0)? {
            return Err(dead());
        }
        for may in self.1.lock().unwrap().iter_mut() {
            may.drain(..may.len() - 1);
        }
        Ok(())
    }

    fn extents(&self, _: u64, len: u64, _: usize) -> Result<Vec<Extent>> {
        Ok(vec![Extent { len, kind: ExtentKind::Data }])
    }
}

struct Records(Host);

impl PresentLog for Records {
    fn note(&self, _run: BlockRange) -> Result<()> {
        Ok(())
    }

    fn record(&self, present: &BlockSet) -> Result<()> {
        let lives = step(&self.0)?;
        let mut power = self.0.lock().unwrap();
        // A journal's record is there or not; when the power goes, it may be either.
        if lives || power.random.below(2) == 0 {
            power.records.push(present.clone());
        }
        if lives { Ok(()) } else { Err(dead()) }
    }
}

/// One thing that a guest or the merger does; `may` is every content that each sector may have
/// after a power cut.
fn act(
    disk: &Disk,
    overlay: &Overlay,
    may: &mut [Vec<u64>],
    random: &mut Random,
    next: &mut u64,
) -> Result<()> {
    let first = random.below(SECTORS);
    let first = if random.below(2) == 0 { first } else { first / PER_BLOCK * PER_BLOCK };
    let count = (random.below(2 * PER_BLOCK) + 1).min(SECTORS - first);
    let (offset, len) = (first * SECTOR, count * SECTOR);
    let part = first as usize..(first + count) as usize;
    match random.below(8) {
        0..=2 => {
            let mut data = vec![0; len as usize];
            for sector in data.chunks_mut(SECTOR as usize) {
                *next += 1;
                sector[..8].copy_from_slice(&next.to_le_bytes());
            }
            for (may, sector) in may[part].iter_mut().zip(data.chunks(SECTOR as usize)) {
                may.push(value_of(sector));
            }
            disk.write_at(&data, offset, false)
        }
        3 => {
            may[part].iter_mut().for_each(|may| may.push(0));
            disk.discard(offset, len, false)
        }
        4 => {
            disk.flush()?;
            may.iter_mut().for_each(|may| {
                may.drain(..may.len() - 1);
            });
            Ok(())
        }
        5 => {
            let mut buf = vec![0; len as usize];
            disk.read_at(&mut buf, offset)?;
            for (may, sector) in may[part].iter().zip(buf.chunks(SECTOR as usize)) {
                assert_eq!(value_of(sector), *may.last().unwrap(), "read");
            }
            Ok(())
        }
        _ => overlay.merge(0).map(drop),
    }
}

/// One run with the power cut at step `cut_at`, then a second life, cut at the same step again.
fn cut(seed: u64, cut_at: u64) -> u64 {
    let mut random = Random(seed);
    let mut below: Vec<u64> = (0..SECTORS).map(|sector| 1000 + sector).collect();
    let (mut file, mut here) = (vec![0; SECTORS as usize], BlockSet::new());
    let mut may: Vec<Vec<u64>> = below.iter().map(|&value| vec![value]).collect();
    let (mut next, mut steps) = (10_000, 0);
    for life in 0..2 {
        let random_cut = Random(seed ^ cut_at << 32 ^ life);
        let power = Power { steps: 0, cut_at, random: random_cut, records: Vec::new() };
        let host: Host = Arc::new(Mutex::new(power));
        let (lower, upper) = (Machine::new(&host, &below), Machine::new(&host, &file));
        let log = Arc::new(Records(Arc::clone(&host)));
        let overlay = Overlay::new(Arc::clone(&lower) as _, Arc::clone(&upper) as _, &here, log);
        let overlay = Arc::new(overlay.unwrap());
        let disk = Disk::new(Arc::clone(&overlay) as _);
        for _ in 0..10 {
            if act(&disk, &overlay, &mut may, &mut random, &mut next).is_err() {
                break;
            }
        }
        if life == 0 {
            steps = host.lock().unwrap().steps;
        }
        (below, file) = (lower.cut(), upper.cut());
        host.lock().unwrap().records.iter().for_each(|record| here.union_with(record));
        for (sector, may) in may.iter_mut().enumerate() {
            let over = here.contains(sector as u64 / PER_BLOCK);
            let found = if over { file[sector] } else { below[sector] };
            let label = format!("seed {seed}, cut at {cut_at}, life {life}, sector {sector}");
            assert!(may.contains(&found), "{label}: {found}, may hold {may:?} (here: {over})");
            *may = vec![found];
        }
    }
    steps
}

#[test]
fn no_flushed_write_is_lost_whatever_was_merged() {
    for seed in seeds(300) {
        let steps = cut(seed, u64::MAX - 1);
        (0..=steps).for_each(|cut_at| {
            cut(seed, cut_at);
        });
    }
}
