//! What people and programs see of a migration: progress while it runs, one summary at the end.

use super::SourceSlot;
use super::images::SourceImages;
use crate::api::{
    Amounts, ApiError, Downtime, Ending, ErrorKind, ImageProgress, ImageSummary, MigrationState,
    Phase, Step, Summary, Verified, WireBytes,
};
use crate::migration::messages::ToSourceShell;
use crate::net::NetTotals;
use dray_engine::Source;
use dray_engine::source::SourceNotice;
use dray_types::{BLOCK_SIZE, BlockRange};
use dray_wire::ToTarget;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Moments that the summary's times are measured between.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// `migrate` was asked for.
    Started,
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
const MARKS: usize = 8;

/// Milliseconds since 1970.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// The numbers of one migration.
pub struct Report {
    slot: Arc<SourceSlot>,
    host: String,
    marks: [Option<Instant>; MARKS],
    /// The target's last numbers: missing blocks per image, remote reads, its counters.
    missing: Vec<u64>,
    remote_reads: u64,
    verified: Option<(u64, u64)>,
    memory: (u64, u64),
    reconnects: u64,
    dirty_since: (Instant, u64),
    dirty_rate: u64,
    wire_since: (Instant, u64),
    wire_rate: u64,
    phase: Phase,
    blocks: (u64, u64),
}

impl Report {
    /// Nothing has happened yet.
    pub fn new(slot: Arc<SourceSlot>, host: String) -> Self {
        let now = Instant::now();
        Self {
            slot,
            host,
            marks: [None; MARKS],
            missing: Vec::new(),
            remote_reads: 0,
            verified: None,
            memory: (0, 0),
            reconnects: 0,
            dirty_since: (now, 0),
            dirty_rate: 0,
            wire_since: (now, 0),
            wire_rate: 0,
            phase: Phase::Prepare,
            blocks: (0, 0),
        }
    }

    /// Whether verification found a difference.
    pub fn differs(&self) -> bool {
        self.verified.is_some_and(|(_, different)| different > 0)
    }

    /// Notes that a moment has come. The first `Begin` of a later attempt replaces an earlier one.
    pub fn mark(&mut self, mark: Mark) {
        self.marks[mark as usize] = Some(Instant::now());
    }

