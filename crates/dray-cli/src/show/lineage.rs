//! The generations of an image on a terminal, the newest first.

use super::style::Style;
use super::units::{BLOCK, bytes};
use dray_api::{ClosedGeneration, HeldAs, Holder, ImageState, LineageStatus};
use std::time::{SystemTime, UNIX_EPOCH};

/// Digits of an id that are shown: as many as tell apart whatever one host has.
const SHORT: usize = 8;

/// Milliseconds since 1970.
pub fn now_unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// How long ago something was, in its largest unit.
pub fn ago(then_unix_ms: u64, now_unix_ms: u64) -> String {
    let seconds = now_unix_ms.saturating_sub(then_unix_ms) / 1000;
    let (count, unit) = match seconds {
        0..120 => (seconds, "s"),
        120..7200 => (seconds / 60, "min"),
        7200..172_800 => (seconds / 3600, "h"),
        _ => (seconds / 86_400, "days"),
    };
    format!("{count} {unit} ago")
}

/// The line of an image, the open generation on top.
pub fn tree(line: &LineageStatus, now: u64, style: Style) -> String {
    let mut text = format!("{}\n", style.bold(&format!("{} ({})", line.image, line.id)));
    if let Some(open) = &line.open {
        let id = style.dim(&short(&open.id.to_string()));
        let written = line.changed_blocks.map(|blocks| format!(", {}", written(blocks, " so far")));
        let what = match line.state {
            ImageState::Replica => format!("replica here, on {}", line.host),
            ImageState::Released => format!("released to QEMU on {}", line.host),
            ImageState::Unknown => format!("unknown on {}", line.host),
            _ => format!("open on {}{}", line.host, written.unwrap_or_default()),
        };
        let mark = if line.state == ImageState::Replica { "○" } else { "●" };
        text += &format!("{mark} {:>3}  {id}  {what}\n", open.number);
    }
    for generation in line.past.iter().rev() {
        text += &row(generation, now, style);
        text += &holders(&generation.held);
    }
    for stray in line.strays.iter().rev() {
        let id = style.dim(&short(&stray.at.id.to_string()));
        text +=
            &format!("◌ {:>3}  {id}  not in this host's version of the line\n", stray.at.number);
        text += &holders(&stray.held);
    }
    for silent in &line.silent {
        text += &format!("{}\n", style.warn(&format!("not asked: {silent}")));
    }
    text
}

/// Who holds a generation, below it.
fn holders(held: &[Holder]) -> String {
    let one = |holder: &Holder| {
        let lost = match holder.distrusted_bytes {
            0 => String::new(),
            lost => format!(" without {}", bytes(lost)),
        };
        match holder.held_as {
            HeldAs::Backup => format!("{} (backup)", holder.place),
            HeldAs::Replica => format!("{} (replica{lost})", holder.place),
        }
    };
    let all: Vec<_> = held.iter().map(one).collect();
    if all.is_empty() { String::new() } else { format!("{:17}held by {}\n", "", all.join(", ")) }
}

fn row(generation: &ClosedGeneration, now: u64, style: Style) -> String {
    let id = style.dim(&short(&generation.at.id.to_string()));
    let when = ago(generation.closed_unix_ms, now);
    let here = if generation.here { " (here)" } else { "" };
    let changed = generation.changed_blocks.map(|blocks| format!(", {}", written(blocks, "")));
    let changed = changed.unwrap_or_default();
    let host = &generation.host;
    let what = match generation.reason.as_str() {
        "backup" if generation.backups.is_empty() => format!("closed on {host} {when}"),
        "backup" => {
            format!("in backup at {}, closed on {host} {when}", generation.backups.join(", "))
        }
        _ => format!("replica left on {host}{here} {when}"),
    };
    format!("○ {:>3}  {id}  {what}, {}{changed}\n", generation.at.number, generation.reason)
}

fn written(blocks: u64, when: &str) -> String {
    format!("{} written{when}", bytes(blocks.saturating_mul(BLOCK)))
}

fn short(id: &str) -> String {
    id.chars().take(SHORT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_told_in_their_largest_unit() {
        let ages = [0, 119, 120, 7199, 7200, 172_799, 172_800];
        let told = ages.map(|seconds| ago(5, 5 + seconds * 1000));
        let wanted = [
            "0 s ago",
            "119 s ago",
            "2 min ago",
            "119 min ago",
            "2 h ago",
            "47 h ago",
            "2 days ago",
        ];
        assert_eq!(told, wanted);
        assert_eq!(ago(9000, 5), "0 s ago", "clocks differ");
    }
}
