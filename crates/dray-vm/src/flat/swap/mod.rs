//! The disk of a running VM goes over from a raw image to the fresh qcow2 that was made of it.
//!
//! The guest stops for it, so both are equal until it goes on. What decides then, also for whoever
//! finds this half done: where QEMU has the disk and, when there is no QEMU any more, the name. A
//! qcow2 that has its name holds everything, and nobody can have written to the raw image since:
//! [`Swap`] is durable before, and from then on the image is served to nobody who comes. The qcow2
//! loses its name, durably, before anybody writes to the raw image again.
//!
//! A connection that closes and an answer that does not come say nothing of where the disk is. While its
//! process runs, only the VM can say that, once it was asked to complete the mirror. Until it does both files
//! stay as they are, the raw image is parked, and the VM is asked again (`recover`).
//!
//! A guest that somebody lets go on writes through QEMU's mirror, so to both files. What any other client of the raw
//! image writes is in that alone: it is held back until it is known where the disk is (`others`).

use super::daemon_place;
use super::fresh::{self, Fresh, Progress, qcow2_path};
use super::{held_back, others};
use crate::leaving::{Leaving, refuse_untold};
use crate::look::process_of;
use crate::own;
use crate::released::note_made;
use crate::released::taking::export;
use dray_config::Config;
use dray_host::abort;
use dray_host::flat::Purpose;
use dray_host::record::{CopyState, ImageRecord, NameKind, Swap};
use dray_host::refusals::random_id;
use dray_host::registry::{Entry, Registry};
use dray_image::{ImageNames, Quiesced};
use dray_qemu::flatten::{self, On};
use dray_qemu::{LayerPlan, Qmp, Stopped, Watched, status};
use dray_types::{Epoch, ImageId};
use serde::Deserialize;
use std::io;
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::task::block_in_place;

/// How long writes may take to end that QEMU no longer waits for.
const QUIET: Duration = Duration::from_secs(5);

fn plan_of(swap: &Swap) -> io::Result<LayerPlan> {
    LayerPlan::deserialize(&swap.plan).map_err(io::Error::other)
}

fn names(swap: &Swap) -> io::Result<ImageNames> {
    ImageNames::of(&plan_of(swap)?.path()).map_err(io::Error::other)
}

/// Whether the qcow2 has its name. While it has not, the name may be somebody else's.
fn is_named(swap: &Swap) -> io::Result<bool> {
    let names = names(swap)?;
    Ok(names.image().try_exists()? && !names.chain().try_exists()?)
}

/// Whether the raw image may be of the past, so that nobody may write to it. Before that a QEMU that
/// has lost its connection has to be let in: a stop waits for its requests.
pub fn may_be_past(swap: &Swap) -> bool {
    swap.done || is_named(swap).unwrap_or(true)
}

/// Takes the qcow2's name away, durably. The file stays under its hidden name as long as there is a [`Swap`]: by
/// that a file that somebody else makes under the name is known for another one.
fn hide(swap: &Swap) -> io::Result<()> {
    let names = names(swap)?;
    match (names.image().try_exists()?, names.chain().try_exists()?) {
        // Somebody else's file, or none.
        (true, true) | (false, false) => Ok(()),
        _ => names.freeze_chain().map_err(io::Error::other),
    }
}

/// The guest will write to the raw image, before it is on the qcow2: that has not everything any more, so its name
/// goes first. Whether it has none.
fn give_up(swap: &Swap) -> bool {
    let hidden = hide(swap);
    if let Err(why) = &hidden {
        tracing::error!(%why, "a guest waits: the name of its qcow2 cannot be taken away");
    }
    hidden.is_ok()
}

/// What the VM of an exchange says of it.
#[derive(Clone, Copy)]
enum Said {
    /// Where it has the disk.
    On(On),
    /// Its process has ended.
    Ended,
    /// Nothing: it runs and does not answer, or not to that.
    Nothing,
}

