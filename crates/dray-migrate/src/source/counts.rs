//! The counts and measurements of the summary, over all restarts of the source's agent. They are
//! written to the migration's folder regularly, so that a restart loses the last half second at
//! most.

use super::Slowed;
use dray_api::{Downtime, PhaseSeconds, Predicted};
use dray_files::StatePath;
use dray_net::NetTotals;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Moments that the summary's times are measured between.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// `migrate` was asked for.
    Started,
    /// The first block was to be copied.
    Copying,
    /// All that was to be copied was copied once.
    Syncing,
    /// The guest stopped at the source.
    Stopped,
    /// Handover began.
    Begin,
    /// No guest write is in flight.
    Quiesced,
    /// The target was asked to prepare.
    Asked,
    /// The target serves.
    Serving,
    /// The guest runs at the target.
    Running,
    /// The source is no longer needed.
    Done,
}

/// Number of marks.
const MARKS: usize = 10;

/// How far the guest's memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Bytes sent.
    pub sent: u64,
    /// Bytes left, as QEMU estimates it.
    pub left: u64,
    /// Bytes that the guest writes in a second, once QEMU has measured it.
    pub dirty_rate: u64,
}

/// What was counted, and when what happened.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Microseconds since 1970 at each [`Mark`].
    marks: [Option<u64>; MARKS],
    /// QEMU's numbers.
    #[serde(default)]
    pub guest_memory: Memory,
    /// Times the link was lost and found again.
    pub reconnects: u64,
    /// Rounds of Sync that are over.
    pub rounds: u32,
    /// Blocks sent again because they were written after they were sent.
    pub blocks_resent: u64,
    /// Per image: blocks sent with data, each sending counted, and those that were sent before.
    #[serde(default)]
    pub images: Vec<(u64, u64)>,
    /// Per image: blocks that the target had in a replica when the migration began.
    #[serde(default)]
    pub shared: Vec<u64>,
    /// Per image: bytes of data among them.
    #[serde(default)]
    pub at_target: Vec<u64>,
    /// Per image: blocks that the target had somewhere.
    #[serde(default)]
    pub found: Vec<u64>,
    /// Bytes of hashes that were sent to find them.
    #[serde(default)]
    pub hash_bytes: u64,
    /// Writes of the guest that were slowed.
    #[serde(default)]
    pub slowed: Slowed,
    /// Blocks sent because the guest wrote them and the strategy mirrors.
    #[serde(default)]
    pub blocks_mirrored: u64,
    /// What was predicted.
    #[serde(default)]
    pub predicted: Option<Predicted>,
    /// Nanoseconds that the guest's writes took before the copy, where there is a goal for that.
    #[serde(default)]
    pub usual_latency: Option<u64>,
    /// The streams' counters.
    pub net: NetTotals,
}

impl Counts {
    /// What an earlier process wrote to `path`; nothing when there was none, or when it cannot be
    /// read: a summary that is not complete is no reason to stop.
    pub fn read(path: &StatePath) -> Self {
        path.read().ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
    }

    /// Replaces the file at `path`. It is not synced: it outlives the agent, not the host.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn write(&self, path: &StatePath) -> io::Result<()> {
        let new = path.with_extension("new");
        new.create()?.write_at(&serde_json::to_vec(self)?, 0)?;
        new.rename(path)
    }

    /// What a new process of the agent goes on with. A handover whose end no earlier process saw
    /// has no duration; counters begin again.
    pub fn resumed(&self) -> Self {
        let mut counts = Self {
            marks: self.marks,
            guest_memory: self.guest_memory,
            reconnects: self.reconnects,
            predicted: self.predicted.clone(),
            usual_latency: self.usual_latency,
            shared: self.shared.clone(),
            at_target: self.at_target.clone(),
            ..Self::default()
        };
        if !self.has(Mark::Serving) {
            for mark in [Mark::Stopped, Mark::Begin, Mark::Quiesced, Mark::Asked] {
                counts.marks[mark as usize] = None;
            }
        }
        counts
    }

    /// Whether the same moments have come.
    pub fn same_times(&self, other: &Self) -> bool {
        self.marks == other.marks
    }

    /// Notes that a moment has come; a later one of the same name replaces it.
    pub fn mark(&mut self, mark: Mark, at: u64) {
        self.marks[mark as usize] = Some(at);
    }

    /// Whether a moment has come.
    pub fn has(&self, mark: Mark) -> bool {
        self.marks[mark as usize].is_some()
    }

    /// When a moment came, in microseconds since 1970.
    pub fn at(&self, mark: Mark) -> Option<u64> {
        self.marks[mark as usize]
    }

    /// Seconds from one moment to another, when both have come.
    pub fn between(&self, from: Mark, to: Mark) -> Option<f64> {
        Some(self.at(to)?.saturating_sub(self.at(from)?) as f64 / 1e6)
    }

    /// How long the guest stood still: until the target served, for images without a VM; until the
    /// guest ran, for a VM. None while that is not over, and when a restart of the agent came
    /// between, so that nobody saw the end.
    pub fn downtime(&self, vm_runs: bool) -> Option<Downtime> {
        let ms = |from, to| self.between(from, to).map(|seconds| seconds * 1e3);
        let (first, last) = self.still(vm_runs);
        Some(Downtime {
            total: ms(first, last)?,
            memory: ms(Mark::Stopped, Mark::Begin).unwrap_or(0.0),
            quiesce: ms(Mark::Begin, Mark::Quiesced)?,
            map: ms(Mark::Quiesced, Mark::Asked)?,
            commit: ms(Mark::Asked, Mark::Serving)?,
            resume: if vm_runs { ms(Mark::Serving, Mark::Running)? } else { 0.0 },
        })
    }
}

