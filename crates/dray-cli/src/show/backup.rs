//! Backups on a terminal.

use super::lineage::{ago, now_unix_ms};
use super::style::Style;
use super::table::{Align, table};
use super::units::{bytes, counted, millis, seconds};
use dray_api::{
    BackedUp, BackupCollected, BackupDone, BackupListing, BackupProgress, BackupPruned,
    BackupStatus, BackupVerified, Consistency, DestinationStatus, RepositoryMade, Restored,
};

const fn consistency(consistency: Consistency) -> &'static str {
    match consistency {
        Consistency::Crash => "crash",
        Consistency::Filesystem => "filesystem",
    }
}

/// A backup that was made.
pub fn made(done: &BackupDone, style: Style) -> String {
    let mut text = String::new();
    for image in &done.images {
        text += &image_made(image, style);
    }
    text += &format!(
        "in '{}' after {}; consistent as after {}; writes were held back for {}\n",
        done.to,
        seconds(done.seconds),
        match done.consistency {
            Consistency::Crash => "a power cut",
            Consistency::Filesystem => "a freeze of the file systems",
        },
        millis(done.quiet_ms)
    );
    if done.pruned > 0 {
        text += &format!("{} removed\n", counted(done.pruned, "earlier backup"));
    }
    text
}

fn image_made(image: &BackedUp, style: Style) -> String {
    let at = &image.generation;
    let how = match (&image.parent, &image.full_because) {
        (Some(parent), _) => format!("since generation {}", parent.number),
        (None, Some(why)) => format!("in full: {why}"),
        (None, None) => "in full".to_owned(),
    };
    let aside = match image.kept_aside_bytes {
        0 => String::new(),
        kept => format!(", {} kept aside", bytes(kept)),
    };
    format!(
        "{} generation {} ({how}): {} changed, {} stored{aside}\n",
        style.bold(&image.image),
        at.number,
        bytes(image.changed_bytes),
        bytes(image.stored_bytes)
    )
}

/// What there is.
pub fn listing(found: &BackupListing, style: Style) -> String {
    let mut text = String::new();
    for running in &found.running {
        text += &under_way(running, style);
    }
    if !found.destinations.is_empty() {
        text += &destinations(&found.destinations, style);
    }
    if !found.backups.is_empty() {
        text += &backups(&found.backups, style);
    }
    for fault in &found.damaged {
        text += &format!("{}\n", style.bad(&format!("cannot be read: {fault}")));
    }
    if text.is_empty() {
        text = "no backups; `dray backup IMAGE --to URL` makes one\n".to_owned();
    }
    text
}

/// What is configured and under way. What lies in a repository that was named in a command is not asked for.
pub fn overview(found: &BackupListing, style: Style) -> String {
    let mut text = String::new();
    if found.destinations.is_empty() {
        let running = if found.running.is_empty() { ", and no backup is running" } else { "" };
        text += &format!("no repository is configured{running}\n");
    }
    if !found.running.is_empty() || !found.destinations.is_empty() {
        text += &listing(found, style);
    }
    text + "`dray backups list URL|NAME` lists the backups in a repository\n"
}

fn under_way(running: &BackupProgress, style: Style) -> String {
    let mut text = String::new();
    for image in &running.images {
        let name = style.bold(&image.image);
        let (done, total) = (bytes(image.bytes_done), bytes(image.bytes_total));
        text += &format!("{name} is being backed up to '{}': {done} of {total}\n", running.to);
    }
    text
}

fn destinations(all: &[DestinationStatus], style: Style) -> String {
    let head = [
        ("NAME", Align::Left),
        ("EVERY", Align::Right),
        ("LAST", Align::Left),
        ("IMAGES", Align::Left),
        ("URL", Align::Left),
    ];
    let now = now_unix_ms();
    let row = |place: &DestinationStatus| {
        let every = place.every_seconds.map(|every| seconds(every as f64));
        let last = place.last_unix_ms.map(|last| ago(last, now));
        [
            place.name.clone(),
            every.unwrap_or_else(|| "-".to_owned()),
            last.unwrap_or_else(|| "-".to_owned()),
            place.images.join(","),
            place.url.clone(),
        ]
    };
    let rows: Vec<[String; 5]> = all.iter().map(row).collect();
    let mut text = table(head, &rows, style);
    for place in all {
        if let Some(why) = &place.error {
            text += &format!("{}\n", style.bad(&format!("{}: {why}", place.name)));
        }
    }
    text
}