/// Where the disk is: on the export of the raw image, or on the qcow2, the chain. Either has everything then. None
/// when that is not known. `done`: it was on the qcow2 before. `named`: the qcow2 has its name.
fn decide(said: Said, done: bool, named: bool) -> Option<On> {
    match said {
        // One that has lost its name may lack what was written to the raw image since.
        Said::On(On::Chain) => (done || named).then_some(On::Chain),
        Said::On(On::Export) => Some(On::Export),
        Said::Ended if done || named => Some(On::Chain),
        Said::Ended => Some(On::Export),
        Said::Nothing => None,
    }
}

/// Asks the VM where it has the disk, and removes there what is left of the other side.
async fn ask(registry: &Registry, qmp: &Qmp, entry: &Entry, swap: &Swap) -> io::Result<On> {
    let plan = plan_of(swap)?;
    let layers = slice::from_ref(&plan);
    let seen = flatten::look(qmp, layers).await.map_err(io::Error::other)?;
    if seen != Some(On::Chain) {
        // A guest that was let go on may wait for its writes, and QEMU for them with what it is asked to remove. As
        // long as the mirror is there both files get what the guest writes, and it is cancelled now.
        if seen.is_none() {
            hold_others_back(registry, entry, swap)?;
        }
        open_raw(entry, swap)?;
    }
    let on = match (seen, flatten::settle(qmp, layers).await) {
        (Some(on), Err(why)) if !why.kind().is_unknown() => {
            tracing::warn!(%why, "cannot remove a node of an exchange that has ended");
            on
        }
        (_, settled) => settled.map_err(io::Error::other)?,
    };
    if seen.is_none() && on == On::Chain {
        // The mirror was completed before it could be cancelled: the qcow2 has everything.
        fresh::name(&names(swap)?, &entry.record())?;
    }
    Ok(on)
}

/// Only the VM's QEMU changes the raw image until it is known where the disk is.
fn hold_others_back(registry: &Registry, entry: &Entry, swap: &Swap) -> io::Result<()> {
    let names = names(swap)?;
    block_in_place(|| others::hold_back(registry, entry, &names, swap.qemu.as_ref()))
}

/// The raw image has everything, and may be written to by whoever is not held back.
fn open_raw(entry: &Entry, swap: &Swap) -> io::Result<()> {
    hide(swap)?;
    entry.disk.unpark();
    Ok(())
}

/// Finds out where the disk is. `qmp`: its VM; none when that has ended.
///
/// # Errors
/// Why that is not known.
async fn where_is(
    registry: &Registry,
    entry: &Entry,
    swap: &Swap,
    qmp: Option<&Qmp>,
) -> io::Result<On> {
    let asked = match qmp {
        Some(qmp) => Some(ask(registry, qmp, entry, swap).await),
        None => None,
    };
    let said = match &asked {
        Some(Ok(on)) => Said::On(*on),
        Some(Err(_)) if !own::has_ended(&swap.qmp, swap.qemu.as_ref()) => Said::Nothing,
        Some(Err(_)) | None => Said::Ended,
    };
    decide(said, swap.done, is_named(swap)?).ok_or_else(|| match asked {
        Some(Err(why)) => why,
        _ => io::Error::other("its vm has the disk on a qcow2 that was given up"),
    })
}

