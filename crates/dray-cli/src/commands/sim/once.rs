//! `dray sim TRACE…`: migrations one by one.

use super::{Common, Input, link, mixed, replay_failed};
use crate::output::Output;
use crate::show::style::Style;
use crate::show::table::{Align, fields};
use crate::show::units::{bytes, count, millis, seconds};
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_sim::replay::study::{Mean, Starts};
use dray_sim::replay::{Order, Outcome, Settings, replay};
use dray_types::{BitRate, Strategy};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `dray sim` without a subcommand.
#[derive(clap::Args, Debug)]
#[group(id = "once")]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// The blocks that move before the guest, and those that move after it
    #[arg(long, default_value = "hybrid")]
    strategy: Strategy,
    /// Order in which blocks move: workload-aware, sequential, paper or paper-incremental
    #[arg(long, default_value = "workload-aware")]
    order: Order,
    /// Rate of the link, as 100Mbit or 1Gbit [default: a migration lasts half of a file; 100Mbit for a load]
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<BitRate>,
    /// Begin of the migration, in seconds of the trace [default: at random]
    #[arg(long, value_name = "SECONDS", conflicts_with = "starts")]
    start: Option<f64>,
    /// Number of random starts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    starts: u32,
    /// Draw the first migration into this file: time against block number
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Simulates one migration of each input and prints its summary.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    let mut first = true;
    for input in args.common.inputs()? {
        let bandwidth = args.bandwidth.map(|rate| rate.bytes_per_second);
        let given = args.start.map(|start| (start.max(0.0) * 1e9) as u64);
        given.map_or(Ok(()), |start| input.check_start(start))?;
        let (delay, mut starts) = input.starts(bandwidth, args.starts, &args.common)?;
        if let Some(start) = given {
            starts.at = vec![start];
        }
        let mut settings = args.common.settings(&input, delay, args.strategy, args.order)?;
        settings.bandwidth = starts.bandwidth;
        let mut outcomes = Vec::new();
        for &start in &starts.at {
            let picture = args.svg.is_some() && std::mem::take(&mut first);
            let settings = Settings { start, picture, ..settings.clone() };
            let outcome = one(&input, &starts, &settings)?;
            if let (Some(path), Some(picture)) = (&args.svg, &outcome.picture) {
                let title = format!("{}, {}", input.name, describe(&settings));
                write(path, &picture.svg(&title))?;
            }
            outcomes.push((start, outcome));
        }
        show(&input, &settings, &outcomes, output);
    }
    Ok(ExitCode::SUCCESS)
}

fn one(input: &Input, starts: &Starts, settings: &Settings) -> ApiResult<Outcome> {
    let records =
        input.open(starts).map_err(|error| super::trace_failed("cannot use the trace", &error))?;
    replay(settings, records).map_err(|error| replay_failed(&input.name, error))
}

fn write(path: &std::path::Path, svg: &str) -> ApiResult<()> {
    std::fs::write(path, svg)
        .map_err(|why| Refusal::new(ErrorKind::Io, format!("cannot write {}", path.display()), why))
}

fn describe(settings: &Settings) -> String {
    let Settings { strategy, order, bandwidth, delay, .. } = settings;
    format!("{strategy}, {order}, {}", link(*bandwidth, *delay))
}

fn show(input: &Input, settings: &Settings, outcomes: &[(u64, Outcome)], output: &Output) {
    let all: Vec<Outcome> = outcomes.iter().map(|(_, outcome)| outcome.clone()).collect();
    let runs: Vec<Value> =
        outcomes.iter().map(|(start, outcome)| as_json(*start, outcome)).collect();
    let result = json!({
        "trace": input.name,
        "strategy": settings.strategy,
        "order": settings.order.to_string(),
        "disk": settings.disk,
        "memory": settings.memory,
        "bandwidth": settings.bandwidth,
        "delay_ns": settings.delay,
        "history": settings.history,
        "runs": runs,
    });
    output.result(&result, |_, style| {
        let head = format!(
            "{}: {} and {} of memory, {}\n",
            style.bold(&input.name),
            bytes(settings.disk),
            bytes(settings.memory),
            describe(settings)
        );
        let text = match outcomes {
            [(start, outcome)] => details(*start, outcome, settings.order, style),
            _ => rows(outcomes, style) + &means(&Mean::of(&all), style),
        };
        head + &text
    });
}

