//! After a crash between two steps of a release or of an adoption: where a disk is says what is left
//! to be done.

use super::watch::Doubt;
use super::{NotReleased, absorb, begin_release, close_to_others, plan_of, taking};
use dray_config::Config;
use dray_host::abort;
use dray_host::registry::{Entry, Registry};
use dray_host::released::Released;
use dray_qemu::bitmap;
use dray_qemu::{LayerPlan, Qmp};
use dray_types::BlockSet;
use std::io;
use std::path::Path;

/// The disk of an image that is registered here is on its own file, as `seen`: a release came to its pivot
/// and is finished, or an adoption did not and is undone, which comes to the same. QEMU holds its own
/// locks, and nobody was served.
///
/// # Errors
/// What QEMU or the store reports.
pub async fn settle_on_file(
    registry: &Registry,
    config: &Config,
    qmp: &Qmp,
    seen: &LayerPlan,
    entry: &Entry,
) -> Result<(), NotReleased> {
    let record = entry.record();
    entry.drop_locks();
    close_to_others(entry);
    let noted = match registry.released.of(record.id) {
        Some(note) => Some(note),
        None => note_again(registry, qmp, entry).await?,
    };
    let Some(note) = noted else {
        // Adopted for the first time, and not for long: nobody has a part of it.
        return forget_told(registry, config, qmp, seen, entry).await;
    };
    tracing::info!(image = record.name, "completing a release that was interrupted");
    // A disk that was released and had not come back has its bitmap as before. Of an exchange that was cut off
    // nobody has watched the file.
    let tracked = note.done && is_recorded(qmp, &note).await?;
    registry.end_release(entry, note, tracked)?;
    forget_told(registry, config, qmp, seen, entry).await
}

async fn is_recorded(qmp: &Qmp, note: &Released) -> Result<bool, NotReleased> {
    let Some(name) = &note.bitmap else { return Ok(false) };
    let found = bitmap::recorded(qmp, plan_of(note)?.local_node(), name).await;
    Ok(found.map_err(NotReleased::Qemu)?.is_some())
}

/// Forgets an image whose disk is on its file. One whose guest is still to be told of a loss comes back
/// instead, which settles it as well.
async fn forget_told(
    registry: &Registry,
    config: &Config,
    qmp: &Qmp,
    seen: &LayerPlan,
    entry: &Entry,
) -> Result<(), NotReleased> {
    match taking::unless_told(registry, config, qmp, seen, entry).await {
        Ok(()) => Ok(registry.forget(&entry.record().name)?),
        Err(NotReleased::Untold(_)) => Ok(()),
        Err(why) => Err(why),
    }
}

/// The note without which nobody would know how the disk's nodes are made.
async fn note_again(registry: &Registry, qmp: &Qmp, entry: &Entry) -> io::Result<Option<Released>> {
    let record = entry.record();
    let Some(adopted) = record.adopted.as_ref().filter(|adopted| adopted.noted) else {
        return Ok(None);
    };
    let plan = serde_json::from_value(adopted.splice.clone()).map_err(io::Error::other)?;
    begin_release(registry, qmp, &plan, entry).await
}

/// The disk of an image is on dray, after an exchange that was cut off: nobody has watched its file, so everything
/// counts as changed.
///
/// # Errors
/// What the store reports.
pub async fn settle_on_dray(
    registry: &Registry,
    qmp: &Qmp,
    plan: &LayerPlan,
    entry: &Entry,
    run_dir: &Path,
) -> io::Result<()> {
    // No later: from here on nothing is written that dray does not see.
    entry.regain_locks();
    match registry.released.of(entry.record().id) {
        // An adoption that came to its pivot. The old node may still be there.
        Some(note) if note.done => {
            let alone = Err(Doubt::Unwatched);
            end_adoption(registry, qmp, plan, (&note, alone), entry, run_dir).await?;
        }
        Some(_) => undo_release(registry, entry, Err(Doubt::Unwatched))?,
        None => {}
    }
    registry.end_adoption(entry)
}

/// The disk of an image that was to be released is on dray, whose locks are there again if they are to be had.
/// What dray tracked is everything if it was alone with the file and QEMU.
///
/// # Errors
/// What the store reports; the line stays suspect.
pub fn undo_release(
    registry: &Registry,
    entry: &Entry,
    alone: Result<(), Doubt>,
) -> io::Result<()> {
    if let (Err(why), Some(line)) = (alone, entry.line()) {
        let image = entry.record().name;
        tracing::warn!(image, %why, "dray treats the whole disk as changed");
        line.settle(&entry.disk, None)?;
    }
    registry.undo_release(entry)
}

/// The pivot is done: what QEMU wrote meanwhile is read and written down, and the note goes. The
/// reason when it could not be read: everything counts as changed then.
///
/// # Errors
/// What the store reports; the line stays suspect.
pub async fn end_adoption(
    registry: &Registry,
    qmp: &Qmp,
    plan: &LayerPlan,
    (note, alone): (&Released, Result<(), Doubt>),
    entry: &Entry,
    run_dir: &Path,
) -> io::Result<Option<String>> {
    abort::step("AdoptAbsorb");
    let changed = match alone {
        Ok(()) => absorb::changed(qmp, plan, note, entry, run_dir).await,
        Err(why) => Err(io::Error::other(why.to_string())),
    };
    abort::step("AdoptSettle");
    let Some(line) = entry.line() else { return Ok(None) };
    let (changed, why) = match changed {
        Ok(changed) => (Some(changed), None),
        Err(why) => (None, Some(why.to_string())),
    };
    line.settle(&entry.disk, changed.as_ref())?;
    let blocks = changed.as_ref().map(BlockSet::len);
    tracing::info!(image = note.image.name, blocks, why, "a released image is on dray again");
    abort::step("AdoptNote");
    registry.released.remove(note.image.id)?;
    Ok(why)
}
