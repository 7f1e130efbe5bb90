//! Where the records of a simulation come from: a file, or a generated load.

use super::{Common, trace_failed};
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_sim::replay::settings::PAPER_DELAY;
use dray_sim::replay::study::Starts;
use dray_trace::analyse::{PAPER_BANDWIDTH, PAPER_STARTS, Totals};
use dray_trace::generate::{Load, LoadSpec};
use dray_trace::{Reader, Record, TraceError};
use dray_types::ByteSize;
use std::path::{Path, PathBuf};

/// Disk of a trace that does not say how large it was.
const DISK: u64 = 32 << 30;
const GIB: u64 = 1 << 30;
/// Bytes a second of a link that a short trace is not given more than: 1 Gbit/s.
const FAST: f64 = 125e6;
/// Memory of a guest that is not known.
const MEMORY: u64 = 1 << 30;
/// A generated load goes on for this many times the shortest migration.
const TIMES: u64 = 6;

enum Kind {
    File(PathBuf),
    Load(Box<LoadSpec>, u64),
}

/// 32 GiB; as far as the trace goes, in whole GiB, when it goes further, and when it is so short
/// that so much would need a faster link than [`FAST`].
fn disk_of(totals: &Totals) -> u64 {
    let seconds = totals.duration as f64 / 2e9;
    let own = totals.end.next_multiple_of(GIB);
    if DISK as f64 > FAST * seconds { own } else { DISK.max(own) }
}

/// A source of records.
pub struct Input {
    /// What people call it.
    pub name: String,
    /// Size of the disk in bytes.
    pub disk: u64,
    /// Memory of the guest in bytes.
    pub memory: u64,
    kind: Kind,
    /// Of a file: its last time in nanoseconds.
    duration: u64,
}

impl Input {
    /// The file or load of this name; a file wins.
    pub fn find(
        name: &str,
        seed: u64,
        disk: Option<ByteSize>,
        memory: Option<ByteSize>,
    ) -> ApiResult<Self> {
        let path = Path::new(name);
        if let (Ok(load), false) = (name.parse::<Load>(), path.exists()) {
            let spec = load.spec();
            return Ok(Self {
                name: name.to_owned(),
                disk: disk.map_or(spec.layout.disk, |size| size.0),
                memory: memory.map_or(spec.memory, |size| size.0),
                kind: Kind::Load(Box::new(spec), seed),
                duration: 0,
            });
        }
        let totals = Reader::open(path)
            .and_then(Totals::of)
            .map_err(|error| trace_failed("cannot use the trace", &error))?;
        let shown = path.file_name().map_or(name.into(), |file| file.to_string_lossy());
        Ok(Self {
            name: shown.split('.').next().unwrap_or(name).to_owned(),
            disk: disk.map_or(disk_of(&totals), |size| size.0),
            memory: memory.map_or(MEMORY, |size| size.0),
            kind: Kind::File(path.to_owned()),
            duration: totals.duration,
        })
    }

    /// The link's delay in nanoseconds, and random starts. Files: uniform over what a migration
    /// leaves, which without a bandwidth is half of the trace; without a delay the paper's, or a
    /// shorter one with which the migration ends before the trace. Loads: the paper's, 3000 s to
    /// 5000 s, at 100 Mbit/s unless told.
    pub fn starts(
        &self,
        bandwidth: Option<u64>,
        count: u32,
        common: &Common,
    ) -> ApiResult<(u64, Starts)> {
        let (seed, given) = (common.seed, common.delay.map(|millis| (millis * 1e6) as u64));
        if let Kind::Load(..) = self.kind {
            let bandwidth = bandwidth.unwrap_or(PAPER_BANDWIDTH);
            let (from, to) = PAPER_STARTS;
            let delay = given.unwrap_or(PAPER_DELAY);
            return Ok((delay, Starts::between(from, to, bandwidth, count, seed)));
        }
        let (duration, bytes) = (self.duration, self.disk + self.memory);
        let chosen = match given {
            None => Starts::choose_delay(duration, bytes, bandwidth, count, seed),
            Some(delay) => Starts::choose(duration, bytes, bandwidth, delay, count, seed)
                .map(|starts| (delay, starts)),
        };
        chosen.ok_or_else(|| {
            let why = format!("the trace ends after {}, before the migration does", self.lasts());
            self.cannot(why)
                .hint("give a larger --bandwidth, or a smaller --disk, --memory or --delay")
        })
    }

    /// Refuses a start at which a trace has ended; a load goes on for ever.
    pub fn check_start(&self, start: u64) -> ApiResult<()> {
        if matches!(self.kind, Kind::Load(..)) || start <= self.duration {
            return Ok(());
        }
        let why = format!("the trace ends after {}, before --start", self.lasts());
        Err(self.cannot(why).hint("give a --start before that; without one it is chosen"))
    }

    /// How long a trace is, for people.
    fn lasts(&self) -> String {
        format!("{} s", self.duration / 1_000_000_000)
    }

    fn cannot(&self, why: String) -> Refusal {
        Refusal::new(ErrorKind::Invalid, format!("cannot replay {}", self.name), why)
    }

    /// The records from the beginning. A load's end with the last of these starts and several
    /// times the shortest migration after it.
    pub fn open(
        &self,
        starts: &Starts,
    ) -> Result<Box<dyn Iterator<Item = Result<Record, TraceError>>>, TraceError> {
        match &self.kind {
            Kind::File(path) => Ok(Box::new(Reader::open(path)?)),
            Kind::Load(spec, seed) => {
                let seconds = (self.disk + self.memory) / starts.bandwidth.max(1) + 1;
                let last = starts.at.last().copied().unwrap_or(0);
                let end = last.saturating_add(seconds.saturating_mul(TIMES * 1_000_000_000));
                let records = spec.records(*seed).take_while(move |record| record.time_ns < end);
                Ok(Box::new(records.map(Ok)))
            }
        }
    }
}
