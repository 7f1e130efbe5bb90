//! The host that has the images at the start.

use crate::disk::Disk;
use crate::faults::{Crash, Setup};
use crate::rng::Rng;
use crate::state::replica::ImageLineage;
use dray_engine::throttle::Throttle;
use dray_engine::{Source, SourceEffect, SourceEvent, SourcePlan, SourceRecord, Time};
use dray_types::{BlockRange, BlockSet, Epoch, ImageId, MigrationId};
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

pub(crate) fn plan(setup: &Setup, suspect: Vec<BlockSet>) -> SourcePlan {
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
    pub(crate) tracked_all_along: bool,
    pub(crate) dirty: Vec<BlockSet>,
    /// Per image, its line when the target has a replica.
    pub(crate) lines: Vec<Option<ImageLineage>>,
    pub(crate) guards: u32,
    pub(crate) quiescing: u32,
    pub(crate) throttle: Throttle,
    pub(crate) parked: bool,
    /// Back after a crash: no write may pass before tracking has begun again.
    pub(crate) untracked: bool,
    /// Answers that the machine still waits for.
    pub(crate) pending: u32,
    /// The last record that is durable may be one whose append has failed: the shell does not know.
    pub(crate) unsure: bool,
    /// What becomes of the next record, if it is the next effect.
    pub(crate) spoiled: Option<Crash>,
    // Durable:
    pub(crate) records: Vec<SourceRecord>,
    pub(crate) regions: Vec<BTreeSet<u64>>,
    pub(crate) retired: bool,
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

    pub(crate) fn forget_sessions(&mut self) {
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

    pub(crate) fn open_regions(&self, setup: &Setup) -> Vec<BlockSet> {
        let region = |blocks, &region: &u64| {
            BlockRange::new(region * REGION, REGION).intersect(BlockRange::new(0, blocks))
        };
        let image = |(regions, image): (&BTreeSet<u64>, &crate::faults::ImageSetup)| {
            regions.iter().map(|r| region(image.blocks, r)).collect()
        };
        self.regions.iter().zip(&setup.images).map(image).collect()
    }
}
