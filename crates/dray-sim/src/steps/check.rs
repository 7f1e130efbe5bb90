//! The invariants, looked at after every event, and what must hold when all is over.

use crate::faults::Side;
use crate::state::guest::Power;
use crate::state::tally::LIVENESS;
use crate::world::World;
use dray_engine::{SECOND, SourceRecord, TargetRecord};
use dray_types::{BlockRange, Epoch, ImageIndex};
use dray_wire::ToSource;

/// The disks are compared with what the source knows after one event in so many.
const LOOK_EVERY: u64 = 16;

impl World {
    /// I1 and I5, after every event.
    pub(crate) fn check_step(&mut self) {
        let (source, target) = (self.source.open(), self.target.open());
        if source && target {
            self.fail("I1: both hosts accept writes".into());
        }
        if target && !self.source.handed_over {
            self.fail("I1: the target serves and the source has not handed over".into());
        }
        let slowed = self.source.throttle.active();
        let linked = self.source.known_session != 0;
        let syncs = linked && self.source.machine.phase() == dray_engine::Phase::Sync;
        if !self.source.throttle_fits() || slowed && !syncs && self.source.idle() {
            self.fail("I4: the guest is slowed and nothing is sent again".into());
        }
        if self.source.handed_over && source {
            self.fail("I5: the source accepts writes after handing over".into());
        }
    }

    pub(crate) fn check_source_epoch(&mut self) {
        let epoch = self.source.machine.epoch();
        if epoch < self.check.source_epoch {
            self.fail(format!("I1: the source's epoch went back to {}", epoch.0));
        }
        self.check.source_epoch = epoch;
    }

    pub(crate) fn check_target_epoch(&mut self) {
        let epoch = self.target.machine.epoch();
        if epoch < self.check.target_epoch {
            self.fail(format!("I1: the target's epoch went back to {}", epoch.0));
        }
        self.check.target_epoch = epoch;
    }

    /// I3: each block stands in one place at the source.
    pub(crate) fn check_blocks(&mut self) {
        if let Err(why) = self.source.machine.partition() {
            self.fail(format!("I3: {why}"));
        }
        // One that is forgotten stays forgotten, and looking for it takes as long as all else.
        if self.events.is_multiple_of(LOOK_EVERY) {
            self.check_forgotten();
        }
    }

    /// I3: a block that differs at the target waits, is in flight or is dirty.
    fn check_forgotten(&mut self) {
        if !self.source.idle() || !self.source.answered() || !self.sees_target() {
            return;
        }
        for image in 0..self.setup.images.len() {
            let index = ImageIndex(image as u16);
            let differs = |&block: &u64| {
                self.source.disks[image].read(block) != self.target.disks[image].read(block)
                    && !self.source.machine.may_differ(index, block)
                    && !self.source.dirty[image].contains(block)
            };
            if let Some(block) = (0..self.setup.images[image].blocks).find(differs) {
                self.fail(format!(
                    "I3: block {block} of image {image} differs, and the source knows nothing of it"
                ));
            }
        }
    }

    /// What the source's machine has heard of the target is of the target's life as it is, and no guest
    /// writes there.
    fn sees_target(&self) -> bool {
        let session = self.link.session;
        !self.link.broken
            && session == self.source.known_session
            && session == self.target.known_session
            && !self.source.handed_over
    }

    /// Attempts and epochs in the source's journal only grow.
    pub(crate) fn check_source_record(&mut self, record: &SourceRecord) {
        let known = |records: &[SourceRecord]| {
            let epoch = |record: &SourceRecord| match record {
                SourceRecord::HandedOver(over) => Some(over.epoch),
                SourceRecord::TakenBack { epoch } => Some(*epoch),
                _ => None,
            };
            records.iter().filter_map(epoch).max().unwrap_or(Epoch(0))
        };
        let fits = match record {
            SourceRecord::HandedOver(over) => {
                let asked = SourceRecord::Attempt { attempt: over.attempt };
                let void = SourceRecord::Void { attempt: over.attempt };
                over.epoch > known(&self.source.records)
                    && self.source.records.contains(&asked)
                    && !self.source.records.contains(&void)
                    && self.promised(over)
            }
            SourceRecord::TakenBack { epoch } => {
                *epoch > known(&self.source.records)
                    && self.target.records.contains(&TargetRecord::Fenced)
            }
            SourceRecord::Attempt { .. } => !self.source.records.contains(record),
            _ => true,
        };
        if !fits {
            self.fail(format!("I1: the source records {record:?}, which contradicts the records"));
        }
    }

