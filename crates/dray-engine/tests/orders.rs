//! In which order blocks move: Copy and its rounds at the source, Backfill at the target, and what
//! a Backfill that is left to the operator does and does not do.

mod support;

use dray_engine::receiver::{Arrival, TargetNotice};
use dray_engine::{
    BackfillControl, SECOND, SourceEffect, SourceEvent, TargetEffect, TargetEvent, TargetRecord,
};
use dray_types::{Attempt, BlockRange, BlockSet, Epoch, ImageIndex, Schedule, Strategy};
use dray_wire::control::MAX_ORDER;
use dray_wire::{MapHash, ToSource, ToTarget};
use support::*;

fn schedule(ranges: &[(u64, u64)]) -> Schedule {
    ranges.iter().map(|&(start, len)| BlockRange::new(start, len)).collect()
}

/// First blocks of the runs sent, in order.
fn starts(effects: &[SourceEffect]) -> Vec<u64> {
    let start = |effect: &SourceEffect| match effect {
        SourceEffect::SendRun { range, .. } => Some(range.start),
        _ => None,
    };
    effects.iter().filter_map(start).collect()
}

fn orders(effects: &[SourceEffect]) -> Vec<Vec<BlockRange>> {
    let order = |(_, body)| match body {
        ToTarget::Order { ranges, .. } => Some(ranges),
        _ => None,
    };
    sent(effects).into_iter().filter_map(order).collect()
}

#[test]
fn copy_and_every_round_follow_the_schedule() {
    let mut source = S::new(Strategy::PreCopy);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::ImagesSynced(Ok(())));
    let copy = schedule(&[(600, 100), (200, 100)]);
    source.step(SourceEvent::Schedule { image: IMAGE, copy, backfill: None });
    source.step(SourceEvent::LinkUp);
    source.opened(&BlockSet::new());
    let data = set(&[(0, 10), (200, 100), (600, 50)]);
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data });
    assert_eq!(starts(&effects), [600, 200, 0]);
    source.received(&effects);
    let effects = source.dirty(&set(&[(1, 1), (205, 1), (620, 1)]));
    assert_eq!(starts(&effects), [620, 205, 1], "a round begins at the head of the order");
    source.received(&effects);
    // Another one may come at any time.
    let copy = schedule(&[(0, 10)]);
    source.step(SourceEvent::Schedule { image: IMAGE, copy, backfill: None });
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    let effects = source.dirty(&set(&[(1, 1), (205, 1), (620, 1)]));
    assert_eq!(starts(&effects), [1, 205, 620]);
}

#[test]
fn the_order_of_backfill_is_told_when_the_target_serves() {
    let mut source = S::ready();
    let order = |order| SourceEvent::Schedule {
        image: IMAGE,
        copy: Schedule::default(),
        backfill: Some(order),
    };
    let effects = source.step(order(schedule(&[(700, 9), (300, 100), (10, 5), (990, 500)])));
    assert!(effects.is_empty());
    let map_hash = source.ask(&set(&[(12, 1), (350, 2), (995, 5)]));
    let effects = source.hear(EPOCH, 1, ToSource::Prepared { map_hash });
    assert!(orders(&effects).is_empty(), "the guest stands still and would wait for it");
    assert!(
        orders(&source.step(order(schedule(&[(700, 9), (300, 100), (10, 5), (990, 500)]))))
            .is_empty()
    );
    let effects = source.hear(Epoch(4), 1, ToSource::Serving);
    let wanted = [(300, 100), (10, 5), (990, 10)].map(|(s, l)| BlockRange::new(s, l));
    assert_eq!(orders(&effects), [wanted], "only where something is missing, and in the image");
    let effects = source.hear(Epoch(4), 1, ToSource::Serving);
    assert!(orders(&effects).is_empty(), "told once");
    let effects = source.step(order(schedule(&[(350, 1)])));
    assert_eq!(orders(&effects), [[BlockRange::new(350, 1)]], "a later one follows at once");
    source.step(SourceEvent::LinkDown);
    assert!(orders(&source.step(order(Schedule::SEQUENTIAL))).is_empty());
    source.step(SourceEvent::LinkUp);
    let state = dray_wire::TargetState::Owner;
    let effects = source.hear(Epoch(4), 1, ToSource::Opened { state, images: Vec::new() });
    assert_eq!(orders(&effects), [[]], "back to address order is said too");
}

