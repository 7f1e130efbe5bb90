//! Batches on a terminal: as a list, and the table that ends one.

use super::style::Style;
use super::table::{Align, table};
use super::units::{about, bytes, millis, rate, seconds};
use dray_api::{BatchStatus, MoveState, MoveStatus, Verified};

/// How much of an id is shown: enough to tell the batches of one host apart.
const SHORT_ID: usize = 8;

/// The start of a batch's id.
pub fn short(batch: &BatchStatus) -> String {
    batch.batch.to_string()[..SHORT_ID].to_owned()
}

/// A state in the words of a table.
const fn word(state: MoveState) -> &'static str {
    match state {
        MoveState::Waiting => "waiting",
        MoveState::Running => "running",
        MoveState::Completed => "moved",
        MoveState::Cancelled => "cancelled",
        MoveState::Failed => "failed",
    }
}

/// Where they go; several hosts when a program has asked for that.
fn hosts(batch: &BatchStatus) -> String {
    let mut hosts: Vec<_> = batch.moves.iter().map(|one| one.to.as_str()).collect();
    hosts.dedup();
    hosts.join(", ")
}

/// How many at a time, and what they may send.
pub fn terms(batch: &BatchStatus) -> String {
    let jobs = format!("{} at a time", batch.jobs);
    match batch.budget {
        Some(limit) => format!("{jobs}, at most {} together", rate(limit.bytes_per_second)),
        None => jobs,
    }
}

/// Batches as a table.
pub fn list(batches: &[BatchStatus], style: Style) -> String {
    if batches.is_empty() {
        return "no batches\n".to_owned();
    }
    let head = [
        ("BATCH", Align::Left),
        ("TO", Align::Left),
        ("STATE", Align::Left),
        ("MOVED", Align::Right),
        ("RUNNING", Align::Right),
        ("WAITING", Align::Right),
        ("NOT MOVED", Align::Right),
        ("RATE", Align::Right),
        ("LIMIT", Align::Right),
        ("TIME", Align::Right),
    ];
    let rows: Vec<[String; 10]> = batches.iter().map(row).collect();
    table(head, &rows, style)
}

fn row(batch: &BatchStatus) -> [String; 10] {
    let count = |state| batch.count(state).to_string();
    let lost = batch.count(MoveState::Failed) + batch.count(MoveState::Cancelled);
    [
        short(batch),
        hosts(batch),
        if batch.over { "over" } else { "running" }.to_owned(),
        count(MoveState::Completed),
        count(MoveState::Running),
        count(MoveState::Waiting),
        lost.to_string(),
        if batch.over { "-".to_owned() } else { rate(batch.rate) },
        batch.budget.map_or("none".to_owned(), |limit| rate(limit.bytes_per_second)),
        seconds(batch.elapsed_seconds),
    ]
}

/// What came of a batch, or of what is over of it: a line, a table, and why each failed.
pub fn ended(batch: &BatchStatus, style: Style) -> String {
    let head = [
        ("WHAT", Align::Left),
        ("RESULT", Align::Left),
        ("TOTAL", Align::Right),
        ("PREDICTED", Align::Right),
        ("DOWNTIME", Align::Right),
        ("ON THE WIRE", Align::Right),
        ("VERIFIED", Align::Left),
    ];
    let rows: Vec<[String; 7]> = batch.moves.iter().map(result_row).collect();
    let mut text = format!("{}\n\n{}", headline(batch, style), table(head, &rows, style));
    let mut reasons = String::new();
    for one in &batch.moves {
        let Some(error) = one.error.as_ref().filter(|_| one.state == MoveState::Failed) else {
            continue;
        };
        reasons += &format!("{} {error}\n", style.bad(&format!("{}:", one.name)));
        if let Some(hint) = &error.hint {
            reasons += &format!("{} {hint}\n", style.good("hint:"));
        }
    }
    if !reasons.is_empty() {
        text += &format!("\n{reasons}");
    }
    text
}

fn headline(batch: &BatchStatus, style: Style) -> String {
    let (moved, all) = (batch.count(MoveState::Completed), batch.moves.len());
    let (from, to, time) = (&batch.from, hosts(batch), seconds(batch.elapsed_seconds));
    let text = style.bold(&format!("moved {moved} of {all} from {from} to {to} in {time}"));
    let mark = if moved == all {
        style.good("✓")
    } else if batch.count(MoveState::Failed) > 0 {
        style.bad("✗")
    } else {
        style.warn("–")
    };
    let sent: u64 = summaries(batch).map(|one| one.wire_bytes.total).sum();
    let average = rate((sent as f64 / batch.elapsed_seconds.max(0.001)) as u64);
    let sent = format!("{} sent, {average} on average ({})", bytes(sent), terms(batch));
    format!("{mark} {text}\n  {}", style.dim(&sent))
}

fn summaries(batch: &BatchStatus) -> impl Iterator<Item = &dray_api::Summary> {
    batch.moves.iter().filter_map(|one| one.summary.as_ref())
}

fn result_row(one: &MoveStatus) -> [String; 7] {
    let none = || "-".to_owned();
    let summary = one.summary.as_ref();
    let downtime = summary.filter(|summary| summary.vm.is_some()).and_then(|s| s.downtime_ms);
    let verified = summary.map(|summary| match summary.verified {
        Verified::Equal => "yes",
        Verified::Different => "no",
        Verified::NotComparable => "not comparable",
        Verified::NothingCompared => "nothing compared",
        Verified::NotAsked => "not asked",
    });
    [
        one.name.clone(),
        word(one.state).to_owned(),
        summary.map_or_else(none, |summary| seconds(summary.total_seconds)),
        one.predicted_seconds.map_or_else(none, about),
        downtime.map_or_else(none, |downtime| millis(downtime.total)),
        summary.map_or_else(none, |summary| bytes(summary.wire_bytes.total)),
        verified.map_or_else(none, str::to_owned),
    ]
}
