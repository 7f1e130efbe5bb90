//! Replays: what must hold for every strategy and order, and what each strategy is.

use dray_engine::SECOND;
use dray_sim::replay::{Order, Outcome, ReplayError, Settings, Throttling, replay};
use dray_trace::generate::Load;
use dray_trace::{Op, Record, Rng};
use dray_types::Strategy;
use std::convert::Infallible;

const GIB: u64 = 1 << 30;

/// A small disk, so that tests are quick: writes and reads at a few hot places and some elsewhere.
fn trace(seed: u64, disk: u64, seconds: u64) -> impl Iterator<Item = Result<Record, Infallible>> {
    let mut rng = Rng::new(seed);
    let mut time = 0.0;
    std::iter::from_fn(move || {
        time += rng.exponential(5e6);
        let op = if rng.chance(0.5) { Op::Read } else { Op::Write };
        let area = if rng.chance(0.9) { disk / 16 } else { disk };
        let offset = disk / 8 + rng.below(area / 512) * 512;
        let length = rng.pick(&[512, 4096, 16384, 65536]);
        let offset = offset.min(disk - length);
        Some(Ok(Record { time_ns: time as u64, op, offset, length }))
    })
    .take_while(move |record: &Result<Record, Infallible>| {
        record.as_ref().is_ok_and(|record| record.time_ns < seconds * SECOND)
    })
}

fn settings(strategy: Strategy, order: Order) -> Settings {
    let mut settings = Settings::new(strategy, order, GIB / 2, 12_500_000);
    settings.start = 30 * SECOND;
    settings.memory = 64 << 20;
    settings
}

fn run(settings: &Settings) -> Outcome {
    replay(settings, trace(1, settings.disk, 150)).unwrap()
}

/// The checks of the replay itself (I3 at the handover, nothing missing at the end) make it fail.
#[test]
fn every_block_is_accounted_for() {
    for strategy in Strategy::ALL.into_iter().filter(|&each| each != Strategy::Deferred) {
        for order in Order::ALL {
            for seed in 0..4 {
                let settings = settings(strategy, order);
                let outcome = replay(&settings, trace(seed, settings.disk, 150)).unwrap();
                let case = format!("{strategy} {order} {seed}: {outcome:?}");
                assert_eq!(outcome.failed, None, "{case}");
                assert_eq!(
                    outcome.first_bytes + outcome.cancelled_bytes.min(GIB),
                    outcome.first_bytes + outcome.cancelled_bytes
                );
                let reached = outcome.first_bytes + outcome.cancelled_bytes;
                assert!(reached >= settings.disk, "{case}");
                assert!(outcome.first_bytes <= settings.disk, "{case}");
                assert_eq!(outcome.memory_bytes, settings.memory, "{case}");
                assert_eq!(outcome.left_bytes, 0, "{case}");
                let least = outcome.wire_bytes() as f64 / settings.bandwidth as f64 * 1e9;
                assert!(outcome.total as f64 >= least, "faster than the link: {case}");
            }
        }
    }
}

#[test]
fn equal_settings_give_equal_outcomes() {
    let settings = settings(Strategy::Hybrid, Order::WorkloadAware);
    assert_eq!(run(&settings), run(&settings));
}

#[test]
fn post_copy_sends_each_block_at_most_once_and_hybrid_at_most_twice() {
    for order in Order::ALL {
        let post = run(&settings(Strategy::PostCopy, order));
        assert_eq!((post.extra_bytes, post.missing_bytes), (0, GIB / 2));
        assert!(post.reads.count > 0 && post.reads.total > 0);
        let hybrid = run(&settings(Strategy::Hybrid, order));
        assert!(hybrid.extra_bytes > 0 && hybrid.extra_bytes <= hybrid.missing_bytes);
        assert_eq!(hybrid.first_bytes, GIB / 2);
        assert!(hybrid.reads.count < post.reads.count);
    }
}

#[test]
fn pre_copy_never_reads_remotely_and_its_downtime_is_bounded() {
    let pre = run(&settings(Strategy::PreCopy, Order::Sequential));
    assert_eq!((pre.reads.count, pre.writes.count, pre.missing_bytes), (0, 0, 0));
    assert!(pre.extra_bytes > 0 && pre.rounds > 0);
    // Three one-way delays for the handover, and at most a full window of dirty blocks: 8 MiB.
    assert!(pre.downtime > 150_000_000 && pre.downtime < 1_000_000_000, "{pre:?}");
}

