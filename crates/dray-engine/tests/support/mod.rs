//! One image, one machine, and short names for what happens to it.
#![allow(dead_code, reason = "each test file uses its own part")]

use dray_engine::receiver::Arrival;
use dray_engine::{
    MILLISECOND, SECOND, Source, SourceEffect, SourceEvent, SourcePlan, SourceRecord, Target,
    TargetEffect, TargetEvent, TargetPlan, TargetRecord, Time, Tuning,
};
use dray_types::{
    Attempt, BLOCK_SIZE, BlockRange, BlockSet, Epoch, ImageId, ImageIndex, MigrationId, Strategy,
};
use dray_wire::{
    Envelope, HandedOver, ImageHandover, ImageOffer, MapHash, Open, TargetImage, TargetState,
    ToSource, ToTarget,
};

pub const BLOCKS: u64 = 1000;
pub const LEN: u64 = BLOCKS * BLOCK_SIZE;
pub const IMAGE: ImageIndex = ImageIndex(0);
/// The epoch in which the source owns the image.
pub const EPOCH: Epoch = Epoch(3);

pub fn set(ranges: &[(u64, u64)]) -> BlockSet {
    ranges.iter().map(|&(start, len)| BlockRange::new(start, len)).collect()
}

pub fn offers() -> Vec<ImageOffer> {
    vec![ImageOffer { id: ImageId(7), name: "root".into(), len: LEN, read_only: false }]
}

pub fn source_plan(strategy: Strategy) -> SourcePlan {
    SourcePlan {
        migration: MigrationId(1),
        images: offers(),
        strategy: strategy.into(),
        epoch: EPOCH,
        max_downtime: 300 * MILLISECOND,
        handover_timeout: 10 * SECOND,
        suspect: vec![BlockSet::new()],
        tuning: Tuning::default(),
    }
}

pub struct S {
    pub machine: Source,
    pub now: u64,
}

impl S {
    pub fn new(strategy: Strategy) -> Self {
        Self { machine: Source::new(source_plan(strategy)), now: SECOND }
    }

    pub fn recover(strategy: Strategy, records: &[SourceRecord]) -> Self {
        Self { machine: Source::recover(source_plan(strategy), records), now: SECOND }
    }

    pub fn step(&mut self, event: SourceEvent) -> Vec<SourceEffect> {
        self.now += MILLISECOND;
        let mut out = Vec::new();
        self.machine.step(Time(self.now), event, &mut out);
        assert_eq!(self.machine.partition(), Ok(()));
        out
    }

    pub fn hear(&mut self, epoch: Epoch, attempt: u64, body: ToSource) -> Vec<SourceEffect> {
        self.step(SourceEvent::Message(Envelope { epoch, attempt: Attempt(attempt), body }))
    }

    /// The target answers that it receives and has `have`.
    pub fn opened(&mut self, have: &BlockSet) -> Vec<SourceEffect> {
        let images = vec![TargetImage { have: have.clone(), zeroed: true }];
        self.hear(EPOCH, 0, ToSource::Opened { state: TargetState::Receiving, images })
    }

    /// Started, connected, scanned.
    pub fn begin(strategy: Strategy, data: &BlockSet) -> (Self, Vec<SourceEffect>) {
        let mut source = Self::new(strategy);
        source.step(SourceEvent::Start);
        source.step(SourceEvent::ImagesSynced(Ok(())));
        source.step(SourceEvent::LinkUp);
        source.opened(&BlockSet::new());
        let effects = source.step(SourceEvent::Scanned { image: IMAGE, data: data.clone() });
        (source, effects)
    }

    pub fn received(&mut self, effects: &[SourceEffect]) -> Vec<SourceEffect> {
        self.hear(EPOCH, 0, ToSource::Received { tags: tags(effects) })
    }

    pub fn dirty(&mut self, blocks: &BlockSet) -> Vec<SourceEffect> {
        self.step(SourceEvent::DirtyTaken { image: IMAGE, blocks: blocks.clone() })
    }

