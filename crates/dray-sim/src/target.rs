//! The target's shell: carries out the effects of `Target` on simulated parts.

use crate::disk::{Disk, Snapshot};
use crate::faults::{Setup, Side};
use crate::guest::Power;
use crate::rng::Rng;
use crate::source::offers;
use crate::world::{Ev, World, note};
use dray_engine::receiver::{Arrival, DiskFault, Held};
use dray_engine::{
    MILLISECOND, SECOND, Target, TargetEffect, TargetEvent, TargetPlan, TargetRecord, Time,
};
use dray_types::{BlockRange, BlockSet, ErrorKind, ImageIndex, MigrationId};
use dray_wire::ImageHandover;
use dray_wire::frame::{PIECE_BLOCKS, mask_bit};
use std::collections::{BTreeMap, VecDeque};

/// First version of what an old disk holds that nobody cleared.
const OLD_CONTENT: u64 = 1 << 60;

/// A frame that is being written.
pub(crate) struct PendingWrite {
    pub(crate) session: u64,
    pub(crate) tag: u64,
    pub(crate) image: ImageIndex,
    pub(crate) range: BlockRange,
    /// None for zeros.
    pub(crate) versions: Option<Vec<u64>>,
    /// What of it is not written.
    pub(crate) left: Left,
}

/// What of a frame is not written.
#[derive(Clone, Copy)]
pub(crate) enum Left {
    /// All of it is.
    Nothing,
    /// Of a described run: pieces that were not found, and those that are said to have a basis.
    Pieces { lacking: u16, near: u16 },
    /// Of described blocks: those that were not found.
    Blocks([u64; 4]),
    /// Of a part: what was found before.
    Elsewhere([u64; 4]),
}

impl Left {
    /// Whether block `nth` of the frame is not written.
    fn has(self, nth: u64) -> bool {
        match self {
            Self::Nothing => false,
            Self::Pieces { lacking, .. } => lacking >> (nth / PIECE_BLOCKS) & 1 == 1,
            Self::Blocks(mask) | Self::Elsewhere(mask) => mask_bit(&mask, nth),
        }
    }
}

fn plan(setup: &Setup) -> TargetPlan {
    TargetPlan {
        migration: MigrationId(1),
        images: offers(setup),
        zeroed: setup.images.iter().map(|image| image.zeroed).collect(),
    }
}

/// The host that gets the images.
pub(crate) struct TargetHost {
    pub(crate) life: u64,
    pub(crate) up: bool,
    pub(crate) awake: bool,
    pub(crate) machine: Target,
    pub(crate) inbox: VecDeque<TargetEvent>,
    effects: Held,
    /// Until then nothing can be written beside the images.
    full_until: u64,
    pub(crate) effects_done: u64,
    pub(crate) session: u64,
    /// As at the source.
    pub(crate) link_ups: VecDeque<u64>,
    pub(crate) known_session: u64,
    pub(crate) disks: Vec<Disk>,
    pub(crate) exposed: bool,
    pub(crate) missing: Vec<BlockSet>,
    agreed: Vec<BlockSet>,
    /// Written by the guest and not in a durable record.
    pub(crate) unrecorded: Vec<BlockSet>,
    pub(crate) writes: BTreeMap<u64, PendingWrite>,
    next_write: u64,
    idle_told: bool,
    pub(crate) finished: bool,
    /// Notes of guest-written blocks that outlive the agent and not the host.
    pub(crate) noted: Vec<BlockSet>,
    // Durable:
    pub(crate) records: Vec<TargetRecord>,
    pub(crate) present: Vec<BlockSet>,
}

impl TargetHost {
    pub(crate) fn new(setup: &Setup, rng: &mut Rng) -> Self {
        let none = vec![BlockSet::new(); setup.images.len()];
        let disk = |image: &crate::faults::ImageSetup| {
            Disk::new(image.blocks, |block| {
                let old = !image.zeroed && rng.chance(0.7);
                if old { OLD_CONTENT + block } else { 0 }
            })
        };
        Self {
            life: 1,
            up: true,
            awake: false,
            machine: Target::new(plan(setup)),
            inbox: VecDeque::new(),
            effects: Held::default(),
            full_until: 0,
            effects_done: 0,
            session: 0,
            link_ups: VecDeque::new(),
            known_session: 0,
            disks: setup.images.iter().map(disk).collect(),
            exposed: false,
            missing: none.clone(),
            agreed: none.clone(),
            unrecorded: none.clone(),
            writes: BTreeMap::new(),
            next_write: 1,
            idle_told: true,
            finished: false,
            noted: none.clone(),
            records: Vec::new(),
            present: none,
        }
    }