#[test]
fn a_deferred_migration_leaves_what_nobody_asks_for() {
    let outcome = run(&settings(Strategy::Deferred, Order::Sequential));
    assert_eq!(outcome.extra_bytes, 0);
    assert!(outcome.left_bytes > GIB / 4, "{outcome:?}");
    assert_eq!(outcome.first_bytes + outcome.cancelled_bytes + outcome.left_bytes, GIB / 2);
    // The guest runs at the target after memory time and the handover alone.
    let memory = outcome.memory_bytes as f64 / 12.5e6 * 1e9;
    assert!((outcome.handover.unwrap() as f64) < memory + 1e9);
}

/// A demand over a short delay is answered before the next tick, and accesses come meanwhile: each is
/// told in its turn. A read of one block, with nothing else on the link, waits for the way there and
/// back and for the blocks that come with it.
#[test]
fn time_never_goes_back() {
    for delay in [1, 10, 50].map(|millis| millis * 1_000_000) {
        let mut settings = Settings { delay, ..settings(Strategy::Deferred, Order::Sequential) };
        let outcome = run(&settings);
        let reads = &outcome.reads;
        assert!(reads.count > 100 && reads.longest <= outcome.total, "{delay}: {outcome:?}");
        assert!(reads.mean() >= 2.0 * delay as f64, "{delay}: {outcome:?}");
        assert!(reads.longest < 2 * delay + SECOND, "{delay}: {outcome:?}");
        settings.throttle = Throttling::Aggressive;
        for strategy in [Strategy::Mirror, Strategy::PreCopy, Strategy::Hybrid] {
            settings.strategy = strategy;
            run(&settings);
        }
    }
}

#[test]
fn the_history_decides_the_order() {
    let aware = settings(Strategy::PostCopy, Order::WorkloadAware);
    let without = run(&Settings { history: 0, refresh: 0, seek: 0, ..aware.clone() });
    let sequential = run(&settings(Strategy::PostCopy, Order::Sequential));
    // Nothing is known of the guest, so its demands are followed; in address order they are not.
    assert!(without.reads.count < sequential.reads.count, "{without:?} {sequential:?}");
    let hybrid = settings(Strategy::Hybrid, Order::WorkloadAware);
    let with = run(&hybrid);
    let without = run(&Settings { history: 0, refresh: 0, ..hybrid.clone() });
    assert!(with.missing_bytes * 3 < without.missing_bytes * 2, "{with:?} {without:?}");
}

/// Writes all over a disk, as a mail server's: a round of Sync is a few blocks in each of many places,
/// and a jump to each of them takes longer than they do. In the order of the schedule the rounds
/// would grow by more than the schedule saves.
#[test]
fn jumps_do_not_eat_what_the_order_saves() {
    let scattered = |seed| {
        let mut rng = Rng::new(seed);
        let mut time = 0.0;
        std::iter::from_fn(move || {
            time += rng.exponential(8e6);
            let hot = rng.chance(0.6);
            let area = if hot { GIB / 16 } else { GIB / 2 - 8192 };
            let offset = if hot { GIB / 8 } else { 0 } + rng.below(area / 4096) * 4096;
            Some(Record { time_ns: time as u64, op: Op::Write, offset, length: 4096 })
        })
        .take_while(|record| record.time_ns < 300 * SECOND)
        .map(Ok::<_, Infallible>)
    };
    for seed in 0..3 {
        for strategy in [Strategy::PreCopy, Strategy::Hybrid] {
            let run = |order| {
                let outcome = replay(&settings(strategy, order), scattered(seed)).unwrap();
                assert_eq!(outcome.failed, None, "{strategy} {order} {seed}");
                outcome.extra_bytes as f64
            };
            let (sequential, aware) = (run(Order::Sequential), run(Order::WorkloadAware));
            assert!(aware < sequential * 0.9, "{strategy} {seed}: {sequential} {aware}");
        }
    }
}

/// Reads of 4 KiB in a sixteenth of a disk, and from the start on in another one.
fn turned(before: u64, after: u64) -> impl Iterator<Item = Result<Record, Infallible>> {
    let mut rng = Rng::new(7);
    let mut time = 0.0;
    std::iter::from_fn(move || {
        time += rng.exponential(5e6);
        let area = if time < 60e9 { before } else { after };
        let offset = area * (GIB / 32) + rng.below(GIB / 32 / 4096) * 4096;
        Some(Record { time_ns: time as u64, op: Op::Read, offset, length: 4096 })
    })
    .take_while(|record| record.time_ns < 150 * SECOND)
    .map(Ok)
}

