//! What the tables replay: the generated loads, and the traces of the folder that `DRAY_TRACES`
//! names.

use dray_engine::SECOND;
use dray_sim::replay::settings::PAPER_DELAY;
use dray_sim::replay::study::Starts;
use dray_sim::replay::{Order, Settings};
use dray_trace::analyse::{PAPER_BANDWIDTH, PAPER_STARTS, Totals};
use dray_trace::generate::{Load, LoadSpec};
use dray_trace::{Reader, Record, TraceError};
use dray_types::Strategy;
use std::error::Error;
use std::path::{Path, PathBuf};

const GIB: u64 = 1 << 30;
/// Disk of a trace that does not say how large it was, and its guest's memory.
const DISK: u64 = 32 * GIB;
const MEMORY: u64 = GIB;
/// A trace for which so much would need a faster link than 1 Gbit/s has the disk it needs.
const FAST: f64 = 125e6;
/// A generated load goes on for this many times the shortest migration.
const TIMES: u64 = 6;

/// What is replayed.
pub struct Case {
    /// What people call it.
    pub name: String,
    /// Size of the disk in bytes.
    pub disk: u64,
    /// Guest memory in bytes.
    pub memory: u64,
    /// Of the link, one way, in nanoseconds.
    pub delay: u64,
    /// How fast the link is and when the migrations begin.
    pub starts: Starts,
    from: From,
}

enum From {
    /// A load and its seed.
    Load(Box<LoadSpec>, u64),
    File(PathBuf),
}

/// Records of a trace, in order of time.
pub type Records = Box<dyn Iterator<Item = Result<Record, TraceError>>>;

impl Case {
    /// A load as the scheduling paper moves it: 100 Mbit/s, random starts.
    pub fn load(load: Load, starts: u32) -> Self {
        let (from, to) = PAPER_STARTS;
        let starts = Starts::between(from, to, PAPER_BANDWIDTH, starts, 1);
        Self::generated(load.name().to_owned(), load.spec(), 1, starts)
    }

    /// A generated load over a link with the paper's delay; the disk is the load's.
    pub fn generated(name: String, spec: LoadSpec, seed: u64, starts: Starts) -> Self {
        let (disk, memory) = (spec.layout.disk, spec.memory);
        Self { name, disk, memory, delay: PAPER_DELAY, starts, from: From::Load(spec.into(), seed) }
    }

    /// A trace of a file, over a link with which a migration lasts half of it.
    ///
    /// # Errors
    /// A trace that cannot be read, or is too short.
    pub fn file(path: &Path, starts: u32) -> Result<Self, Box<dyn Error>> {
        let totals = Reader::open(path).and_then(Totals::of)?;
        let own = totals.end.next_multiple_of(GIB);
        let short = DISK as f64 > FAST * totals.duration as f64 / 2e9;
        let disk = if short { own } else { DISK.max(own) };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let chosen = Starts::choose_delay(totals.duration, disk + MEMORY, None, starts, 1);
        let (delay, starts) = chosen.ok_or("the trace is too short")?;
        Ok(Self {
            name: name.split('.').next().unwrap_or_default().to_owned(),
            disk,
            memory: MEMORY,
            delay,
            starts,
            from: From::File(path.to_owned()),
        })
    }

    /// Its records.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn open(&self) -> Result<Records, TraceError> {
        match &self.from {
            From::File(path) => Ok(Box::new(Reader::open(path)?)),
            From::Load(spec, seed) => {
                let seconds = (self.disk + self.memory) / self.starts.bandwidth + 1;
                let last = self.starts.at.last().copied().unwrap_or(0);
                let end = last.saturating_add(seconds * TIMES * SECOND);
                let records = spec.records(*seed).take_while(move |record| record.time_ns < end);
                Ok(Box::new(records.map(Ok)))
            }
        }
    }

    /// A migration of it.
    pub fn settings(&self, strategy: Strategy, order: Order) -> Settings {
        let mut settings = Settings::new(strategy, order, self.disk, self.starts.bandwidth);
        (settings.memory, settings.delay) = (self.memory, self.delay);
        settings
    }
}

/// The traces of the folder that `DRAY_TRACES` names, by name; none without it.
///
/// # Errors
/// A folder that cannot be read.
pub fn files() -> std::io::Result<Vec<PathBuf>> {
    let Some(folder) = std::env::var_os("DRAY_TRACES") else { return Ok(Vec::new()) };
    let paths = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut files: Vec<PathBuf> = paths.collect::<std::io::Result<_>>()?;
    files.retain(|path| path.to_string_lossy().contains(".csv"));
    files.sort();
    Ok(files)
}