    /// Guest writes are accepted.
    pub(crate) fn open(&self) -> bool {
        self.up && self.exposed
    }

    /// Memory is gone.
    pub(crate) fn die(&mut self) {
        self.up = false;
        self.life += 1;
        self.awake = false;
        self.inbox.clear();
        self.effects.clear();
        self.session = 0;
        self.known_session = 0;
        self.link_ups.clear();
        self.exposed = false;
        self.idle_told = true;
        self.missing.iter_mut().for_each(|set| *set = BlockSet::new());
        self.unrecorded.iter_mut().for_each(|set| *set = BlockSet::new());
    }

    /// Everything that was missing and is here.
    fn all_present(&self) -> Vec<BlockSet> {
        let present = |(agreed, missing): (&BlockSet, &BlockSet)| {
            let mut present = agreed.clone();
            present.subtract(missing);
            present
        };
        self.agreed.iter().zip(&self.missing).map(present).collect()
    }

    /// Blocks of the agreed map in `range` that no durable record names.
    pub(crate) fn unnamed(&self, image: usize, range: BlockRange) -> BlockSet {
        let mut unnamed = self.agreed[image].intersection(range);
        unnamed.subtract(&self.present[image]);
        unnamed
    }

    pub(crate) fn make_present(&mut self, image: usize, present: &BlockSet) {
        self.present[image].union_with(present);
        self.unrecorded[image].subtract(present);
    }
}

/// What becomes of a frame whose writes succeed.
fn arrival(write: &PendingWrite) -> Arrival {
    match write.left {
        Left::Pieces { lacking, near } if lacking != 0 => Arrival::Partly { lacking, near },
        Left::Blocks(lacking) if lacking != [0; 4] => Arrival::SomeBlocks { lacking },
        _ => Arrival::Written,
    }
}

impl World {
    pub(crate) fn target_turn(&mut self) {
        loop {
            if let Some(effect) = self.target.effects.take() {
                if self.crashes(Side::Target) {
                    return;
                }
                let Some(effect) = self.written(effect) else { continue };
                let slow = matches!(effect, TargetEffect::Journal(_) | TargetEffect::Expose { .. });
                self.target_effect(effect);
                if slow {
                    let delay = self.disk_time();
                    return self.at(delay, Ev::Turn(Side::Target, self.target.life));
                }
            } else if let Some(event) = self.target.inbox.pop_front() {
                self.target.idle_told = false;
                self.target_event(event);
            } else if !self.target.idle_told {
                self.target.idle_told = true;
                self.target_event(TargetEvent::Idle);
            } else {
                self.target.awake = false;
                return;
            }
        }
    }

    fn target_event(&mut self, event: TargetEvent) {
        if !matches!(event, TargetEvent::Tick | TargetEvent::Idle) {
            note!(self, "target <- {event:?}");
        }
        match event {
            TargetEvent::LinkUp => {
                self.target.known_session = self.target.link_ups.pop_front().unwrap_or(0);
            }
            TargetEvent::LinkDown => self.target.known_session = 0,
            _ => {}
        }
        if matches!(event, TargetEvent::LinkUp | TargetEvent::LinkDown) {
            self.target.effects.new_session();
        }
        let mut out = Vec::new();
        self.target.machine.step(Time(self.now), event, &mut out);
        out.into_iter().for_each(|effect| self.target.effects.push(effect));
        self.check_target_epoch();
    }

    /// The effect, as far as what it writes beside the images can be written: it stays the first
    /// until there is room again. Records that may be left out are.
    fn written(&mut self, effect: TargetEffect) -> Option<TargetEffect> {
        let writes = matches!(
            effect,
            TargetEffect::Journal(_)
                | TargetEffect::Expose { .. }
                | TargetEffect::Withdraw
                | TargetEffect::Finish
        );
        if !writes {
            return Some(effect);
        }
        if self.faulty(self.setup.faults.full) {
            self.fill_target(SECOND);
        }
        if self.now >= self.target.full_until {
            return Some(effect);
        }
        if let TargetEffect::Journal(records) = &effect
            && records.iter().all(TargetRecord::may_be_left_out)
        {
            return None;
        }
        note!(self, "target cannot {effect:?}");
        self.check.full += 1;
        self.target.effects.put_back(effect);
        self.at(SECOND, Ev::TryAgain(self.target.life));
        None
    }