#[test]
fn what_a_jump_takes_is_told_before_the_orders() {
    let mut source = S::ready();
    assert!(source.step(SourceEvent::Jumps { nanos: 70 }).is_empty());
    let backfill = schedule(&[(10, 5)]);
    let backfill = Some(backfill);
    source.step(SourceEvent::Schedule { image: IMAGE, copy: Schedule::default(), backfill });
    let map_hash = source.ask(&set(&[(12, 1)]));
    source.hear(EPOCH, 1, ToSource::Prepared { map_hash });
    let effects = source.hear(Epoch(4), 1, ToSource::Serving);
    let bodies: Vec<_> = sent(&effects).into_iter().map(|(_, body)| body).collect();
    let [ToTarget::Jumps { nanos: 70 }, ToTarget::Order { .. }] = &bodies[..] else {
        panic!("{bodies:?}")
    };
}

#[test]
fn an_order_is_cut_off_where_the_protocol_says() {
    let mut source = S::ready();
    // Ranges of two blocks that overlap, so that the schedule does not join them.
    let ranges = (0..MAX_ORDER as u64 + 9).map(|n| BlockRange::new(12 + n % 2, 1));
    let backfill = ranges.collect();
    let backfill = Some(backfill);
    source.step(SourceEvent::Schedule { image: IMAGE, copy: Schedule::default(), backfill });
    let map_hash = source.ask(&set(&[(12, 2)]));
    source.hear(EPOCH, 1, ToSource::Prepared { map_hash });
    let effects = source.hear(Epoch(4), 1, ToSource::Serving);
    assert!(orders(&effects)[0].len() <= MAX_ORDER);
    assert!(!orders(&effects)[0].is_empty());
}

/// Rounds of few scattered blocks: jumps would make them longer than what they carry.
#[test]
fn scattered_rounds_go_by_address_and_what_is_written_most_stays_last() {
    let mut source = S::new(Strategy::PreCopy);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::ImagesSynced(Ok(())));
    let copy = schedule(&[(0, 100), (600, 100), (200, 100), (700, 100), (400, 100)]);
    source.step(SourceEvent::Schedule { image: IMAGE, copy, backfill: None });
    source.step(SourceEvent::LinkUp);
    source.opened(&BlockSet::new());
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data: set(&[(0, 1000)]) });
    // The link carries 100 blocks in 100 ms: ten blocks in the time of a jump.
    for effect in &effects {
        source.now += SECOND / 10;
        source.received(std::slice::from_ref(effect));
    }
    let round = set(&[(50, 2), (210, 2), (410, 2), (610, 2), (720, 2)]);
    let effects = source.dirty(&round);
    assert_eq!(starts(&effects), [50, 210, 410, 610, 720]);
}

/// A target with its live map; every fetch arrives before the next answer.
struct Filling {
    target: T,
    live: BlockSet,
    fetched: Vec<BlockRange>,
    waiting: Vec<TargetEffect>,
}

impl Filling {
    fn new(target: T, live: BlockSet, effects: Vec<TargetEffect>) -> Self {
        Self { target, live, fetched: Vec::new(), waiting: effects }
    }

    fn running(missing: &BlockSet) -> Self {
        let (target, effects) = T::running(missing);
        Self::new(target, missing.clone(), effects)
    }

