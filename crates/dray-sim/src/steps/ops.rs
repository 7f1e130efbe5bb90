//! The guest's requests on their way through the agent of its host.

use crate::disk::Disk;
use crate::faults::Side;
use crate::state::guest::{Kind, Op, Power};
use crate::world::{Ev, World, note};
use dray_engine::{SourceEvent, TargetEvent};
use dray_types::{BlockRange, BlockSet, ImageIndex};

/// What lies around a block that a guest waits for is fetched with it, in blocks.
const NEIGHBOURHOOD: u64 = 8;

impl World {
    pub(crate) fn guest_tick(&mut self) {
        // Once the faults are over the guest slows down, so that any strategy can end.
        let rests = self.now > self.setup.faults_until && !self.setup.restless;
        let calm = if rests { 10 } else { 1 };
        let gap = self.around(calm * self.setup.op_gap);
        self.at(gap + 1, Ev::GuestTick);
        self.boot_if_dead();
        if self.rng.chance(0.02) {
            self.source
                .lines
                .iter_mut()
                .flatten()
                .for_each(crate::state::replica::ImageLineage::close_regions);
        }
        if self.guest.power == Power::Running && self.guest.ops.len() < self.setup.depth {
            self.guest.next_op(&self.setup, &mut self.rng);
        }
        self.issue_waiting();
        self.vm_drained();
    }

    pub(crate) fn issue_waiting(&mut self) {
        let waiting: Vec<u64> =
            self.guest.ops.iter().filter(|(_, op)| !op.issued).map(|(&id, _)| id).collect();
        for id in waiting {
            match self.guest.place {
                Side::Source => self.issue_at_source(id),
                Side::Target => self.issue_at_target(id),
            }
        }
    }

    fn issue_at_source(&mut self, id: u64) {
        let Some(op) = self.guest.ops.get(&id) else { return };
        let may = match op.kind {
            Kind::Write => self.source.open(),
            Kind::Read | Kind::Flush => self.source.readable(),
        };
        if !may {
            return;
        }
        let mut wait = 0;
        if op.kind == Kind::Write {
            let (image, range) = (op.image, op.range);
            wait = self.source.throttled(self.now, image, range);
            self.source.mark_dirty(image, range);
        }
        let snapshot = self.source.disks[self.guest.ops[&id].image].snapshot();
        self.issued(id, Some(snapshot));
        let stamp = self.stamp;
        let delay = wait + self.disk_time();
        self.at(delay, Ev::OpDone { op: id, stamp });
    }

    fn issue_at_target(&mut self, id: u64) {
        if !self.target.open() {
            return;
        }
        let Some(op) = self.guest.ops.get(&id) else { return };
        if op.kind == Kind::Write && !self.target.takes_changes {
            return self.change_waits();
        }
        let (image, range) = (op.image, op.range);
        let needs = op.kind == Kind::Read || op.kind == Kind::Write && op.partial;
        if needs && self.target.missing[image].intersects(range) {
            return self.demand(id, image, range);
        }
        let flush = op.kind == Kind::Flush;
        let snapshot = self.target.disks[image].snapshot();
        self.issued(id, Some(snapshot));
        let present = self.target.unrecorded[image].clone();
        if let Some(op) = self.guest.ops.get_mut(&id) {
            op.present = present;
        }
        let stamp = self.stamp;
        let delay = self.disk_time();
        let ev = if flush { Ev::FlushData { op: id, stamp } } else { Ev::OpDone { op: id, stamp } };
        self.at(delay, ev);
    }

    /// A change comes before the target lets any through.
    fn change_waits(&mut self) {
        if !std::mem::replace(&mut self.target.told_of_change, true) {
            self.tell_target(TargetEvent::ChangeWaits);
        }
    }

    /// A guest waits for missing blocks: told once to every life of the agent.
    fn demand(&mut self, id: u64, image: usize, range: BlockRange) {
        let life = self.target.life;
        let Some(op) = self.guest.ops.get_mut(&id) else { return };
        op.waits_since.get_or_insert(self.now);
        if std::mem::replace(&mut op.demanded, life) == life {
            return;
        }
        let start = range.start.saturating_sub(NEIGHBOURHOOD);
        let around = BlockRange::new(start, range.end() + NEIGHBOURHOOD - start);
        let runs = self.target.missing[image].intersection(around).runs().collect();
        self.tell_target(TargetEvent::Demand { image: ImageIndex(image as u16), runs });
    }

    fn issued(&mut self, id: u64, snapshot: Option<crate::disk::Snapshot>) {
        self.stamp += 1;
        let Some(op) = self.guest.ops.get_mut(&id) else { return };
        op.issued = true;
        op.snapshot = snapshot;
        let first = op.stamp == 0;
        op.stamp = self.stamp;
        let (kind, image, range, version) = (op.kind, op.image, op.range, op.version);
        match kind {
            Kind::Write if first => self.guest.write_issued(image, range, version),
            Kind::Flush => {
                let covers = self.guest.flush_covers(image);
                if let Some(op) = self.guest.ops.get_mut(&id) {
                    op.covers = covers;
                }
            }
            _ => {}
        }
    }

