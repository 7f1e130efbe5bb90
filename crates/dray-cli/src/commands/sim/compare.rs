//! `dray sim compare`: what the workload-aware order saves.

use super::{Common, link, replay_failed};
use crate::output::Output;
use crate::show::style::Style;
use crate::show::table::{Align, table};
use crate::show::units::bytes;
use dray_api::ApiResult;
use dray_sim::replay::Order;
use dray_sim::replay::study::{Cell, Mean, compare, reduction};
use dray_types::{BitRate, Strategy};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Arguments of `dray sim compare`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// A model to compare (repeatable) [default: pre-copy, hybrid and post-copy]
    #[arg(long = "strategy", value_name = "STRATEGY")]
    strategies: Vec<Strategy>,
    /// Rate of the link (repeatable) [default: a migration lasts half of a file; 100Mbit for a load]
    #[arg(long = "bandwidth", value_name = "RATE")]
    bandwidths: Vec<BitRate>,
    /// Order to compare with address order: workload-aware, or paper or paper-incremental (algorithms of
    /// the literature)
    #[arg(long, default_value = "workload-aware")]
    order: Order,
    /// Number of random starts
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    starts: u32,
}

/// One line of the table.
struct Row {
    trace: String,
    bandwidth: u64,
    delay: u64,
    cell: Cell,
}

/// Simulates each input with several strategies and orders and prints them side by side.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    let strategies = match &args.strategies[..] {
        [] => vec![Strategy::PreCopy, Strategy::Hybrid, Strategy::PostCopy],
        some => some.to_vec(),
    };
    let bandwidths = match &args.bandwidths[..] {
        [] => vec![None],
        some => some.iter().map(|rate| Some(rate.bytes_per_second)).collect(),
    };
    let mut lines = Vec::new();
    for input in args.common.inputs()? {
        for &bandwidth in &bandwidths {
            let (delay, starts) = input.starts(bandwidth, args.starts, &args.common)?;
            for &strategy in &strategies {
                output.note(&format!(
                    "{}, {strategy}, {}",
                    input.name,
                    link(starts.bandwidth, delay)
                ));
                let settings = args.common.settings(&input, delay, strategy, args.order)?;
                let cell = compare(&settings, &starts, &|| input.open(&starts))
                    .map_err(|error| replay_failed(&input.name, error))?;
                let trace = input.name.clone();
                lines.push(Row { trace, bandwidth: starts.bandwidth, delay, cell });
            }
        }
    }
    let result =
        json!({ "starts": args.starts, "rows": lines.iter().map(as_json).collect::<Vec<_>>() });
    output.result(&result, |_, style| text(&lines, style));
    Ok(ExitCode::SUCCESS)
}

fn as_json(line: &Row) -> Value {
    let Cell { strategy, sequential, aware } = &line.cell;
    let mean = |mean: &Mean| {
        json!({
            "runs": mean.runs,
            "failed": mean.failed,
            "extra_bytes": mean.extra_bytes,
            "missing_bytes": mean.missing_bytes,
            "remote_reads": mean.remote_reads,
            "remote_read_bytes": mean.remote_bytes,
            "remote_read_wait_ns": mean.wait,
            "throttled": mean.throttled,
            "total_ns": mean.total,
            "downtime_ns": mean.downtime,
            "wire_bytes": mean.wire_bytes,
        })
    };
    let saved = |value: fn(&Mean) -> f64| {
        reduction(value(sequential), value(aware)).filter(|percent| percent.is_finite())
    };
    json!({
        "trace": line.trace,
        "strategy": strategy,
        "bandwidth": line.bandwidth,
        "delay_ns": line.delay,
        "sequential": mean(sequential),
        "ordered": mean(aware),
        "extra_reduction_percent": saved(|mean| mean.extra_bytes),
        "remote_reads_reduction_percent": saved(|mean| mean.remote_reads),
        "throttled_reduction_percent": saved(|mean| mean.throttled),
        "total_reduction_percent": saved(|mean| mean.total),
    })
}

/// A change in percent as the literature writes it: −75 % is three quarters less.
fn change(sequential: f64, aware: f64) -> String {
    match reduction(sequential, aware) {
        None => "–".to_owned(),
        Some(percent) if percent.is_infinite() => "new".to_owned(),
        Some(percent) if percent.abs() < 0.05 => "0.0 %".to_owned(),
        Some(percent) => format!("{:+.1} %", -percent).replace('-', "−"),
    }
}

fn text(lines: &[Row], style: Style) -> String {
    let head = [
        ("TRACE", Align::Left),
        ("MODEL", Align::Left),
        ("LINK", Align::Right),
        ("EXTRA seq", Align::Right),
        ("ordered", Align::Right),
        ("", Align::Right),
        ("REMOTE READS seq", Align::Right),
        ("ordered", Align::Right),
        ("", Align::Right),
        ("TIME", Align::Right),
        ("", Align::Left),
    ];
    let row = |line: &Row| {
        let Cell { strategy, sequential, aware } = &line.cell;
        let failed = sequential.failed + aware.failed;
        [
            line.trace.clone(),
            strategy.to_string(),
            link(line.bandwidth, line.delay),
            bytes(sequential.extra_bytes as u64),
            bytes(aware.extra_bytes as u64),
            change(sequential.extra_bytes, aware.extra_bytes),
            format!("{:.0}", sequential.remote_reads),
            format!("{:.0}", aware.remote_reads),
            change(sequential.remote_reads, aware.remote_reads),
            change(sequential.total, aware.total),
            if failed == 0 {
                String::new()
            } else {
                format!("{} and {} of {} failed", sequential.failed, aware.failed, aware.runs)
            },
        ]
    };
    table(head, &lines.iter().map(row).collect::<Vec<_>>(), style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_read_well() {
        assert_eq!(change(100.0, 24.0), "−76.0 %");
        assert_eq!(change(100.0, 102.0), "+2.0 %");
        assert_eq!(change(0.0, 0.0), "–");
        assert_eq!(change(0.0, 1.0), "new");
        assert_eq!(change(1e9, 1e9), "0.0 %");
    }
}
