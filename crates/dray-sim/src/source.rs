//! The source's shell: carries out the effects of `Source` on simulated parts.

use crate::disk::Disk;
use crate::faults::{Crash, Setup, Side};
use crate::guest::Kind;
use crate::replica::Line;
use crate::rng::Rng;
use crate::world::{Ev, World, note};
use dray_engine::throttle::Throttle;
use dray_engine::{MILLISECOND, Source, SourceEffect, SourceEvent, SourcePlan, SourceRecord, Time};
use dray_types::{BlockRange, BlockSet, Epoch, ImageId, ImageIndex, MigrationId};
use dray_wire::ImageOffer;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Blocks of a write-intent region: small, so that images here have several.
const REGION: u64 = 16;

pub(crate) fn offers(setup: &Setup) -> Vec<ImageOffer> {
    let offer = |(ix, image): (usize, &crate::faults::ImageSetup)| ImageOffer {
        id: ImageId(100 + ix as u128),
        name: format!("disk{ix}"),
        len: image.blocks * dray_types::BLOCK_SIZE,
        read_only: image.read_only,
    };
    setup.images.iter().enumerate().map(offer).collect()
}

fn plan(setup: &Setup, suspect: Vec<BlockSet>) -> SourcePlan {
    SourcePlan {
        migration: MigrationId(1),
        images: offers(setup),
        strategy: setup.strategy,
        epoch: Epoch(setup.epoch),
        max_downtime: setup.max_downtime,
        handover_timeout: setup.handover_timeout,
        suspect,
        tuning: setup.tuning.clone(),
    }
}

/// The host that has the images at the start.
pub(crate) struct SourceHost {
    pub(crate) life: u64,
    pub(crate) up: bool,
    pub(crate) awake: bool,
    pub(crate) machine: Source,
    pub(crate) inbox: VecDeque<SourceEvent>,
    pub(crate) effects: VecDeque<SourceEffect>,
    pub(crate) effects_done: u64,
    pub(crate) session: u64,
    /// Sessions whose `LinkUp` waits in the inbox, and the one that the machine knows: what it
    /// sends belongs there and nowhere else.
    pub(crate) link_ups: VecDeque<u64>,
    pub(crate) known_session: u64,
    /// What was described in this session: first block and versions, by tag.
    pub(crate) kept: BTreeMap<u64, (u64, Vec<u64>)>,
    pub(crate) disks: Vec<Disk>,
    pub(crate) tracking: bool,
    /// The tracker has seen every write since the migration began.
    tracked_all_along: bool,
    pub(crate) dirty: Vec<BlockSet>,
    /// Per image, its line when the target has a replica.
    pub(crate) lines: Vec<Option<Line>>,
    guards: u32,
    quiescing: u32,
    pub(crate) throttle: Throttle,
    parked: bool,
    /// Back after a crash: no write may pass before tracking has begun again.
    pub(crate) untracked: bool,
    /// Answers that the machine still waits for.
    pending: u32,
    /// The last record that is durable may be one whose append has failed: the shell does not know.
    pub(crate) unsure: bool,
    /// What becomes of the next record, if it is the next effect.
    pub(crate) spoiled: Option<Crash>,
    // Durable:
    pub(crate) records: Vec<SourceRecord>,
    regions: Vec<BTreeSet<u64>>,
    retired: bool,
    /// The handed-over record is durable and was not taken back.
    pub(crate) handed_over: bool,
}

impl SourceHost {
    pub(crate) fn new(setup: &Setup, rng: &mut Rng) -> Self {
        let images = setup.images.len();
        let disk = |(ix, image): (usize, &crate::faults::ImageSetup)| {
            Disk::new(image.blocks, |block| {
                if rng.chance(image.density) { 1 + block + ((ix as u64) << 20) } else { 0 }
            })
        };
        Self {
            life: 1,
            up: true,
            awake: false,
            machine: Source::new(plan(setup, vec![BlockSet::new(); images])),
            inbox: VecDeque::new(),
            effects: VecDeque::new(),
            effects_done: 0,
            session: 0,
            link_ups: VecDeque::new(),
            known_session: 0,
            kept: BTreeMap::new(),
            disks: setup.images.iter().enumerate().map(disk).collect(),
            tracking: false,
            tracked_all_along: true,
            dirty: vec![BlockSet::new(); images],
            lines: Vec::new(),
            guards: 0,
            quiescing: 0,
            throttle: Throttle::new(),
            parked: false,
            untracked: false,
            pending: 0,
            unsure: false,
            spoiled: None,
            records: Vec::new(),
            regions: vec![BTreeSet::new(); images],
            retired: false,
            handed_over: false,
        }
    }