/// The order wants first what the guest has read, and the guest reads there no more.
#[test]
fn an_order_turned_upside_down_costs_few_reads() {
    for (before, after) in [(12, 0), (14, 1), (12, 6), (15, 3)] {
        let reads = |order, memory| {
            let base = settings(Strategy::PostCopy, order);
            let settings = Settings { start: 60 * SECOND, memory, ..base };
            replay(&settings, turned(before, after)).unwrap().reads.count
        };
        let both = |memory| (reads(Order::Sequential, memory), reads(Order::WorkloadAware, memory));
        // Before that is noticed some have to wait; unnoticed it would be three times as many.
        let (sequential, aware) = both(0);
        assert!(aware * 2 <= sequential * 3, "{before} {after}: {sequential} {aware}");
        // While the guest's memory crosses it is noticed at the source. What is left is chance: reads of
        // a small area come near each other and are taken for a stream now and then.
        let (sequential, aware) = both(GIB / 16);
        assert!(aware * 10 <= sequential * 11, "{before} {after}: {sequential} {aware}");
    }
}

#[test]
fn no_memory_no_delay_and_no_accesses() {
    let none = || std::iter::empty::<Result<Record, Infallible>>();
    for strategy in [Strategy::PreCopy, Strategy::PostCopy, Strategy::Hybrid] {
        let settings = Settings {
            delay: 0,
            ..Settings::new(strategy, Order::WorkloadAware, 64 << 20, 1 << 20)
        };
        let outcome = replay(&settings, none()).unwrap();
        assert_eq!((outcome.extra_bytes, outcome.first_bytes), (0, 64 << 20), "{strategy}");
        assert_eq!(outcome.total / SECOND, 64, "{strategy}: {outcome:?}");
    }
}

#[test]
fn an_access_behind_the_end_is_an_error() {
    let settings = Settings::new(Strategy::Hybrid, Order::Sequential, 1 << 20, 1 << 20);
    let record = Record { time_ns: 0, op: Op::Read, offset: 1 << 20, length: 512 };
    let error = replay(&settings, [Ok::<_, Infallible>(record)]).unwrap_err();
    assert!(matches!(error, ReplayError::DiskTooSmall { end } if end == (1 << 20) + 512));
}

#[test]
fn a_picture_shows_every_kind_of_traffic() {
    let picture = Settings { picture: true, ..settings(Strategy::Hybrid, Order::WorkloadAware) };
    let outcome = run(&picture);
    let svg = outcome.picture.as_ref().unwrap().svg("hybrid");
    assert!(svg.len() < 600_000, "{}", svg.len());
    let filled = svg.lines().filter(|line| line.starts_with("<path") && line.contains("\"M"));
    assert!(filled.count() >= 7, "what was sent in three ways, reads and writes: {svg}");
}

#[test]
fn a_generated_load_replays() {
    let spec = Load::Web.spec();
    let mut settings =
        Settings::new(Strategy::Hybrid, Order::WorkloadAware, spec.layout.disk, 50_000_000);
    settings.memory = spec.memory;
    settings.start = 1000 * SECOND;
    let outcome = replay(&settings, spec.records(1).map(Ok::<_, Infallible>)).unwrap();
    assert_eq!(outcome.failed, None);
    assert!(outcome.extra_bytes > 0 && outcome.extra_bytes < settings.disk / 8, "{outcome:?}");
}

#[test]
fn throttling_holds_writes_back_and_shortens_the_rounds() {
    let free = run(&settings(Strategy::PreCopy, Order::Sequential));
    assert_eq!((free.throttled, free.throttled_for), (0, 0));
    let mut throttled = settings(Strategy::PreCopy, Order::Sequential);
    throttled.throttle = Throttling::Aggressive;
    let aggressive = run(&throttled);
    assert!(aggressive.throttled > 0 && aggressive.throttled_for > 0, "{aggressive:?}");
    assert!(aggressive.extra_bytes < free.extra_bytes, "{aggressive:?} {free:?}");
    throttled.throttle = Throttling::Soft;
    assert!(run(&throttled).throttled < aggressive.throttled);
}

/// A third of the limit is written. While guest memory moves and little else is sent, the limit is
/// still half of what the link carries.
#[test]
fn a_guest_that_writes_less_than_the_limit_is_hardly_slowed() {
    let mut settings = settings(Strategy::PreCopy, Order::Sequential);
    settings.throttle = Throttling::Soft;
    settings.memory = 256 << 20;
    let outcome = run(&settings);
    assert_eq!(outcome.failed, None);
    assert!(outcome.throttled <= 5, "{outcome:?}");
}

#[test]
fn mirrored_writes_are_sent_and_nothing_waits_at_the_target() {
    let mirror = run(&settings(Strategy::Mirror, Order::Sequential));
    assert_eq!((mirror.reads.count, mirror.missing_bytes), (0, 0), "{mirror:?}");
    assert!(mirror.extra_bytes > 0);
}

