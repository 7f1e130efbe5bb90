//! The progress of a running migration, for people and programs. Its end is in
//! [`summary`](super::summary), its counts are in [`counts`](super::counts).

use super::SourceSlot;
use super::counts::{Counts, Mark, Memory, WallClock};
use super::images::SourceImages;
use super::rate::Rate;
use crate::Clock;
use crate::forecast::Now;
use crate::messages::{Made, NotReleased, ToSourceShell};
use crate::shown::{not_started, shown_phase};
use dray_api::{Amounts, ImageProgress, Phase, Predicted, Refusal, Step};
use dray_engine::source::{SourceNotice, SourceStatus};
use dray_engine::{Source, Time};
use dray_files::StatePath;
use dray_types::{BLOCK_SIZE, BlockRange, ImageIndex};
use dray_wire::ToTarget;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Pause between writings of the counts.
const SAVE_INTERVAL: Duration = Duration::from_millis(500);
/// Name of the file of the counts in the migration's folder.
pub const COUNTS: &str = "counts.json";

/// The numbers of one migration.
pub struct Report {
    pub(super) slot: Arc<SourceSlot>,
    pub(super) host: String,
    clock: WallClock,
    time: Clock,
    /// What was counted in this process; the times and the memory also in those before.
    counts: Counts,
    /// What earlier processes counted.
    before: Counts,
    path: StatePath,
    saved: (Time, Counts),
    /// The target's last numbers: missing blocks per image, remote reads, its counters.
    missing: Vec<u64>,
    pub(super) remote_reads: u64,
    /// Per image: missing blocks that the target has found itself, as far as it has told this process.
    found_there: Vec<u64>,
    pub(super) verified: Option<(u64, u64)>,
    /// How far verification has come: the image, and the bytes of it that were compared.
    verifying: Option<(usize, u64)>,
    /// What was verified was not what had been handed over.
    pub(super) incomparable: bool,
    /// Backfill waits for the target's operator.
    paused: bool,
    /// Why the guest was not started at the target.
    pub(super) guest_failed: Option<String>,
    /// What the target has not given to QEMU.
    pub(super) not_released: Option<NotReleased>,
    /// What is shown of a guest that is not started there yet.
    not_started: Option<Refusal>,
    /// What the target has told of the qcow2 files that it makes, by the images' numbers.
    pub(super) qcow2: BTreeMap<u16, Made>,
    dirty_since: (Time, u64),
    dirty_rate: u64,
    wire_rate: Rate,
    phase: Phase,
}

impl Report {
    /// Goes on with what an earlier process left at `path`.
    pub fn new(slot: Arc<SourceSlot>, host: String, path: StatePath, time: Clock) -> Self {
        let now = time.now();
        let before = Counts::read(&path);
        let wire_rate = Rate::new(before.net.wire_bytes());
        let mut this = Self {
            slot,
            host,
            clock: WallClock::start(),
            time,
            counts: before.resumed(),
            before,
            path,
            saved: (now, Counts::default()),
            missing: Vec::new(),
            remote_reads: 0,
            found_there: Vec::new(),
            verified: None,
            verifying: None,
            incomparable: false,
            paused: false,
            guest_failed: None,
            not_started: None,
            not_released: None,
            qcow2: BTreeMap::new(),
            dirty_since: (now, 0),
            dirty_rate: 0,
            wire_rate,
            phase: Phase::Prepare,
        };
        if !this.counts.has(Mark::Started) {
            let started = this.slot.intent().started_unix_ms;
            this.counts.mark(Mark::Started, started * 1000);
        }
        this
    }

    /// `migrate` or `resume` was asked for: earlier tries count no more.
    pub fn begin(&mut self) {
        (self.counts, self.before) = Default::default();
        self.found_there.clear();
        self.wire_rate = Rate::new(self.total().net.wire_bytes());
        self.mark(Mark::Started);
    }

