//! What the source's shell does, on sets of blocks.

use super::guest::GuestLocation;
use super::link::Frame;
use super::settings::Settings;
use super::world::{IMAGE, MIGRATION, World, offer};
use dray_engine::source::SourceNotice;
use dray_engine::throttle::Throttle;
use dray_engine::{SECOND, Source, SourceEffect, SourceEvent, SourcePlan, Time, Tuning};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet, Epoch};
use std::collections::VecDeque;

/// Nothing is lost here, so no handover is ever void for its length, in nanoseconds.
const HANDOVER_TIMEOUT: u64 = 86_400 * SECOND;

pub(super) struct SourceShell {
    machine: Source,
    inbox: VecDeque<SourceEvent>,
    pub(super) tracking: bool,
    pub(super) dirty: BlockSet,
    pub(super) throttle: Throttle,
    /// Writes are told to the engine.
    pub(super) mirrors: bool,
    /// What it was told and has not sent since.
    pub(super) told: BlockSet,
    effects: Vec<SourceEffect>,
}

impl SourceShell {
    pub(super) fn new(settings: &Settings, tuning: Tuning) -> Self {
        let plan = SourcePlan {
            migration: MIGRATION,
            images: vec![offer(settings)],
            strategy: settings.strategy.into(),
            epoch: Epoch(1),
            max_downtime: settings.max_downtime,
            handover_timeout: HANDOVER_TIMEOUT,
            tuning,
            suspect: vec![BlockSet::new()],
        };
        Self {
            machine: Source::new(plan),
            inbox: VecDeque::new(),
            tracking: false,
            dirty: BlockSet::new(),
            throttle: Throttle::new(),
            mirrors: settings.strategy.traits().mirrors,
            told: BlockSet::new(),
            effects: Vec::new(),
        }
    }

    /// Whether the guest's disk is still here.
    pub(super) fn owns(&self) -> bool {
        self.machine.owns()
    }

    /// Whether blocks of the range are yet to be sent in this pass.
    pub(super) fn waits(&self, range: BlockRange) -> bool {
        self.machine.waits(IMAGE, range)
    }

    pub(super) fn rounds(&self) -> u32 {
        self.machine.status().rounds
    }
}

/// The pieces that Sync sends of which a block is dirty.
fn in_units(dirty: BlockSet, settings: &Settings) -> BlockSet {
    let unit = (settings.sync_unit / BLOCK_SIZE).max(1);
    if unit == 1 {
        return dirty;
    }
    let whole = BlockRange::whole(settings.disk);
    let piece = |run: BlockRange| {
        let start = run.start / unit * unit;
        BlockRange::new(start, run.end().next_multiple_of(unit) - start).intersect(whole)
    };
    dirty.runs().map(piece).collect()
}

impl World {
    /// Gives the source an event and carries out what follows from it.
    pub(super) fn tell_source(&mut self, event: SourceEvent) {
        self.source.inbox.push_back(event);
        while let Some(event) = self.source.inbox.pop_front() {
            let mut effects = std::mem::take(&mut self.source.effects);
            self.source.machine.step(Time(self.now), event, &mut effects);
            effects.drain(..).for_each(|effect| self.source_effect(effect));
            self.source.effects = effects;
        }
    }

    fn source_effect(&mut self, effect: SourceEffect) {
        let source = &mut self.source;
        match effect {
            SourceEffect::Send(envelope) => self.send_to_target(envelope),
            SourceEffect::StartTracking => source.tracking = true,
            SourceEffect::StopTracking => source.tracking = false,
            SourceEffect::Scan { image } => {
                let data = [BlockRange::whole(self.settings.disk)].into_iter().collect();
                source.inbox.push_back(SourceEvent::Scanned { image, data });
            }
            SourceEffect::SendRun { tag, range, urgent, clear_dirty, .. } => {
                if clear_dirty {
                    source.dirty.remove(range);
                }
                let written = source.told.count(range) == range.len;
                source.told.remove(range);
                self.send_frame(Frame { tag, range, urgent, written });
            }
            SourceEffect::SendZero { .. } => self.broken_by("zeros of a disk that has none"),
            SourceEffect::TakeDirty { image } => {
                self.link.begin_pass();
                let blocks = in_units(std::mem::take(&mut source.dirty), &self.settings);
                source.inbox.push_back(SourceEvent::DirtyTaken { image, blocks });
            }
            SourceEffect::PutBack { blocks, .. } => source.dirty.union_with(&blocks),
            SourceEffect::Quiesce => {
                self.stop_guest();
                let lens = vec![offer(&self.settings).len];
                self.source.inbox.push_back(SourceEvent::Quiesced { lens });
            }
            SourceEffect::Resume => self.guest.place = GuestLocation::Source,
            SourceEffect::SyncImages => {
                source.inbox.push_back(SourceEvent::ImagesSynced(Ok(())));
            }
            SourceEffect::Journal(_) | SourceEffect::Retire | SourceEffect::Restore => {}
            SourceEffect::Notice(notice) => self.source_notice(notice),
            // Nothing is ever said to be reusable here.
            SourceEffect::Describe { .. }
            | SourceEffect::SendKept { .. }
            | SourceEffect::DescribeBlocks { .. }
            | SourceEffect::SendPart { .. } => {}
            SourceEffect::Throttle { limit } => source.throttle.set(Time(self.now), limit),
        }
    }

    fn source_notice(&mut self, notice: SourceNotice) {
        match notice {
            SourceNotice::Ready => self.send_memory(),
            SourceNotice::Abandoned { why } => self.fail(why.map(|why| why.in_words())),
            SourceNotice::HandoverFailed { why }
            | SourceNotice::Refused { why }
            | SourceNotice::Broken { why } => self.broken_by(&why),
            _ => {}
        }
    }

    /// The guest stops: what the heat has learnt by now orders what is still missing.
    fn stop_guest(&mut self) {
        self.guest.stops(self.now);
        if self.refreshes()
            && let Some(order) = self.order(true)
        {
            self.source.inbox.push_back(order);
        }
    }
}
