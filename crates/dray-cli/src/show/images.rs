//! Images on a terminal.

use super::lineage::{ago, now_unix_ms};
use super::style::Style;
use super::table::{Align, table};
use super::units::{BLOCK, bytes, counted};
use dray_api::{ImageState, ImageStatus, KeptFor, NotLocked, Spliced};

const fn state(state: ImageState) -> &'static str {
    match state {
        ImageState::Owner => "owner",
        ImageState::Incoming => "incoming",
        ImageState::Replica => "replica",
        ImageState::Released => "released",
        ImageState::Unknown => "unknown",
    }
}

/// All images as a table.
pub fn list(images: &[ImageStatus], style: Style) -> String {
    if images.is_empty() {
        return "no images; `dray images add NAME PATH` or `dray adopt` brings some\n".to_owned();
    }
    let head = [
        ("NAME", Align::Left),
        ("STATE", Align::Left),
        ("SIZE", Align::Right),
        ("ALLOCATED", Align::Right),
        ("MISSING", Align::Right),
        ("CLIENTS", Align::Right),
        ("EPOCH", Align::Right),
        ("PATH", Align::Left),
    ];
    let rows: Vec<[String; 8]> = images.iter().map(row).collect();
    table(head, &rows, style)
        + &closed(images, style)
        + &not_locked(images, style)
        + &losses(images, style)
}

/// Why images are closed, and what to do about it.
fn closed(images: &[ImageStatus], style: Style) -> String {
    let mut text = String::new();
    for image in images {
        let Some(closed) = &image.closed else { continue };
        let name = style.bad(&image.name);
        text += &format!("\n{name} is closed: {}\n  {}\n", closed.why, closed.hint);
    }
    text
}

/// Whose files other programs have, and what to do about it.
fn not_locked(images: &[ImageStatus], style: Style) -> String {
    let mut text = String::new();
    for image in images {
        let Some(NotLocked { why, hint }) = &image.not_locked else { continue };
        let name = style.bad(&image.name);
        text += &format!("\n{name} is not locked: {why}\n  {hint}\n");
    }
    text
}

/// Whose writes may be lost, and whether their guests know.
fn losses(images: &[ImageStatus], style: Style) -> String {
    let mut text = String::new();
    for image in images {
        let Some(lost) = &image.write_back_error else { continue };
        let name = style.bad(&image.name);
        let times = counted(lost.count, "error");
        text += &format!("\nwrites to {name} may be lost: {} ({times})\n  ", lost.why);
        text += match (lost.told, image.state) {
            (true, _) => "a flush of its guest has reported this; check the guest's data\n",
            (false, ImageState::Owner) => {
                "its guest does not know yet: the next flush of the guest fails\n"
            }
            (false, _) => "no guest uses this copy; dray does not trust it\n",
        };
    }
    text
}

fn row(image: &ImageStatus) -> [String; 8] {
    let missing = match image.missing_blocks {
        0 => "-".to_owned(),
        blocks => bytes(blocks.saturating_mul(BLOCK)),
    };
    [
        image.name.clone(),
        state(image.state).to_owned() + &remark(image),
        bytes(image.size),
        bytes(image.allocated),
        missing,
        image.clients.to_string(),
        image.epoch.0.to_string(),
        image.path.display().to_string(),
    ]
}

/// What the state alone does not say.
fn remark(image: &ImageStatus) -> String {
    if image.closed.is_some() {
        return " (closed)".to_owned();
    }
    match &image.kept_for {
        Some(KeptFor { host, bytes: Some(needed) }) => {
            format!(" ({host} needs {})", bytes(*needed))
        }
        Some(KeptFor { host, bytes: None }) => format!(" (kept for {host})"),
        None if image.not_locked.is_some() => " (not locked)".to_owned(),
        None if image.state == ImageState::Released => released(image, now_unix_ms()),
        None if image.in_place => " (read-only, in place)".to_owned(),
        None if image.read_only => " (read-only)".to_owned(),
        None => replica(image, now_unix_ms()).unwrap_or_default(),
    }
}

/// Who tracks what is written to a released image, and since when.
fn released(image: &ImageStatus, now: u64) -> String {
    let since =
        image.since_unix_ms.map_or_else(String::new, |since| format!("{}, ", ago(since, now)));
    match image.tracked_by {
        Some(pid) => format!(" ({since}tracked by QEMU {pid})"),
        None => format!(" ({since}not tracked)"),
    }
}

/// What a replica holds, and since when.
fn replica(image: &ImageStatus, now: u64) -> Option<String> {
    let (generation, since) = (image.generation?, image.since_unix_ms?);
    Some(format!(" (generation {}, left {})", generation.number, ago(since, now)))
}

/// The disks that were adopted (`"adopted"`) or released (`"released"`).
pub fn spliced(spliced: &Spliced, done: &str, style: Style) -> String {
    let mut text = String::new();
    for disk in &spliced.disks {
        let name = style.bold(&disk.device);
        let path = disk.path.display();
        let image = &disk.image;
        text += &format!("{done} {name}: image {image}, {path}, in {:.1} ms\n", disk.ms);
    }
    if text.is_empty() {
        text = format!("nothing to do: no disk was {done}\n");
    }
    text
}