    /// A hybrid that has copied everything and waits for the guest.
    pub fn ready() -> Self {
        let (mut source, effects) = Self::begin(Strategy::Hybrid, &set(&[(0, 20)]));
        let told = source.received(&effects);
        assert!(source.machine.is_ready(), "{told:?}");
        source
    }

    /// From ready to the question for the promise; returns the hash of the map.
    pub fn ask(&mut self, dirty: &BlockSet) -> MapHash {
        self.step(SourceEvent::BeginHandover);
        self.step(SourceEvent::Quiesced { lens: vec![LEN] });
        self.step(SourceEvent::ImagesSynced(Ok(())));
        let effects = self.dirty(dirty);
        prepare(&effects).expect("the source asks").1
    }

    /// Past the point of no return.
    pub fn handed_over(dirty: &BlockSet) -> (Self, Vec<SourceEffect>) {
        let mut source = Self::ready();
        let map_hash = source.ask(dirty);
        let effects = source.hear(EPOCH, 1, ToSource::Prepared { map_hash });
        (source, effects)
    }
}

/// The map and its hash, if the source asks for a promise.
pub fn prepare(effects: &[SourceEffect]) -> Option<(BlockSet, MapHash)> {
    sent(effects).into_iter().find_map(|(_, body)| match body {
        ToTarget::Prepare { images, map_hash } => Some((images[0].missing.clone(), map_hash)),
        _ => None,
    })
}

pub fn sent(effects: &[SourceEffect]) -> Vec<(Attempt, ToTarget)> {
    let message = |effect: &SourceEffect| match effect {
        SourceEffect::Send(envelope) => Some((envelope.attempt, envelope.body.clone())),
        _ => None,
    };
    effects.iter().filter_map(message).collect()
}

pub fn tags(effects: &[SourceEffect]) -> Vec<u64> {
    let tag = |effect: &SourceEffect| match effect {
        SourceEffect::SendRun { tag, .. } | SourceEffect::SendZero { tag, .. } => Some(*tag),
        _ => None,
    };
    effects.iter().filter_map(tag).collect()
}

/// Blocks of the runs sent.
pub fn runs(effects: &[SourceEffect]) -> BlockSet {
    let run = |effect: &SourceEffect| match effect {
        SourceEffect::SendRun { range, .. } => Some(*range),
        _ => None,
    };
    effects.iter().filter_map(run).collect()
}

/// Where the first effect that fits stands; the test fails without one.
pub fn place<E: std::fmt::Debug>(effects: &[E], fits: impl Fn(&E) -> bool) -> usize {
    effects.iter().position(fits).unwrap_or_else(|| panic!("not among {effects:?}"))
}

pub struct T {
    pub machine: Target,
    pub now: u64,
}

pub fn target_plan() -> TargetPlan {
    TargetPlan {
        migration: MigrationId(1),
        images: offers(),
        zeroed: vec![true],
        based: vec![false],
    }
}

pub fn images(missing: &BlockSet) -> Vec<ImageHandover> {
    vec![ImageHandover { len: LEN, missing: missing.clone() }]
}

impl T {
    pub fn new() -> Self {
        Self { machine: Target::new(target_plan()), now: SECOND }
    }

    pub fn recover(records: &[TargetRecord]) -> Self {
        Self { machine: Target::recover(target_plan(), records), now: SECOND }
    }

    pub fn step(&mut self, event: TargetEvent) -> Vec<TargetEffect> {
        self.now += MILLISECOND;
        let mut out = Vec::new();
        self.machine.step(Time(self.now), event, &mut out);
        out
    }

    pub fn hear(&mut self, epoch: Epoch, attempt: u64, body: ToTarget) -> Vec<TargetEffect> {
        self.step(TargetEvent::Message(Envelope { epoch, attempt: Attempt(attempt), body }))
    }

    pub fn open(&mut self, handed_over: Option<HandedOver>) -> Vec<TargetEffect> {
        self.step(TargetEvent::LinkUp);
        let epoch = handed_over.map_or(EPOCH, |over| over.epoch);
        let open = Open { migration: MigrationId(1), images: offers(), handed_over };
        self.hear(epoch, 0, ToTarget::Open(open))
    }