    /// For a while there is no room for what the target writes beside the images.
    pub(crate) fn fill_target(&mut self, mean: u64) {
        self.target.full_until = self.now + self.around(mean);
    }

    pub(crate) fn try_again(&mut self, life: u64) {
        if life == self.target.life {
            self.target.effects.retry();
            self.wake(Side::Target);
        }
    }

    fn target_answer(&mut self, delay: u64, event: TargetEvent) {
        self.at(delay, Ev::Target(self.target.life, event));
    }

    fn target_effect(&mut self, effect: TargetEffect) {
        note!(self, "target -> {effect:?}");
        let life = self.target.life;
        match effect {
            TargetEffect::Send(envelope) => self.send_to_source(&envelope),
            TargetEffect::Journal(records) => {
                self.check_target_records(&records);
                self.target.records.extend(records);
            }
            TargetEffect::SyncImages { id } => {
                let snapshots = self.target.disks.iter().map(Disk::snapshot).collect();
                let fails = self.faulty(self.setup.faults.sync_error);
                let delay = self.disk_time();
                self.at(delay, Ev::TargetSynced { life, id, snapshots, fails });
            }
            TargetEffect::Expose { images } => self.expose(&images),
            TargetEffect::Withdraw => self.target.exposed = false,
            TargetEffect::ReachGuest => {
                let absent = self.guest.power == Power::Absent;
                let alive = absent || self.guest.memory[Side::Target as usize];
                let reached = alive && !self.faulty(self.setup.faults.unreachable);
                let result = if reached { Ok(()) } else { Err("no answer".to_owned()) };
                let delay = self.around(5 * MILLISECOND);
                self.target_answer(delay, TargetEvent::GuestReachable(result));
            }
            TargetEffect::StartGuest => {
                let delay = self.around(5 * MILLISECOND);
                self.at(delay, Ev::StartGuest { life });
            }
            TargetEffect::AskMissing { image, range, max } => {
                let run = self.target.missing[image.ix()].next_run(range.start, max);
                let run = run.map(|run| run.intersect(range)).filter(|run| !run.is_empty());
                let delay = self.around(20_000);
                self.target_answer(delay, TargetEvent::NextMissing { image, run });
            }
            TargetEffect::Checkpoint { id } => {
                let snapshots = self.target.disks.iter().map(Disk::snapshot).collect();
                let present = self.target.all_present();
                let fails = self.faulty(self.setup.faults.sync_error);
                let delay = self.disk_time();
                self.at(delay, Ev::CheckpointData { life, id, snapshots, present, fails });
            }
            TargetEffect::Finish => self.finish(),
            TargetEffect::Discard => {}
            TargetEffect::Notice(notice) => self.target_notice(&notice),
        }
    }

    fn expose(&mut self, images: &[ImageHandover]) {
        self.check_expose();
        let target = &mut self.target;
        for (ix, image) in images.iter().enumerate() {
            target.agreed[ix] = image.missing.clone();
            target.missing[ix] = image.missing.clone();
            target.missing[ix].subtract(&target.present[ix]);
            target.missing[ix].subtract(&target.noted[ix]);
            target.unrecorded[ix] = target.noted[ix].clone();
            target.unrecorded[ix].subtract(&target.present[ix]);
        }
        target.exposed = true;
        self.check_handover_map();
    }

    fn finish(&mut self) {
        self.target.missing.iter_mut().for_each(|missing| *missing = BlockSet::new());
        self.target.exposed = true;
        self.target.finished = true;
        self.check_complete();
    }

    pub(crate) fn target_synced(
        &mut self,
        life: u64,
        id: u64,
        snapshots: &[Snapshot],
        fails: bool,
    ) {
        if life != self.target.life {
            return;
        }
        if !fails {
            self.settle_target(snapshots);
        }
        let result = if fails { Err("input/output error".to_owned().into()) } else { Ok(()) };
        let delay = self.around(50_000);
        self.target_answer(delay, TargetEvent::ImagesSynced { id, result });
    }

