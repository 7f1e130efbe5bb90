//! I2: what a guest was told is flushed survives a power cut at an owner with missing blocks, and
//! no old data comes back after the source has filled the rest again. Now and then the agent is
//! killed, and another process goes on with what the first has noted; or a sync fails. Every run is
//! repeated with the power cut at every one of its steps.

use crate::power::{self, Machine, PER_BLOCK, Records, SECTOR, dead, sectors_of, value_of};
use crate::random::{Random, seeds};
use dray_image::{Disk, Fetcher, Fill, Image, Result, ZeroMode};
use dray_types::{BlockRange, BlockSet};
use std::sync::{Arc, OnceLock, Weak};

/// Five blocks and three sectors: the tail of an image need not be a block.
const SECTORS: u64 = 5 * PER_BLOCK + 3;
const BLOCKS: u64 = 6;
const SEEDS: u64 = 2000;
const OPERATIONS: u64 = 10;
/// What the target's disk held before anything was copied to it; must never be seen.
const GARBAGE: u64 = u64::MAX;

/// What the source has in a sector; block 2 is zeros there.
fn source_sector(sector: u64) -> u64 {
    if sector / PER_BLOCK == 2 { 0 } else { 1000 + sector }
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
    /// A flush failed: the guest knows that it may have lost what it wrote since the last one.
    told: bool,
    /// Sectors of which it knows that, until it writes them again.
    doubtful: Vec<bool>,
}

impl Guest {
    fn write(&mut self, first: u64, values: &[u64]) {
        for (sector, &value) in (first as usize..).zip(values) {
            self.may[sector].push(value);
            self.doubtful[sector] = false;
        }
    }

    fn flushed(&mut self) {
        for (may, _) in self.may.iter_mut().zip(&self.doubtful).filter(|(_, doubtful)| !**doubtful)
        {
            may.drain(..may.len() - 1);
        }
    }

    fn is_told(&mut self) {
        self.told = true;
        for (may, doubtful) in self.may.iter().zip(&mut self.doubtful) {
            *doubtful |= may.len() > 1;
        }
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
            4 => self.flush(disk),
            5 => disk.checkpoint(),
            6 => self.read_something(disk, random, seed),
            _ => {
                let start = random.below(BLOCKS);
                let len = (random.below(3) + 1).min(BLOCKS - start);
                Source::send(disk, BlockRange::new(start, len)).map(drop)
            }
        }
    }

    fn flush(&mut self, disk: &Disk) -> Result<()> {
        let result = disk.flush();
        match &result {
            Ok(()) => self.flushed(),
            Err(_) => self.is_told(),
        }
        result
    }

    /// Another process serves the disk after a failed sync: what the guest finds must be something
    /// that it may find. It may find the same after a power cut as before.
    fn resumes(&mut self, disk: &Disk, label: &str) -> Result<()> {
        for (sector, may) in self.may.iter_mut().enumerate() {
            let mut buf = [0; SECTOR as usize];
            disk.read_at(&mut buf, sector as u64 * SECTOR)?;
            let found = value_of(&buf);
            assert!(may.contains(&found), "{label}: sector {sector} holds {found}, may {may:?}");
            may.push(found);
        }
        Ok(())
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
        self.doubtful.fill(false);
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

/// A host until its power goes, with one agent after the other.
struct Life<'a> {
    host: power::Host,
    machine: Arc<Machine>,
    /// Missing when the power came back.
    missing: &'a BlockSet,
    label: String,
}

impl Life<'_> {
    /// A process begins to serve the disk.
    fn serve(&self) -> Arc<Disk> {
        let disk = Disk::new(Arc::clone(&self.machine) as _);
        let source = Arc::new(Source::default());
        source.disk.set(Arc::downgrade(&disk)).unwrap();
        let (recorded, noted) = self.host.lock().unwrap().believed();
        let mut missing = self.missing.clone();
        [&recorded, &noted].into_iter().for_each(|here| missing.subtract(here));
        let log = Arc::new(Records(Arc::clone(&self.host)));
        disk.serve_with_missing(missing, &noted, source, log);
        disk
    }

    /// Until the power goes, or for `OPERATIONS`.
    fn go_on(&self, guest: &mut Guest, random: &mut Random, seed: u64) -> Result<()> {
        let mut disk = self.serve();
        for _ in 0..OPERATIONS {
            let event = random.below(24);
            self.host.lock().unwrap().sync_fails |= event == 0;
            guest.told = false;
            let done = guest.act(&disk, random, seed);
            if self.is_cut() {
                return done;
            }
            if done.is_err() {
                // As the message advises, once the guest has been told.
                if !guest.told {
                    guest.flush(&disk).expect_err("the guest is told");
                }
                disk = self.serve();
                guest.resumes(&disk, &self.label)?;
            } else if event < 6 {
                disk = self.serve();
            }
        }
        Ok(())
    }

    fn is_cut(&self) -> bool {
        let power = self.host.lock().unwrap();
        power.steps > power.cut_at
    }
}

/// One run with the power cut at step `cut_at`, then a second life, cut at the same step again.
/// Returns how many steps the first life took.
fn run(seed: u64, cut_at: u64) -> u64 {
    let mut random = Random(seed);
    let (mut sectors, mut missing) = handover(&mut random);
    let may = (0..SECTORS).map(|s| vec![source_sector(s)]).collect();
    let doubtful = vec![false; SECTORS as usize];
    let mut guest = Guest { may, next_value: 10_000, told: false, doubtful };
    let mut steps = 0;
    for life in 0..2 {
        let host = power::host(cut_at, Random(seed ^ cut_at << 32 ^ life));
        let machine = Machine::new(&host, &sectors);
        let label = format!("seed {seed}, cut at {cut_at}, life {life}");
        let this = Life { host, machine, missing: &missing, label };
        // An error is the power cut.
        let _ = this.go_on(&mut guest, &mut random, seed);
        if life == 0 {
            steps = this.host.lock().unwrap().steps;
        }
        let left = this.machine.cut();
        let (recorded, _) = this.host.lock().unwrap().believed();
        let label = this.label.clone();
        missing.subtract(&recorded);
        guest.wakes(&left, &missing, &label);
        sectors = left;
    }
    steps
}

#[test]
fn no_flushed_write_is_lost_and_no_old_data_comes_back() {
    let mut cuts = 0;
    for seed in seeds(SEEDS) {
        let steps = run(seed, u64::MAX - 1);
        (0..=steps).for_each(|cut_at| {
            run(seed, cut_at);
        });
        cuts += steps + 1;
    }
    println!("{cuts} power cuts");
}
