//! Memory, the guard, and many threads at the log.

use dray_heat::{AccessLog, Heat, HeatConfig, Op};
use dray_types::{BlockRange, Schedule};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
}

/// Accesses anywhere in an image of 16 TiB, the worst case for counts by place.
fn scattered(config: HeatConfig) -> (Heat, usize) {
    let blocks = 16 << (40 - 12);
    let mut heat = Heat::new(blocks, config);
    let (mut state, mut most) = (1, 0);
    for i in 0..200_000 {
        let op = if i % 2 == 0 { Op::Read } else { Op::Write };
        heat.access(op, BlockRange::new(random(&mut state) % blocks, 1 + i % 8));
        if i % 1000 == 0 {
            most = most.max(heat.memory());
        }
    }
    (heat, most)
}

#[test]
fn sixteen_tebibytes_cost_a_few_megabytes() {
    let (heat, most) = scattered(HeatConfig::default());
    assert!(most < 12 << 20, "{most} bytes");
    assert!(heat.chunk_blocks(Op::Write) > 1024, "the chunks have grown");
    let (_, most) = scattered(HeatConfig::paper());
    assert!(most < 32 << 20, "{most} bytes");
}

#[test]
fn huge_discards_stay_in_the_bound() {
    let blocks = 16 << (40 - 12);
    let mut heat = Heat::new(blocks, HeatConfig::default());
    for at in (0..blocks).step_by(1 << 18) {
        heat.access(Op::Write, BlockRange::new(at, blocks));
    }
    assert!(heat.memory() < 12 << 20, "{} bytes", heat.memory());
}

#[test]
fn random_accesses_give_address_order() {
    let blocks = 8 << 20;
    let mut heat = Heat::new(blocks, HeatConfig::default());
    let mut state = 3;
    for _ in 0..20_000 {
        heat.access(Op::Write, BlockRange::new(random(&mut state) % (blocks - 8), 4));
        heat.access(Op::Read, BlockRange::new(random(&mut state) % (blocks - 8), 4));
    }
    // Or an order that is the same.
    let by_address = |schedule: Schedule| schedule.ranges().len() <= 1;
    assert!(by_address(heat.copy_schedule()), "{:?}", heat.regret(Op::Write));
    assert!(by_address(heat.backfill_schedule()), "{:?}", heat.regret(Op::Read));
}

#[test]
fn a_workload_turned_upside_down_gives_address_order() {
    let blocks = 8 << 20;
    let mut heat = Heat::new(blocks, HeatConfig::default());
    let mut state = 9;
    // Trials begin and end at powers of two: the low half is learnt, then the guest leaves it for
    // the high half, which a schedule would send first and address order last.
    let mut write = |heat: &mut Heat, from: u64, operations: u64| {
        for _ in 0..operations {
            heat.access(
                Op::Write,
                BlockRange::new(from + random(&mut state) % (blocks / 2 - 8), 4),
            );
        }
    };
    write(&mut heat, 0, 8192);
    assert!(heat.regret(Op::Write).predicts(), "{:?}", heat.regret(Op::Write));
    assert!(!heat.copy_schedule().is_sequential());
    write(&mut heat, blocks / 2, 8193);
    assert!(!heat.regret(Op::Write).predicts(), "{:?}", heat.regret(Op::Write));
    assert!(heat.copy_schedule().is_sequential());
}

#[test]
fn reads_that_turn_elsewhere_are_noticed_before_a_trial_ends() {
    // 8 GiB, half a gibibyte of it read at random for an hour, then another one.
    let blocks = 8 << 18;
    let mut heat = Heat::new(blocks, HeatConfig::default());
    let mut state = 11;
    let mut read = |heat: &mut Heat, from: u64, operations: u64| {
        for _ in 0..operations {
            let at = from + random(&mut state) % (1 << 17) / 4 * 4;
            heat.access(Op::Read, BlockRange::new(at, 4));
        }
    };
    // Blocks of an area among as many that the order brings first.
    let first = |heat: &Heat, area: u64| {
        let (mut rest, mut inside) = (1 << 17, 0);
        for range in heat.backfill_schedule().ranges() {
            let (here, _) = range.split_at_most(rest);
            rest -= here.len;
            let end = here.end().min(area + (1 << 17));
            inside += end.saturating_sub(here.start.max(area));
        }
        inside
    };
    read(&mut heat, 6 << 18, 100_000);
    assert!(first(&heat, 6 << 18) > 1 << 16, "{}", first(&heat, 6 << 18));
    // Long histories are tried now and then: it takes a migration to be noticed at once.
    let mut late = heat.clone();
    read(&mut late, 0, 1000);
    assert_eq!(first(&late, 0), 0);
    heat.try_now();
    read(&mut heat, 0, 1000);
    assert!(first(&heat, 0) > 1 << 16, "{}", first(&heat, 0));
}