    pub fn arrives(
        &mut self,
        tag: u64,
        start: u64,
        len: u64,
        arrival: Arrival,
    ) -> Vec<TargetEffect> {
        let range = BlockRange::new(start, len);
        self.step(TargetEvent::RunArrived { tag, image: IMAGE, range, arrival })
    }

    pub fn prepare(&mut self, attempt: u64, missing: &BlockSet) -> Vec<TargetEffect> {
        let images = images(missing);
        let map_hash = MapHash::of(&images);
        self.hear(EPOCH, attempt, ToTarget::Prepare { images, map_hash })
    }

    pub fn synced(&mut self, id: u64) -> Vec<TargetEffect> {
        self.step(TargetEvent::ImagesSynced { id, result: Ok(()) })
    }

    /// An owner that misses `missing`, whose guest is being reached.
    pub fn owner(missing: &BlockSet) -> (Self, Vec<TargetEffect>) {
        let mut target = Self::new();
        target.open(None);
        let effects = target.prepare(1, missing);
        target.synced(sync_id(&effects));
        let effects = target.hear(Epoch(4), 1, ToTarget::Commit(over(missing)));
        (target, effects)
    }

    /// An owner whose guest runs.
    pub fn running(missing: &BlockSet) -> (Self, Vec<TargetEffect>) {
        let (mut target, _) = Self::owner(missing);
        target.step(TargetEvent::GuestReachable(Ok(())));
        let effects = target.step(TargetEvent::GuestStarted(Ok(())));
        (target, effects)
    }

    pub fn next_missing(&mut self, run: Option<(u64, u64)>) -> Vec<TargetEffect> {
        let run = run.map(|(start, len)| BlockRange::new(start, len));
        self.step(TargetEvent::NextMissing { image: IMAGE, run })
    }

    pub fn tick_after(&mut self, time: u64) -> Vec<TargetEffect> {
        self.now += time;
        self.step(TargetEvent::Tick)
    }
}

pub fn over(missing: &BlockSet) -> HandedOver {
    let map_hash = MapHash::of(&images(missing));
    HandedOver { epoch: Epoch(4), attempt: Attempt(1), map_hash }
}

pub fn sync_id(effects: &[TargetEffect]) -> u64 {
    let id = |effect: &TargetEffect| match effect {
        TargetEffect::SyncImages { id } => Some(*id),
        _ => None,
    };
    effects.iter().find_map(id).expect("a sync begins")
}

pub fn said(effects: &[TargetEffect]) -> Vec<Envelope<ToSource>> {
    let message = |effect: &TargetEffect| match effect {
        TargetEffect::Send(envelope) => Some(envelope.clone()),
        _ => None,
    };
    effects.iter().filter_map(message).collect()
}

/// Blocks asked for, and the tags.
pub fn fetches(effects: &[TargetEffect]) -> Vec<(u64, BlockRange, bool)> {
    let fetch = |envelope: Envelope<ToSource>| match envelope.body {
        ToSource::Fetch { tag, range, urgent, .. } => Some((tag, range, urgent)),
        _ => None,
    };
    said(effects).into_iter().filter_map(fetch).collect()
}

/// A source whose operator wants hashes given, or not, at a session that can answer them, or not; its
/// image was looked through for `data`.
pub fn describing(
    strategy: Strategy,
    wanted: bool,
    known: bool,
    data: &BlockSet,
) -> (S, Vec<SourceEffect>) {
    let mut plan = source_plan(strategy);
    plan.tuning.reuse = wanted;
    let mut source = S::new(strategy);
    source.machine = Source::new(plan);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::ImagesSynced(Ok(())));
    source.step(SourceEvent::Reuse { known, together: false });
    source.step(SourceEvent::LinkUp);
    source.opened(&BlockSet::new());
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data: data.clone() });
    (source, effects)
}
