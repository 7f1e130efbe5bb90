//! The block that ends a migration.

use super::style::Style;
use super::table::fields;
use super::units::{bytes, count, counted, millis, rate, seconds};
use dray_api::{
    Compared, Downtime, Ending, ImageSummary, LinkFrom, PhaseSeconds, Predicted, Provided, Summary,
    Verified, WireBytes,
};

/// A label and what stands beside it.
type Labelled = (&'static str, String);

/// What separates parts of one line.
const DOT: &str = " · ";

/// The summary of a migration; with `detail` also each image.
pub fn summary(summary: &Summary, detail: bool, style: Style) -> String {
    let mut lines = times(summary, style);
    lines.extend(downtime(summary.downtime_ms.as_ref(), style));
    lines.extend(wire(&summary.wire_bytes, style));
    lines.extend(guest_data(summary, style));
    lines.extend(providers(summary, style));
    lines.extend(rounds(summary, style));
    if summary.blocks_mirrored > 0 {
        lines.push(("mirrored", counted(summary.blocks_mirrored, "block")));
    }
    lines.extend(slowed(summary));
    lines.push(("remote reads", count(summary.remote_reads)));
    lines.extend(predicted(summary, style));
    lines.extend(verified(summary.verified, summary.compared.as_ref(), style));
    lines.extend(summary.images.iter().filter_map(|image| qcow2(image, style)));
    lines.extend(not_released(summary, style));
    lines.push(("migration", style.dim(&summary.migration.to_string())));
    if detail {
        for image in &summary.images {
            let name = if image.image == image.name_at_target {
                image.image.clone()
            } else {
                format!("{} → {}", image.image, image.name_at_target)
            };
            let sent = counted(image.blocks_sent, "block");
            let twice = count(image.blocks_sent_twice);
            let size = bytes(image.bytes);
            let found = match image.bytes_from_target {
                0 => String::new(),
                found => format!(", {} reused", bytes(found)),
            };
            let text = format!("{name}: {size}, {sent} sent, {twice} more than once{found}");
            lines.push(("image", text));
        }
    }
    format!("{}\n\n{}", headline(summary, style), fields(&lines, style))
}

fn headline(summary: &Summary, style: Style) -> String {
    let images = counted(summary.images.len() as u64, "image");
    let what = match &summary.vm {
        Some(vm) => format!("{vm} ({images})"),
        None => images,
    };
    let Summary { from, to, .. } = summary;
    let time = seconds(summary.total_seconds);
    let Summary { strategy, order, .. } = summary;
    match summary.result {
        Ending::Completed => {
            let text = format!("moved {what} from {from} to {to} in {time}");
            format!(
                "{} {} {}",
                style.good("✓"),
                style.bold(&text),
                style.dim(&format!("({strategy}, {order})"))
            )
        }
        Ending::Cancelled => {
            let text = format!("cancelled after {time}: {what} stays at {from}");
            format!("{} {}", style.warn("–"), style.bold(&text))
        }
        Ending::Failed => {
            let text = format!("failed after {time}: {what} from {from} to {to}");
            format!("{} {}", style.bad("✗"), style.bold(&text))
        }
    }
}

/// The total and its phases, and what was done after it.
fn times(summary: &Summary, style: Style) -> Vec<Labelled> {
    let phases = &summary.phase_seconds;
    let total = match phases.total() {
        short if short < 9.995 => format!("{short:.2} s"),
        long => seconds(long),
    };
    let mut lines = total_and_parts("time", &total, &parts_of(phases), style);
    if phases.after >= 0.05 {
        let what = match summary.verified {
            Verified::NotAsked => "release",
            _ => "verify, release",
        };
        lines.extend(total_and_parts("afterwards", &seconds(phases.after), &[what.into()], style));
    }
    lines
}

/// Seconds of each phase, rounded so that they add up to the rounded total: the longest takes the difference. Those that
/// round to nothing are left out, but for the handover.
fn parts_of(phases: &PhaseSeconds) -> Vec<String> {
    let (unit, digits) = match phases.total() {
        short if short < 9.995 => (100.0, 2),
        short if short < 59.95 => (10.0, 1),
        _ => (1.0, 0),
    };
    let exact = [phases.prepare, phases.copy, phases.sync, phases.handover, phases.backfill];
    let mut shown = exact.map(|took| f64::round(took * unit));
    let off = f64::round(phases.total() * unit) - shown.iter().sum::<f64>();
    if let Some(longest) = shown.iter_mut().max_by(|one, other| one.total_cmp(other)) {
        *longest += off;
    }
    let named = ["prepare", "copy", "sync", "handover", "backfill"].into_iter().zip(shown);
    let parts = named.filter_map(|(name, shown)| match shown > 0.0 {
        true => Some(format!("{name} {:.digits$}", shown / unit)),
        false if name == "handover" && phases.handover > 0.0 => {
            Some(format!("{name} {}", millis(phases.handover * 1e3)))
        }
        false => None,
    });
    parts.collect()
}

fn downtime(downtime: Option<&Downtime>, style: Style) -> Vec<Labelled> {
    let Some(downtime) = downtime else {
        return vec![(
            "downtime",
            "unknown: the agent was restarted during the handover".to_owned(),
        )];
    };
    let parts = [
        ("memory", downtime.memory),
        ("quiesce", downtime.quiesce),
        ("map", downtime.map),
        ("commit", downtime.commit),
        ("resume", downtime.resume),
    ];
    let parts = parts.map(|(name, ms)| format!("{name} {ms:.1}"));
    total_and_parts("downtime", &millis(downtime.total), &parts, style)
}

fn wire(wire: &WireBytes, style: Style) -> Vec<Labelled> {
    let kinds = [
        ("raw", wire.raw),
        ("compressed", wire.compressed),
        ("zero", wire.zero),
        ("memory", wire.memory),
        ("control", wire.control),
        ("hash", wire.hash),
    ];
    let parts: Vec<String> = kinds
        .into_iter()
        .filter(|(_, amount)| *amount > 0)
        .map(|(name, amount)| format!("{name} {}", bytes(amount)))
        .collect();
    total_and_parts("on the wire", &bytes(wire.total), &parts, style)
}

fn guest_data(summary: &Summary, style: Style) -> Vec<Labelled> {
    let blocks = counted(summary.blocks_sent, "block");
    let twice = format!("{} sent more than once", count(summary.blocks_sent_twice));
    total_and_parts("guest data", &bytes(summary.guest_bytes), &[blocks, twice], style)
}

/// Where the bytes came from, a line for each place; nothing to say when all were the source's.
fn providers(summary: &Summary, style: Style) -> Vec<Labelled> {
    let source = |one: &&Provided| one.provider == "source";
    if summary.providers.iter().all(|one| source(&one)) {
        return Vec::new();
    }
    let line = |(nth, one): (usize, &Provided)| {
        let predicted = match one.predicted {
            Some(predicted) => format!("{}, {} predicted", one.provider, bytes(predicted)),
            None => format!("{}, unknown before", one.provider),
        };
        let text = format!("{:<TOTAL_WIDTH$} {}", bytes(one.bytes), style.dim(&predicted));
        (if nth == 0 { "came from" } else { "" }, text)
    };
    summary.providers.iter().enumerate().map(line).collect()
}

fn rounds(summary: &Summary, style: Style) -> Vec<Labelled> {
    let mut parts = Vec::new();
    if summary.resends > 0 {
        parts.push(counted(summary.resends, "resend"));
    }
    if summary.reconnects > 0 {
        parts.push(counted(summary.reconnects, "reconnect"));
    }
    total_and_parts("rounds", &count(summary.rounds.into()), &parts, style)
}

/// Nothing to say of a guest that was not slowed.
fn slowed(summary: &Summary) -> Option<Labelled> {
    let slowed = summary.throttled_operations > 0;
    let writes = counted(summary.throttled_operations, "write");
    let text = format!("{writes}, {} in all", millis(summary.throttled_ms));
    slowed.then_some(("slowed", text))
}

/// What was predicted, each with what came of it.
fn predicted(summary: &Summary, style: Style) -> Vec<Labelled> {
    let Some(predicted) = &summary.predicted else { return Vec::new() };
    let parts = |of: &Predicted| {
        let sent = format!("{} sent", bytes(of.bytes));
        let twice = format!("{} twice", bytes(of.bytes_twice));
        let reads = counted(of.remote_reads, "remote read");
        let assumed = if of.link_from == Some(LinkFrom::Assumed) { ", assumed" } else { "" };
        let link = format!("at {}{assumed}", rate(of.link));
        [format!("downtime {}", millis(of.downtime_ms)), sent, twice, reads, link]
    };
    let line = |label, of: &Predicted| {
        total_and_parts(label, &seconds(of.total_seconds), &parts(of), style)
    };
    let mut lines = line("predicted", predicted);
    if let Some(actual) = &summary.actual {
        lines.extend(line("actual", actual));
        lines.extend(actual.missed.iter().map(|missed| ("missed", style.warn(missed))));
    }
    lines
}

/// Why QEMU does not have the disks at the end.
fn not_released(summary: &Summary, style: Style) -> Option<Labelled> {
    let why = summary.not_released.as_ref()?;
    let text = format!(
        "no: the disks stay on dray at {} until you give `dray release` there: {why}",
        summary.to
    );
    Some(("released", style.warn(&text)))
}

/// What became of the qcow2 that was asked for.
fn qcow2(image: &ImageSummary, style: Style) -> Option<Labelled> {
    let name = &image.name_at_target;
    match (&image.qcow2, &image.stays_raw) {
        (Some(made), _) => Some(("qcow2", made.clone())),
        (None, Some(why)) => Some(("qcow2", style.warn(&format!("none: {name} stays raw: {why}")))),
        (None, None) => None,
    }
}

/// What verification has found, and how much it compared.
fn verified(verified: Verified, compared: Option<&Compared>, style: Style) -> Vec<Labelled> {
    let found = match verified {
        Verified::Equal => style.good("yes: the target was re-read and equals the source"),
        Verified::Different => style.bad("no: the target differs from the source"),
        Verified::NotComparable => {
            style.warn("not comparable: at the source, another image now has the name of an image")
        }
        Verified::NothingCompared => style.warn("no: nothing could be compared"),
        Verified::NotAsked => "not asked (--verify)".to_owned(),
    };
    let mut lines = vec![("verified", found)];
    let Some(Compared { blocks, of, why }) = compared else { return lines };
    let amount = format!("{} of {} compared", count(*blocks), counted(*of, "block"));
    // A guest that runs always writes some blocks: only when all are left out is the reason shown. It
    // has a line for each part, so that the block fits into 80 columns.
    let why = why.iter().filter(|_| verified == Verified::NothingCompared);
    let why = why.flat_map(|why| why.split_inclusive("; ")).map(str::trim_end);
    lines.extend(std::iter::once(&*amount).chain(why).map(|line| ("", style.dim(line))));
    lines
}

/// Width of the totals, so that the parts of all lines begin below each other.
const TOTAL_WIDTH: usize = 10;
/// Width of the parts: the block fits into 80 columns.
const PARTS_WIDTH: usize = 52;

/// A line of a label, a total and its parts; further lines for parts that do not fit.
fn total_and_parts(
    label: &'static str,
    total: &str,
    parts: &[String],
    style: Style,
) -> Vec<Labelled> {
    let mut rows = vec![String::new()];
    for part in parts {
        let row = rows.last().map_or(0, |row| row.chars().count());
        if row > 0 && row + DOT.chars().count() + part.chars().count() > PARTS_WIDTH {
            rows.push(String::new());
        }
        if let Some(row) = rows.last_mut() {
            let separator = if row.is_empty() { "" } else { DOT };
            *row += &format!("{separator}{part}");
        }
    }
    let line = |(nth, row): (usize, String)| {
        let (label, total) = if nth == 0 { (label, total) } else { ("", "") };
        let text = if row.is_empty() {
            total.to_owned()
        } else {
            format!("{total:<TOTAL_WIDTH$} {}", style.dim(&row))
        };
        (label, text)
    };
    rows.into_iter().enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_phases_that_are_shown_add_up() {
        let mut phases = PhaseSeconds {
            prepare: 0.004,
            copy: 1.844,
            sync: 0.004,
            handover: 0.021,
            backfill: 0.004,
            after: 9.0,
        };
        assert_eq!(parts_of(&phases), ["copy 1.86", "handover 0.02"]);
        phases.copy = 20.04;
        assert_eq!(parts_of(&phases), ["copy 20.1", "handover 21.0 ms"]);
        phases.copy = 100.4;
        assert_eq!(parts_of(&phases), ["copy 100", "handover 21.0 ms"]);
        (phases.copy, phases.handover) = (0.0, 0.0);
        assert_eq!(parts_of(&phases), ["backfill 0.01"]);
    }

    #[test]
    fn a_qcow2_that_was_asked_for_is_told_of() {
        let mut image = ImageSummary {
            image: "vm.qcow2".into(),
            name_at_target: "vm.raw".into(),
            bytes: 1,
            blocks_sent: 1,
            blocks_sent_twice: 0,
            bytes_in_place: 0,
            bytes_from_replica: 0,
            bytes_from_target: 0,
            given: Vec::new(),
            replica_not_used: None,
            qcow2: None,
            stays_raw: None,
        };
        let told = |image: &ImageSummary| qcow2(image, Style::default());
        assert_eq!(told(&image), None);
        image.stays_raw = Some("the pool is nearly full".into());
        let none = "none: vm.raw stays raw: the pool is nearly full";
        assert_eq!(told(&image), Some(("qcow2", none.to_owned())));
        image.qcow2 = Some("vm.qcow2".into());
        assert_eq!(told(&image), Some(("qcow2", "vm.qcow2".to_owned())));
    }

    #[test]
    fn what_was_not_compared_is_not_called_equal() {
        let told = |found, blocks| {
            let compared = Compared::new(blocks, 1024);
            verified(found, Some(&compared), Style::default()).into_iter().map(|(_, text)| text)
        };
        let nothing: Vec<_> = told(Verified::NothingCompared, 0).collect();
        assert_eq!(nothing[..2], ["no: nothing could be compared", "0 of 1,024 blocks compared"]);
        assert!(nothing[2].contains("may have written") && nothing[3].contains("64 MiB"));
        assert!(nothing.iter().all(|line| line.len() <= 63), "{nothing:?}");
        let all: Vec<_> = told(Verified::Equal, 1024).collect();
        assert_eq!(all[1..], ["1,024 of 1,024 blocks compared"]);
        let most: Vec<_> = told(Verified::Equal, 1000).collect();
        assert_eq!(most[1..], ["1,000 of 1,024 blocks compared"]);
    }
}