#[test]
fn a_scan_of_the_disk_is_one_reader_and_does_not_make_it_forget() {
    let blocks = 8 << 18;
    let mut heat = Heat::new(blocks, HeatConfig::default());
    let mut state = 13;
    for _ in 0..20_000 {
        let at = (6 << 18) + random(&mut state) % (1 << 17) / 4 * 4;
        heat.access(Op::Read, BlockRange::new(at, 4));
    }
    let before = heat.frequency(Op::Read, 6 << 18);
    heat.try_now();
    (0..1000).for_each(|n| heat.access(Op::Read, BlockRange::new(n * 64, 64)));
    assert_eq!(heat.frequency(Op::Read, 6 << 18), before);
}

#[test]
fn a_steady_workload_is_trusted() {
    let blocks = 8 << 20;
    let mut heat = Heat::new(blocks, HeatConfig::default());
    let mut state = 5;
    for _ in 0..5_000 {
        heat.access(Op::Write, BlockRange::new((1 << 20) + random(&mut state) % (1 << 17), 2));
    }
    let regret = heat.regret(Op::Write);
    assert!(regret.scheduled < regret.sequential / 4.0, "{regret:?}");
    let last = *heat.copy_schedule().ranges().last().unwrap();
    assert!(BlockRange::new(1 << 20, 1 << 17).contains(last), "{last:?}");
}

#[test]
fn hot_segments_and_rates() {
    let mut heat = Heat::new(1 << 20, HeatConfig::default());
    for _ in 0..10 {
        heat.access(Op::Write, BlockRange::new(16_384, 4));
        heat.access(Op::Read, BlockRange::new(40_000, 2));
    }
    heat.access(Op::Write, BlockRange::new(0, 8));
    let scores: Vec<_> =
        heat.segment_scores(16_384).map(|s| (s.segment, s.reads, s.writes)).collect();
    assert_eq!(scores, [(0, 0.0, 8.0), (1, 0.0, 40.0), (2, 20.0, 0.0)]);
    assert_eq!(heat.segment_scores(16_384).next().unwrap().score(0.5, 0.5), 2.0);
    assert_eq!((heat.read_rate(40_000), heat.read_rate(0)), (2.0, 0.0));
    assert_eq!(heat.write_rate(16_384), 40.0 / 11.0);
    let rates: Vec<_> = heat.segment_rates(16_384).collect();
    assert_eq!(rates, [(0, 0.0, 8.0 / 11.0), (1, 0.0, 40.0 / 11.0), (2, 2.0, 0.0)]);
    let chance = heat.chance(Op::Write, 16_384, 32.0);
    assert!((chance - (1.0 - (-40.0f64 / 11.0).exp())).abs() < 1e-9, "{chance}");
}

#[test]
fn nothing_is_lost_or_made_up_between_threads() {
    threads_push(&AccessLog::new(1024));
    threads_push(&AccessLog::with_lanes(3, 1024));
}

fn threads_push(log: &AccessLog) {
    let (threads, each) = (4u64, 50_000u64);
    let done = AtomicBool::new(false);
    let (mut seen, noted) = thread::scope(|scope| {
        let drain = scope.spawn(|| {
            let mut seen = Vec::new();
            loop {
                let last = done.load(Ordering::Acquire);
                log.drain(|op, range| seen.push((op, range.start, range.len)));
                if last {
                    return seen;
                }
            }
        });
        let pushers: Vec<_> = (0..threads)
            .map(|t| {
                scope.spawn(move || {
                    let range = |i| BlockRange::new(t * each + i, t + 1);
                    (0..each).filter(|&i| log.push_in(t as usize, Op::Read, range(i))).count()
                        as u64
                })
            })
            .collect();
        let noted: u64 = pushers.into_iter().map(|p| p.join().unwrap()).sum();
        done.store(true, Ordering::Release);
        (drain.join().unwrap(), noted)
    });
    assert_eq!(noted + log.dropped(), threads * each);
    // A push that a drain has overtaken stays for a later lap of the ring.
    for i in 0..3 * 2 * log.capacity() as u64 {
        log.push_in(i as usize % 3, Op::Write, BlockRange::new(i, 1));
        log.drain(|op, range| {
            if op == Op::Read {
                seen.push((op, range.start, range.len));
            }
        });
    }
    assert_eq!(seen.len() as u64, noted);
    assert!(seen.iter().all(|&(_, start, len)| len == start / each + 1));
    seen.sort_unstable_by_key(|s| s.1);
    seen.dedup_by_key(|s| s.1);
    assert_eq!(seen.len() as u64, noted, "an access came twice");
}

#[test]
fn a_small_image_has_an_order_though_jumps_are_dear() {
    // 32 MiB, a chunk of 4 MiB is read; a jump takes the time of 1 MiB.
    let mut heat = Heat::new(8192, HeatConfig::default());
    for nth in 0..600 {
        heat.access(Op::Read, BlockRange::new(6 * 1024 + nth * 769 % 1024, 1));
    }
    let first = heat.backfill_schedule().ranges().first().copied();
    assert!(first.is_some_and(|range| range.start == 6 * 1024), "{first:?}");
}