    /// What an earlier process had come to.
    pub fn resumes(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Whether verification found a difference.
    pub fn differs(&self) -> bool {
        self.verified.is_some_and(|(_, different)| different > 0)
    }

    /// What the target was to compare with is not here any more.
    pub fn cannot_compare(&mut self) {
        self.incomparable = true;
    }

    /// Notes that a moment has come. The first `Begin` of a later attempt replaces an earlier one.
    pub fn mark(&mut self, mark: Mark) {
        self.counts.mark(mark, self.clock.micros());
    }

    /// Notes when the guest was stopped: before anyone here knew, and QEMU flushes its disks meanwhile.
    pub fn stopped(&mut self, at: Option<Duration>) {
        let now = self.clock.micros();
        let at = at.and_then(|at| u64::try_from(at.as_micros()).ok());
        self.counts.mark(Mark::Stopped, at.map_or(now, |at| at.min(now)));
    }

    /// Notes a moment that a target which was asked again may tell once more.
    fn mark_once(&mut self, mark: Mark) {
        if !self.counts.has(mark) {
            self.mark(mark);
        }
    }

    /// What all processes of this agent counted.
    pub(super) fn total(&self) -> Counts {
        let mut total = self.counts.clone();
        total.net = self.before.net.plus(self.slot.stats.totals());
        total.slowed = self.before.slowed.plus(self.slot.limiter.slowed());
        total.hash_bytes = self.before.hash_bytes + self.slot.stats.hash_bytes.load(Relaxed);
        total.found.resize(total.found.len().max(self.before.found.len()), 0);
        let found = total.found.iter_mut().zip(&self.before.found);
        found.for_each(|(sum, before)| *sum += before);
        total.blocks_mirrored += self.before.blocks_mirrored;
        total.blocks_resent += self.before.blocks_resent;
        total.rounds += self.before.rounds;
        total.images.resize(total.images.len().max(self.before.images.len()), (0, 0));
        for (sum, before) in total.images.iter_mut().zip(&self.before.images) {
            *sum = (sum.0 + before.0, sum.1 + before.1);
        }
        total
    }

    /// Writes the counts down now and then, so that a restart of the agent does not lose them.
    pub fn save(&mut self) {
        if self.time.since(self.saved.0) < SAVE_INTERVAL && self.saved.1.same_times(&self.counts) {
            return;
        }
        let total = self.total();
        if total != self.saved.1
            && let Err(why) = total.write(&self.path)
        {
            // The summary will lack them; the migration does not need them.
            tracing::debug!(migration = %self.slot.board.migration, %why, "cannot save counts");
        }
        self.saved = (self.time.now(), total);
    }

    /// A message goes to the target.
    pub fn sending(&mut self, message: &ToTarget) {
        if matches!(message, ToTarget::Prepare { .. }) {
            self.mark(Mark::Asked);
        }
    }

    /// The engine's notices, for the times and the phase.
    pub fn notice(&mut self, notice: &SourceNotice) {
        match notice {
            SourceNotice::Phase(phase) => self.enter(shown_phase(*phase)),
            SourceNotice::TargetServing => self.mark_once(Mark::Serving),
            SourceNotice::Verified { blocks, different } => {
                self.verified = Some((*blocks, *different));
            }
            SourceNotice::Done => self.mark_once(Mark::Done),
            // Why it was not started says nothing of why it has come back.
            SourceNotice::TakenBack => self.guest_waits(None),
            SourceNotice::HandoverFailed { why } => {
                self.slot.board.notice(format!("handover failed: {why}"));
            }
            _ => {}
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        match phase {
            Phase::Copy => self.mark_once(Mark::Copying),
            Phase::Sync => self.mark_once(Mark::Syncing),
            _ => {}
        }
    }

    /// The target's shell has said something.
    pub fn told(&mut self, message: &ToSourceShell) {
        match message {
            ToSourceShell::GuestRunning => {
                self.mark_once(Mark::Running);
                self.guest_waits(None);
            }
            ToSourceShell::GuestWaits(why) => self.guest_waits(Some(why)),
            ToSourceShell::GuestFailed(why) => {
                self.guest_waits(None);
                self.slot.board.notice(format!("the target could not start the guest: {why}"));
                self.guest_failed = Some(why.clone());
            }
            ToSourceShell::Progress { missing, remote_reads, .. } => {
                self.missing = self.within(missing);
                self.remote_reads = *remote_reads;
            }
            ToSourceShell::Found(more) => {
                let before = self.found_there.iter().copied().chain(std::iter::repeat(0));
                let sums = more.iter().zip(before).map(|(more, found)| found.saturating_add(*more));
                self.found_there = self.within(&sums.collect::<Vec<_>>());
            }
            ToSourceShell::Paused(paused) => self.paused = *paused,
            ToSourceShell::Released(result) => self.not_released = result.clone().err(),
            ToSourceShell::Qcow2 { image, made } => self.qcow2_told(*image, made),
            ToSourceShell::Finished => self.finish(),
            _ => {}
        }
    }

    /// What a target says of the blocks of each image: there are no more of them than the image has.
    fn within(&self, blocks: &[u64]) -> Vec<u64> {
        let images = self.slot.intent().images;
        let all = images.iter().map(|image| BlockRange::whole(image.offer.len).len);
        blocks.iter().zip(all).map(|(blocks, all)| *blocks.min(&all)).collect()
    }

    /// Shows why the guest is not started at the target yet, or that no longer.
    fn guest_waits(&mut self, why: Option<&str>) {
        let guest = self.slot.intent().vm.and_then(|vm| vm.facts);
        let qmp = guest.map(|guest| guest.qmp.display().to_string()).unwrap_or_default();
        let now = why.map(|why| not_started(&qmp, why));
        self.slot.board.show_wait(&mut self.not_started, now);
    }

    /// A session begins. A target that waits for its guest says so in each.
    pub fn new_session(&mut self) {
        self.guest_waits(None);
    }

    /// Dirty blocks were taken from the tracker.
    pub fn dirtied(&mut self, blocks: u64) {
        let span = self.time.since(self.dirty_since.0).as_secs_f64();
        if span > 0.05 {
            self.dirty_rate = (blocks as f64 * BLOCK_SIZE as f64 / span) as u64;
            self.dirty_since = (self.time.now(), 0);
        }
    }

    /// Bytes of data of each image that lie at the target as they are here.
    pub fn begins_with(&mut self, at_target: Vec<u64>) {
        self.counts.at_target = at_target;
    }

    /// What was predicted, to be compared at the end.
    pub fn predict(&mut self, predicted: Predicted) {
        self.counts.predicted = Some(predicted);
    }

    /// What the guest's writes take as a rule, as it is known or becomes known now.
    pub fn usual_latency(&mut self, find: impl FnOnce(Option<u64>) -> u64) {
        self.counts.usual_latency = Some(find(self.counts.usual_latency));
    }

    /// Whether that is known.
    pub fn knows_usual_latency(&self) -> bool {
        self.counts.usual_latency.is_some()
    }

    /// QEMU's numbers.
    pub fn memory(&mut self, memory: Memory) {
        self.counts.guest_memory = memory;
    }

    /// The most bytes a second that the streams carried for two seconds on end.
    pub fn steady_rate(&self) -> u64 {
        self.wire_rate.steady()
    }

    /// The link came back.
    pub fn reconnected(&mut self) {
        self.counts.reconnects += 1;
    }

    /// The target compares this part of an image.
    pub fn verifying(&mut self, image: ImageIndex, ranges: &[BlockRange]) {
        let end = ranges.last().map_or(0, |range| range.end() * BLOCK_SIZE);
        self.verifying = Some((image.ix(), end));
    }

    /// Takes over what the engine has counted.
    pub fn observe(&mut self, status: &SourceStatus) {
        (self.counts.blocks_resent, self.counts.rounds) = (status.blocks_resent, status.rounds);
        self.counts.blocks_mirrored = status.blocks_mirrored;
        if status.shared.iter().any(|&blocks| blocks > 0) {
            self.counts.shared.clone_from(&status.shared);
        }
        self.counts.found.clone_from(&status.image_blocks_found);
        self.counts.found.resize(status.image_blocks_found.len().max(self.found_there.len()), 0);
        let found = self.counts.found.iter_mut().zip(&self.found_there);
        found.for_each(|(found, there)| *found = found.saturating_add(*there));
        let sent = status.image_blocks_sent.iter().copied();
        self.counts.images = sent.zip(status.image_blocks_resent.iter().copied()).collect();
    }

    /// Shows how far it is.
    pub fn refresh(&mut self, engine: Option<&Source>, images: &SourceImages) {
        let Some(engine) = engine else { return };
        let status = engine.status();
        self.observe(&status);
        let counts = self.total();
        let wire = counts.net.wire_bytes();
        let rate = self.wire_rate.measure(wire);
        let mut rows = images.progress(&status, &self.missing, engine.owns());
        if self.phase == Phase::Release {
            self.show_verification(&mut rows);
        }
        let total = rows.iter().fold(Amounts::default(), |sum, row| sum.plus(row.amounts));
        let left = if self.phase == Phase::Backfill {
            total.bytes_missing
        } else {
            total.bytes_total - total.bytes_done.min(total.bytes_total)
        };
        let step = self.step(status.link_up);
        let memory = counts.guest_memory;
        let now = self.now(left, rate);
        let converges = match (memory.sent, counts.predicted.as_ref()) {
            _ if self.phase >= Phase::Handover => None,
            (0, predicted) => predicted.map(|predicted| predicted.converges),
            _ => Some(now.converges()),
        };
        let downtime = counts.downtime(self.vm_runs()).map(|downtime| downtime.total);
        self.slot.board.change(|shown| {
            let progress = &mut shown.progress;
            progress.phase = self.phase;
            progress.step = step;
            progress.elapsed_seconds = self.elapsed();
            progress.total = total;
            progress.images = rows;
            (progress.memory_bytes, progress.memory_left) = (memory.sent, memory.left);
            progress.bytes_from_target = counts.found.iter().sum::<u64>() * BLOCK_SIZE;
            progress.wire_bytes = wire;
            progress.rate = rate;
            progress.dirty_rate = self.dirty_rate;
            progress.round = counts.rounds + 1;
            progress.remote_reads = self.remote_reads;
            progress.paused = self.paused && self.phase == Phase::Backfill;
            progress.link_up = status.link_up;
            progress.seconds_left =
                now.seconds_left(counts.predicted.as_ref()).filter(|_| !progress.paused);
            progress.converges = converges;
            let predicted = counts.predicted.as_ref().map(|predicted| predicted.downtime_ms);
            progress.downtime_ms = downtime.or(predicted.filter(|_| !counts.has(Mark::Begin)));
        });
    }

    /// Every block is at the target: what is left to do is to compare them, if that was asked for.
    fn show_verification(&self, rows: &mut [ImageProgress]) {
        let images = self.slot.intent().images;
        for (ix, (row, image)) in rows.iter_mut().zip(&images).enumerate() {
            if let Some(Made::Copied { done, total }) = self.qcow2.get(&(ix as u16)) {
                (row.amounts.bytes_done, row.amounts.bytes_total) = (*done, *total);
                continue;
            }
            let whole = BlockRange::whole(image.offer.len).len * BLOCK_SIZE;
            row.amounts.bytes_total = whole;
            row.amounts.bytes_done = match self.verifying {
                _ if !self.is_verifying() => whole,
                Some((now, done)) if now == ix => done.min(whole),
                Some((now, _)) if now > ix => whole,
                _ => 0,
            };
        }
    }

    /// What is known of the rest: of memory what QEMU says, and before that what was measured.
    fn now(&self, left: u64, rate: u64) -> Now {
        let memory = self.counts.guest_memory;
        let conditions =
            self.slot.intent().options.map(|options| options.conditions).unwrap_or_default();
        let (memory_left, memory_dirty) = match memory.sent {
            0 => (conditions.memory, conditions.memory_dirty),
            _ => (memory.left, memory.dirty_rate),
        };
        Now { phase: self.phase, left, rate, memory_left, memory_dirty }
    }

    fn is_verifying(&self) -> bool {
        let options = self.slot.intent().options;
        self.verified.is_none() && options.is_some_and(|options| options.settings.verify)
    }

    /// Whether the guest of a VM is to run at the target.
    pub(super) fn vm_runs(&self) -> bool {
        let facts = self.slot.intent().vm.and_then(|vm| vm.facts);
        facts.is_some_and(|facts| facts.running)
    }

    fn step(&self, link_up: bool) -> Option<Step> {
        let memory = self.counts.guest_memory.sent > 0 && !self.counts.has(Mark::Begin);
        if !link_up {
            Some(Step::WaitForPeer)
        } else if memory && self.phase < Phase::Handover {
            Some(Step::Memory)
        } else if self.phase == Phase::Release && self.is_verifying() {
            Some(Step::Verify)
        } else if self.phase == Phase::Release && self.is_making() {
            Some(Step::Convert)
        } else {
            None
        }
    }

    /// Microseconds since 1970.
    pub(super) fn now_micros(&self) -> u64 {
        self.clock.micros()
    }

    /// Seconds since it was asked for; a clock that was set back is no negative time.
    pub(super) fn elapsed(&self) -> f64 {
        let started = self.counts.at(Mark::Started);
        started.map_or(0.0, |at| self.clock.micros().saturating_sub(at) as f64 / 1e6)
    }
}

impl SourceImages {
    /// How far each image is.
    pub fn progress(
        &self,
        status: &dray_engine::source::SourceStatus,
        missing: &[u64],
        owns: bool,
    ) -> Vec<ImageProgress> {
        let row = |ix: usize| {
            let whole = BlockRange::whole(self.offer(ix).len).len;
            let sent = status.sent.get(ix).copied().unwrap_or(0);
            let waiting = status.waiting.get(ix).copied().unwrap_or(0);
            let dirty = self.dirty_count(ix);
            let total = (sent + waiting).min(whole);
            // A target that owns the image knows best: what its guest wrote over is not sent.
            let missing = missing.get(ix).copied().filter(|_| !owns);
            let done = missing.map_or(sent.min(whole), |missing| total.saturating_sub(missing));
            ImageProgress {
                image: self.name(ix).to_owned(),
                amounts: Amounts {
                    bytes_total: total * BLOCK_SIZE,
                    bytes_done: done * BLOCK_SIZE,
                    bytes_missing: missing.unwrap_or(0) * BLOCK_SIZE,
                    dirty_blocks: dirty,
                },
            }
        };
        (0..self.len()).map(row).collect()
    }
}