    /// Guest writes are accepted.
    pub(crate) fn open(&self) -> bool {
        self.up && !self.untracked && !self.parked && self.guards == 0 && self.quiescing == 0
    }

    /// The gate and the machine agree on whether the guest is slowed.
    pub(crate) fn throttle_fits(&self) -> bool {
        !self.up || !self.idle() || self.throttle.active() == self.machine.write_limit().is_some()
    }

    /// Nothing that the machine asked for is left to do.
    pub(crate) fn idle(&self) -> bool {
        self.effects.is_empty()
    }

    /// The machine has every answer that it waits for.
    pub(crate) fn answered(&self) -> bool {
        self.pending == 0
    }

    /// How long a write waits before it is carried out.
    pub(crate) fn throttled(&mut self, now: u64, image: usize, range: BlockRange) -> u64 {
        let new_dirty = self.dirty[image].complement_in(range).len() * dray_types::BLOCK_SIZE;
        self.throttle.delay(Time(now), new_dirty)
    }

    /// Guest reads are answered.
    pub(crate) fn readable(&self) -> bool {
        self.up && !self.parked
    }

    fn forget_sessions(&mut self) {
        self.session = 0;
        self.known_session = 0;
        self.kept.clear();
        self.link_ups.clear();
    }

    /// Memory is gone.
    pub(crate) fn die(&mut self) {
        self.up = false;
        self.life += 1;
        self.awake = false;
        self.inbox.clear();
        self.effects.clear();
        self.forget_sessions();
        self.tracking = false;
        self.tracked_all_along = false;
        self.guards = 0;
        self.quiescing = 0;
        self.throttle = Throttle::new();
        self.pending = 0;
        self.unsure = false;
        self.dirty.iter_mut().for_each(|dirty| *dirty = BlockSet::new());
    }

    /// A write of the guest, tracked by a migration or not, belongs to the open generation.
    pub(crate) fn mark_line(&mut self, image: usize, range: BlockRange) {
        if let Some(Some(line)) = self.lines.get_mut(image) {
            line.mark(range);
        }
    }

    pub(crate) fn mark_dirty(&mut self, image: usize, range: BlockRange) {
        self.mark_line(image, range);
        if self.tracking {
            self.dirty[image].insert(range);
            self.regions[image].extend(range.start / REGION..=(range.end() - 1) / REGION);
        }
    }

    fn open_regions(&self, setup: &Setup) -> Vec<BlockSet> {
        let region = |blocks, &region: &u64| {
            BlockRange::new(region * REGION, REGION).intersect(BlockRange::new(0, blocks))
        };
        let image = |(regions, image): (&BTreeSet<u64>, &crate::faults::ImageSetup)| {
            regions.iter().map(|r| region(image.blocks, r)).collect()
        };
        self.regions.iter().zip(&setup.images).map(image).collect()
    }
}

impl World {
    pub(crate) fn source_turn(&mut self) {
        loop {
            if !self.source.effects.is_empty() {
                if self.crashes(Side::Source) {
                    return;
                }
                let Some(effect) = self.source.effects.pop_front() else { return };
                let slow = matches!(effect, SourceEffect::Journal(_) | SourceEffect::Retire);
                let mut delay = self.disk_time();
                let spoiled = self.source.spoiled.take();
                match effect {
                    SourceEffect::Journal(record) => delay += self.source_journal(record, spoiled),
                    effect => self.source_effect(effect),
                }
                if slow {
                    return self.at(delay, Ev::Turn(Side::Source, self.source.life));
                }
            } else if let Some(event) = self.source.inbox.pop_front() {
                self.source_event(event);
            } else {
                self.source.awake = false;
                return;
            }
        }
    }

