//! Predictions on a terminal.

use super::style::Style;
use super::table::{Align, table};
use super::units::{bytes, count, millis, rate, seconds};
use dray_agent::api::{LinkFrom, Planned, PlannedStrategy};

/// What each strategy would take.
pub fn planned(plan: &Planned, style: Style) -> String {
    let head = [
        ("STRATEGY", Align::Left),
        ("TOTAL", Align::Right),
        ("MOVES AFTER", Align::Right),
        ("DOWNTIME", Align::Right),
        ("SENT", Align::Right),
        ("TWICE", Align::Right),
        ("REMOTE READS", Align::Right),
    ];
    let rows: Vec<[String; 7]> = plan.strategies.iter().map(row).collect();
    let mut text = format!(
        "to {}: {} of data and {} of memory at {} ({}), {} round trip\n\
         the guest writes {} to its disks and {} to its memory\n\n{}",
        plan.to,
        bytes(plan.data),
        bytes(plan.memory),
        rate(plan.link),
        match plan.link_from {
            LinkFrom::Limit => "the limit",
            LinkFrom::Measured => "as measured last",
            LinkFrom::Assumed => "assumed",
        },
        millis(plan.rtt_ms),
        rate(plan.written),
        rate(plan.memory_written),
        table(head, &rows, style),
    );
    for PlannedStrategy { strategy, predicted } in &plan.strategies {
        for missed in &predicted.missed {
            text += &format!("{}\n", style.warn(&format!("{strategy}: {missed}")));
        }
    }
    text
}

fn row(PlannedStrategy { strategy, predicted }: &PlannedStrategy) -> [String; 7] {
    let total = if predicted.converges {
        seconds(predicted.total_seconds)
    } else {
        "never ends".to_owned()
    };
    [
        strategy.to_string(),
        total,
        seconds(predicted.handover_seconds),
        millis(predicted.downtime_ms),
        bytes(predicted.bytes),
        bytes(predicted.bytes_twice),
        count(predicted.remote_reads),
    ]
}
