//! Disks that keep, for every sector, everything that a power cut may leave of it: what was flushed,
//! or anything written since.

use crate::random::Random;
use dray_image::{
    Error, ErrorKind, Extent, ExtentKind, Geometry, Image, PresentLog, Result, ZeroMode,
};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Bytes of a sector.
pub const SECTOR: u64 = 512;
/// Sectors of a block.
pub const PER_BLOCK: u64 = BLOCK_SIZE / SECTOR;

/// What a host's power cut treats as one: the steps so far, the records of what is present.
pub struct Power {
    /// Steps taken so far.
    pub steps: u64,
    /// The power goes during this one.
    pub cut_at: u64,
    /// Decides what is left.
    pub random: Random,
    /// What the log has recorded.
    pub records: Vec<BlockSet>,
    /// What the log has noted; a power cut takes it away, a kill does not.
    pub notes: BlockSet,
    /// The next flush fails: what it should have made durable may never be.
    pub sync_fails: bool,
}

impl Power {
    /// What the next process takes for present: recorded, and only noted.
    pub fn believed(&self) -> (BlockSet, BlockSet) {
        let (mut recorded, mut noted) = (BlockSet::new(), self.notes.clone());
        self.records.iter().for_each(|record| recorded.union_with(record));
        noted.subtract(&recorded);
        (recorded, noted)
    }
}

/// All disks and records of one host.
pub type Host = Arc<Mutex<Power>>;

/// Nothing works without power.
pub fn dead() -> Error {
    Error::new(ErrorKind::Io, "using the disk", "the power is gone")
}

/// A host whose power goes during step `cut_at`.
pub fn host(cut_at: u64, random: Random) -> Host {
    Arc::new(Mutex::new(Power {
        steps: 0,
        cut_at,
        random,
        records: Vec::new(),
        notes: BlockSet::new(),
        sync_fails: false,
    }))
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

/// A sector: everything that a power cut may leave of it; the last is what it holds now.
#[derive(Clone)]
struct Sector {
    may: Vec<u64>,
    /// A flush failed for it: later ones leave it as it is, until it is written again.
    clean: bool,
}

/// A disk that keeps, for every sector, everything that a power cut may leave.
pub struct Machine {
    host: Host,
    sectors: Mutex<Vec<Sector>>,
    /// A sync failed, and no flush has said so.
    owed: AtomicBool,
}

impl Machine {
    /// A disk of these sectors, all flushed.
    pub fn new(host: &Host, sectors: &[u64]) -> Arc<Self> {
        let sector = |&value: &u64| Sector { may: vec![value], clean: false };
        let sectors = sectors.iter().map(sector).collect();
        let (host, sectors) = (Arc::clone(host), Mutex::new(sectors));
        Arc::new(Self { host, sectors, owed: AtomicBool::new(false) })
    }

    fn put(&self, offset: u64, values: impl Iterator<Item = u64>) -> Result<()> {
        let lives = step(&self.host)?;
        let mut sectors = self.sectors.lock().unwrap();
        for (nth, value) in values.enumerate() {
            let sector = &mut sectors[(offset / SECTOR) as usize + nth];
            sector.may.push(value);
            sector.clean = false;
        }
        if lives { Ok(()) } else { Err(dead()) }
    }

    /// What a power cut leaves.
    pub fn cut(&self) -> Vec<u64> {
        let random = &mut self.host.lock().unwrap().random;
        let sectors = self.sectors.lock().unwrap();
        let left = |Sector { may, .. }: &Sector| may[random.below(may.len() as u64) as usize];
        sectors.iter().map(left).collect()
    }

    fn try_flush(&self) -> Result<()> {
        if !step(&self.host)? {
            return Err(dead());
        }
        if std::mem::take(&mut self.host.lock().unwrap().sync_fails) {
            return Err(self.fail_flush());
        }
        for Sector { may, .. } in self.sectors.lock().unwrap().iter_mut().filter(|one| !one.clean) {
            may.drain(..may.len() - 1);
        }
        Ok(())
    }

    fn fail_flush(&self) -> Error {
        let random = &mut self.host.lock().unwrap().random;
        for sector in self.sectors.lock().unwrap().iter_mut() {
            sector.clean |= sector.may.len() > 1 && random.below(2) == 0;
        }
        Error::new(ErrorKind::Io, "flushing the disk", "it could not write all of it")
    }
}

/// What a sector says.
pub fn value_of(sector: &[u8]) -> u64 {
    u64::from_le_bytes(sector[..8].try_into().unwrap())
}

impl Image for Machine {
    fn geometry(&self) -> Geometry {
        Geometry {
            len: self.sectors.lock().unwrap().len() as u64 * SECTOR,
            min_block: 512,
            preferred_block: 4096,
            read_only: false,
        }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let sectors = self.sectors.lock().unwrap();
        for (nth, sector) in buf.chunks_mut(SECTOR as usize).enumerate() {
            let value = sectors[(offset / SECTOR) as usize + nth].may.last().unwrap();
            sector.fill(0);
            sector[..8].copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        self.put(offset, data.chunks(SECTOR as usize).map(value_of))?;
        if fua { self.sync() } else { Ok(()) }
    }

    fn zero(&self, offset: u64, len: u64, _mode: ZeroMode, fua: bool) -> Result<()> {
        self.put(offset, (0..len / SECTOR).map(|_| 0))?;
        if fua { self.sync() } else { Ok(()) }
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.zero(offset, len, ZeroMode::MayUnmap, fua)
    }

    fn flush(&self) -> Result<()> {
        let done = self.try_flush();
        let owed = self.owed.swap(false, Ordering::SeqCst);
        if owed { Err(done.err().unwrap_or_else(dead)) } else { done }
    }

    fn sync(&self) -> Result<()> {
        let done = self.try_flush();
        self.owed.fetch_or(done.is_err(), Ordering::SeqCst);
        done
    }

    fn extents(&self, _: u64, len: u64, _: usize) -> Result<Vec<Extent>> {
        Ok(vec![Extent { len, kind: ExtentKind::Data }])
    }
}

/// A journal of what is present, and notes.
pub struct Records(pub Host);

impl PresentLog for Records {
    fn note(&self, run: BlockRange) -> Result<()> {
        self.0.lock().unwrap().notes.insert(run);
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

    fn forget_notes(&self) -> Result<()> {
        self.0.lock().unwrap().notes = BlockSet::new();
        Ok(())
    }
}

/// Sectors that say `values`.
pub fn sectors_of(values: impl Iterator<Item = u64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        let end = bytes.len() + SECTOR as usize;
        bytes.extend_from_slice(&value.to_le_bytes());
        bytes.resize(end, 0);
    }
    bytes
}
