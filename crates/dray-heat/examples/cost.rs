//! What heat costs: nanoseconds for an access on the I/O path and for one that is drained and counted,
//! part by part, and milliseconds for a schedule. `cargo run --release -p dray-heat --example cost`.
//!
//! What is counted is a history with full lists: rounds enough that trials pause, then 16 half rounds,
//! two of them with a trial. A part's cost is the difference that its setting makes.

use dray_heat::{AccessLog, ColdOrder, Heat, HeatConfig, Op};
use dray_types::BlockRange;
use std::hint::black_box;
use std::thread;
use std::time::Instant;

const TEBIBYTE: u64 = 1 << (40 - 12);
const ACCESSES: u64 = 4_000_000;

/// Before what is measured: trials pause after four rounds of 20,000 of each kind of operation.
const HISTORY: usize = 640_000;
const COUNTED: usize = 640_000;

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 8
}

/// Nine in ten accesses to 2000 places of 4 MiB with falling popularity, one in ten anywhere.
fn popular(state: &mut u64) -> BlockRange {
    let draw = random(state);
    let uniform = draw >> 2 & 0xffff;
    let start = if draw >> 20 & 0xf != 0 {
        let place = uniform * uniform / 0xffff * 2000 / 0xffff;
        (place * 104_729) % (TEBIBYTE / 1024) * 1024 + (draw >> 30) % 1000
    } else {
        (draw >> 4) % (TEBIBYTE - 16)
    };
    BlockRange::new(start, 1 + (draw >> 40) % 8)
}

/// 4 KiB anywhere in 2 GiB, so that every chunk that may have a count has one.
fn scattered(state: &mut u64) -> BlockRange {
    BlockRange::new(random(state) % (1 << 19), 1)
}

/// 64 KiB anywhere in 16 GiB.
fn large(state: &mut u64) -> BlockRange {
    BlockRange::new(random(state) % (1 << 18) * 16, 16)
}

fn each(from: Instant, times: u64) -> f64 {
    from.elapsed().as_nanos() as f64 / times as f64
}

fn push_by(threads: u64, lanes: usize) -> f64 {
    let log = AccessLog::with_lanes(lanes, 1 << 16);
    let each_thread = ACCESSES / threads;
    let start = Instant::now();
    thread::scope(|scope| {
        for t in 0..threads {
            let log = &log;
            scope.spawn(move || {
                for i in 0..each_thread {
                    log.push_in(t as usize, Op::Write, BlockRange::new(t << 32 | i, 8));
                    // Emptied now and then, so that pushes find room.
                    if t == 0 && i % 16_384 == 0 {
                        log.drain(|_, range| {
                            black_box(range);
                        });
                    }
                }
            });
        }
    });
    each(start, each_thread)
}

/// Nanoseconds to drain and count one of the accesses after the history.
fn counted(accesses: &[(Op, BlockRange)], heat: Option<&mut Heat>) -> f64 {
    let log = AccessLog::new(1 << 14);
    let (mut spent, mut heat) = (0.0, heat);
    for (nth, part) in accesses.chunks(4096).enumerate() {
        part.iter().for_each(|&(op, range)| {
            log.push(op, range);
        });
        let start = Instant::now();
        match &mut heat {
            Some(heat) => log.drain_into(heat),
            None => log.drain(|_, range| {
                black_box(range);
            }),
        }
        if nth * 4096 >= HISTORY {
            spent += start.elapsed().as_nanos() as f64;
        }
    }
    spent / COUNTED as f64
}

fn parts(name: &str, load: fn(&mut u64) -> BlockRange) {
    let mut state = 1;
    let accesses: Vec<_> = (0..HISTORY + COUNTED)
        .map(|nth| (if nth % 4 == 0 { Op::Read } else { Op::Write }, load(&mut state)))
        .collect();
    let all = HeatConfig::default();
    let no_trials = HeatConfig { guard: false, ..all };
    let counts = HeatConfig { cold: ColdOrder::FarFirst, ..no_trials };
    let mut each = vec![counted(&accesses, None)];
    let mut heat = Heat::new(TEBIBYTE, all);
    for config in [counts, no_trials, all] {
        heat = Heat::new(TEBIBYTE, config);
        each.push(counted(&accesses, Some(&mut heat)));
    }
    let parts: Vec<f64> = each.windows(2).map(|pair| pair[1] - pair[0]).collect();
    println!(
        "{name}: an access {:6.1} ns: log {:5.1}, counts {:5.1}, streams {:5.1}, trials {:5.1}",
        each[3], each[0], parts[0], parts[1], parts[2]
    );
    let mut paper = Heat::new(TEBIBYTE, HeatConfig::paper());
    println!("{name}: as the paper counts {:6.1} ns", counted(&accesses, Some(&mut paper)));
    whole(name, &heat);
}

fn whole(name: &str, heat: &Heat) {
    let start = Instant::now();
    let ranges = heat.unguarded(Op::Write).ranges().len();
    let took = each(start, 1) / 1e6;
    println!("{name}: schedule of 1 TiB {took:8.3} ms, {ranges} ranges");
    let start = Instant::now();
    let bytes = heat.encode().len();
    let took = each(start, 1) / 1e6;
    println!("{name}: encode {took:8.3} ms, {bytes} bytes; in memory {} KiB", heat.memory() / 1024);
}

fn main() {
    for (threads, lanes) in [(1, 1), (2, 1), (2, 2)] {
        let each = push_by(threads, lanes);
        println!("push, {threads} threads, {lanes} lanes: {each:13.1} ns an access and thread");
    }
    parts("popular  ", popular);
    parts("scattered", scattered);
    parts("large    ", large);
}