impl Counts {
    /// How long each phase took, `now` that all is over. A phase of which no process saw the beginning counts as a
    /// part of the one after it.
    pub fn phases(&self, vm_runs: bool, now: u64) -> PhaseSeconds {
        let (first, last) = self.still(vm_runs);
        let mut at = self.at(Mark::Started).unwrap_or(now);
        let mut until = |end: Option<u64>| {
            let end = end.unwrap_or(at).max(at);
            let took = end - std::mem::replace(&mut at, end);
            took as f64 / 1e6
        };
        PhaseSeconds {
            prepare: until(self.at(Mark::Copying)),
            copy: until(self.at(Mark::Syncing)),
            sync: until(self.at(first)),
            handover: until(self.at(last)),
            backfill: until(self.at(Mark::Done)),
            after: until(Some(now)),
        }
    }

    /// The moments between which the guest stood still.
    fn still(&self, vm_runs: bool) -> (Mark, Mark) {
        let first = if self.has(Mark::Stopped) { Mark::Stopped } else { Mark::Begin };
        (first, if vm_runs { Mark::Running } else { Mark::Serving })
    }
}

/// Time since 1970 that never goes back while the process lives.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    began: Instant,
    unix: Duration,
}

impl WallClock {
    /// A clock that is right now.
    pub fn start() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { began: Instant::now(), unix }
    }

    /// Microseconds since 1970.
    pub fn micros(&self) -> u64 {
        (self.unix + self.began.elapsed()).as_micros() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_phases_add_up_to_the_total() {
        let mut counts = Counts::default();
        assert_eq!(counts.phases(true, 7), PhaseSeconds::default());
        let marks = [Mark::Started, Mark::Copying, Mark::Syncing, Mark::Begin, Mark::Serving];
        marks
            .into_iter()
            .zip([0, 1, 5, 7, 10])
            .for_each(|(mark, at)| counts.mark(mark, at * 500_000));
        counts.mark(Mark::Done, 4_000_000);
        let mut expected = PhaseSeconds {
            prepare: 0.5,
            copy: 2.0,
            sync: 1.0,
            handover: 1.5,
            backfill: 0.0,
            after: 1.0,
        };
        assert_eq!(counts.phases(false, 6_000_000), expected, "it served when all was there");
        counts.mark(Mark::Stopped, 3_000_000);
        counts.mark(Mark::Running, 4_500_000);
        counts.mark(Mark::Done, 5_000_000);
        (expected.sync, expected.backfill) = (0.5, 0.5);
        assert_eq!(counts.phases(true, 6_000_000), expected);
        assert_eq!(expected.total(), 5.0);
        counts.marks[Mark::Copying as usize] = None;
        (expected.prepare, expected.copy) = (0.0, 2.5);
        assert_eq!(counts.phases(true, 6_000_000), expected, "nobody saw it begin");
    }

    #[test]
    fn a_restart_keeps_what_was_measured() {
        let dir = tempfile::tempdir().unwrap();
        let path = StatePath::real(dir.path().join("counts.json"));
        assert_eq!(Counts::read(&path), Counts::default());
        let mut counts = Counts { reconnects: 3, usual_latency: Some(7), ..Counts::default() };
        counts.mark(Mark::Stopped, 1_000_000);
        counts.mark(Mark::Begin, 1_004_000);
        counts.write(&path).unwrap();
        let mut counts = Counts::read(&path);
        assert_eq!(counts.reconnects, 3);
        assert_eq!(counts.resumed().usual_latency, Some(7));
        assert!(!counts.resumed().has(Mark::Stopped), "nobody knows when the target served");
        counts.mark(Mark::Quiesced, 1_005_000);
        counts.mark(Mark::Asked, 1_007_000);
        assert_eq!(counts.downtime(true), None);
        counts.mark(Mark::Serving, 1_017_000);
        assert_eq!(counts.downtime(true), None, "nobody saw the guest run");
        counts.mark(Mark::Running, 1_020_500);
        let parts = counts.downtime(true).unwrap();
        let sum = parts.memory + parts.quiesce + parts.map + parts.commit + parts.resume;
        assert_eq!((parts.total, parts.memory, parts.resume), (20.5, 4.0, 3.5));
        assert!((sum - parts.total).abs() < 1e-9, "{parts:?}");
        std::fs::write(&path, "{").unwrap();
        assert_eq!(Counts::read(&path), Counts::default());
    }
}