/// Makes a qcow2 of a complete raw image whose disk is [`flattened`](LayerPlan::flattened), while
/// its guest goes on, and puts the disk on it. Returns where it is. On failure the guest is on the
/// raw image, through dray, and no qcow2 is left behind, unless the record has a [`Swap`]: then it
/// is not known where the disk is.
///
/// # Errors
/// Why there is no qcow2.
pub async fn make_qcow2(
    registry: &Registry,
    qmp: &Qmp,
    entry: &Entry,
    flat: &LayerPlan,
    config: &Arc<Config>,
    progress: Progress,
) -> io::Result<PathBuf> {
    let path = qcow2_path(&entry.record().path);
    if let Some(swap) = entry.record().swap {
        return match swap.done {
            true => Ok(path),
            false => Err(io::Error::other("the exchange of its disk has not ended")),
        };
    }
    refuse_used(registry, &path, &entry.record().name)?;
    refuse_untold(entry)?;
    let fresh = block_in_place(|| {
        let allocated = entry.file.allocated_bytes().map_err(io::Error::other)?;
        let place = daemon_place(&config.run_dir, Purpose::Serve, entry.record().id);
        let admits = Arc::clone(config) as _;
        Fresh::begin(&entry.disk, &path, allocated, place, admits, progress)
    })?;
    let made = match block_in_place(|| fresh.copy_most()) {
        Ok(()) => {
            abort::step("Qcow2Copied");
            let export = export(config, entry.record().name);
            match flatten::check_export(qmp, flat, &export).await {
                Ok(()) => go_over(registry, qmp, entry, &fresh, flat.in_qcow2(&path)).await,
                Err(why) => Err(io::Error::other(why)),
            }
        }
        Err(why) => Err(why),
    };
    if made.is_err() && entry.record().swap.is_none() {
        fresh.discard();
    }
    made.map(|()| path)
}

/// Refuses a path for a qcow2 that another image of this host has, under whichever of its names.
///
/// # Errors
/// Which image.
pub fn refuse_used(registry: &Registry, path: &Path, name: &str) -> io::Result<()> {
    let has = |record: &ImageRecord| {
        let left = record.state == CopyState::Replica && record.migration.is_none();
        record.path == path && record.name != name && !left
    };
    match registry.all_records().into_iter().find(has) {
        None => Ok(()),
        Some(record) => {
            let (path, name) = (path.display(), record.name);
            Err(io::Error::other(format!("{path} exists already: it is image '{name}'")))
        }
    }
}

/// No qcow2 is made of a complete raw image: it gets its name, and nothing else is left.
///
/// # Errors
/// What the file system or the store reports.
pub fn keep_raw(registry: &Registry, entry: &Entry) -> io::Result<()> {
    let path = qcow2_path(&entry.record().path);
    if refuse_used(registry, &path, &entry.record().name).is_ok() {
        let names = ImageNames::of(&path).map_err(io::Error::other)?;
        names.remove_chain().map_err(io::Error::other)?;
    }
    registry.finish_partial(entry)
}

async fn go_over(
    registry: &Registry,
    qmp: &Qmp,
    entry: &Entry,
    fresh: &Fresh,
    plan: LayerPlan,
) -> io::Result<()> {
    let guest = Watched::begin(qmp).await.map_err(io::Error::other)?;
    // Until the guest goes on, wherever it is then.
    let leaving = Leaving::begin(entry)?;
    let mut swap = begin_swap(registry, qmp, entry, &plan, guest.running())?;
    let began = Instant::now();
    let stopped = stop_equal(qmp, entry, fresh, (guest, &mut swap.running), &leaving).await;
    let (stopped, quiet) = match stopped {
        Ok(stopped) => stopped,
        // It has no name, so QEMU has not seen it.
        Err(why) => return stay(registry, entry, swap, Some(qmp)).await.and(Err(why)),
    };
    abort::step("Qcow2Named");
    let mut quiet = Some(quiet);
    let (pivoted, asked) = pivot((registry, entry), qmp, &plan, &swap, &stopped, &mut quiet).await;
    abort::step("Qcow2Pivoted");
    if stopped.check().is_err() {
        // Whoever has let the guest go on may stop it.
        runs_again(registry, entry);
        swap.running = false;
    }
    // QEMU was never asked to complete the mirror: the disk is on the raw image, also if QEMU says nothing more. It
    // may have to write there before it can end the mirror.
    let stays = pivoted.is_err() && !asked && give_up(&swap);
    if let Some(quiet) = quiet.filter(|_| !stays) {
        // Whoever writes to it could write to what is of the past.
        entry.disk.park(quiet);
    }
    match pivoted {
        Ok(_) => end_swap(registry, entry, swap, Some(qmp)).await?,
        Err(why) => end_failed(registry, qmp, entry, swap, why).await?,
    }
    let ms = began.elapsed().as_secs_f64() * 1e3;
    tracing::info!(image = entry.record().name, ms, "on a fresh qcow2");
    Ok(())
}

