//! Carries out the effects of `Source` on simulated parts.

use crate::disk::Disk;
use crate::faults::Side;
use crate::state::guest::Kind;
use crate::state::replica::ImageLineage;
use crate::state::source::{offers, plan};
use crate::world::{Ev, World, note};
use dray_engine::{MILLISECOND, Source, SourceEffect, SourceEvent, SourceRecord, Time};
use dray_types::{BlockRange, BlockSet, ImageIndex};

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
        source.lines.iter_mut().flatten().for_each(ImageLineage::restart);
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