    /// Carries out one effect; false when nothing is left to do.
    fn turn(&mut self) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        let effects = match self.waiting.remove(0) {
            TargetEffect::AskMissing { range, max, .. } => {
                let run = self.live.next_run(range.start, max);
                let run = run.map(|run| run.intersect(range)).filter(|run| !run.is_empty());
                self.target.step(TargetEvent::NextMissing { image: IMAGE, run })
            }
            TargetEffect::Send(envelope) => match envelope.body {
                ToSource::Fetch { tag, range, .. } => {
                    self.fetched.push(range);
                    self.live.remove(range);
                    self.target.arrives(tag, range.start, range.len, Arrival::Written)
                }
                _ => Vec::new(),
            },
            _ => Vec::new(),
        };
        self.waiting.extend(effects);
        true
    }

    fn all(&mut self) -> Vec<u64> {
        while self.turn() {}
        std::mem::take(&mut self.fetched).iter().map(|range| range.start).collect()
    }

    fn step(&mut self, event: TargetEvent) {
        let effects = self.target.step(event);
        self.waiting.extend(effects);
    }
}

fn order(ranges: &[(u64, u64)]) -> ToTarget {
    let ranges = ranges.iter().map(|&(start, len)| BlockRange::new(start, len)).collect();
    ToTarget::Order { image: IMAGE, ranges }
}

#[test]
fn backfill_follows_the_order_and_then_the_addresses() {
    let missing = set(&[(0, 40), (500, 30), (900, 20)]);
    let (mut target, _) = T::owner(&missing);
    target.hear(Epoch(4), 1, order(&[(u64::MAX, 9), (905, 5), (490, 20), (905, 99)]));
    target.hear(Epoch(4), 1, ToTarget::Order { image: ImageIndex(9), ranges: Vec::new() });
    target.step(TargetEvent::GuestReachable(Ok(())));
    let effects = target.step(TargetEvent::GuestStarted(Ok(())));
    let mut filling = Filling::new(target, missing, effects);
    assert_eq!(filling.all(), [905, 500, 910, 0, 510, 900]);
    assert!(filling.live.is_empty());
}

#[test]
fn blocks_that_the_guest_overwrote_are_passed_over_in_one_question() {
    let mut filling = Filling::running(&set(&[(0, 1000)]));
    filling.live = set(&[(900, 10)]);
    let mut turns = 0;
    while filling.turn() {
        turns += 1;
    }
    assert_eq!(filling.fetched, [BlockRange::new(900, 10)]);
    assert!(turns < 12, "{turns} turns");
}

#[test]
fn a_demand_is_followed_where_nothing_better_is_known() {
    let missing = set(&[(0, 64), (300, 64), (800, 200)]);
    let (mut target, _) = T::owner(&missing);
    target.hear(Epoch(4), 1, order(&[(300, 64)]));
    let runs = vec![BlockRange::new(800, 4)];
    target.step(TargetEvent::GuestReachable(Ok(())));
    let mut effects = target.step(TargetEvent::Demand { image: IMAGE, runs });
    effects.extend(target.step(TargetEvent::GuestStarted(Ok(()))));
    let mut filling = Filling::new(target, missing, effects);
    assert_eq!(filling.all(), [800, 300, 0, 804, 868, 932, 996], "the order knows better");

    // Without a history each demand is followed; in address order as such none is.
    let demanded = |order: Option<ToTarget>| {
        let (mut target, _) = T::owner(&set(&[(0, 64), (800, 200)]));
        let ordered = order.is_some();
        if let Some(order) = order {
            target.hear(Epoch(4), 1, order);
        }
        assert_eq!(target.machine.widens(), ordered);
        target.step(TargetEvent::GuestReachable(Ok(())));
        let runs = vec![BlockRange::new(800, 4)];
        let mut effects = target.step(TargetEvent::Demand { image: IMAGE, runs });
        effects.extend(target.step(TargetEvent::GuestStarted(Ok(()))));
        Filling::new(target, set(&[(0, 64), (800, 200)]), effects).all()
    };
    assert_eq!(demanded(Some(order(&[]))), [800, 804, 868, 932, 996, 0]);
    assert_eq!(demanded(None), [800, 0, 804, 868, 932, 996]);
}

