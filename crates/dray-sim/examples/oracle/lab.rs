//! What the orders save in the moves that `bench/orders.sh` makes: `oracle lab [SEEDS] [KEY=VALUE…]`,
//! tables in Markdown.
//!
//! A load on a disk of a few GiB that heat has watched for a while, over links without a delay;
//! nothing is charged for jumps, as the link is slower than the disk there. Hybrid in address order,
//! in the agent's and in the two orders that know the future; pre-copy with throttled writes in
//! address order and in the agent's. Keys, each a list with commas: `load`, `mbit`, `gib`,
//! `watched` (seconds), `throttle` (soft, aggressive), `memory` (MiB).

use crate::cases::Case;
use dray_engine::SECOND;
use dray_sim::replay::oracle::Future;
use dray_sim::replay::study::{Mean, Starts, reduction};
use dray_sim::replay::{Given, Order, Outcome, Settings, Throttling, replay};
use dray_trace::generate::Load;
use dray_types::{Schedule, Strategy};
use std::error::Error;

const MIB: f64 = (1 << 20) as f64;
/// What tbf lets through of the rate it is given.
const PAYLOAD: f64 = 0.957;

/// The values of a key among the arguments, or these.
fn list(args: &[String], key: &str, default: &str) -> Vec<String> {
    let value = |word: &String| Some(word.strip_prefix(key)?.strip_prefix('=')?.to_owned());
    let given = args.iter().find_map(value);
    let values = given.as_deref().unwrap_or(default).split(',');
    values.filter(|each| !each.is_empty()).map(str::to_owned).collect()
}

/// One line of a table: a load, a link in Mbit/s, a disk in GiB, and how long heat has watched in
/// seconds.
struct Cell {
    load: Load,
    mbit: f64,
    gib: f64,
    watched: u64,
    memory: u64,
}

impl Cell {
    fn case(&self, seed: u64) -> Case {
        let mut spec = self.load.spec();
        spec.layout.disk = ((self.gib * 1024.0) as u64) << 20;
        spec.memory = self.memory << 20;
        let bandwidth = (self.mbit * PAYLOAD * 1e6 / 8.0) as u64;
        let starts = Starts { bandwidth, at: vec![self.watched * SECOND] };
        let mut case = Case::generated(self.name(), spec, seed, starts);
        case.delay = 0;
        case
    }

    fn name(&self) -> String {
        format!("{} | {} Mbit/s | {} GiB | {} s", self.load, self.mbit, self.gib, self.watched)
    }

    fn settings(&self, case: &Case, strategy: Strategy, order: Order) -> Settings {
        let start = self.watched * SECOND;
        Settings { start, seek: 0, refresh: SECOND, ..case.settings(strategy, order) }
    }

    fn hybrid(&self, seeds: u64) -> Result<(), Box<dyn Error>> {
        let mut outcomes: [Vec<Outcome>; 4] = Default::default();
        for seed in 1..=seeds {
            let case = self.case(seed);
            let settings = |order| self.settings(&case, Strategy::Hybrid, order);
            let address = settings(Order::Sequential);
            let by_address = replay(&address, case.open()?)?;
            let handover = by_address.handover.unwrap_or(by_address.total);
            let future = Future::read(&address, handover, case.open()?)?;
            let given = |schedule: Schedule| Settings {
                given: Some(Given::Copy(schedule)),
                ..address.clone()
            };
            let aware = settings(Order::WorkloadAware);
            let others = [aware, given(future.by_count()), given(future.fewest())];
            outcomes[0].push(by_address);
            for (outcomes, settings) in outcomes[1..].iter_mut().zip(&others) {
                outcomes.push(replay(settings, case.open()?)?);
            }
        }
        let extra: Vec<f64> = outcomes.iter().map(|each| Mean::of(each).extra_bytes).collect();
        let each: Vec<String> = outcomes[0]
            .iter()
            .zip(&outcomes[1])
            .map(|(seq, aware)| change(seq.extra_bytes as f64, aware.extra_bytes as f64))
            .collect();
        println!(
            "| {} | {:.1} MiB | {:.1} MiB | {} | {} | {} | {} |",
            self.name(),
            extra[0] / MIB,
            extra[1] / MIB,
            change(extra[0], extra[1]),
            each.join(" "),
            change(extra[0], extra[2]),
            change(extra[0], extra[3]),
        );
        Ok(())
    }

    fn throttled(&self, seeds: u64, throttle: Throttling) -> Result<(), Box<dyn Error>> {
        let mean = |order| -> Result<Mean, Box<dyn Error>> {
            let one = |seed| -> Result<Outcome, Box<dyn Error>> {
                let case = self.case(seed);
                let settings = self.settings(&case, Strategy::PreCopy, order);
                Ok(replay(&Settings { throttle, ..settings }, case.open()?)?)
            };
            Ok(Mean::of(&(1..=seeds).map(one).collect::<Result<Vec<_>, _>>()?))
        };
        let (seq, aware) = (mean(Order::Sequential)?, mean(Order::WorkloadAware)?);
        println!(
            "| {} | {throttle:?} | {:.0} | {:.0} | {} | {:.1} MiB | {:.1} MiB | {} | {} and {} |",
            self.name(),
            seq.throttled,
            aware.throttled,
            change(seq.throttled, aware.throttled),
            seq.extra_bytes / MIB,
            aware.extra_bytes / MIB,
            change(seq.extra_bytes, aware.extra_bytes),
            seq.failed,
            aware.failed,
        );
        Ok(())
    }
}

fn change(address: f64, other: f64) -> String {
    let percent = reduction(address, other).unwrap_or(0.0);
    format!("{:+.1} %", -percent).replace('-', "−")
}

fn cells(args: &[String]) -> Result<Vec<Cell>, Box<dyn Error>> {
    let memory = list(args, "memory", "80").first().map_or(Ok(0), |mib| mib.parse())?;
    let mut cells = Vec::new();
    for load in list(args, "load", "file-server,mail") {
        for mbit in list(args, "mbit", "128,200") {
            for gib in list(args, "gib", "2,3,4,6") {
                for watched in list(args, "watched", "45,90,180") {
                    let (load, mbit, gib) = (load.parse()?, mbit.parse()?, gib.parse()?);
                    cells.push(Cell { load, mbit, gib, watched: watched.parse()?, memory });
                }
            }
        }
    }
    Ok(cells)
}

/// Prints them.
pub fn tables(args: &[String]) -> Result<(), Box<dyn Error>> {
    let seeds: u64 = args.first().map_or(Ok(3), |text| text.parse())?;
    let cells = cells(args)?;
    println!(
        "| load | link | disk | watched | by address | workload-aware | | each | counts known | everything known |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    cells.iter().try_for_each(|cell| cell.hybrid(seeds))?;
    println!(
        "\n| load | link | disk | watched | mode | throttled by address | workload-aware | | sent twice by address | workload-aware | | fail |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    for mode in list(args, "throttle", "soft,aggressive") {
        let throttle = if mode == "soft" { Throttling::Soft } else { Throttling::Aggressive };
        cells.iter().try_for_each(|cell| cell.throttled(seeds, throttle))?;
    }
    Ok(())
}
