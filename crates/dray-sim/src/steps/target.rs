//! Carries out the effects of `Target` on simulated parts.

use crate::disk::{Disk, Snapshot};
use crate::faults::Side;
use crate::state::guest::Power;
use crate::state::target::{Left, PendingWrite, plan};
use crate::world::{Ev, World, note};
use dray_engine::receiver::{Arrival, DiskFault};
use dray_engine::{
    MILLISECOND, Phase, SECOND, Target, TargetEffect, TargetEvent, TargetRecord, Time,
};
use dray_types::{BlockRange, BlockSet, ErrorKind, ImageIndex};
use dray_wire::ImageHandover;

/// First version of what another program has written.
const EDITED: u64 = 1 << 61;

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
                // A copy that returns and has lost writes has to be prepared again.
                let returns = self.setup.images.iter().any(|image| image.replica);
                let fails = self.faulty(self.setup.faults.sync_error) && !returns;
                let delay = self.disk_time();
                self.at(delay, Ev::TargetSynced { life, id, snapshots, fails });
            }
            TargetEffect::BeginAnew { image } => self.target.disks[image.ix()].begin_anew(),
            TargetEffect::Expose { images } => self.expose(&images),
            TargetEffect::LetChange => self.guest_stays(),
            TargetEffect::Withdraw => {
                self.target.exposed = false;
                self.guest_goes_back();
            }
            TargetEffect::ReachGuest => {
                self.user_resumes();
                let absent = self.guest.power == Power::Absent;
                let alive = absent || self.guest.memory[Side::Target as usize];
                let reached = alive && !self.faulty(self.setup.faults.unreachable);
                let result = if reached { Ok(()) } else { Err("no answer".into()) };
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
        // What is not on the disk can go at any time: at once.
        target.disks.iter_mut().for_each(Disk::evict);
        for (ix, image) in images.iter().enumerate() {
            target.agreed[ix] = image.missing.clone();
            target.missing[ix] = image.missing.clone();
            target.missing[ix].subtract(&target.present[ix]);
            target.missing[ix].subtract(&target.noted[ix]);
            target.unrecorded[ix] = target.noted[ix].clone();
            target.unrecorded[ix].subtract(&target.present[ix]);
        }
        target.exposed = true;
        (target.takes_changes, target.told_of_change) = (false, false);
        self.check_handover_map();
    }

    fn finish(&mut self) {
        self.target.missing.iter_mut().for_each(|missing| *missing = BlockSet::new());
        self.target.exposed = true;
        self.target.takes_changes = true;
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
        if fails {
            let disks = self.target.disks.iter_mut().zip(snapshots);
            disks.for_each(|(disk, snapshot)| disk.lose(snapshot, &mut self.rng));
        } else {
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
            let result = Err("input/output error".into());
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

    /// Another program has changed the files of images that come while no agent ran; the agent that starts sees that
    /// they were changed, and not where. Without a promise it makes them zeros, and takes no copy that returns.
    fn edit_what_comes(&mut self) {
        let machine = Target::recover(plan(&self.setup), &self.target.records);
        let comes = !machine.owns() && !machine.is_over();
        if !comes || !self.faulty(self.setup.faults.edited) {
            return;
        }
        let promised = machine.phase() == Phase::Handover;
        let images = self.setup.images.iter().enumerate();
        for (ix, image) in images.filter(|(_, image)| promised || !image.replica) {
            let disk = &mut self.target.disks[ix];
            if promised {
                for _ in 0..20 {
                    let block = self.rng.below(image.blocks);
                    disk.write(block, EDITED + block);
                }
            } else {
                disk.begin_anew();
            }
            self.target.records.push(TargetRecord::Distrusted { image: ImageIndex(ix as u16) });
            self.check.edited += 1;
        }
    }

    pub(crate) fn restart_target(&mut self) {
        self.edit_what_comes();
        let target = &mut self.target;
        target.up = true;
        target.machine = Target::recover(plan(&self.setup), &target.records);
        self.check.target_reborn(target.machine.epoch());
        self.tell_target(TargetEvent::Start);
    }
}
