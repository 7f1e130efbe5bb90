//! What the jumps of an order cost and save: `jumps [STARTS] [KEY=VALUE…] [NAME…]`, a table in Markdown.
//!
//! The loads and traces of `oracle` (a NAME picks some), each with several budgets of jumps (`share`,
//! one part in so many of a copy), extra traffic in MiB. Keys, each a list with commas: `share`, `strategy`.

#[path = "cases/mod.rs"]
mod cases;

use cases::Case;
use dray_heat::HeatConfig;
use dray_sim::replay::study::{Mean, reduction, runs};
use dray_sim::replay::{Order, Settings};
use dray_trace::generate::Load;
use dray_types::Strategy;
use std::error::Error;

const MIB: f64 = (1 << 20) as f64;

/// The values of a key among the arguments, or these.
fn list(args: &[String], key: &str, default: &str) -> Vec<String> {
    let value = |word: &String| Some(word.strip_prefix(key)?.strip_prefix('=')?.to_owned());
    let given = args.iter().find_map(value);
    given.as_deref().unwrap_or(default).split(',').map(str::to_owned).collect()
}

fn change(address: f64, other: f64) -> String {
    let percent = reduction(address, other).filter(|percent| percent.is_finite());
    percent.map_or("–".to_owned(), |percent| format!("{:+.1} %", -percent).replace('-', "−"))
}

fn both(address: f64, other: f64) -> String {
    format!("{address:.1} → {other:.1} | {}", change(address, other))
}

fn mean(case: &Case, settings: &Settings) -> Result<Mean, Box<dyn Error>> {
    Ok(Mean::of(&runs(settings, &case.starts, &|| case.open())?))
}

fn lines(case: &Case, args: &[String]) -> Result<(), Box<dyn Error>> {
    for strategy in list(args, "strategy", "pre-copy,hybrid,post-copy") {
        let strategy: Strategy = strategy.parse()?;
        let address = mean(case, &case.settings(strategy, Order::Sequential))?;
        for share in list(args, "share", "32,48,56,64,96") {
            let heat = HeatConfig { jump_share: share.parse()?, ..HeatConfig::default() };
            let settings = case.settings(strategy, Order::WorkloadAware);
            let aware = mean(case, &Settings { heat, ..settings })?;
            let jumps = aware.jumps * settings.seek as f64 / address.total * 100.0;
            println!(
                "| {} | {strategy} | {share} | {} | {} | {:.0} | {jumps:.2} % | {} | {} and {} |",
                case.name,
                both(address.extra_bytes / MIB, aware.extra_bytes / MIB),
                both(address.remote_reads, aware.remote_reads),
                aware.jumps,
                change(address.total, aware.total),
                address.failed,
                aware.failed,
            );
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let (args, names): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| word.contains('='));
    let mut names = names.into_iter().peekable();
    let starts = names.next_if(|word| word.parse::<u32>().is_ok());
    let starts: u32 = starts.map_or(Ok(3), |text| text.parse())?;
    let names: Vec<String> = names.collect();
    let wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(part));
    println!("| load | model | share | extra | | remote reads | | jumps | take | time | fail |");
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for load in Load::ALL.into_iter().filter(|load| wanted(load.name())) {
        lines(&Case::load(load, starts), &args)?;
    }
    for path in cases::files()?.iter().filter(|path| wanted(&path.to_string_lossy())) {
        lines(&Case::file(path, starts)?, &args)?;
    }
    Ok(())
}
