//! The host to which the images go.

use crate::disk::Disk;
use crate::faults::Setup;
use crate::rng::Rng;
use crate::state::source::offers;
use dray_engine::receiver::Held;
use dray_engine::{Target, TargetEvent, TargetPlan, TargetRecord};
use dray_types::{BlockRange, BlockSet, ImageIndex, MigrationId};
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
    pub(crate) fn has(self, nth: u64) -> bool {
        match self {
            Self::Nothing => false,
            Self::Pieces { lacking, .. } => lacking >> (nth / PIECE_BLOCKS) & 1 == 1,
            Self::Blocks(mask) | Self::Elsewhere(mask) => mask_bit(&mask, nth),
        }
    }
}

pub(crate) fn plan(setup: &Setup) -> TargetPlan {
    TargetPlan {
        migration: MigrationId(1),
        images: offers(setup),
        zeroed: setup.images.iter().map(|image| image.zeroed).collect(),
        based: setup.images.iter().map(|image| image.replica).collect(),
    }
}

/// The host that gets the images.
pub(crate) struct TargetHost {
    pub(crate) life: u64,
    pub(crate) up: bool,
    pub(crate) awake: bool,
    pub(crate) machine: Target,
    pub(crate) inbox: VecDeque<TargetEvent>,
    pub(crate) effects: Held,
    /// Until then nothing can be written beside the images.
    pub(crate) full_until: u64,
    pub(crate) effects_done: u64,
    pub(crate) session: u64,
    /// As at the source.
    pub(crate) link_ups: VecDeque<u64>,
    pub(crate) known_session: u64,
    pub(crate) disks: Vec<Disk>,
    pub(crate) exposed: bool,
    /// Changes wait otherwise.
    pub(crate) takes_changes: bool,
    /// The machine knows that one does.
    pub(crate) told_of_change: bool,
    pub(crate) missing: Vec<BlockSet>,
    pub(crate) agreed: Vec<BlockSet>,
    /// Written by the guest and not in a durable record.
    pub(crate) unrecorded: Vec<BlockSet>,
    pub(crate) writes: BTreeMap<u64, PendingWrite>,
    pub(crate) next_write: u64,
    pub(crate) idle_told: bool,
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
            takes_changes: false,
            told_of_change: false,
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

    /// Guests are served.
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
        self.takes_changes = false;
        self.told_of_change = false;
        self.idle_told = true;
        self.missing.iter_mut().for_each(|set| *set = BlockSet::new());
        self.unrecorded.iter_mut().for_each(|set| *set = BlockSet::new());
    }

    /// Everything that was missing and is here.
    pub(crate) fn all_present(&self) -> Vec<BlockSet> {
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