    /// The first half of a flush at an owner with missing blocks: data, then the record (I2).
    pub(crate) fn flush_data(&mut self, id: u64, stamp: u64) {
        let Some(op) = self.guest.ops.get(&id).filter(|op| op.issued && op.stamp == stamp) else {
            return;
        };
        if let Some(snapshot) = &op.snapshot {
            self.target.disks[op.image].settle(snapshot);
        }
        let delay = self.disk_time();
        self.at(delay, Ev::OpDone { op: id, stamp });
    }

    pub(crate) fn op_done(&mut self, id: u64, stamp: u64) {
        if !self.guest.ops.get(&id).is_some_and(|op| op.issued && op.stamp == stamp) {
            return;
        }
        let Some(op) = self.guest.ops.remove(&id) else { return };
        match op.kind {
            Kind::Write => self.write_reaches_disk(&op),
            Kind::Read => self.read_returns(&op),
            Kind::Flush => self.flush_returns(&op),
        }
        self.vm_drained();
    }

    fn write_reaches_disk(&mut self, op: &Op) {
        let (image, range) = (op.image, op.range);
        note!(self, "guest at {:?}: wrote {image} {range:?} = {:x}", self.guest.place, op.version);
        match self.guest.place {
            Side::Source => {
                if self.source.handed_over {
                    self.fail("I5: the source carried out a write after handing over".into());
                }
                self.put(op, 1.0);
                self.source.mark_dirty(image, range);
                if self.setup.strategy.mirrors && self.rng.chance(0.9) {
                    let delay = self.around(100_000);
                    let image = ImageIndex(image as u16);
                    let told = SourceEvent::Written { image, range };
                    self.at(delay, Ev::Source(self.source.life, told));
                }
            }
            Side::Target => {
                self.put(op, 1.0);
                self.target.missing[image].remove(range);
                // Backfilled blocks too: until a record names them they may be fetched again, and
                // then the source's version must not come over what the guest wrote.
                let written = self.target.unnamed(image, range);
                self.target.unrecorded[image].union_with(&written);
                self.target.noted[image].union_with(&written);
            }
        }
        self.guest.write_acked(image, range, op.version);
    }

    fn put(&mut self, op: &Op, share: f64) {
        let disk: &mut Disk = match self.guest.place {
            Side::Source => &mut self.source.disks[op.image],
            Side::Target => &mut self.target.disks[op.image],
        };
        for block in op.range.start..op.range.end() {
            if share >= 1.0 || self.rng.chance(share) {
                disk.write(block, op.version);
            }
        }
    }

    fn read_returns(&mut self, op: &Op) {
        let (place, image) = (self.guest.place, op.image);
        for block in op.range.start..op.range.end() {
            let found = match place {
                Side::Source => self.source.disks[image].read(block),
                Side::Target => self.target.disks[image].read(block),
            };
            let wanted = self.guest.expected(image, block);
            if found != wanted {
                self.fail(format!(
                    "I2: the guest at the {place:?} read {found:x} from block {block} of image \
                     {image} and had written {wanted:x}"
                ));
            }
        }
    }

    fn flush_returns(&mut self, op: &Op) {
        match self.guest.place {
            Side::Source => {
                if let Some(snapshot) = &op.snapshot {
                    self.source.disks[op.image].settle(snapshot);
                }
            }
            Side::Target => self.target.make_present(op.image, &op.present),
        }
        self.guest.flush_acked(op.image, &op.covers);
    }

    /// The agent dies: what it was carrying out may have reached the disk or not, and comes again.
    pub(crate) fn stop_ops(&mut self, side: Side) {
        if self.guest.place != side {
            return;
        }
        let ids: Vec<u64> =
            self.guest.ops.iter().filter(|(_, op)| op.issued).map(|(&id, _)| id).collect();
        for id in ids {
            let Some(mut op) = self.guest.ops.remove(&id) else { continue };
            if op.kind == Kind::Write {
                self.put(&op, 0.5);
            }
            op.issued = false;
            op.present = BlockSet::new();
            self.guest.ops.insert(id, op);
        }
    }

    /// A guest whose host lost power boots where the images are owned.
    fn boot_if_dead(&mut self) {
        if self.guest.power != Power::Dead || self.rng.chance(0.7) {
            return;
        }
        let at_source = self.source.open() && self.source.machine.owns();
        let at_target = self.target.open() && self.target.machine.guest_started_here();
        if at_source || at_target {
            let place = if at_source { Side::Source } else { Side::Target };
            self.boot(place);
        }
    }

    fn boot(&mut self, place: Side) {
        note!(self, "guest boots at the {place:?}");
        for image in 0..self.setup.images.len() {
            for block in 0..self.setup.images[image].blocks {
                let missing = self.target.missing[image].contains(block);
                let found = if place == Side::Source || missing {
                    self.source.disks[image].read(block)
                } else {
                    self.target.disks[image].read(block)
                };
                if !self.guest.found_after_power_cut(image, block, found) {
                    self.fail(format!(
                        "I2: after a power cut the {place:?} has {found:x} in block {block} of \
                         image {image}, which no power cut can leave there"
                    ));
                }
            }
        }
        self.guest.place = place;
        self.guest.power = Power::Running;
        self.guest.memory = [place == Side::Source, place == Side::Target];
    }
}
