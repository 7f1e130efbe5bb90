//! Predictions on a terminal.

use super::style::Style;
use super::table::{Align, table};
use super::units::{bytes, count, millis, rate, seconds};
use dray_api::{LinkFrom, Planned, PlannedImage, PlannedStrategy, Strategy, Subject};
use serde::Serialize;

/// One of several migrations that are planned.
#[derive(Serialize)]
pub struct PlannedMove {
    /// What moves.
    pub subject: Subject,
    /// What it would take.
    #[serde(flatten)]
    pub plan: Planned,
}

impl PlannedMove {
    /// Seconds that it would take with `auto`; without end when it would not end.
    pub fn seconds(&self) -> f64 {
        let auto = self.plan.strategies.iter().find(|one| one.strategy == Strategy::Auto);
        let predicted = auto.map(|one| &one.predicted).filter(|predicted| predicted.converges);
        predicted.map_or(f64::INFINITY, |predicted| predicted.total_seconds)
    }
}

/// Several migrations, each by itself, and what they send together.
pub fn planned_moves(moves: &[PlannedMove], style: Style) -> String {
    let one = |one: &PlannedMove| {
        let name = match &one.subject {
            Subject::Vm { qmp } => qmp.display().to_string(),
            Subject::Images { names } => names.join(", "),
        };
        format!("{}\n{}\n", style.bold(&name), planned(&one.plan, style))
    };
    let all: String = moves.iter().map(one).collect();
    let images = moves.iter().flat_map(|one| &one.plan.images);
    let (data, source) =
        images.fold((0, 0), |sum, image| (sum.0 + image.data, sum.1 + image.source));
    let (data, source) = (bytes(data), bytes(source));
    format!("{all}together: {data} of data, {source} of it from the source\n")
}

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
         {}\n{}\n{}",
        plan.to,
        bytes(plan.data),
        bytes(plan.memory),
        rate(plan.link),
        match plan.link_from {
            LinkFrom::Limit => "the limit".to_owned(),
            LinkFrom::Measured => "as measured last".to_owned(),
            LinkFrom::Assumed => format!("assumed; `dray peers {} --probe` measures it", plan.to),
        },
        millis(plan.rtt_ms),
        written(plan, style),
        from_where(plan, style),
        table(head, &rows, style),
    );
    for PlannedStrategy { strategy, predicted } in &plan.strategies {
        for missed in &predicted.missed {
            text += &format!("{}\n", style.warn(&format!("{strategy}: {missed}")));
        }
    }
    text
}

/// What the guest writes, or that nobody here sees it.
fn written(plan: &Planned, style: Style) -> String {
    let memory = rate(plan.memory_written);
    match plan.written {
        Some(written) => {
            format!("the guest writes {} to its disks and {memory} to its memory", rate(written))
        }
        None => {
            let unknown = "what it writes to its disks is unknown until they are under dray, and \
                           counts as nothing here";
            format!("the guest writes {memory} to its memory\n{}", style.warn(unknown))
        }
    }
}

/// Where each image's bytes would come from, and what cannot be used or is not known.
fn from_where(plan: &Planned, style: Style) -> String {
    let head = [("IMAGE", Align::Left), ("FROM", Align::Left), ("BYTES", Align::Right)];
    let rows: Vec<[String; 3]> =
        plan.images.iter().flat_map(|image| shares(image, &plan.to)).collect();
    if rows.is_empty() {
        return String::new();
    }
    let mut text = format!("\n{}", table(head, &rows, style));
    for image in &plan.images {
        for note in &image.notes {
            text += &format!("{}\n", style.warn(&format!("{}: {note}", image.image)));
        }
    }
    if let Some(why) = &plan.silent {
        let what = format!("the content of {} is not counted: {why}", plan.to);
        text += &format!("{}\n", style.warn(&what));
    }
    if let Some(indexed) = plan.indexed.filter(|&indexed| indexed > 0) {
        let (to, indexed) = (&plan.to, bytes(indexed));
        text += &format!(
            "how much of it {to} has elsewhere in its pools ({indexed} known there) is unknown until \
             measured\n"
        );
    }
    text
}

/// A row for each place that an image's bytes would come from; the source's is always there.
fn shares(image: &PlannedImage, to: &str) -> Vec<[String; 3]> {
    let generation = image.generation.map(|number| format!("generation {number}"));
    let of = |place: &str| match &generation {
        Some(generation) => format!("{place}, {generation}"),
        None => place.to_owned(),
    };
    let mut rows: Vec<(String, u64)> =
        image.given.iter().map(|(place, bytes)| (of(place), *bytes)).collect();
    if image.at_target > 0 {
        let what = if image.in_place { "base image at" } else { "replica at" };
        rows.push((of(&format!("{what} {to}")), image.at_target));
    }
    let source = match &generation {
        Some(generation) => format!("source, changed since {generation}"),
        None => "source".to_owned(),
    };
    rows.push((source, image.source));
    let name = |nth| if nth == 0 { image.image.clone() } else { String::new() };
    let row = |(nth, (from, amount))| [name(nth), from, bytes(amount)];
    rows.into_iter().enumerate().map(row).collect()
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