#[test]
fn auto_copies_less_than_pre_copy_twice_and_waits_less_than_post_copy() {
    let auto = run(&settings(Strategy::Auto, Order::WorkloadAware));
    let hybrid = run(&settings(Strategy::Hybrid, Order::WorkloadAware));
    let post = run(&settings(Strategy::PostCopy, Order::WorkloadAware));
    let most = hybrid.extra_bytes + hybrid.extra_bytes / 20;
    assert!(auto.extra_bytes <= most, "{auto:?} {hybrid:?}");
    assert!(auto.reads.count < post.reads.count, "{auto:?} {post:?}");
}

/// Over many guests, because in few of them a single read is a large share. What is written is read here.
#[test]
fn auto_lets_no_more_reads_wait_than_hybrid() {
    let reads = |strategy| {
        let one = |seed| {
            let mut settings = settings(strategy, Order::WorkloadAware);
            settings.bandwidth = 125_000_000;
            let outcome = replay(&settings, trace(seed, settings.disk, 60)).unwrap();
            assert_eq!(outcome.failed, None, "{outcome:?}");
            (outcome.reads.count, outcome.extra_bytes)
        };
        (0..40).map(one).fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
    };
    let (auto, hybrid) = (reads(Strategy::Auto), reads(Strategy::Hybrid));
    // A twentieth, or one read of so few.
    assert!(auto.0 <= hybrid.0 + (hybrid.0 / 20).max(1), "{auto:?} {hybrid:?}");
    assert!(auto.1 <= hybrid.1 + hybrid.1 / 20, "{auto:?} {hybrid:?}");
}

/// LiveFS's parameters: what was observed decides, and synchronising whole segments of a guest that
/// writes all the time costs what handing the rest over does not.
#[test]
fn hot_set_is_quicker_than_synchronising_segments_and_waits_less_than_post_copy() {
    use dray_engine::hotset::Rule;
    use dray_sim::replay::HotSet;
    use dray_sim::replay::livefs::{afs, bonnie};
    const SEGMENT: u64 = 8 << 20;
    let base = |strategy| Settings { start: 60 * SECOND, ..settings(strategy, Order::Sequential) };
    let run = |settings: &Settings| {
        let records = bonnie(GIB / 2, GIB / 8, 6 << 20, 1);
        let records = records.take_while(|record| record.time_ns < 900 * SECOND);
        replay(settings, records.map(Ok::<_, Infallible>)).unwrap()
    };
    let rule = |threshold| Rule { segment: SEGMENT, threshold, ..Rule::default() };
    let mut livefs = base(Strategy::HotSet);
    livefs.sync_unit = SEGMENT;
    livefs.hot_set = HotSet { rule: rule(0.0), handover_size: Some(SEGMENT), ..HotSet::default() };
    let mut hot = base(Strategy::HotSet);
    hot.hot_set = HotSet { rule: rule(1.0), handover_size: Some(GIB / 8), ..HotSet::default() };
    let (livefs, hot) = (run(&livefs), run(&hot));
    assert!(hot.total * 3 < livefs.total * 2, "{hot:?} {livefs:?}");

    let reads = |settings: &Settings| {
        let records = afs(GIB / 2, 40, 200, 1);
        let records = records.take_while(|record| record.time_ns < 400 * SECOND);
        replay(settings, records.map(Ok::<_, Infallible>)).unwrap()
    };
    let mut seen = base(Strategy::HotSet);
    seen.hot_set.rule = rule(1.0);
    let post = reads(&base(Strategy::PostCopy));
    let after = reads(&seen);
    assert!(
        post.reads.count > 50 && after.reads.total * 2 < post.reads.total,
        "{after:?} {post:?}"
    );
    // Observed for no time at all nothing is hot: post-copy.
    seen.hot_set.observed = Some(0);
    let blind = reads(&seen);
    assert_eq!((blind.missing_bytes, blind.reads), (post.missing_bytes, post.reads));
}

#[test]
fn goals_move_autos_choice() {
    let auto = settings(Strategy::Auto, Order::WorkloadAware);
    let free = run(&auto);
    let quick = run(&Settings { deadline: Some(SECOND), ..auto.clone() });
    let smooth = run(&Settings { max_added_latency: Some(1000), ..auto });
    let seen = |outcome: &Outcome| (outcome.extra_bytes, outcome.reads.count);
    assert!(quick.extra_bytes < free.extra_bytes, "{:?} {:?}", seen(&quick), seen(&free));
    assert!(smooth.extra_bytes > quick.extra_bytes, "{:?} {:?}", seen(&smooth), seen(&quick));
    assert!(smooth.reads.count < quick.reads.count, "{:?} {:?}", seen(&smooth), seen(&quick));
}
