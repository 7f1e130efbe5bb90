//! How well the past of a load predicts its future: temporal locality, spatial locality and
//! popularity as section 3 of the scheduling paper (Zheng, Ng and Sripanidkulchai, VEE 2011)
//! defines them.
//!
//! For a start *t* of a migration, *history* is what comes before it and *migration* what comes
//! after, both of a fixed length. Blocks are 512-byte sectors here, as in the paper.
//!
//! * Temporal locality: of the blocks (4 KiB blocks, 1 MiB chunks) accessed in the migration, the
//!   share that was accessed by the same kind of operation in the history; and of those blocks, the
//!   share that was accessed there at least three times.
//! * Spatial locality: for each block written in the migration and not in the history, the distance
//!   (difference of block numbers × block size) to the closest block written in the history.
//! * Popularity: Spearman's rank correlation, equal ranks averaged, between the access frequencies
//!   of all chunks of the disk in history and in migration. A chunk's frequency is the sum of the
//!   frequencies of its blocks.
//!
//! All are means over several random starts from a seed.

mod counts;
mod rank;
mod spatial;

use crate::record::{Op, Record};
use crate::rng::Rng;
use counts::Counts;

pub use rank::spearman;
pub use spatial::Distances;

/// Bytes in a sector: the block of the paper.
pub const SECTOR: u64 = 512;
/// The paper's link in bytes a second: 100 Mbit/s.
pub const PAPER_BANDWIDTH: u64 = 12_500_000;
/// The paper's history in nanoseconds: 3000 s.
pub const PAPER_HISTORY: u64 = 3_000_000_000_000;
/// The paper's starts lie between these times in nanoseconds.
pub const PAPER_STARTS: (u64, u64) = (3_000_000_000_000, 5_000_000_000_000);

/// Which parts of a trace are compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Windows {
    /// Nanoseconds before a start.
    pub history: u64,
    /// Nanoseconds after a start.
    pub migration: u64,
    /// Earliest and latest start.
    pub starts: (u64, u64),
    /// Number of starts.
    pub count: u32,
    /// Seed of the starts.
    pub seed: u64,
}

impl Windows {
    /// The paper's: 3000 s of history, 20 starts between 3000 s and 5000 s, and a migration of
    /// (2 × image + memory) ÷ 100 Mbit/s (its section 3.2).
    pub fn paper(image: u64, memory: u64) -> Self {
        let seconds = (2 * image + memory) as f64 / PAPER_BANDWIDTH as f64;
        let migration = (seconds * 1e9) as u64;
        Self { history: PAPER_HISTORY, migration, starts: PAPER_STARTS, count: 20, seed: 1 }
    }

    /// For a trace too short for the paper's: two fifths of it are history, two fifths migration,
    /// and the starts lie in between.
    pub fn within(duration: u64) -> Self {
        let fifth = duration / 5;
        let starts = (2 * fifth, 3 * fifth);
        Self { history: 2 * fifth, migration: 2 * fifth, starts, count: 20, seed: 1 }
    }

    /// The paper's if the trace is long enough, else [`Windows::within`].
    pub fn fitting(duration: u64, image: u64, memory: u64) -> Self {
        let paper = Self::paper(image, memory);
        let fits = paper.starts.1 + paper.migration <= duration;
        if fits { paper } else { Self::within(duration) }
    }
}

/// How much of one kind of operation there is.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Volume {
    /// Accesses.
    pub operations: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What a trace is, before any window.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Totals {
    /// Time of the last record in nanoseconds.
    pub duration: u64,
    /// One past the last byte accessed.
    pub end: u64,
    /// Reads.
    pub reads: Volume,
    /// Writes.
    pub writes: Volume,
}

impl Totals {
    /// Counts everything.
    pub fn of<E>(records: impl Iterator<Item = Result<Record, E>>) -> Result<Self, E> {
        let mut totals = Self::default();
        for record in records {
            totals.add(&record?);
        }
        Ok(totals)
    }

    /// Counts one more record.
    pub fn add(&mut self, record: &Record) {
        self.duration = self.duration.max(record.time_ns);
        self.end = self.end.max(record.end());
        let volume = match record.op {
            Op::Read => &mut self.reads,
            Op::Write => &mut self.writes,
        };
        volume.operations += 1;
        volume.bytes += record.length;
    }

    /// Mean bytes a second of a volume; zero for a trace without duration.
    pub fn rate(&self, volume: Volume) -> f64 {
        if self.duration == 0 { 0.0 } else { volume.bytes as f64 * 1e9 / self.duration as f64 }
    }
}