/// What lies around a demand comes along only while it delays nobody.
#[test]
fn many_demands_at_once_bring_nothing_along() {
    let (mut target, _) = T::running(&set(&[(0, 900)]));
    target.hear(Epoch(4), 1, order(&[]));
    let mut demand = |start| {
        let runs = vec![BlockRange::new(start, 16)];
        let effects = target.step(TargetEvent::Demand { image: IMAGE, runs });
        let (tag, ..) = fetches(&effects)[0];
        (tag, target.machine.widens())
    };
    let ((first, wide), (_, crowded)) = (demand(100), demand(300));
    assert!(wide && !crowded);
    target.arrives(first, 100, 16, Arrival::Written);
    assert!(target.machine.widens(), "one of the two is here");
}

/// Demands that follow each other are those of a guest that reads a file.
#[test]
fn a_stream_of_demands_is_followed_in_spite_of_the_order() {
    let missing = set(&[(0, 64), (300, 64), (800, 200)]);
    let (mut target, _) = T::owner(&missing);
    target.hear(Epoch(4), 1, order(&[(300, 64)]));
    target.step(TargetEvent::GuestReachable(Ok(())));
    let mut effects = Vec::new();
    for start in [800, 810] {
        let runs = vec![BlockRange::new(start, 4)];
        effects.extend(target.step(TargetEvent::Demand { image: IMAGE, runs }));
    }
    effects.extend(target.step(TargetEvent::GuestStarted(Ok(()))));
    let fetched = Filling::new(target, missing, effects).all();
    assert_eq!(fetched, [800, 810, 814, 878, 942, 300, 0, 804]);
}

/// Two files that are read in turns, and single reads between them.
#[test]
fn streams_are_followed_though_other_demands_come_between() {
    let missing = set(&[(0, 64), (300, 64), (600, 100), (800, 100), (950, 20)]);
    let (mut target, _) = T::owner(&missing);
    target.hear(Epoch(4), 1, order(&[(300, 64)]));
    target.step(TargetEvent::GuestReachable(Ok(())));
    let mut effects = Vec::new();
    for start in [800, 600, 960, 810, 610, 32] {
        let runs = vec![BlockRange::new(start, 4)];
        effects.extend(target.step(TargetEvent::Demand { image: IMAGE, runs }));
    }
    effects.extend(target.step(TargetEvent::GuestStarted(Ok(()))));
    let fetched = Filling::new(target, missing, effects).all();
    let demanded = [800, 600, 960, 810, 610, 32];
    assert_eq!(fetched[..6], demanded);
    assert_eq!(fetched[6..8], [614, 678], "behind the stream that came last");
    let place = |block| fetched.iter().position(|&at| at == block);
    assert!(place(814).is_some() && place(814) < place(300), "and the other: {fetched:?}");
}

#[test]
fn deferred_fetches_what_the_guest_asks_for_and_nothing_else() {
    let missing = set(&[(0, 200)]);
    let mut target = T::new();
    target.open(None);
    target.hear(EPOCH, 1, ToTarget::Defer);
    let id = sync_id(&target.prepare(1, &missing));
    let effects = target.synced(id);
    let paused = TargetRecord::BackfillPaused { paused: true };
    let with_the_promise = |e: &TargetEffect| {
        matches!(e, TargetEffect::Journal(records)
            if records[0] == paused && matches!(records[1], TargetRecord::Prepared { .. }))
    };
    place(&effects, with_the_promise);
    target.hear(Epoch(4), 1, ToTarget::Commit(over(&missing)));
    target.step(TargetEvent::GuestReachable(Ok(())));
    let effects = target.step(TargetEvent::GuestStarted(Ok(())));
    let mut filling = Filling::new(target, missing, effects);
    assert!(filling.all().is_empty());
    filling.step(TargetEvent::Demand { image: IMAGE, runs: vec![BlockRange::new(50, 8)] });
    assert_eq!(filling.all(), [50]);
    filling.target.now += 10 * SECOND;
    filling.step(TargetEvent::Tick);
    assert!(filling.all().is_empty());
    assert!(filling.target.machine.status().paused && !filling.target.machine.is_complete());

    filling.step(TargetEvent::BackfillControl(BackfillControl::Start));
    assert_eq!(filling.all().len(), 4, "what lies behind, then the rest");
    filling.step(TargetEvent::Checkpointed { id: 2, result: Ok(()) });
    assert!(filling.target.machine.is_complete());
    let status = filling.target.machine.status();
    assert_eq!((status.blocks_fetched, status.blocks_refetched), (200, 0));
}

