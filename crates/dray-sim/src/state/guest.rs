//! The guest: its requests, and the bystander that knows what each block must hold.

use crate::disk::Snapshot;
use crate::faults::{Pattern, Setup, Side};
use crate::rng::Rng;
use dray_types::{BlockRange, BlockSet};
use std::collections::{BTreeMap, BTreeSet};

/// Longest request of the guest, in blocks.
const MAX_OP: u64 = 24;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Power {
    /// There is none: only storage moves.
    Absent,
    Running,
    Paused,
    /// Its host lost power.
    Dead,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Write,
    Read,
    Flush,
}

/// A request that the guest waits for.
pub(crate) struct Op {
    pub(crate) kind: Kind,
    pub(crate) image: usize,
    pub(crate) range: BlockRange,
    pub(crate) version: u64,
    /// Covers its blocks only in part: what is missing must be fetched first.
    pub(crate) partial: bool,
    /// Being carried out; otherwise it waits for the agent or for blocks.
    pub(crate) issued: bool,
    /// Changes when the agent that carries it out dies.
    pub(crate) stamp: u64,
    /// The life of the agent that was told of the missing blocks.
    pub(crate) demanded: u64,
    /// When the guest began to wait for missing blocks.
    pub(crate) waits_since: Option<u64>,
    /// What a flush covers: block, order of the write, version.
    pub(crate) covers: Vec<(u64, u64, u64)>,
    pub(crate) snapshot: Option<Snapshot>,
    pub(crate) present: BlockSet,
}

/// What the guest did to one block.
#[derive(Clone, Default)]
struct Track {
    acked: (u64, u64),
    floor: u64,
    since: Vec<(u64, u64)>,
}

/// Guest and bystander.
pub(crate) struct Guest {
    pub(crate) power: Power,
    pub(crate) place: Side,
    /// Its memory exists at the source, at the target.
    pub(crate) memory: [bool; 2],
    pub(crate) ops: BTreeMap<u64, Op>,
    next_op: u64,
    order: u64,
    next_version: u64,
    tracks: Vec<Vec<Track>>,
    unflushed: Vec<BTreeSet<u64>>,
    cursor: u64,
}

impl Guest {
    pub(crate) fn new(setup: &Setup, content: impl Fn(usize, u64) -> u64) -> Self {
        let track = |image, block| {
            let version = content(image, block);
            Track { acked: (0, version), floor: version, since: Vec::new() }
        };
        let tracks = setup.images.iter().enumerate();
        let tracks: Vec<Vec<_>> =
            tracks.map(|(ix, image)| (0..image.blocks).map(|b| track(ix, b)).collect()).collect();
        Self {
            power: if setup.guest { Power::Running } else { Power::Absent },
            place: Side::Source,
            memory: [setup.guest, false],
            ops: BTreeMap::new(),
            next_op: 1,
            order: 0,
            next_version: 1 << 32,
            unflushed: vec![BTreeSet::new(); tracks.len()],
            tracks,
            cursor: 0,
        }
    }

    /// The next request, unless it would overlap one that is under way.
    pub(crate) fn next_op(&mut self, setup: &Setup, rng: &mut Rng) -> Option<u64> {
        let image = rng.below(setup.images.len() as u64) as usize;
        let shape = &setup.images[image];
        let kind = if rng.chance(0.03) {
            Kind::Flush
        } else if rng.chance(setup.write_share) && !shape.read_only {
            Kind::Write
        } else {
            Kind::Read
        };
        let range = self.place_op(shape.blocks, setup.pattern, rng);
        let overlaps = |op: &Op| {
            op.image == image
                && op.kind != Kind::Flush
                && kind != Kind::Flush
                && !op.range.intersect(range).is_empty()
        };
        if self.ops.values().any(overlaps) {
            return None;
        }
        let zero = rng.chance(0.15);
        self.next_version += 1;
        let version = if zero { crate::disk::ZERO } else { self.next_version };
        let op = Op {
            kind,
            image,
            range,
            version,
            partial: !zero && rng.chance(0.1),
            issued: false,
            stamp: 0,
            demanded: 0,
            waits_since: None,
            covers: Vec::new(),
            snapshot: None,
            present: BlockSet::new(),
        };
        let id = self.next_op;
        self.next_op += 1;
        self.ops.insert(id, op);
        Some(id)
    }

    fn place_op(&mut self, blocks: u64, pattern: Pattern, rng: &mut Rng) -> BlockRange {
        let len = rng.between(1, MAX_OP.min(blocks));
        let start = match pattern {
            Pattern::Random => rng.below(blocks),
            Pattern::Sequential => {
                self.cursor += len;
                self.cursor % blocks
            }
            Pattern::HotSpot if rng.chance(0.9) => rng.below(blocks.div_ceil(10)),
            Pattern::HotSpot => rng.below(blocks),
        };
        BlockRange::new(start, len.min(blocks - start))
    }

    /// A write may reach the disk from now on.
    pub(crate) fn write_issued(&mut self, image: usize, range: BlockRange, version: u64) {
        self.order += 1;
        for block in range.start..range.end() {
            self.tracks[image][block as usize].since.push((self.order, version));
            self.unflushed[image].insert(block);
        }
    }

    /// The guest was told that its write is done.
    pub(crate) fn write_acked(&mut self, image: usize, range: BlockRange, version: u64) {
        for block in range.start..range.end() {
            let track = &mut self.tracks[image][block as usize];
            let order = track.since.last().map_or(0, |&(order, _)| order);
            track.acked = (order, version);
        }
    }

    /// What a flush that begins now must make safe.
    pub(crate) fn flush_covers(&self, image: usize) -> Vec<(u64, u64, u64)> {
        let covered = |&block: &u64| {
            let (order, version) = self.tracks[image][block as usize].acked;
            (block, order, version)
        };
        self.unflushed[image].iter().map(covered).collect()
    }

    /// The guest was told that its flush is done (I2).
    pub(crate) fn flush_acked(&mut self, image: usize, covers: &[(u64, u64, u64)]) {
        for &(block, order, version) in covers {
            let track = &mut self.tracks[image][block as usize];
            let before = track.since.len();
            track.since.retain(|&(at, _)| at > order);
            if track.since.len() < before {
                track.floor = version;
            }
            if track.since.is_empty() {
                self.unflushed[image].remove(&block);
            }
        }
    }

    /// What the guest last was told that the block holds.
    pub(crate) fn expected(&self, image: usize, block: u64) -> u64 {
        self.tracks[image][block as usize].acked.1
    }

    /// After a power cut the guest finds `version`: false when a flushed write is gone (I2).
    pub(crate) fn found_after_power_cut(&mut self, image: usize, block: u64, version: u64) -> bool {
        let track = &mut self.tracks[image][block as usize];
        let legal = version == track.floor || track.since.iter().any(|&(_, v)| v == version);
        *track = Track { acked: (self.order, version), floor: version, since: Vec::new() };
        self.unflushed[image].remove(&block);
        legal
    }

    /// Writes that are being carried out.
    pub(crate) fn writes_in_flight(&self) -> impl Iterator<Item = &Op> {
        self.ops.values().filter(|op| op.kind == Kind::Write && op.issued)
    }
}