/// Locality and popularity of one kind of operation. Shares are 0 to 1; none where nothing of the
/// kind was there to measure.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Locality {
    /// Share of accessed 512-byte blocks that the history has seen.
    pub seen_sectors: Option<f64>,
    /// Share of accessed 4 KiB blocks that the history has seen.
    pub seen_blocks: Option<f64>,
    /// Share of accessed 1 MiB chunks that the history has seen.
    pub seen_chunks: Option<f64>,
    /// Of the 512-byte blocks that the history has seen: share it has seen at least three times.
    pub seen_thrice: Option<f64>,
    /// Where blocks lie that the history has not seen.
    pub fresh: Option<Distances>,
    /// Rank correlation of the popularity of 1 MiB chunks.
    pub rank_1m: Option<f64>,
    /// Rank correlation of the popularity of 4 MiB chunks.
    pub rank_4m: Option<f64>,
}

/// What [`analyse`] finds.
#[derive(Clone, PartialEq, Debug)]
pub struct Analysis {
    /// The whole trace.
    pub totals: Totals,
    /// What was compared.
    pub windows: Windows,
    /// Size of the disk in bytes that distances and ranks refer to.
    pub disk: u64,
    /// Reads predicted by reads.
    pub reads: Locality,
    /// Writes predicted by writes.
    pub writes: Locality,
}

/// Analyses a trace of which `open` gives the records from the beginning, once for every start.
/// A disk smaller than what the trace accesses counts as that large.
pub fn analyse<I, E>(
    open: impl Fn() -> Result<I, E>,
    totals: Totals,
    windows: Windows,
    disk: u64,
) -> Result<Analysis, E>
where
    I: Iterator<Item = Result<Record, E>>,
{
    let disk = disk.max(totals.end);
    let mut rng = Rng::new(windows.seed);
    let (mut reads, mut writes) = (Mean::default(), Mean::default());
    for _ in 0..windows.count {
        let start = rng.between(windows.starts.0, windows.starts.1.max(windows.starts.0));
        let periods = Periods::collect(open()?, start, &windows)?;
        reads.add(periods.reads.compare(disk, &mut rng));
        writes.add(periods.writes.compare(disk, &mut rng));
    }
    Ok(Analysis { totals, windows, disk, reads: reads.result(), writes: writes.result() })
}

/// Accesses of one kind before and after a start.
#[derive(Default)]
struct Pair {
    history: Counts,
    migration: Counts,
}

#[derive(Default)]
struct Periods {
    reads: Pair,
    writes: Pair,
}

impl Periods {
    fn collect<E>(
        records: impl Iterator<Item = Result<Record, E>>,
        start: u64,
        windows: &Windows,
    ) -> Result<Self, E> {
        let mut periods = Self::default();
        let (from, to) = (start.saturating_sub(windows.history), start + windows.migration);
        for record in records {
            let record = record?;
            if record.time_ns >= to {
                break;
            }
            if record.time_ns < from {
                continue;
            }
            let pair = match record.op {
                Op::Read => &mut periods.reads,
                Op::Write => &mut periods.writes,
            };
            let counts =
                if record.time_ns < start { &mut pair.history } else { &mut pair.migration };
            counts.add(record.offset, record.length);
        }
        Ok(periods)
    }
}

impl Pair {
    fn compare(&self, disk: u64, rng: &mut Rng) -> Locality {
        let Self { history, migration } = self;
        let seen = |unit: u64| migration.share_seen_in(history, unit / SECTOR);
        let rank = |chunk: u64| {
            let chunks = disk.div_ceil(chunk);
            spearman(&history.frequencies(chunk, chunks), &migration.frequencies(chunk, chunks))
        };
        Locality {
            seen_sectors: seen(SECTOR),
            seen_blocks: seen(4096),
            seen_chunks: seen(1 << 20),
            seen_thrice: migration.share_seen_thrice_in(history),
            fresh: spatial::distances(history, migration, disk, rng),
            rank_1m: rank(1 << 20),
            rank_4m: rank(4 << 20),
        }
    }
}

/// Means over starts, each over those where it was defined.
#[derive(Default)]
struct Mean {
    all: Vec<Locality>,
}

impl Mean {
    fn add(&mut self, locality: Locality) {
        self.all.push(locality);
    }

    fn result(self) -> Locality {
        let mean = |value: fn(&Locality) -> Option<f64>| {
            let values: Vec<f64> = self.all.iter().filter_map(value).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        let fresh: Vec<&Distances> = self.all.iter().filter_map(|l| l.fresh.as_ref()).collect();
        Locality {
            seen_sectors: mean(|l| l.seen_sectors),
            seen_blocks: mean(|l| l.seen_blocks),
            seen_chunks: mean(|l| l.seen_chunks),
            seen_thrice: mean(|l| l.seen_thrice),
            fresh: Distances::mean(&fresh),
            rank_1m: mean(|l| l.rank_1m),
            rank_4m: mean(|l| l.rank_4m),
        }
    }
}