    fn settle_target(&mut self, snapshots: &[Snapshot]) {
        for (disk, snapshot) in self.target.disks.iter_mut().zip(snapshots) {
            disk.settle(snapshot);
        }
    }

    pub(crate) fn checkpoint_data(
        &mut self,
        life: u64,
        id: u64,
        snapshots: &[Snapshot],
        present: Vec<BlockSet>,
        fails: bool,
    ) {
        if life != self.target.life {
            return;
        }
        if fails {
            let result = Err("input/output error".to_owned());
            return self.tell_target(TargetEvent::Checkpointed { id, result });
        }
        self.settle_target(snapshots);
        let delay = self.disk_time();
        self.at(delay, Ev::CheckpointRecord { life, id, present });
    }

    pub(crate) fn checkpoint_record(&mut self, life: u64, id: u64, present: &[BlockSet]) {
        if life != self.target.life {
            return;
        }
        for (ix, present) in present.iter().enumerate() {
            self.target.make_present(ix, present);
        }
        self.tell_target(TargetEvent::Checkpointed { id, result: Ok(()) });
    }

    /// A frame came through whole: it will be written.
    pub(crate) fn start_write(&mut self, write: PendingWrite, looking: u64) {
        let id = self.target.next_write;
        self.target.next_write += 1;
        self.target.writes.insert(id, write);
        let delay = looking + self.disk_time();
        self.at(delay, Ev::WriteDone { life: self.target.life, id });
    }

    pub(crate) fn write_done(&mut self, life: u64, id: u64) {
        if life != self.target.life {
            return;
        }
        let Some(write) = self.target.writes.remove(&id) else { return };
        let fails = self.faulty(self.setup.faults.write_error);
        self.apply(&write, if fails { 0.5 } else { 1.0 });
        self.check_filled(write.image, write.range);
        let arrived = arrival(&write);
        let PendingWrite { session, tag, image, range, versions, left } = write;
        if let (Some(versions), Left::Nothing) = (versions, left) {
            self.remember(image, range, &versions);
        }
        self.check_landed(session, image, range);
        let arrival = if fails {
            self.check.write_errors += 1;
            Arrival::Failed(DiskFault {
                kind: ErrorKind::NoSpace,
                why: "no space left on device".into(),
            })
        } else {
            arrived
        };
        self.tell_target(TargetEvent::RunArrived { tag, image, range, arrival });
    }

    /// Writes each block of the frame with probability `share`.
    fn apply(&mut self, write: &PendingWrite, share: f64) {
        let image = write.image.ix();
        for (nth, block) in (write.range.start..write.range.end()).enumerate() {
            let wanted = !self.target.exposed || self.target.missing[image].contains(block);
            if !wanted || write.left.has(nth as u64) || !(share >= 1.0 || self.rng.chance(share)) {
                continue;
            }
            let version = write.versions.as_ref().map_or(0, |versions| versions[nth]);
            self.target.disks[image].write(block, version);
            if self.target.exposed && share >= 1.0 {
                self.target.missing[image].remove(BlockRange::new(block, 1));
            }
        }
    }

    /// The agent dies while frames are being written: any part of them may have reached the disk.
    pub(crate) fn lose_pending_writes(&mut self) {
        for write in std::mem::take(&mut self.target.writes).into_values() {
            self.apply(&write, 0.5);
        }
    }

    /// Before a new session begins, frames of the old one are written or forgotten.
    pub(crate) fn settle_old_writes(&mut self) {
        for write in std::mem::take(&mut self.target.writes).into_values() {
            if self.rng.chance(0.5) {
                self.apply(&write, 1.0);
                let arrival = arrival(&write);
                let PendingWrite { tag, image, range, .. } = write;
                self.tell_target(TargetEvent::RunArrived { tag, image, range, arrival });
            }
        }
    }

    pub(crate) fn restart_target(&mut self) {
        let target = &mut self.target;
        target.up = true;
        target.machine = Target::recover(plan(&self.setup), &target.records);
        self.check.target_reborn(target.machine.epoch());
        self.tell_target(TargetEvent::Start);
    }
}