/// Makes it durable that an exchange has begun.
fn begin_swap(
    registry: &Registry,
    qmp: &Qmp,
    entry: &Entry,
    plan: &LayerPlan,
    running: bool,
) -> io::Result<Swap> {
    let plan = serde_json::to_value(plan).map_err(io::Error::other)?;
    let (qmp, qemu) = (qmp.socket().to_owned(), process_of(qmp));
    let swap = Swap { qmp, qemu, plan, running, done: false };
    set_swap(registry, entry, Some(swap.clone()))?;
    Ok(swap)
}

/// Puts the disk of a stopped guest, whose writes `quiet` holds back, on the qcow2. What came of that, and whether
/// QEMU was asked to complete the mirror.
async fn pivot(
    (registry, entry): (&Registry, &Entry),
    qmp: &Qmp,
    plan: &LayerPlan,
    swap: &Swap,
    stopped: &Stopped,
    quiet: &mut Option<Quiesced>,
) -> (dray_qemu::Result<Duration>, bool) {
    let asked = AtomicBool::new(false);
    let may_pivot = || {
        abort::step("Qcow2Pivots");
        stopped.check().map(|()| asked.store(true, Ordering::SeqCst))
    };
    // What the guest writes after that goes through the mirror, and so to both, until the disk is on the qcow2.
    let may_open = || match asked.load(Ordering::SeqCst) {
        true => hold_others_back(registry, entry, swap).is_ok(),
        false => block_in_place(|| give_up(swap)),
    };
    let pivoted = flatten::unflatten(qmp, slice::from_ref(plan), &may_pivot);
    let pivoted = held_back(pivoted, stopped, quiet, may_open).await;
    (pivoted, asked.load(Ordering::SeqCst))
}

/// Ends an exchange that failed, because of `why`, where the disk is found to be. Fails when that is not the qcow2.
async fn end_failed(
    registry: &Registry,
    qmp: &Qmp,
    entry: &Entry,
    swap: Swap,
    why: dray_qemu::Error,
) -> io::Result<()> {
    match where_is(registry, entry, &swap, Some(qmp)).await {
        Ok(On::Chain) => end_swap(registry, entry, swap, Some(qmp)).await,
        Ok(On::Export) => {
            stay(registry, entry, swap, Some(qmp)).await?;
            Err(io::Error::other(why))
        }
        Err(unknown) => {
            tracing::warn!(image = entry.record().name, %unknown,
                "the agent does not know where a disk is");
            Err(io::Error::other(format!("the agent did not know where the disk was: {why}")))
        }
    }
}

fn set_swap(registry: &Registry, entry: &Entry, swap: Option<Swap>) -> io::Result<()> {
    registry.update(entry, |record| record.swap = swap)
}

/// The disk is on the raw image: the qcow2 goes, and the guest goes on.
async fn stay(registry: &Registry, entry: &Entry, swap: Swap, qmp: Option<&Qmp>) -> io::Result<()> {
    open_raw(entry, &swap)?;
    others::let_go_on(entry);
    let_run(qmp, &swap).await?;
    set_swap(registry, entry, None).inspect_err(|_| runs_again(registry, entry))?;
    if let Err(why) = names(&swap)?.remove_chain() {
        let path = plan_of(&swap)?.path();
        tracing::error!(path = %path.display(), %why,
            "cannot remove a file that is not needed any more");
    }
    Ok(())
}

