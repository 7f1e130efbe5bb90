//! `auto` against the presets: `auto_table [STARTS] [PRESET…] [NAME…]`, a table in Markdown.
//!
//! Every preset (or those that are named) and `auto` migrate the same disk from the same starts, in
//! the agent's order, over the generated loads and the traces of the folder that `DRAY_TRACES` names
//! (a NAME picks some). `auto` in place of presets runs it alone.
//! The *cost* of a migration is what the planner weighs: seconds of the link for what is sent twice,
//! and seconds that guests' reads wait for missing blocks. The best preset is the one of least cost
//! among those that end. `docs/measurements/simulation.md` has the result, and says how to read it.

mod cases;

use cases::Case;
use dray_engine::SECOND;
use dray_sim::replay::Order;
use dray_sim::replay::study::{Mean, runs};
use dray_trace::generate::Load;
use dray_types::Strategy;
use std::error::Error;

const PRESETS: [Strategy; 5] =
    [Strategy::PreCopy, Strategy::Hybrid, Strategy::PostCopy, Strategy::Mirror, Strategy::HotSet];

/// A case and its lines of the table.
struct Lines(Case);

impl Lines {
    fn mean(&self, strategy: Strategy) -> Result<Mean, Box<dyn Error>> {
        let Self(case) = self;
        let settings = case.settings(strategy, Order::WorkloadAware);
        Ok(Mean::of(&runs(&settings, &case.starts, &|| case.open())?))
    }

    /// Seconds.
    fn cost(&self, mean: &Mean) -> f64 {
        let link = mean.extra_bytes / self.0.starts.bandwidth as f64;
        link + mean.remote_reads * mean.wait / SECOND as f64
    }

    fn show(&self, presets: &[Strategy]) -> Result<(), Box<dyn Error>> {
        let mut best: Option<(Strategy, Mean)> = None;
        for &strategy in presets {
            let mean = self.mean(strategy)?;
            self.line(&strategy.to_string(), &mean, "");
            let cost = self.cost(&mean);
            if mean.failed == 0 && best.is_none_or(|(_, best)| cost < self.cost(&best)) {
                best = Some((strategy, mean));
            }
        }
        let auto = self.mean(Strategy::Auto)?;
        let verdict = match &best {
            Some((strategy, best)) => {
                format!("{strategy}: {}", verdict(&auto, best, self.cost(&auto), self.cost(best)))
            }
            None if presets.is_empty() => String::new(),
            None => "no preset ends".to_owned(),
        };
        self.line("**auto**", &auto, &verdict);
        Ok(())
    }

    fn line(&self, strategy: &str, mean: &Mean, verdict: &str) {
        let mib = (1u64 << 20) as f64;
        let failed = if mean.failed > 0 {
            format!("{} of {} fail; ", mean.failed, mean.runs)
        } else {
            String::new()
        };
        println!(
            "| {} | {strategy} | {:.0} | {:.1} | {:.0} | {:.0} | {:.1} | {failed}{verdict} |",
            self.0.name,
            mean.total / 1e9,
            mean.extra_bytes / mib,
            mean.remote_reads,
            mean.downtime / 1e6,
            self.cost(mean),
        );
    }
}

/// Where `auto` is more than 5 % worse than the best preset, beyond what is no difference: 1 MiB, a
/// read, 10 ms of downtime.
fn verdict(auto: &Mean, best: &Mean, cost: f64, best_cost: f64) -> String {
    let more = |name: &str, auto: f64, best: f64, floor: f64| {
        (auto > best * 1.05 + floor).then(|| name.to_owned())
    };
    let worse: Vec<String> = [
        more("total", auto.total, best.total, 0.0),
        more("extra", auto.extra_bytes, best.extra_bytes, (1 << 20) as f64),
        more("reads", auto.remote_reads, best.remote_reads, 1.0),
        more("downtime", auto.downtime, best.downtime, 1e7),
    ]
    .into_iter()
    .flatten()
    .collect();
    match (worse.is_empty(), auto.failed) {
        (_, 1..) => "auto fails".to_owned(),
        (true, _) => "within 5 % in each".to_owned(),
        (false, _) if cost <= best_cost * 1.05 => {
            format!("more {} for less cost", worse.join(", "))
        }
        (false, _) => format!("**worse**: {}", worse.join(", ")),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let starts: u32 = args.next().map_or(Ok(3), |text| text.parse())?;
    let (presets, names): (Vec<String>, Vec<String>) =
        args.partition(|text| text.parse::<Strategy>().is_ok());
    let presets: Vec<Strategy> =
        presets.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    let mut presets = if presets.is_empty() { PRESETS.to_vec() } else { presets };
    presets.retain(|&preset| preset != Strategy::Auto);
    let wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(part));
    println!(
        "| load | strategy | total s | extra MiB | remote reads | downtime ms | cost s | against the best preset |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for load in Load::ALL.into_iter().filter(|load| wanted(load.name())) {
        Lines(Case::load(load, starts)).show(&presets)?;
    }
    for path in cases::files()?.iter().filter(|path| wanted(&path.to_string_lossy())) {
        Lines(Case::file(path, starts)?).show(&presets)?;
    }
    Ok(())
}