#[test]
fn paused_and_started_outlive_a_restart() {
    let missing = set(&[(0, 8)]);
    let images = images(&missing);
    let map_hash = MapHash::of(&images);
    let mut records = vec![
        TargetRecord::BackfillPaused { paused: true },
        TargetRecord::Prepared { attempt: Attempt(1), map_hash, images, epoch: Epoch(1) },
        TargetRecord::Committed(over(&missing)),
        TargetRecord::GuestStarted,
    ];
    let fetches_after_restart = |records: &[TargetRecord]| {
        let mut target = T::recover(records);
        let mut effects = target.step(TargetEvent::Start);
        effects.extend(target.open(Some(over(&missing))));
        Filling::new(target, missing.clone(), effects).all()
    };
    assert!(fetches_after_restart(&records).is_empty());
    records.push(TargetRecord::BackfillPaused { paused: false });
    assert_eq!(fetches_after_restart(&records), [0]);
}

#[test]
fn a_pause_leaves_what_a_lost_link_took() {
    let (mut target, _) = T::running(&set(&[(0, 8), (20, 8)]));
    target.next_missing(Some((0, 8)));
    let effects = target.step(TargetEvent::BackfillControl(BackfillControl::Pause));
    assert!(
        effects
            .contains(&TargetEffect::Journal(vec![TargetRecord::BackfillPaused { paused: true }]))
    );
    let effects = target.next_missing(Some((20, 8)));
    assert!(fetches(&effects).is_empty(), "the question is older than the pause");
    target.step(TargetEvent::LinkDown);
    let effects = target.open(Some(over(&set(&[(0, 8), (20, 8)]))));
    assert!(fetches(&effects).is_empty());
    let runs = vec![BlockRange::new(2, 1)];
    let effects = target.step(TargetEvent::Demand { image: IMAGE, runs });
    let [(_, range, true)] = fetches(&effects)[..] else { panic!("{effects:?}") };
    assert_eq!(range, BlockRange::new(2, 1));
    assert_eq!(target.machine.status().blocks_refetched, 1);
    let effects = target.step(TargetEvent::BackfillControl(BackfillControl::Start));
    let asks = |e: &TargetEffect| matches!(e, TargetEffect::AskMissing { .. });
    assert!(effects.iter().any(asks));
}

#[test]
fn a_void_attempt_takes_its_deferral_with_it() {
    let missing = set(&[(0, 8)]);
    let mut target = T::new();
    target.open(None);
    target.hear(EPOCH, 1, ToTarget::Defer);
    let id = sync_id(&target.prepare(1, &missing));
    target.synced(id);
    target.hear(EPOCH, 1, ToTarget::Void);
    let id = sync_id(&target.prepare(2, &missing));
    let effects = target.synced(id);
    let paused = |e: &TargetEffect| {
        matches!(e, TargetEffect::Journal(records)
            if records.contains(&TargetRecord::BackfillPaused { paused: true }))
    };
    assert!(!effects.iter().any(paused));
}

#[test]
fn backfill_cannot_be_controlled_where_there_is_none() {
    let mut target = T::new();
    let effects = target.step(TargetEvent::BackfillControl(BackfillControl::Start));
    let refused =
        |e: &TargetEffect| matches!(e, TargetEffect::Notice(TargetNotice::Refused { .. }));
    assert!(effects.iter().any(refused) && effects.len() == 1);
}

#[test]
fn deferred_says_so_right_before_it_asks() {
    let (mut source, effects) = S::begin(Strategy::Deferred, &set(&[(0, 50)]));
    assert!(tags(&effects).is_empty() && source.machine.is_ready());
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    source.step(SourceEvent::ImagesSynced(Ok(())));
    let effects = source.dirty(&set(&[(90, 1)]));
    let bodies: Vec<_> = sent(&effects).into_iter().map(|(_, body)| body).collect();
    assert!(matches!(&bodies[..], [ToTarget::Defer, ToTarget::Prepare { .. }]), "{bodies:?}");
}
