//! After a crash between two steps of a release or of an adoption: where a disk is says what is left
//! to be done.

use super::{NotReleased, absorb, begin_release, plan_of, taking};
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
    let noted = match registry.released.of(record.id) {
        Some(note) => Some(note),
        None => note_again(registry, qmp, entry).await?,
    };
    let Some(note) = noted else {
        // Adopted for the first time, and not for long: nobody has a part of it.
        return forget_told(registry, config, qmp, seen, entry).await;
    };
    tracing::info!(image = record.name, "completing a release that was interrupted");
    let tracked = match &note.bitmap {
        Some(name) => {
            let found = bitmap::recorded(qmp, plan_of(&note)?.local_node(), name).await;
            found.map_err(NotReleased::Qemu)?.is_some()
        }
        None => false,
    };
    registry.end_release(entry, note, tracked)?;
    forget_told(registry, config, qmp, seen, entry).await
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

/// The disk of an image is on dray.
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
    match registry.released.of(entry.record().id) {
        // An adoption that came to its pivot. The old node may still be there.
        Some(note) if note.done => {
            end_adoption(registry, qmp, plan, &note, entry, run_dir).await?;
        }
        Some(_) => registry.undo_release(entry)?,
        None => {}
    }
    registry.end_adoption(entry)?;
    entry.regain_locks();
    Ok(())
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
    note: &Released,
    entry: &Entry,
    run_dir: &Path,
) -> io::Result<Option<String>> {
    abort::step("AdoptAbsorb");
    let changed = absorb::changed(qmp, plan, note, entry, run_dir).await;
    abort::step("AdoptSettle");
    let Some(line) = entry.line() else { return Ok(None) };
    let (changed, why) = match changed {
        Ok(changed) => (Some(changed), None),
        Err(why) => (None, Some(why)),
    };
    line.settle(&entry.disk, changed.as_ref())?;
    let blocks = changed.as_ref().map(BlockSet::len);
    tracing::info!(image = note.image.name, blocks, why, "a released image is on dray again");
    abort::step("AdoptNote");
    registry.released.remove(note.image.id)?;
    Ok(why)
}