    fn between(&self, from: Mark, to: Mark) -> Option<f64> {
        let (from, to) = (self.marks[from as usize]?, self.marks[to as usize]?);
        Some(to.saturating_duration_since(from).as_secs_f64())
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
            SourceNotice::Phase(phase) => self.phase = shown_phase(*phase),
            SourceNotice::TargetServing => self.mark(Mark::Serving),
            SourceNotice::Verified { blocks, different } => {
                self.verified = Some((*blocks, *different));
            }
            SourceNotice::Done => self.mark(Mark::Done),
            SourceNotice::HandoverFailed { why } => {
                self.slot.board.notice(format!("handover failed: {why}"));
            }
            _ => {}
        }
    }

    /// The target's shell has said something.
    pub fn told(&mut self, message: &ToSourceShell) {
        match message {
            ToSourceShell::GuestRunning => self.mark(Mark::Running),
            ToSourceShell::Progress { missing, remote_reads, .. } => {
                self.missing.clone_from(missing);
                self.remote_reads = *remote_reads;
            }
            ToSourceShell::Finished => self.finish(),
            _ => {}
        }
    }

    /// Dirty blocks were taken from the tracker.
    pub fn dirtied(&mut self, blocks: u64) {
        let span = self.dirty_since.0.elapsed().as_secs_f64();
        if span > 0.05 {
            self.dirty_rate = (blocks as f64 * BLOCK_SIZE as f64 / span) as u64;
            self.dirty_since = (Instant::now(), 0);
        }
    }

    /// QEMU's numbers.
    pub fn memory(&mut self, sent: u64, left: u64) {
        self.memory = (sent, left);
    }

    /// The link came back.
    pub fn reconnected(&mut self) {
        self.reconnects += 1;
    }

    /// Shows how far it is.
    pub fn refresh(&mut self, engine: Option<&Source>, images: &SourceImages) {
        let Some(engine) = engine else { return };
        let wire = self.slot.stats.totals().wire_bytes();
        let span = self.wire_since.0.elapsed().as_secs_f64();
        if span >= 1.0 {
            self.wire_rate = ((wire - self.wire_since.1) as f64 / span) as u64;
            self.wire_since = (Instant::now(), wire);
        }
        let status = engine.status();
        self.blocks = (status.blocks_sent, status.blocks_resent);
        let rows = images.progress(&status, &self.missing, engine.owns());
        let total = rows.iter().fold(Amounts::default(), |sum, row| sum.plus(row.amounts));
        let left = if self.phase == Phase::Backfill {
            total.bytes_missing
        } else {
            total.bytes_total - total.bytes_done.min(total.bytes_total)
        };
        let step = self.step(status.link_up);
        self.slot.board.change(|shown| {
            let progress = &mut shown.progress;
            progress.phase = self.phase;
            progress.step = step;
            progress.elapsed_seconds = self.elapsed();
            progress.total = total;
            progress.images = rows;
            (progress.memory_bytes, progress.memory_left) = self.memory;
            progress.wire_bytes = wire;
            progress.rate = self.wire_rate;
            progress.dirty_rate = self.dirty_rate;
            progress.round = status.rounds + 1;
            progress.remote_reads = self.remote_reads;
            progress.link_up = status.link_up;
            // Verification sends next to nothing: the rate says nothing about its end.
            let sending = self.wire_rate > 0 && self.phase < Phase::Release;
            progress.seconds_left = sending.then(|| left as f64 / self.wire_rate as f64);
            progress.downtime_ms = self.downtime().map(|downtime| downtime.total);
        });
    }

    fn step(&self, link_up: bool) -> Option<Step> {
        let memory = self.memory.0 > 0 && self.marks[Mark::Begin as usize].is_none();
        if !link_up {
            Some(Step::WaitForPeer)
        } else if memory && self.phase < Phase::Handover {
            Some(Step::Memory)
        } else if self.phase == Phase::Release {
            Some(Step::Verify)
        } else {
            None
        }
    }

    fn elapsed(&self) -> f64 {
        self.marks[Mark::Started as usize].map_or(0.0, |at| at.elapsed().as_secs_f64())
    }

    fn downtime(&self) -> Option<Downtime> {
        let ms = |from, to| self.between(from, to).unwrap_or(0.0) * 1e3;
        let first =
            if self.marks[Mark::Stopped as usize].is_some() { Mark::Stopped } else { Mark::Begin };
        let ran = self.marks[Mark::Running as usize].is_some();
        let last = if ran { Mark::Running } else { Mark::Serving };
        Some(Downtime {
            total: self.between(first, last)? * 1e3,
            memory: ms(Mark::Stopped, Mark::Begin),
            quiesce: ms(Mark::Begin, Mark::Quiesced),
            map: ms(Mark::Quiesced, Mark::Asked),
            commit: ms(Mark::Asked, Mark::Serving),
            resume: if ran { ms(Mark::Serving, Mark::Running) } else { 0.0 },
        })
    }

    /// It ended before handover.
    pub fn ended(&self, cancelled: bool, error: ApiError) {
        self.slot.board.change(|shown| {
            shown.state =
                if cancelled { MigrationState::Cancelled } else { MigrationState::Failed };
            // The VM's own failure, told earlier, says more than what followed from it.
            if shown.error.is_none() || cancelled {
                shown.error = Some(error);
            }
            shown.progress.phase = Phase::Ended;
        });
    }

    /// The target could not start the guest and gave the images back.
    pub fn taken_back(&self) {
        let error = ApiError::new(
            ErrorKind::Hypervisor,
            "migration failed",
            "the target could not start the guest and handed the images back",
        )
        .hint("the guest goes on at the source; see the target agent's log");
        self.ended(false, error);
    }

    /// Everything is at the target and the target has told its part: the summary.
    fn finish(&mut self) {
        let verified = match self.verified {
            None => Verified::NotAsked,
            Some((_, 0)) => Verified::Equal,
            Some(_) => Verified::Different,
        };
        let summary = self.summary(verified);
        self.slot.board.change(|shown| {
            shown.state = MigrationState::Completed;
            shown.error = None;
            shown.progress.phase = Phase::Ended;
            shown.summary = Some(summary);
            if verified == Verified::Different {
                shown.state = MigrationState::Failed;
                shown.error = Some(
                    ApiError::new(
                        ErrorKind::Verification,
                        "verification failed",
                        "blocks at the target differ from the source as of handover",
                    )
                    .hint("the source's replica is kept; compare it before you remove it"),
                );
            }
        });
    }

    fn summary(&self, verified: Verified) -> Summary {
        let intent = self.slot.intent();
        let totals = self.slot.stats.totals();
        let shown = self.slot.board.read();
        let options = intent.options.as_ref();
        let strategy = options.map_or(dray_engine::Strategy::Hybrid, |options| options.strategy);
        let images = intent.images.iter().map(|image| ImageSummary {
            image: image.name.clone(),
            name_at_target: image.offer.name.clone(),
            bytes: image.offer.len,
            blocks_sent: 0,
            blocks_sent_twice: 0,
        });
        Summary {
            result: Ending::Completed,
            migration: intent.migration,
            vm: intent.vm.as_ref().and_then(|vm| vm.name.clone()),
            from: self.host.clone(),
            to: intent.peer.clone(),
            strategy: shown_strategy(strategy),
            started_unix_ms: shown.started_unix_ms,
            ended_unix_ms: unix_ms(),
            total_seconds: self.between(Mark::Started, Mark::Done).unwrap_or(0.0),
            downtime_ms: self.downtime().unwrap_or_default(),
            wire_bytes: wire_bytes(&totals),
            guest_bytes: totals.data_blocks * BLOCK_SIZE,
            rounds: shown.progress.round,
            blocks_sent: totals.data_blocks,
            blocks_sent_twice: self.blocks.1,
            resends: self.slot.stats.mismatches.load(Relaxed),
            reconnects: self.reconnects,
            remote_reads: self.remote_reads,
            verified,
            images: images.collect(),
        }
    }
}