/// The guest goes on if it ran, unless its VM has ended. It is let go on once: after that its user may have stopped
/// it.
async fn let_run(qmp: Option<&Qmp>, swap: &Swap) -> io::Result<()> {
    let Some(qmp) = qmp.filter(|_| swap.running) else { return Ok(()) };
    match status::cont(qmp).await {
        Err(_) if own::has_ended(&swap.qmp, swap.qemu.as_ref()) => Ok(()),
        ran => ran.map_err(io::Error::other),
    }
}

/// For this agent a guest runs again, although that could not be written down.
fn runs_again(registry: &Registry, entry: &Entry) {
    registry.change(entry, |record| record.swap.iter_mut().for_each(|swap| swap.running = false));
}

/// The disk is on the qcow2, which is the truth from now on, and the guest goes on.
async fn end_swap(
    registry: &Registry,
    entry: &Entry,
    swap: Swap,
    qmp: Option<&Qmp>,
) -> io::Result<()> {
    let running = swap.running && qmp.is_some();
    set_swap(registry, entry, Some(Swap { done: true, running, ..swap.clone() }))?;
    abort::step("Qcow2Done");
    entry.disk.park_now();
    entry.disk.fail_parked();
    others::let_go_on(entry);
    let Some(qmp) = qmp else { return Ok(()) };
    if let Err(why) = note_made(registry, qmp, &plan_of(&swap)?, record_of(entry, &swap)?) {
        tracing::warn!(%why, "cannot note the options of a disk's nodes");
    }
    let_run(Some(qmp), &swap).await?;
    if let Err(why) = set_swap(registry, entry, Some(Swap { done: true, running: false, ..swap })) {
        tracing::warn!(%why, "cannot record that a guest runs again");
        runs_again(registry, entry);
    }
    Ok(())
}

/// The qcow2 as an image: one that nobody has seen before.
fn record_of(entry: &Entry, swap: &Swap) -> io::Result<ImageRecord> {
    let path = plan_of(swap)?.path();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let id = ImageId(random_id().map_err(io::Error::other)?);
    let (place, format, epoch) = (NameKind::Named, Some("qcow2".to_owned()), Epoch(1));
    let (migration, replica, swap) = (None, None, None);
    let record = entry.record();
    Ok(ImageRecord { name, id, path, place, format, epoch, migration, replica, swap, ..record })
}

/// Ends an exchange that was broken off where the disk is found to be, and the guest goes on. `qmp`: its VM;
/// none when that has ended.
pub async fn settle_swap(
    registry: &Registry,
    entry: &Entry,
    swap: Swap,
    qmp: Option<&Qmp>,
) -> io::Result<()> {
    match where_is(registry, entry, &swap, qmp).await? {
        On::Chain => end_swap(registry, entry, swap, qmp).await,
        On::Export => stay(registry, entry, swap, qmp).await,
    }
}

/// Stops the guest and copies the rest, unless the guest is to be told that some of it may be lost. The
/// qcow2 then has its name, and nobody can write to the raw
/// image until what is returned is dropped. `running`: whether the guest is to go on afterwards.
async fn stop_equal(
    qmp: &Qmp,
    entry: &Entry,
    fresh: &Fresh,
    (guest, running): (Watched, &mut bool),
    leaving: &Leaving,
) -> io::Result<(Stopped, Quiesced)> {
    let stopped = guest.stop(qmp).await.map_err(io::Error::other)?;
    *running = stopped.was_running();
    abort::step("Qcow2Stopped");
    block_in_place(|| {
        let quiet = entry.disk.quiesce(QUIET).map_err(io::Error::other)?;
        fresh.copy_rest()?;
        leaving.check_copied()?;
        fresh.name(&entry.record())?;
        Ok((stopped, quiet))
    })
}

#[cfg(test)]
mod tests;
