//! `oracle reads [STARTS] [NAME…]`: how many reads of post-copy wait at least.
//!
//! In address order, in the agent's order, in an order that knows how often each block will be read,
//! and in one that knows when. Jumps are charged to the agent's order alone.

use crate::cases::Case;
use dray_sim::replay::oracle::Reads;
use dray_sim::replay::study::reduction;
use dray_sim::replay::{Given, Order, Outcome, Settings, replay};
use dray_types::{Schedule, Strategy};
use std::error::Error;

/// Over all starts.
#[derive(Default)]
struct Waits {
    reads: u64,
    /// Nanoseconds that they wait, and that the migrations take.
    wait: u64,
    total: u64,
    jumps: u64,
}

impl Waits {
    fn add(&mut self, outcome: &Outcome) {
        self.reads += outcome.reads.count;
        self.wait += outcome.reads.total;
        self.total += outcome.total;
        self.jumps += outcome.seeks;
    }

    /// Beside address order.
    fn beside(&self, address: &Self) -> String {
        change(address.reads, self.reads)
    }
}

fn change(from: u64, to: u64) -> String {
    let saved = reduction(from as f64, to as f64).unwrap_or(0.0);
    if saved < 0.0 { format!("+{:.1} %", -saved) } else { format!("−{saved:.1} %") }
}

pub fn head() {
    println!(
        "| load | by address | workload-aware | | wait | time | jumps | counts known | everything known |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
}

/// A line of the table.
pub fn line(case: &Case) -> Result<(), Box<dyn Error>> {
    let [mut address, mut aware, mut counts, mut fewest] = [(); 4].map(|()| Waits::default());
    let mut each = Vec::new();
    for &start in &case.starts.at {
        let settings = |order| Settings { start, ..case.settings(Strategy::PostCopy, order) };
        let by_address = settings(Order::Sequential);
        let outcome = replay(&by_address, case.open()?)?;
        let handover = outcome.handover.unwrap_or(outcome.total);
        let future = Reads::read(&by_address, handover, outcome.total, case.open()?)?;
        let given = |schedule: Schedule| -> Result<Outcome, Box<dyn Error>> {
            let given = Some(Given::Backfill(schedule));
            Ok(replay(&Settings { given, ..by_address.clone() }, case.open()?)?)
        };
        let by_heat = replay(&settings(Order::WorkloadAware), case.open()?)?;
        each.push(change(outcome.reads.count, by_heat.reads.count));
        aware.add(&by_heat);
        counts.add(&given(future.by_count())?);
        fewest.add(&given(future.fewest().0)?);
        address.add(&outcome);
    }
    let starts = case.starts.at.len() as f64;
    let ms = |waits: &Waits| waits.wait as f64 / waits.reads.max(1) as f64 / 1e6;
    println!(
        "| {} | {:.0} | {:.0} | {} ({}) | {:.0} → {:.0} ms | {} | {:.0} | {} | {} |",
        case.name,
        address.reads as f64 / starts,
        aware.reads as f64 / starts,
        aware.beside(&address),
        each.join(" "),
        ms(&address),
        ms(&aware),
        change(address.total, aware.total),
        aware.jumps as f64 / starts,
        counts.beside(&address),
        fewest.beside(&address),
    );
    Ok(())
}
