//! What heat costs: nanoseconds for an access on the I/O path, for one that is drained and counted,
//! and for a schedule. `cargo run --release -p dray-heat --example cost`.

use dray_heat::{AccessLog, Heat, HeatConfig, Op};
use dray_types::BlockRange;
use std::hint::black_box;
use std::thread;
use std::time::Instant;

const TEBIBYTE: u64 = 1 << (40 - 12);
const ACCESSES: u64 = 4_000_000;

/// Nine in ten accesses to 2000 places of 4 MiB with falling popularity, one in ten anywhere.
fn workload(state: &mut u64) -> (Op, BlockRange) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    let draw = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 8;
    let op = if draw & 3 == 0 { Op::Read } else { Op::Write };
    let uniform = draw >> 2 & 0xffff;
    let start = if draw >> 20 & 0xf != 0 {
        let place = uniform * uniform / 0xffff * 2000 / 0xffff;
        (place * 104_729) % (TEBIBYTE / 1024) * 1024 + (draw >> 30) % 1000
    } else {
        (draw >> 4) % (TEBIBYTE - 16)
    };
    (op, BlockRange::new(start, 1 + (draw >> 40) % 8))
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

fn counted(name: &str, config: HeatConfig) {
    let mut state = 1;
    let accesses: Vec<_> = (0..ACCESSES / 4).map(|_| workload(&mut state)).collect();
    let log = AccessLog::new(1 << 14);
    let mut heat = Heat::new(TEBIBYTE, config);
    let mut spent = 0.0;
    for part in accesses.chunks(8192) {
        part.iter().for_each(|&(op, range)| {
            log.push(op, range);
        });
        let start = Instant::now();
        log.drain_into(&mut heat);
        spent += start.elapsed().as_nanos() as f64;
    }
    println!("{name}: drain and count an access      {:8.1} ns", spent / accesses.len() as f64);
    let start = Instant::now();
    let schedule = heat.unguarded(Op::Write);
    let took = each(start, 1) / 1e6;
    let ranges = schedule.ranges().len();
    println!("{name}: schedule of 1 TiB              {took:8.3} ms, {ranges} ranges");
    let start = Instant::now();
    let bytes = heat.encode();
    let took = each(start, 1) / 1e6;
    println!("{name}: encode                         {took:8.3} ms, {} bytes", bytes.len());
    println!("{name}: memory                         {:8} KiB", heat.memory() / 1024);
}

fn main() {
    for (threads, lanes) in [(1, 1), (2, 1), (2, 2)] {
        let each = push_by(threads, lanes);
        println!("push, {threads} threads, {lanes} lanes: {each:13.1} ns an access and thread");
    }
    counted("default", HeatConfig::default());
    counted("paper  ", HeatConfig::paper());
}
