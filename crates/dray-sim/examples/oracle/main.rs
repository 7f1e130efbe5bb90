//! What an order of blocks can save at most: `oracle [STARTS] [NAME…]`, a table in Markdown; `oracle
//! reads …` the same for reads that wait ([`waits`]), `oracle lab …` for the moves of
//! `bench/orders.sh` ([`lab`]).
//!
//! Hybrid over the generated loads and the traces of the folder that `DRAY_TRACES` names (a NAME picks
//! some): what is sent twice in address order, in the agent's order, in an order that knows how
//! often each block will be written, and in the best of all orders, which knows when. Jumps are
//! charged to the agent's order alone. `docs/measurements/simulation.md` has the result.

#[path = "../cases/mod.rs"]
mod cases;
mod lab;
mod waits;

use cases::Case;
use dray_sim::replay::oracle::Future;
use dray_sim::replay::study::reduction;
use dray_sim::replay::{Given, Order, Settings, replay};
use dray_trace::generate::Load;
use dray_types::{Schedule, Strategy};
use std::error::Error;

/// Bytes sent twice, over all starts.
#[derive(Default)]
struct Extra {
    address: u64,
    aware: u64,
    counts: u64,
    fewest: u64,
}

fn extra(case: &Case, settings: &Settings) -> Result<u64, Box<dyn Error>> {
    Ok(replay(settings, case.open()?)?.extra_bytes)
}

impl Extra {
    fn of(case: &Case) -> Result<Self, Box<dyn Error>> {
        let mut sum = Self::default();
        for &start in &case.starts.at {
            let aware = case.settings(Strategy::Hybrid, Order::WorkloadAware);
            let address = case.settings(Strategy::Hybrid, Order::Sequential);
            let address = Settings { start, ..address };
            let by_address = replay(&address, case.open()?)?;
            let handover = by_address.handover.unwrap_or(by_address.total);
            let future = Future::read(&address, handover, case.open()?)?;
            let given = |schedule: Schedule| Settings {
                given: Some(Given::Copy(schedule)),
                ..address.clone()
            };
            sum.address += by_address.extra_bytes;
            sum.aware += extra(case, &Settings { start, ..aware })?;
            sum.counts += extra(case, &given(future.by_count()))?;
            sum.fewest += extra(case, &given(future.fewest()))?;
        }
        Ok(sum)
    }

    fn line(&self, case: &Case) -> Result<(), Box<dyn Error>> {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20) / case.starts.at.len() as f64;
        let saved = |other: u64| reduction(self.address as f64, other as f64).unwrap_or(0.0);
        println!(
            "| {} | {:.1} MiB | {:.1} MiB | −{:.1} % | −{:.1} % | −{:.1} % |",
            case.name,
            mib(self.address),
            mib(self.aware),
            saved(self.aware),
            saved(self.counts),
            saved(self.fewest),
        );
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).peekable();
    if args.next_if_eq("lab").is_some() {
        return lab::tables(&args.collect::<Vec<_>>());
    }
    let reads = args.next_if_eq("reads").is_some();
    let starts: u32 = args.next().map_or(Ok(3), |text| text.parse())?;
    let names: Vec<String> = args.collect();
    let wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(part));
    if reads {
        waits::head();
    } else {
        println!("| load | by address | workload-aware | | counts known | everything known |");
        println!("|---|---|---|---|---|---|");
    }
    let line = |case: &Case| if reads { waits::line(case) } else { Extra::of(case)?.line(case) };
    for load in Load::ALL.into_iter().filter(|load| wanted(load.name())) {
        line(&Case::load(load, starts))?;
    }
    for path in cases::files()?.iter().filter(|path| wanted(&path.to_string_lossy())) {
        line(&Case::file(path, starts)?)?;
    }
    Ok(())
}
