//! Hot-set against LiveFS-style pre-copy, and its read delay against post-copy's: the experiments of
//! the LiveFS paper. `cargo run --release -p dray-sim --example livefs`

use dray_engine::SECOND;
use dray_engine::hotset::{Rule, SEGMENT};
use dray_sim::replay::livefs::{afs, bonnie};
use dray_sim::replay::{HotSet, Order, Outcome, Settings, replay};
use dray_trace::Record;
use dray_types::Strategy;
use std::convert::Infallible;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// Starts over a whole cycle of Bonnie++, which lasts 72 s.
const STARTS: u64 = 8;

/// The paper's disk, memory and link.
fn settings(strategy: Strategy) -> Settings {
    let mut settings = Settings::new(strategy, Order::WorkloadAware, 6 * GIB, 125_000_000);
    settings.memory = 512 * MIB;
    settings.delay = SECOND / 10_000;
    settings.start = 120 * SECOND;
    settings.history = 200_000;
    settings
}

fn run(settings: &Settings, records: impl Iterator<Item = Record>) -> Outcome {
    let records = records.take_while(|record| record.time_ns < 3600 * SECOND);
    replay(settings, records.map(Ok::<_, Infallible>)).expect("no invariant is broken")
}

fn main() {
    println!("Bonnie++: 1 GiB at 60 MB/s on 6 GiB, 512 MiB of memory, 1 Gbit/s, {STARTS} starts");
    let mut first = None;
    let mut show = |name: &str, settings: &Settings| {
        let one = |n: u64| {
            let settings = Settings { start: (120 + n * 9) * SECOND, ..settings.clone() };
            run(&settings, bonnie(6 * GIB, GIB, 60_000_000, 1))
        };
        let outcomes: Vec<Outcome> = (0..STARTS).map(one).collect();
        let mean = |value: fn(&Outcome) -> u64| {
            outcomes.iter().map(value).sum::<u64>() as f64 / STARTS as f64
        };
        let total = mean(|outcome| outcome.total) / 1e9;
        let longest = outcomes.iter().map(|outcome| outcome.total).max().unwrap_or(0) as f64 / 1e9;
        let reference = *first.get_or_insert(total);
        let failed = outcomes.iter().filter(|outcome| outcome.failed.is_some()).count();
        println!(
            "{name:44} {total:6.1} s  x{:.2}  longest {longest:6.1} s  extra {:5.0} MiB  remote reads {:5.0}  \
             failed {failed}",
            total / reference,
            mean(|outcome| outcome.extra_bytes) / MIB as f64,
            mean(|outcome| outcome.reads.count),
        );
    };
    let all = Rule { threshold: 0.0, ..Rule::default() };
    for segments in [0, 1, 4, 16] {
        let mut livefs = settings(Strategy::HotSet);
        livefs.sync_unit = SEGMENT;
        livefs.hot_set =
            HotSet { rule: all, handover_size: Some(segments * SEGMENT), ..HotSet::default() };
        livefs.hot_set.endless = true;
        show(&format!("LiveFS-style pre-copy, handover-size {segments} x 64 MiB"), &livefs);
    }
    for mib in [64, 256, 1024] {
        let mut hot = settings(Strategy::HotSet);
        hot.hot_set.handover_size = Some(mib * MIB);
        show(&format!("hot-set, handover-size {mib} MiB"), &hot);
    }
    for strategy in [Strategy::PreCopy, Strategy::Hybrid, Strategy::PostCopy, Strategy::Auto] {
        show(&strategy.to_string(), &settings(strategy));
    }

    println!("AFS: 200 workers read 1 MiB each, 500 reads of 64 KiB a second");
    let mut first = None;
    let mut show = |name: &str, settings: &Settings| {
        let outcome = run(settings, afs(6 * GIB, 200, 500, 1));
        let (total, after) = (outcome.total, outcome.total - outcome.handover.unwrap_or(0));
        // Every read after the handover counts, those that did not wait too.
        let reads = (after / (SECOND / 500)).max(1);
        let mean = outcome.reads.total as f64 / reads as f64 / 1e6;
        let reference = *first.get_or_insert(mean);
        println!(
            "{name:30} mean delay {mean:8.4} ms ({:+.0} %)  remote reads {:5}  total {:.1} s",
            (mean / reference.max(1e-9) - 1.0) * 100.0,
            outcome.reads.count,
            total as f64 / 1e9,
        );
    };
    for order in [Order::Sequential, Order::WorkloadAware] {
        show(&format!("post-copy, {order}"), &Settings { order, ..settings(Strategy::PostCopy) });
    }
    for seconds in [5, 15, 55, 100] {
        let mut hot = settings(Strategy::HotSet);
        hot.order = Order::Sequential;
        hot.hot_set.observed = Some(seconds * SECOND);
        hot.hot_set.rule.threshold = 30.0;
        hot.hot_set.handover_size = Some(30 * SEGMENT);
        show(&format!("hot-set, observed for {seconds} s"), &hot);
    }
}