    pub(crate) fn source_event(&mut self, event: SourceEvent) {
        if !matches!(event, SourceEvent::Tick) {
            note!(self, "source <- {event:?}");
        }
        if matches!(
            event,
            SourceEvent::Scanned { .. }
                | SourceEvent::DirtyTaken { .. }
                | SourceEvent::Quiesced { .. }
                | SourceEvent::QuiesceFailed { .. }
                | SourceEvent::ImagesSynced(_)
        ) {
            self.source.pending -= 1;
        }
        match event {
            SourceEvent::LinkUp => {
                self.source.known_session = self.source.link_ups.pop_front().unwrap_or(0);
                self.source.kept.clear();
            }
            SourceEvent::LinkDown => self.source.known_session = 0,
            _ => {}
        }
        let mut out = Vec::new();
        self.source.machine.step(Time(self.now), event, &mut out);
        self.source.effects.extend(out);
        self.check_source_epoch();
        self.check_blocks();
    }

    fn source_answer(&mut self, delay: u64, event: SourceEvent) {
        self.at(delay, Ev::Source(self.source.life, event));
    }

    fn source_effect(&mut self, effect: SourceEffect) {
        note!(self, "source -> {effect:?}");
        let life = self.source.life;
        match effect {
            SourceEffect::Send(envelope) => self.send_to_target(&envelope),
            SourceEffect::Journal(_) => {}
            SourceEffect::StartTracking => self.start_tracking(),
            SourceEffect::StopTracking => self.source.tracking = false,
            SourceEffect::Scan { image } => {
                self.source.pending += 1;
                let delay = self.disk_time();
                self.at(delay, Ev::ScanDone { life, image });
            }
            SourceEffect::SendRun { tag, image, range, clear_dirty, .. } => {
                if clear_dirty {
                    self.source.dirty[image.ix()].remove(range);
                }
                self.check_launch(image, range);
                let session = self.source.known_session;
                let delay = self.disk_time();
                let described = false;
                self.at(delay, Ev::ReadDone { life, session, tag, image, range, described });
            }
            SourceEffect::Describe { tag, image, range } => {
                if self.source.machine.owns() {
                    self.source.dirty[image.ix()].remove(range);
                }
                self.check_launch(image, range);
                let session = self.source.known_session;
                let delay = self.disk_time();
                let described = true;
                self.at(delay, Ev::ReadDone { life, session, tag, image, range, described });
            }
            SourceEffect::SendKept { tag, of, image, range } => {
                self.check_launch(image, range);
                self.send_kept(tag, of, image, range);
            }
            SourceEffect::DescribeBlocks { tag, of, image, range } => {
                self.check_launch(image, range);
                self.send_described_blocks(tag, of, image, range);
            }
            SourceEffect::SendPart { tag, of, image, range, blocks } => {
                self.check_launch(image, range);
                self.send_part(tag, of, image, range, blocks);
            }
            SourceEffect::SendZero { tag, image, range } => {
                self.check_launch(image, range);
                self.send_zero(tag, image, range);
            }
            SourceEffect::TakeDirty { image } => {
                self.source.pending += 1;
                let blocks = std::mem::take(&mut self.source.dirty[image.ix()]);
                let delay = self.around(100_000);
                self.source_answer(delay, SourceEvent::DirtyTaken { image, blocks });
            }
            SourceEffect::PutBack { image, blocks } => {
                self.source.dirty[image.ix()].union_with(&blocks);
            }
            SourceEffect::Quiesce => {
                self.source.pending += 1;
                self.source.quiescing += 1;
                let delay = self.around(MILLISECOND);
                self.at(delay, Ev::QuiesceCheck { life });
            }
            SourceEffect::Resume => self.source.guards = 0,
            SourceEffect::SyncImages => {
                self.source.pending += 1;
                let snapshots = self.source.disks.iter().map(Disk::snapshot).collect();
                let fails = self.faulty(self.setup.faults.sync_error);
                let delay = self.disk_time();
                self.at(delay, Ev::SourceSynced { life, snapshots, fails });
            }
            SourceEffect::Retire => {
                self.source.retired = true;
                self.source.parked = true;
            }
            SourceEffect::Restore => {
                self.source.retired = false;
                self.source.parked = false;
                self.source.guards = 0;
            }
            SourceEffect::Throttle { limit } => self.source.throttle.set(Time(self.now), limit),
            SourceEffect::Notice(notice) => self.source_notice(notice),
        }
    }

    fn start_tracking(&mut self) {
        self.source.untracked = false;
        if !std::mem::replace(&mut self.source.tracking, true) {
            self.source.dirty.iter_mut().for_each(|dirty| *dirty = BlockSet::new());
        }
        // A write that is under way may reach the disk after the copier has read its blocks.
        let under_way: Vec<_> =
            self.guest.writes_in_flight().map(|op| (op.image, op.range)).collect();
        for (image, range) in under_way {
            self.source.mark_dirty(image, range);
        }
    }