    /// The target's last word on disk is the promise for exactly this.
    fn promised(&self, over: &dray_wire::HandedOver) -> bool {
        let last = self.target.records.iter().rev().find(|record| {
            !matches!(
                record,
                TargetRecord::Received { .. }
                    | TargetRecord::Touched
                    | TargetRecord::Distrusted { .. }
            )
        });
        matches!(last, Some(TargetRecord::Prepared { attempt, map_hash, .. })
            if *attempt == over.attempt && *map_hash == over.map_hash)
    }

    pub(crate) fn check_target_records(&mut self, records: &[TargetRecord]) {
        for record in records {
            let fits = match record {
                TargetRecord::Committed(over) => {
                    self.source.records.contains(&SourceRecord::HandedOver(*over))
                }
                TargetRecord::Fenced => {
                    !self.target.takes_changes
                        && !self.target.records.contains(&TargetRecord::GuestStarting)
                }
                TargetRecord::GuestStarting => self.target.open(),
                _ => true,
            };
            if !fits {
                self.fail(format!("I1: the target records {record:?} too early"));
            }
        }
    }

    /// The target is about to serve.
    pub(crate) fn check_expose(&mut self) {
        let committed = self.target.records.iter().any(|r| matches!(r, TargetRecord::Committed(_)));
        if !committed {
            self.fail("I1: the target serves before it has recorded that it owns".into());
        }
    }

    /// I3: what is not missing is equal, as long as the guest has not gone on.
    pub(crate) fn check_handover_map(&mut self) {
        if self.guest.place == Side::Target || self.target.machine.guest_started_here() {
            return;
        }
        for image in 0..self.setup.images.len() {
            for block in 0..self.setup.images[image].blocks {
                let wanted = self.source.disks[image].read(block);
                let missing = self.target.missing[image].contains(block);
                let found = self.target.disks[image].read(block);
                if !missing && wanted != found {
                    return self.fail(format!(
                        "I3: at handover block {block} of image {image} is {found:x} at the \
                         target, {wanted:x} at the source, and not in the map"
                    ));
                }
            }
        }
    }

    /// A block is under way: two versions of it could overtake each other.
    pub(crate) fn check_launch(&mut self, image: ImageIndex, range: BlockRange) {
        if self.source.handed_over
            || self.source.known_session != self.link.session
            || self.link.broken
        {
            return;
        }
        for block in range.start..range.end() {
            if std::mem::replace(&mut self.check.flying[image.ix()][block as usize], true) {
                return self.fail(format!("I3: two versions of block {block} are under way"));
            }
        }
    }

    pub(crate) fn check_landed(&mut self, session: u64, image: ImageIndex, range: BlockRange) {
        if session == self.link.session {
            self.check.flying[image.ix()][range.start as usize..range.end() as usize].fill(false);
        }
    }

    /// What the target's replica has is not sent, whatever the strategy, unless the replica was changed.
    fn check_shared(&mut self, image: ImageIndex, range: BlockRange) {
        if self.target.records.contains(&TargetRecord::Distrusted { image }) {
            return;
        }
        let Some(Some(line)) = self.source.lines.get(image.ix()) else { return };
        let needless = (range.start..range.end()).find(|&block| !line.may_differ(block));
        if let Some(block) = needless {
            self.fail(format!("block {block} of {image:?} is sent, and the replica has it"));
        }
    }

    pub(crate) fn check_crossing(&mut self, image: ImageIndex, range: BlockRange) {
        self.check_shared(image, range);
        let strategy = self.setup.strategy;
        let limit = 1 + u8::from(strategy.copies);
        if strategy.syncs
            || !self.setup.clean_wire()
            || self.check.crashes > 0
            || self.vm.resumes > 0
        {
            return;
        }
        for block in range.start..range.end() {
            let count = &mut self.check.crossings[image.ix()][block as usize];
            *count = count.saturating_add(1);
            if *count > limit {
                let (name, count) = (strategy.name, *count);
                return self.fail(format!("{name} sends block {block} {count} times"));
            }
        }
    }

