//! I2: what a guest was told is flushed survives a power cut at an owner with missing blocks, and
//! no old data comes back after the source has filled the rest again.
//!
//! The disk below has a live state and, for every sector, everything that a power cut may leave:
//! the durable content or any content written since the last flush. Every run is repeated with the
//! power cut at every one of its steps. `DRAY_SEED=n cargo test -p dray-image --test power_cut`
//! repeats one seed.

use dray_image::{
    Disk, Error, ErrorKind, Extent, Fetcher, Fill, Geometry, Image, PresentLog, Result, ZeroMode,
};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use std::sync::{Arc, Mutex, OnceLock, Weak};

const SECTOR: u64 = 512;
const PER_BLOCK: u64 = BLOCK_SIZE / SECTOR;
/// Five blocks and three sectors: the tail of an image need not be a block.
const SECTORS: u64 = 5 * PER_BLOCK + 3;
const LEN: u64 = SECTORS * SECTOR;
const BLOCKS: u64 = 6;
const SEEDS: u64 = 2000;
const OPERATIONS: u64 = 10;
/// What the target's disk held before anything was copied to it; must never be seen.
const GARBAGE: u64 = u64::MAX;

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

/// What the source has in a sector; block 2 is zeros there.
fn source_sector(sector: u64) -> u64 {
    if sector / PER_BLOCK == 2 { 0 } else { 1000 + sector }
}

/// Power, disk and log: what a power cut treats as one.
struct Host {
    steps: u64,
    cut_at: u64,
    random: Random,
    /// Everything each sector may hold after a cut; the last is what it holds now.
    sectors: Vec<Vec<u64>>,
    records: Vec<BlockSet>,
}

struct Machine(Mutex<Host>);

fn dead() -> Error {
    Error::new(ErrorKind::Io, "using the disk", "the power is gone")
}

impl Machine {
    /// One step; false when the power goes during it.
    fn step(&self, host: &mut Host) -> Result<bool> {
        if host.steps > host.cut_at {
            return Err(dead());
        }
        host.steps += 1;
        Ok(host.steps <= host.cut_at)
    }

    fn put(&self, offset: u64, values: impl Iterator<Item = u64>) -> Result<()> {
        let mut host = self.0.lock().unwrap();
        let lives = self.step(&mut host)?;
        for (nth, value) in values.enumerate() {
            host.sectors[(offset / SECTOR) as usize + nth].push(value);
        }
        if lives { Ok(()) } else { Err(dead()) }
    }

    /// The sectors and records that a power cut leaves.
    fn cut(&self) -> (Vec<u64>, Vec<BlockSet>) {
        let mut host = self.0.lock().unwrap();
        let Host { random, sectors, records, .. } = &mut *host;
        let left = sectors.iter().map(|may| may[random.below(may.len() as u64) as usize]);
        (left.collect(), records.clone())
    }
}

impl Image for Machine {
    fn geometry(&self) -> Geometry {
        Geometry { len: LEN, min_block: 512, preferred_block: 4096, read_only: false }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let host = self.0.lock().unwrap();
        for (nth, sector) in buf.chunks_mut(SECTOR as usize).enumerate() {
            let value = host.sectors[(offset / SECTOR) as usize + nth].last().unwrap();
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
        let mut host = self.0.lock().unwrap();
        if !self.step(&mut host)? {
            return Err(dead());
        }
        for may in &mut host.sectors {
            may.drain(..may.len() - 1);
        }
        Ok(())
    }

    fn extents(&self, _: u64, _: u64, _: usize) -> Result<Vec<Extent>> {
        Ok(Vec::new())
    }
}

impl PresentLog for Machine {
    fn note(&self, _run: dray_types::BlockRange) -> Result<()> {
        Ok(())
    }

    fn record(&self, present: &BlockSet) -> Result<()> {
        let mut host = self.0.lock().unwrap();
        let lives = self.step(&mut host)?;
        // A journal's record is there or not; when the power goes, it may be either.
        if lives || host.random.below(2) == 0 {
            host.records.push(present.clone());
        }
        if lives { Ok(()) } else { Err(dead()) }
    }
}

fn value_of(sector: &[u8]) -> u64 {
    u64::from_le_bytes(sector[..8].try_into().unwrap())
}

fn sectors_of(values: impl Iterator<Item = u64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        let end = bytes.len() + SECTOR as usize;
        bytes.extend_from_slice(&value.to_le_bytes());
        bytes.resize(end, 0);
    }
    bytes
}

/// Answers demands at once; when the power is gone, whoever waits is told.
#[derive(Default)]
struct Source {
    disk: OnceLock<Weak<Disk>>,
}

impl Source {
    fn send(disk: &Disk, range: BlockRange) -> Result<u64> {
        let mut filled = 0;
        for number in range.start..range.end() {
            let first = number * PER_BLOCK;
            let data = sectors_of((first..first + PER_BLOCK).map(source_sector));
            let fill =
                if dray_image::runs::is_zero(&data) { Fill::Zero } else { Fill::Data(&data) };
            filled += disk.fill(BlockRange::new(number, 1), fill)?;
        }
        Ok(filled)
    }
}

impl Fetcher for Source {
    fn demand(&self, range: BlockRange) {
        let disk = self.disk.get().and_then(Weak::upgrade).unwrap();
        if Self::send(&disk, range).is_err() {
            disk.fail_parked();
        }
    }

    fn peek(&self, _: u64, _: &mut [u8]) -> Result<()> {
        Err(dead())
    }
}

/// What the guest knows: per sector, every content it may find after a power cut. The last is what
/// it reads now.
struct Guest {
    may: Vec<Vec<u64>>,
    next_value: u64,
}