/// Bytes on the wire by kind: what the frames' payloads do not account for on the data streams is
/// headers, and counts with the zeros that the headers name.
fn wire_bytes(totals: &NetTotals) -> WireBytes {
    let data = totals.data_sent + totals.data_received;
    let payload = totals.raw_bytes + totals.compressed_out;
    WireBytes {
        total: totals.wire_bytes(),
        raw: totals.raw_bytes,
        compressed: totals.compressed_out,
        zero: data.saturating_sub(payload),
        memory: totals.memory_sent + totals.memory_received,
        control: totals.control_sent + totals.control_received,
        hash: 0,
    }
}

/// The engine's phase as the API names it.
pub fn shown_phase(phase: dray_engine::Phase) -> Phase {
    match phase {
        dray_engine::Phase::Copy => Phase::Copy,
        dray_engine::Phase::Sync => Phase::Sync,
        dray_engine::Phase::Handover => Phase::Handover,
        dray_engine::Phase::Backfill => Phase::Backfill,
        dray_engine::Phase::Release => Phase::Release,
    }
}

/// The engine's strategy as the API names it.
pub fn shown_strategy(strategy: dray_engine::Strategy) -> crate::api::Strategy {
    match strategy {
        dray_engine::Strategy::PreCopy => crate::api::Strategy::PreCopy,
        dray_engine::Strategy::PostCopy => crate::api::Strategy::PostCopy,
        dray_engine::Strategy::Hybrid => crate::api::Strategy::Hybrid,
        dray_engine::Strategy::Deferred => crate::api::Strategy::Deferred,
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
            let missing = if owns { 0 } else { missing.get(ix).copied().unwrap_or(0) };
            ImageProgress {
                image: self.name(ix).to_owned(),
                amounts: Amounts {
                    bytes_total: (sent + waiting).min(whole) * BLOCK_SIZE,
                    bytes_done: sent.min(whole) * BLOCK_SIZE,
                    bytes_missing: missing * BLOCK_SIZE,
                    dirty_blocks: dirty,
                },
            }
        };
        (0..self.len()).map(row).collect()
    }
}