    /// A Backfill that is paused on the disk fetches nothing that no guest waits for.
    pub(crate) fn check_paused(&mut self, message: &ToSource) {
        if !matches!(message, ToSource::Fetch { urgent: false, .. } | ToSource::Describe { .. }) {
            return;
        }
        let paused = self.target.records.iter().rev().find_map(|record| match record {
            TargetRecord::BackfillPaused { paused } => Some(*paused),
            TargetRecord::Void { .. } => Some(false),
            _ => None,
        });
        if paused == Some(true) {
            self.fail("a paused Backfill fetches blocks in the background".into());
        }
    }

    /// Hashes are asked for only in a session that knows what that is.
    pub(crate) fn check_asks(&mut self, message: &ToSource) {
        let current = self.target.known_session == self.link.session;
        if matches!(message, ToSource::Describe { .. }) && current && !self.asks_known {
            self.fail("hashes are asked for in a session that did not agree to that".into());
        }
    }

    /// I3: what a frame has filled is what the guest knows, and what was not missing is as it was.
    pub(crate) fn check_filled(&mut self, image: ImageIndex, range: BlockRange) {
        if !self.target.exposed || self.guest.power == Power::Dead {
            return;
        }
        for block in range.start..range.end() {
            if !self.target.missing[image.ix()].contains(block) {
                self.compare_block(Side::Target, image.ix(), block);
            }
        }
    }

    /// Every block is at the target, as the bystander knows it (I3).
    pub(crate) fn check_complete(&mut self) {
        if self.guest.power != Power::Dead {
            self.compare(Side::Target);
        }
    }

    fn compare(&mut self, side: Side) {
        for image in 0..self.setup.images.len() {
            for block in 0..self.setup.images[image].blocks {
                self.compare_block(side, image, block);
            }
        }
    }

    fn compare_block(&mut self, side: Side, image: usize, block: u64) {
        let unsettled = |op: &crate::state::guest::Op| {
            op.image == image && op.range.contains(BlockRange::new(block, 1))
        };
        let found = match side {
            Side::Source => self.source.disks[image].read(block),
            Side::Target => self.target.disks[image].read(block),
        };
        let wanted = self.guest.expected(image, block);
        if found != wanted && !self.guest.ops.values().any(unsettled) {
            self.fail(format!(
                "I3: block {block} of image {image} at the {side:?} is {found:x}, the guest wrote \
                 {wanted:x}"
            ));
        }
    }

    fn alive(&self) -> bool {
        self.source.up && self.target.up && self.guest.power != Power::Dead
    }

    fn ended_at_target(&self) -> bool {
        self.source.records.contains(&SourceRecord::Done) && self.target.finished
    }

    fn ended_at_source(&self) -> bool {
        match self.source.records.last() {
            Some(SourceRecord::TakenBack { .. }) => self.source.open(),
            Some(SourceRecord::Abandoned) => self.source.open() && !self.check.resuming,
            _ => false,
        }
    }

    /// The migration has ended, both agents live and the guest runs or is absent.
    pub(crate) fn is_over(&self) -> bool {
        let runs = matches!(self.guest.power, Power::Running | Power::Absent);
        self.alive() && runs && (self.ended_at_target() || self.ended_at_source())
    }

    pub(crate) fn check_end(&mut self) -> Result<(), String> {
        let side = if self.ended_at_target() { Side::Target } else { Side::Source };
        if self.guest.power == Power::Running && self.guest.place != side {
            return Err(format!("the images are at the {side:?}, the guest is not"));
        }
        self.compare(side);
        self.failed.take().map_or(Ok(()), Err)
    }

    pub(crate) fn stuck(&self) -> String {
        format!(
            "liveness: not over {} s after the last fault (source {:?}, target {:?}, guest {:?})",
            LIVENESS / SECOND,
            self.source.machine.phase(),
            self.target.machine.phase(),
            self.guest.power
        )
    }

    /// How it ended, in a word.
    pub(crate) fn ending(&self) -> &'static str {
        match self.source.records.last() {
            Some(SourceRecord::Done) => "done",
            Some(SourceRecord::TakenBack { .. }) => "taken back",
            _ => "abandoned",
        }
    }
}