impl Guest {
    fn write(&mut self, first: u64, values: &[u64]) {
        for (sector, &value) in (first..).zip(values) {
            self.may[sector as usize].push(value);
        }
    }

    fn flushed(&mut self) {
        self.may.iter_mut().for_each(|may| {
            may.drain(..may.len() - 1);
        });
    }

    fn place(random: &mut Random) -> (u64, u64) {
        if random.below(2) == 0 {
            let first = random.below(BLOCKS) * PER_BLOCK;
            (first, (PER_BLOCK * (random.below(3) + 1)).min(SECTORS - first))
        } else {
            let first = random.below(SECTORS);
            (first, (random.below(12) + 1).min(SECTORS - first))
        }
    }

    fn write_something(&mut self, disk: &Disk, random: &mut Random) -> Result<()> {
        let (first, count) = Self::place(random);
        let (kind, fua) = (random.below(4), random.below(5) == 0);
        let mut value = || {
            self.next_value += 1;
            if kind < 2 { self.next_value } else { 0 }
        };
        let values: Vec<u64> = (0..count).map(|_| value()).collect();
        self.write(first, &values);
        let (offset, len) = (first * SECTOR, count * SECTOR);
        match kind {
            0 | 1 => disk.write_at(&sectors_of(values.into_iter()), offset, fua)?,
            2 => disk.zero(offset, len, ZeroMode::MayUnmap, fua)?,
            _ => disk.discard(offset, len, fua)?,
        }
        if fua {
            for may in &mut self.may[first as usize..(first + count) as usize] {
                may.drain(..may.len() - 1);
            }
        }
        Ok(())
    }

    fn read_something(&self, disk: &Disk, random: &mut Random, seed: u64) -> Result<()> {
        let (first, count) = Self::place(random);
        let mut buf = vec![0; (count * SECTOR) as usize];
        disk.read_at(&mut buf, first * SECTOR)?;
        for (sector, bytes) in (first..).zip(buf.chunks(SECTOR as usize)) {
            let now = self.may[sector as usize].last().unwrap();
            assert_eq!(value_of(bytes), *now, "seed {seed}: sector {sector} read");
        }
        Ok(())
    }

    fn act(&mut self, disk: &Disk, random: &mut Random, seed: u64) -> Result<()> {
        match random.below(9) {
            0..=3 => self.write_something(disk, random),
            4 => {
                disk.flush()?;
                self.flushed();
                Ok(())
            }
            5 => disk.checkpoint(),
            6 => self.read_something(disk, random, seed),
            _ => {
                let start = random.below(BLOCKS);
                let len = (random.below(3) + 1).min(BLOCKS - start);
                Source::send(disk, BlockRange::new(start, len)).map(drop)
            }
        }
    }

    /// The power comes back: what the guest finds must be something it may find.
    fn wakes(&mut self, disk: &[u64], missing: &BlockSet, label: &str) {
        for (sector, may) in self.may.iter_mut().enumerate() {
            let from_source = missing.contains(sector as u64 / PER_BLOCK);
            let found = if from_source { source_sector(sector as u64) } else { disk[sector] };
            assert!(
                may.contains(&found),
                "{label}: sector {sector} holds {found}, may hold {may:?} (missing: {from_source})"
            );
            *may = vec![found];
        }
    }
}

/// A target just after the commit: some blocks arrived before, the others hold garbage.
fn handover(random: &mut Random) -> (Vec<u64>, BlockSet) {
    let mut missing = BlockSet::new();
    (0..BLOCKS).filter(|_| random.below(4) > 0).for_each(|b| missing.insert(BlockRange::new(b, 1)));
    let content = |sector| {
        if missing.contains(sector / PER_BLOCK) { GARBAGE } else { source_sector(sector) }
    };
    ((0..SECTORS).map(content).collect(), missing)
}

/// One run with the power cut at step `cut_at`, then a second life, cut at the same step again.
/// Returns how many steps the first life took.
fn run(seed: u64, cut_at: u64) -> u64 {
    let mut random = Random(seed);
    let (mut sectors, mut missing) = handover(&mut random);
    let mut guest =
        Guest { may: (0..SECTORS).map(|s| vec![source_sector(s)]).collect(), next_value: 10_000 };
    let mut steps = 0;
    for life in 0..2 {
        let host = Host {
            steps: 0,
            cut_at,
            random: Random(seed ^ cut_at << 32 ^ life),
            sectors: sectors.iter().map(|&value| vec![value]).collect(),
            records: Vec::new(),
        };
        let machine = Arc::new(Machine(Mutex::new(host)));
        let disk = Disk::new(Arc::clone(&machine) as _);
        let source = Arc::new(Source::default());
        source.disk.set(Arc::downgrade(&disk)).unwrap();
        disk.serve_with_missing(missing.clone(), source, Arc::clone(&machine) as _);
        for _ in 0..OPERATIONS {
            if guest.act(&disk, &mut random, seed).is_err() {
                break;
            }
        }
        if life == 0 {
            steps = machine.0.lock().unwrap().steps;
        }
        let (left, records) = machine.cut();
        records.iter().for_each(|record| missing.subtract(record));
        guest.wakes(&left, &missing, &format!("seed {seed}, cut at {cut_at}, life {life}"));
        sectors = left;
    }
    steps
}

#[test]
fn no_flushed_write_is_lost_and_no_old_data_comes_back() {
    let seeds = match std::env::var("DRAY_SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("DRAY_SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..SEEDS,
    };
    let mut cuts = 0;
    for seed in seeds {
        let steps = run(seed, u64::MAX - 1);
        (0..=steps).for_each(|cut_at| {
            run(seed, cut_at);
        });
        cuts += steps + 1;
    }
    println!("{cuts} power cuts");
}