    pub(crate) fn scan_done(&mut self, life: u64, image: ImageIndex) {
        if life == self.source.life {
            let data = self.source.disks[image.ix()].data();
            let blocks = self.setup.images[image.ix()].blocks;
            let shared = self.source.lines[image.ix()].as_ref().map(|line| line.shared(blocks));
            if let Some(blocks) = shared {
                self.source_answer(0, SourceEvent::Shared { image, blocks });
            }
            let delay = self.around(100_000);
            self.source_answer(delay, SourceEvent::Scanned { image, data });
        }
    }

    pub(crate) fn quiesce_check(&mut self, life: u64) {
        if life != self.source.life {
            return;
        }
        if self.faulty(self.setup.faults.quiesce_fails) {
            self.source.quiescing -= 1;
            return self.tell_source(SourceEvent::QuiesceFailed { why: "a write hangs".into() });
        }
        if self.guest.ops.values().any(|op| op.kind == Kind::Write && op.issued) {
            return self.at(MILLISECOND, Ev::QuiesceCheck { life });
        }
        self.source.quiescing -= 1;
        self.source.guards += 1;
        let lens = offers(&self.setup).iter().map(|offer| offer.len).collect();
        let delay = self.around(MILLISECOND);
        self.source_answer(delay, SourceEvent::Quiesced { lens });
    }

    pub(crate) fn source_synced(
        &mut self,
        life: u64,
        snapshots: &[crate::disk::Snapshot],
        fails: bool,
    ) {
        if life != self.source.life {
            return;
        }
        if fails {
            return self.tell_source(SourceEvent::ImagesSynced(Err("input/output error".into())));
        }
        for (disk, snapshot) in self.source.disks.iter_mut().zip(snapshots) {
            disk.settle(snapshot);
        }
        self.tell_source(SourceEvent::ImagesSynced(Ok(())));
    }

    pub(crate) fn read_done(
        &mut self,
        life: u64,
        session: u64,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        described: bool,
    ) {
        // A read belongs to the session it was asked for in: a later one has other plans.
        if life != self.source.life || session != self.source.known_session || session == 0 {
            return;
        }
        if self.faulty(self.setup.faults.read_error) {
            self.check.read_errors += 1;
            let why = "input/output error".to_owned();
            return self.tell_source(SourceEvent::RunFailed { tag, why });
        }
        if described {
            self.send_described(tag, image, range);
        } else {
            self.send_run(tag, image, range);
        }
    }

    pub(crate) fn restart_source(&mut self) {
        let source = &mut self.source;
        source.up = true;
        source.lines.iter_mut().flatten().for_each(Line::restart);
        let suspect = source.open_regions(&self.setup);
        source.machine = Source::recover(plan(&self.setup, suspect), &source.records);
        // Who owns is decided before anything is exported.
        source.parked = source.retired || !source.machine.owns();
        source.untracked = source.machine.owns() && !source.machine.is_over();
        self.check.source_reborn(source.machine.epoch());
        self.tell_source(SourceEvent::Start);
        self.vm_source_restarted();
    }

    /// The operator tries an abandoned migration again.
    pub(crate) fn resume_migration(&mut self) {
        let source = &mut self.source;
        let idle = source.pending == 0 && source.inbox.is_empty() && source.effects.is_empty();
        if !source.up || !idle {
            return self.at(200 * MILLISECOND, Ev::ResumeMigration);
        }
        self.check.resuming = false;
        if !matches!(source.records.last(), Some(SourceRecord::Abandoned)) {
            return;
        }
        source.records.push(SourceRecord::Resumed);
        let suspect = if source.tracked_all_along {
            source.dirty.iter_mut().map(std::mem::take).collect()
        } else {
            let whole = |image: &crate::faults::ImageSetup| {
                [BlockRange::new(0, image.blocks)].into_iter().collect()
            };
            self.setup.images.iter().map(whole).collect()
        };
        source.tracked_all_along = true;
        source.machine = Source::recover(plan(&self.setup, suspect), &source.records);
        source.life += 1;
        source.awake = false;
        let epoch = source.machine.epoch();
        note!(self, "source: the migration is resumed");
        self.check.source_reborn(epoch);
        self.lose_session();
        self.source.forget_sessions();
        self.tell_source(SourceEvent::Start);
    }
}
