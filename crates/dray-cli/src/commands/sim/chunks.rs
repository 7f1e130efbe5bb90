//! `dray sim chunks`: the selected chunk size against the best and the worst one.

use super::{Common, link, mixed, replay_failed};
use crate::output::Output;
use crate::show::style::Style;
use crate::show::table::{Align, table};
use crate::show::units::bytes;
use dray_api::ApiResult;
use dray_sim::replay::Order;
use dray_sim::replay::study::{Gain, chunk_gains};
use dray_types::{BitRate, Strategy};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Arguments of `dray sim chunks`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// Model whose extra traffic is compared: hybrid as in the literature, or pre-copy
    #[arg(long, default_value = "hybrid")]
    strategy: Strategy,
    /// Order whose choice is compared: workload-aware, or paper or paper-incremental (algorithms of the
    /// literature)
    #[arg(long, default_value = "workload-aware")]
    order: Order,
    /// Rate of the link [default: a migration lasts half of a file; 100Mbit for a load]
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<BitRate>,
    /// Number of random starts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    starts: u32,
}

struct Row {
    trace: String,
    bandwidth: u64,
    delay: u64,
    selected: Gain,
    fixed: Vec<Gain>,
}

/// Replays traces with several chunk sizes and prints what each would cost.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    let mut lines = Vec::new();
    for input in args.common.inputs()? {
        let bandwidth = args.bandwidth.map(|rate| rate.bytes_per_second);
        let (delay, starts) = input.starts(bandwidth, args.starts, &args.common)?;
        let link = link(starts.bandwidth, delay);
        output.note(&format!("{}, {}, {link}", input.name, args.strategy));
        let settings = args.common.settings(&input, delay, args.strategy, args.order)?;
        let (selected, fixed) = chunk_gains(&settings, &starts, &|| input.open(&starts))
            .map_err(|error| replay_failed(&input.name, error))?;
        let (trace, bandwidth) = (input.name, starts.bandwidth);
        lines.push(Row { trace, bandwidth, delay, selected, fixed });
    }
    let result = json!({
        "strategy": args.strategy,
        "order": args.order.to_string(),
        "starts": args.starts,
        "rows": lines.iter().map(as_json).collect::<Vec<_>>(),
    });
    output.result(&result, |_, style| text(&lines, args.order, style));
    Ok(ExitCode::SUCCESS)
}

fn gain(gain: &Gain) -> Value {
    json!({ "chunk": gain.size, "gain_percent": gain.percent.filter(|percent| percent.is_finite()) })
}

fn as_json(line: &Row) -> Value {
    json!({
        "trace": line.trace,
        "bandwidth": line.bandwidth,
        "delay_ns": line.delay,
        "selected": gain(&line.selected),
        "fixed": line.fixed.iter().map(gain).collect::<Vec<_>>(),
    })
}

/// The fixed sizes with the least and the greatest gain.
fn extremes(fixed: &[Gain]) -> Option<(&Gain, &Gain)> {
    let order = |a: &&Gain, b: &&Gain| {
        let value = |gain: &Gain| gain.percent.unwrap_or(0.0);
        value(a).total_cmp(&value(b))
    };
    Some((fixed.iter().min_by(order)?, fixed.iter().max_by(order)?))
}

fn text(lines: &[Row], order: Order, style: Style) -> String {
    let head = [
        ("TRACE", Align::Left),
        ("LINK", Align::Right),
        ("WORST", Align::Right),
        ("AT", Align::Right),
        ("BEST", Align::Right),
        ("AT", Align::Right),
        ("SELECTED", Align::Right),
        ("AT", Align::Right),
        ("OF BEST", Align::Right),
    ];
    let percent =
        |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.1} %"));
    let row = |line: &Row| {
        let size = |gain: &Gain| gain.size.map_or(String::new(), bytes);
        let (worst, best) = extremes(&line.fixed).unwrap_or((&line.selected, &line.selected));
        let share = match (line.selected.percent, best.percent) {
            (Some(selected), Some(best)) if best > 0.0 => Some(selected / best * 100.0),
            _ => None,
        };
        [
            line.trace.clone(),
            link(line.bandwidth, line.delay),
            percent(worst.percent),
            size(worst),
            percent(best.percent),
            size(best),
            percent(line.selected.percent),
            mixed(order).unwrap_or("each start's").to_owned(),
            percent(share),
        ]
    };
    table(head, &lines.iter().map(row).collect::<Vec<_>>(), style)
}
