//! Many seeds of the simulator, and crashes between any two effects.

use dray_sim::run::run_with_crash;
use dray_sim::{Crash, CrashPoint, Side, crash_everywhere, run};
use dray_types::Strategy;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Seeds of a test run.
const SEEDS: u64 = 1_600;

#[test]
fn many_seeds() {
    let first = std::env::var("DRAY_SIM_FIRST").map_or(0, |text| text.parse().unwrap());
    let count = std::env::var("DRAY_SIM_COUNT").map_or(SEEDS, |text| text.parse().unwrap());
    let mut endings = BTreeMap::new();
    let (mut events, mut described, mut found, mut blocks) = (0, 0, 0, 0);
    let (mut asked, mut asked_found, mut full, mut edited) = (0, 0, 0, 0);
    let mut failures = Vec::new();
    for seed in first..first + count {
        match run(seed) {
            Ok(outcome) => {
                *endings.entry(outcome.ending).or_insert(0u64) += 1;
                events += outcome.events;
                full += outcome.full;
                edited += outcome.edited;
                described += outcome.described;
                found += outcome.found;
                blocks += outcome.blocks_found;
                asked += outcome.asked;
                asked_found += outcome.asked_found;
            }
            Err(report) => failures.push(report),
        }
    }
    for report in &failures {
        println!("{}", report.lines().next().unwrap_or_default());
    }
    println!("{count} seeds, {events} events: {endings:?}, {} failed", failures.len());
    println!("{described} pieces described, {found} of them found, and {blocks} blocks of others");
    println!("{full} times the target had no room for what it had to write");
    println!("{edited} files that come were changed by another program");
    println!("Backfill asked about {asked} pieces, {asked_found} of them found");
    assert!(failures.is_empty(), "{} seeds failed; the first:\n{}", failures.len(), failures[0]);
    assert!(found > count && described > 2 * found || count < 100, "too little is asked for");
    assert!(full > count / 4 || count < 100, "the target has room too often");
    assert!(edited > count / 20 || count < 100, "too few files are changed");
    assert!(blocks > count || count < 100, "too little is asked for by blocks");
    assert!(
        asked_found > count / 4 && asked > asked_found || count < 100,
        "Backfill asks too little"
    );
    assert!(endings["done"] > count / 2 || count < 100, "too few migrations succeed");
}

#[test]
fn a_crash_between_any_two_effects() {
    let crash_seeds = std::env::var("DRAY_SIM_COUNT").map_or(6, |text| text.parse().unwrap());
    let all: Vec<_> = Strategy::ALL
        .into_iter()
        .flat_map(|strategy| (0..crash_seeds).map(move |seed| (strategy, seed)))
        .flat_map(|(strategy, seed)| [Crash::Kill, Crash::PowerCut].map(|c| (strategy, seed, c)))
        .collect();
    let next = AtomicUsize::new(0);
    // Each of two threads takes the next: this test is as long as all others of its crate.
    let runs = || {
        let mut total = 0;
        while let Some(&(strategy, seed, crash)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            let runs = crash_everywhere(seed, strategy, crash);
            let runs = runs.unwrap_or_else(|report| panic!("{report}"));
            assert!(runs > 20, "{strategy}: only {runs} places to crash at");
            total += runs;
        }
        total
    };
    let total: u64 = std::thread::scope(|scope| {
        let other = scope.spawn(runs);
        runs() + other.join().expect("no place to crash at was too much")
    });
    println!("{total} runs with a crash");
}

/// The target may run out of room at any of its effects, for a while: the guest goes on, one host owns,
/// and the migration ends.
#[test]
fn the_target_may_have_no_room_from_any_effect_on() {
    let seeds = std::env::var("DRAY_SIM_COUNT").map_or(4, |text| text.parse().unwrap());
    let mut total = 0;
    for strategy in Strategy::ALL {
        for seed in 0..seeds {
            let runs = crash_everywhere(seed, strategy, Crash::Full);
            total += runs.unwrap_or_else(|report| panic!("{report}"));
        }
    }
    println!("{total} runs without room");
    assert!(total > 10 * seeds);
}

/// Any record of the source may be one that cannot be written: the guest goes on, one host owns, and
/// the migration ends.
#[test]
fn any_record_of_the_source_may_fail() {
    let seeds = std::env::var("DRAY_SIM_COUNT").map_or(4, |text| text.parse().unwrap());
    let mut total = 0;
    for strategy in Strategy::ALL {
        for seed in 0..seeds {
            for crash in [Crash::Unrecorded, Crash::Unsure] {
                let runs = crash_everywhere(seed, strategy, crash);
                total += runs.unwrap_or_else(|report| panic!("{report}"));
            }
        }
    }
    println!("{total} runs with a record that failed");
}

/// Repeats what a failure names: `DRAY_SIM_SEED`, `DRAY_SIM_STRATEGY`, `DRAY_SIM_CRASH`.
#[test]
fn one_seed() {
    let Ok(seed) = std::env::var("DRAY_SIM_SEED") else { return };
    let seed = seed.parse().expect("DRAY_SIM_SEED is a number");
    let result = match std::env::var("DRAY_SIM_STRATEGY") {
        Ok(strategy) => {
            let crash = std::env::var("DRAY_SIM_CRASH").ok().map(|text| place(&text));
            run_with_crash(seed, strategy.parse::<Strategy>().expect("a strategy"), crash)
        }
        Err(_) => run(seed),
    };
    match result {
        Ok(outcome) => println!("{outcome:?}"),
        Err(report) => panic!("{report}"),
    }
}

fn place(text: &str) -> CrashPoint {
    let mut parts = text.split(',');
    let mut part = || parts.next().expect("DRAY_SIM_CRASH is side,effect,crash");
    CrashPoint {
        side: if part() == "Source" { Side::Source } else { Side::Target },
        effect: part().parse().expect("a number of effects"),
        crash: match part() {
            "Kill" => Crash::Kill,
            "Full" => Crash::Full,
            "Unrecorded" => Crash::Unrecorded,
            "Unsure" => Crash::Unsure,
            _ => Crash::PowerCut,
        },
    }
}