pub fn as_json(start: u64, outcome: &Outcome) -> Value {
    json!({
        "start_ns": start,
        "failed": outcome.failed,
        "total_ns": outcome.total,
        "handover_ns": outcome.handover,
        "downtime_ns": outcome.downtime,
        "extra_bytes": outcome.extra_bytes,
        "missing_bytes": outcome.missing_bytes,
        "remote_reads": outcome.reads.count,
        "remote_read_bytes": outcome.reads.bytes,
        "remote_read_wait_ns": outcome.reads.total,
        "remote_writes": outcome.writes.count,
        "urgent_bytes": outcome.urgent_bytes,
        "throttled": outcome.throttled,
        "stopped": outcome.stopped,
        "first_bytes": outcome.first_bytes,
        "memory_bytes": outcome.memory_bytes,
        "cancelled_bytes": outcome.cancelled_bytes,
        "left_bytes": outcome.left_bytes,
        "wire_bytes": outcome.wire_bytes(),
        "rounds": outcome.rounds,
        "jumps": outcome.seeks,
        "write_chunk": outcome.chunks.0,
        "read_chunk": outcome.chunks.1,
        "records": outcome.records,
    })
}

fn time(nanos: u64) -> String {
    seconds(nanos as f64 / 1e9)
}

fn details(start: u64, outcome: &Outcome, order: Order, style: Style) -> String {
    let mut lines = vec![("start", format!("{} into the trace", time(start)))];
    if let Some(why) = &outcome.failed {
        lines.push(("failed", why.clone()));
    }
    lines.push(("total time", time(outcome.total)));
    if let Some(handover) = outcome.handover {
        lines.push(("guest at target", format!("after {}", time(handover))));
        lines.push(("downtime", millis(outcome.downtime as f64 / 1e6)));
    }
    lines.push(("on the wire", bytes(outcome.wire_bytes())));
    lines.push(("extra traffic", format!("{} sent again", bytes(outcome.extra_bytes))));
    let reads = &outcome.reads;
    let waits = format!(
        "{} ({}), mean wait {}, longest {}",
        count(reads.count),
        bytes(reads.bytes),
        millis(reads.mean() / 1e6),
        millis(reads.longest as f64 / 1e6)
    );
    lines.push(("remote reads", waits));
    lines.push(("throttled", count(outcome.throttled)));
    if outcome.left_bytes > 0 {
        lines.push(("still missing", bytes(outcome.left_bytes)));
    }
    if outcome.chunks != (0, 0) {
        let (writes, reads) = outcome.chunks;
        let chunks = match mixed(order) {
            Some(mixture) => format!("{mixture} of {} and more", bytes(writes.min(reads))),
            None => format!("{} by writes, {} by reads", bytes(writes), bytes(reads)),
        };
        lines.push(("chunks", chunks));
        lines.push(("jumps", count(outcome.seeks)));
    }
    fields(&lines, style)
}

fn rows(outcomes: &[(u64, Outcome)], style: Style) -> String {
    let head = [
        ("START", Align::Right),
        ("TOTAL", Align::Right),
        ("DOWNTIME", Align::Right),
        ("EXTRA", Align::Right),
        ("REMOTE READS", Align::Right),
        ("THROTTLED", Align::Right),
        ("", Align::Left),
    ];
    let row = |(start, outcome): &(u64, Outcome)| {
        [
            time(*start),
            time(outcome.total),
            millis(outcome.downtime as f64 / 1e6),
            bytes(outcome.extra_bytes),
            count(outcome.reads.count),
            count(outcome.throttled),
            outcome.failed.as_ref().map_or(String::new(), |_| "did not converge".to_owned()),
        ]
    };
    let rows: Vec<_> = outcomes.iter().map(row).collect();
    crate::show::table::table(head, &rows, style)
}

fn means(mean: &Mean, style: Style) -> String {
    let lines = [
        ("mean total time", seconds(mean.total / 1e9)),
        ("mean extra traffic", bytes(mean.extra_bytes as u64)),
        (
            "mean remote reads",
            format!("{:.0} ({})", mean.remote_reads, bytes(mean.remote_bytes as u64)),
        ),
        ("mean wait", millis(mean.wait / 1e6)),
    ];
    fields(&lines, style)
}