fn backups(all: &[BackupStatus], style: Style) -> String {
    let head = [
        ("IMAGE", Align::Left),
        ("GENERATION", Align::Right),
        ("ID", Align::Left),
        ("TAKEN", Align::Left),
        ("SIZE", Align::Right),
        ("ADDED", Align::Right),
        ("HOST", Align::Left),
        ("CONSISTENT", Align::Left),
    ];
    let now = now_unix_ms();
    let row = |backup: &BackupStatus| {
        [
            backup.image.clone(),
            backup.generation.number.to_string(),
            backup.generation.id.to_string().chars().take(8).collect(),
            ago(backup.taken_unix_ms, now),
            bytes(backup.size),
            bytes(backup.added_bytes),
            backup.host.clone(),
            consistency(backup.consistency).to_owned(),
        ]
    };
    let rows: Vec<[String; 8]> = all.iter().map(row).collect();
    table(head, &rows, style)
}

/// A repository that was made.
pub fn repository_made(made: &RepositoryMade, style: Style) -> String {
    let how = if made.encrypted { "encrypted" } else { "not encrypted" };
    format!("{} is a repository now, {how}\n", style.bold(&made.at))
}

/// A backup that was told to end.
pub fn cancelled(progress: &BackupProgress, _: Style) -> String {
    format!("the backup to '{}' is cancelled; nothing of it stays\n", progress.to)
}

/// What was removed.
pub fn pruned(done: &BackupPruned, style: Style) -> String {
    let mut text = String::new();
    if !done.removed.is_empty() {
        text += &backups(&done.removed, style);
    }
    let went = if done.dry_run { "would be removed" } else { "removed" };
    let removed = counted(done.removed.len() as u64, "backup");
    text + &format!("{removed} {went}, {} kept\n", counted(done.kept, "backup"))
}

/// What a collection did.
pub fn collected(done: &BackupCollected, _: Style) -> String {
    let mut text = format!("{} given back", bytes(done.removed_bytes));
    if done.condemned_bytes > 0 {
        text += &format!(", {} to be given back by the next run", bytes(done.condemned_bytes));
        text += " after the grace period of 24 hours";
    }
    if done.fenced_writers > 0 {
        text += &format!(", {} given up", counted(done.fenced_writers, "silent writer"));
    }
    text + "\n"
}

/// Backups without a fault.
pub fn verified(found: &BackupVerified, style: Style) -> String {
    let read = match found.bytes_read {
        0 => "their descriptions were read".to_owned(),
        read => format!("{} of content were read", bytes(read)),
    };
    format!("{} in order; {read}\n", style.good(&counted(found.backups, "backup")))
}

/// An image that was made of a backup.
pub fn restored(done: &Restored, style: Style) -> String {
    format!(
        "{} is generation {} of '{}': {}, {} of it written, in {}\n{}\n",
        style.bold(&done.image),
        done.generation.number,
        done.of,
        bytes(done.size),
        bytes(done.written_bytes),
        seconds(done.seconds),
        done.path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_asked_for_is_not_called_absent() {
        let style = Style { colour: false };
        let nothing = overview(&BackupListing::default(), style);
        assert!(nothing.starts_with("no repository is configured, and no backup is running\n"));
        assert!(
            nothing.contains("`dray backups list URL|NAME`") && !nothing.contains("no backups")
        );
        let to = "file:///nas".to_owned();
        let running = vec![BackupProgress { to, images: Vec::new(), elapsed_seconds: 1.0 }];
        let running = BackupListing { running, ..BackupListing::default() };
        assert!(!overview(&running, style).contains("no backup is running"));
    }
}
