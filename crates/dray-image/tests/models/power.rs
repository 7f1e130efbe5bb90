//! Disks that keep, for every sector, everything that a power cut may leave of it: what was flushed,
//! or anything written since.

use crate::random::Random;
use dray_image::{
    Error, ErrorKind, Extent, ExtentKind, Geometry, Image, PresentLog, Result, ZeroMode,
};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
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
}

/// All disks and records of one host.
pub type Host = Arc<Mutex<Power>>;

/// Nothing works without power.
pub fn dead() -> Error {
    Error::new(ErrorKind::Io, "using the disk", "the power is gone")
}

/// A host whose power goes during step `cut_at`.
pub fn host(cut_at: u64, random: Random) -> Host {
    Arc::new(Mutex::new(Power { steps: 0, cut_at, random, records: Vec::new() }))
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
pub struct Machine(Host, Mutex<Vec<Vec<u64>>>);

impl Machine {
    /// A disk of these sectors, all flushed.
    pub fn new(host: &Host, sectors: &[u64]) -> Arc<Self> {
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

    /// What a power cut leaves.
    pub fn cut(&self) -> Vec<u64> {
        let random = &mut self.0.lock().unwrap().random;
        let sectors = self.1.lock().unwrap();
        sectors.iter().map(|may| may[random.below(may.len() as u64) as usize]).collect()
    }
}

/// What a sector says.
pub fn value_of(sector: &[u8]) -> u64 {
    u64::from_le_bytes(sector[..8].try_into().unwrap())
}

impl Image for Machine {
    fn geometry(&self) -> Geometry {
        Geometry {
            len: self.1.lock().unwrap().len() as u64 * SECTOR,
            min_block: 512,
            preferred_block: 4096,
            read_only: false,
        }
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

    fn sync(&self) -> Result<()> {
        self.flush()
    }

    fn extents(&self, _: u64, len: u64, _: usize) -> Result<Vec<Extent>> {
        Ok(vec![Extent { len, kind: ExtentKind::Data }])
    }
}

/// A journal of what is present.
pub struct Records(pub Host);

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

    fn forget_notes(&self) -> Result<()> {
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
