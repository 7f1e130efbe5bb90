//! The disk of a running VM goes over from a raw image to the fresh qcow2 that was made of it.
//!
//! The guest stops for it, so both are equal until it goes on. What decides then, also for whoever
//! finds this half done: where QEMU has the disk and, when there is no QEMU any more, the name. A
//! qcow2 that has its name holds everything, and nobody can have written to the raw image since:
//! [`Swap`] is durable before, and from then on the image is served to nobody who comes.

use super::daemon_place;
use super::fresh::{Fresh, Progress, qcow2_path};
use super::held_back;
use crate::leaving::{Leaving, refuse_untold};
use crate::ops::images::random_id;
use crate::released::note_made;
use crate::vm::look::process_of;
use dray_host::flat::Purpose;
use dray_host::migration::abort;
use dray_host::process::QemuProcess;
use dray_host::registry::{CopyState, Entry, ImageRecord, Place, Registry, Swap};
use dray_image::{ImageNames, Quiesced};
use dray_qemu::flatten::{self, On};
use dray_qemu::{ErrorKind, LayerPlan, Qmp, Stopped, status};
use dray_types::{Epoch, ImageId};
use serde::Deserialize;
use std::io;
use std::path::{Path, PathBuf};
use std::slice;
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

/// Takes the qcow2's name away and removes it.
fn remove_file(swap: &Swap) -> io::Result<()> {
    let names = names(swap)?;
    if is_named(swap)? {
        names.freeze_chain().map_err(io::Error::other)?;
    }
    names.remove_chain().map_err(io::Error::other)
}

/// The guest will write to the raw image, before it is on the qcow2: that has not everything any more, so its name
/// goes first. Whether it has none.
fn give_up(swap: &Swap) -> bool {
    let removed = remove_file(swap);
    if let Err(why) = &removed {
        tracing::error!(%why, "a guest that goes on waits: its qcow2 cannot lose its name");
    }
    removed.is_ok()
}

/// Lets a guest run again that was stopped. One whose QEMU is gone needs nobody.
pub(super) async fn wake(qmp: &Qmp, running: bool) -> dray_qemu::Result<()> {
    if !running {
        return Ok(());
    }
    match status::cont(qmp).await {
        Err(why) if why.kind() == ErrorKind::Closed => Ok(()),
        ran => ran,
    }
}

/// Makes a qcow2 of a complete raw image whose disk is [`flattened`](LayerPlan::flattened), while
/// its guest goes on, and puts the disk on it. Returns where it is. On failure the guest is on the
/// raw image, through dray, and no qcow2 is left behind, unless the record has a [`Swap`]: then it
/// is not known where the disk is.
///
/// # Errors
/// Why there is no qcow2.
pub(crate) async fn make_qcow2(
    registry: &Registry,
    qmp: &Qmp,
    entry: &Entry,
    flat: &LayerPlan,
    run_dir: &Path,
    progress: Progress,
) -> io::Result<PathBuf> {
    let path = qcow2_path(&entry.record().path);
    if let Some(swap) = entry.record().swap {
        if !swap.done {
            let is_its =
                |now: QemuProcess| swap.qemu.as_ref().is_none_or(|own| own.is_process(&now));
            let same = process_of(qmp).is_none_or(is_its);
            settle_swap(registry, entry, swap, same.then_some(qmp)).await?;
        }
        if entry.record().swap.is_some() {
            return Ok(path);
        }
    }
    refuse_used(registry, &path, &entry.record().name)?;
    refuse_untold(entry)?;
    let fresh = block_in_place(|| {
        let allocated = entry.file.allocated_bytes().map_err(io::Error::other)?;
        let place = daemon_place(run_dir, Purpose::Serve, entry.record().id);
        Fresh::begin(&entry.disk, &path, allocated, place, progress)
    })?;
    let made = match block_in_place(|| fresh.copy_most()) {
        Ok(()) => {
            abort::step("Qcow2Copied");
            go_over(registry, qmp, entry, &fresh, flat.in_qcow2(&path)).await
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
    let running = status::status(qmp).await.map_err(io::Error::other)?.running;
    // Until the guest goes on, wherever it is then.
    let leaving = Leaving::begin(entry)?;
    let known = serde_json::to_value(&plan).map_err(io::Error::other)?;
    let (qmp_path, qemu) = (qmp.socket().to_owned(), process_of(qmp));
    let swap = Swap { qmp: qmp_path, qemu, plan: known, running, done: false };
    set_swap(registry, entry, Some(swap.clone()))?;
    let began = Instant::now();
    let stopped = stop_equal(qmp, entry, fresh, running, &leaving).await;
    let (stopped, quiet) = match stopped {
        Ok(stopped) => stopped,
        // It has no name, so QEMU has not seen it.
        Err(why) => return stay(registry, entry, swap, Some(qmp)).await.and(Err(why)),
    };
    abort::step("Qcow2Named");
    let pivots = AtomicBool::new(false);
    let may_pivot = || stopped.check().map(|()| pivots.store(true, Ordering::SeqCst));
    let may_open = || !pivots.load(Ordering::SeqCst) && block_in_place(|| give_up(&swap));
    let pivoted = flatten::unflatten(qmp, slice::from_ref(&plan), &may_pivot);
    let mut quiet = Some(quiet);
    let pivoted = held_back(pivoted, &stopped, &mut quiet, may_open).await;
    abort::step("Qcow2Pivoted");
    let on = match &pivoted {
        Ok(_) => Ok(On::Chain),
        Err(_) => flatten::settle(qmp, slice::from_ref(&plan)).await,
    };
    match on {
        Ok(On::Export) => {
            stay(registry, entry, swap, Some(qmp)).await?;
            drop(quiet);
            pivoted.map(drop).map_err(io::Error::other)
        }
        Err(why) if why.kind() != ErrorKind::Closed => {
            // Whoever writes to it could write to what is of the past.
            quiet.into_iter().for_each(|quiet| entry.disk.park(quiet));
            Err(io::Error::other(format!("it is not known where the disk is: {why}")))
        }
        _ => {
            quiet.into_iter().for_each(|quiet| entry.disk.park(quiet));
            entry.disk.fail_parked();
            end_swap(registry, entry, swap, Some(qmp)).await?;
            let ms = began.elapsed().as_secs_f64() * 1e3;
            tracing::info!(image = entry.record().name, ms, "on a fresh qcow2");
            Ok(())
        }
    }
}

fn set_swap(registry: &Registry, entry: &Entry, swap: Option<Swap>) -> io::Result<()> {
    registry.update(entry, |record| record.swap = swap)
}

/// The disk is on the raw image: the qcow2 goes, and the guest goes on.
async fn stay(registry: &Registry, entry: &Entry, swap: Swap, qmp: Option<&Qmp>) -> io::Result<()> {
    if let Err(why) = remove_file(&swap) {
        let path = plan_of(&swap)?.path();
        tracing::error!(path = %path.display(), %why, "cannot remove a file that is of no use");
    }
    set_swap(registry, entry, None)?;
    match qmp {
        Some(qmp) => wake(qmp, swap.running).await.map_err(io::Error::other),
        None => Ok(()),
    }
}

/// The disk is on the qcow2, which is the truth from now on, and the guest goes on.
async fn end_swap(
    registry: &Registry,
    entry: &Entry,
    swap: Swap,
    qmp: Option<&Qmp>,
) -> io::Result<()> {
    set_swap(registry, entry, Some(Swap { done: true, ..swap.clone() }))?;
    abort::step("Qcow2Done");
    let Some(qmp) = qmp else { return Ok(()) };
    if let Err(why) = note_made(registry, qmp, &plan_of(&swap)?, record_of(entry, &swap)?) {
        tracing::warn!(%why, "what a disk's nodes were made with is not known any more");
    }
    wake(qmp, swap.running).await.map_err(io::Error::other)?;
    set_swap(registry, entry, Some(Swap { done: true, running: false, ..swap }))
}

/// The qcow2 as an image: one that nobody has seen before.
fn record_of(entry: &Entry, swap: &Swap) -> io::Result<ImageRecord> {
    let path = plan_of(swap)?.path();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let id = ImageId(random_id().map_err(io::Error::other)?);
    let (place, format, epoch) = (Place::Named, Some("qcow2".to_owned()), Epoch(1));
    let (migration, replica, swap) = (None, None, None);
    let record = entry.record();
    Ok(ImageRecord { name, id, path, place, format, epoch, migration, replica, swap, ..record })
}

/// Ends an exchange that was broken off where the disk is found to be, and the guest goes on. `qmp`: its VM;
/// none when that has ended.
pub(super) async fn settle_swap(
    registry: &Registry,
    entry: &Entry,
    swap: Swap,
    qmp: Option<&Qmp>,
) -> io::Result<()> {
    let is_over = match qmp {
        None => swap.done || is_named(&swap)?,
        Some(qmp) => {
            let plan = plan_of(&swap)?;
            let on = flatten::settle(qmp, slice::from_ref(&plan)).await;
            on.map_err(io::Error::other)? == On::Chain
        }
    };
    match is_over {
        true => end_swap(registry, entry, swap, qmp).await,
        false => stay(registry, entry, swap, qmp).await,
    }
}

/// Stops the guest and copies the rest, unless the guest is to be told that some of it may be lost. The
/// qcow2 then has its name, and nobody can write to the raw
/// image until what is returned is dropped.
async fn stop_equal(
    qmp: &Qmp,
    entry: &Entry,
    fresh: &Fresh,
    running: bool,
    leaving: &Leaving,
) -> io::Result<(Stopped, Quiesced)> {
    let stopped = Stopped::begin(qmp, running).await.map_err(io::Error::other)?;
    abort::step("Qcow2Stopped");
    block_in_place(|| {
        let quiet = entry.disk.quiesce(QUIET).map_err(io::Error::other)?;
        fresh.copy_rest()?;
        leaving.check_copied()?;
        fresh.name()?;
        Ok((stopped, quiet))
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::Config;
    use crate::exports::ImageExports;
    use crate::leaving::left_stopped;
    use dray_host::store::Store;
    use dray_image::{Loss, LossLog};
    use dray_nbd::{Client, Exports};
    use dray_qemu::Pivot;
    use std::sync::Arc;

    const QCOW2: &[u8] = b"everything";

    /// A host of which nothing runs, with a complete raw image whose disk goes over.
    pub struct Host {
        dir: tempfile::TempDir,
        pub registry: Arc<Registry>,
    }

    impl Host {
        pub fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let at = dir.path().display();
            let text = format!(
                "[agent]\nname = \"hosta\"\nstate_dir = \"{at}/state\"\nrun_dir = \"{at}/run\"\n\
                 [tls]\ndir = \"{at}\"\n[[pool]]\nname = \"p\"\npath = \"{at}/pool\"\n"
            );
            let config = Config::parse(&text, &dir.path().join("dray.toml")).unwrap();
            std::fs::create_dir(dir.path().join("pool")).unwrap();
            let store = Store::open(&dir.path().join("state")).unwrap();
            let registry = Registry::load(store, Arc::new(config)).unwrap();
            Self { dir, registry }
        }

        pub fn pool(&self) -> PathBuf {
            self.dir.path().join("pool")
        }

        fn names(&self) -> ImageNames {
            ImageNames::of(&self.pool().join("vm.qcow2")).unwrap()
        }

        fn raw(&self, done: bool) -> Arc<Entry> {
            let path = self.pool().join("vm.raw");
            ImageNames::of(&path).unwrap().create_partial(8192).unwrap();
            let plan = LayerPlan {
                qdev: "disk0".into(),
                depth: 0,
                format: "qcow2".into(),
                size: 8192,
                file_size: 8192,
                read_only: false,
                pivot: Pivot::Mirror,
                local: serde_json::Map::new(),
            };
            let plan = plan.directly_on(&qcow2_path(&path));
            let (qmp, plan) = (self.dir.path().join("qmp"), serde_json::to_value(plan).unwrap());
            let record = ImageRecord {
                place: Place::Partial,
                mode: 0o600,
                epoch: Epoch(2),
                swap: Some(Swap { qmp, qemu: None, plan, running: true, done }),
                ..ImageRecord::owned("vm.raw".into(), ImageId(7), path, 8192)
            };
            let file = self.registry.open_file(&record).unwrap();
            self.registry.add(record, file).unwrap()
        }

        /// Its vm has ended.
        fn recover(&self) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let entry = self.registry.get("vm.raw").unwrap();
            let swap = entry.record().swap.unwrap();
            runtime.unwrap().block_on(settle_swap(&self.registry, &entry, swap, None)).unwrap();
        }

        /// What is in the pool.
        fn files(&self) -> Vec<String> {
            let all = std::fs::read_dir(self.pool()).unwrap();
            let name = |e: io::Result<std::fs::DirEntry>| e.unwrap().file_name().into_string();
            let mut names: Vec<_> = all.map(|entry| name(entry).unwrap()).collect();
            names.sort();
            names
        }
    }

    /// The vm ended while its disk went over: its qcow2 has everything if it has its name, and only
    /// then.
    #[test]
    fn without_qemu_the_name_decides() {
        let host = Host::new();
        let entry = host.raw(false);
        std::fs::write(host.names().chain(), QCOW2).unwrap();
        host.recover();
        assert_eq!(entry.record().swap, None);
        keep_raw(&host.registry, &entry).unwrap();
        assert_eq!(host.files(), ["vm.raw"]);

        let host = Host::new();
        let entry = host.raw(false);
        std::fs::write(host.names().image(), QCOW2).unwrap();
        host.recover();
        assert!(entry.record().swap.is_some_and(|swap| swap.done));
        assert_eq!(std::fs::read(host.names().image()).unwrap(), QCOW2);
        host.registry.remove_partial(&entry).unwrap();
        assert_eq!(host.files(), ["vm.qcow2"]);
    }

    /// The guest goes on over the raw image: if everything ends before anybody has said so, that is the truth.
    #[test]
    fn a_qcow2_that_is_given_up_is_not_the_truth_after_a_crash() {
        let host = Host::new();
        let entry = host.raw(false);
        std::fs::write(host.names().image(), QCOW2).unwrap();
        let swap = entry.record().swap.unwrap();
        assert!(may_be_past(&swap));
        assert!(give_up(&swap) && !may_be_past(&swap), "it may be written to");
        assert!(give_up(&swap), "again");
        host.recover();
        assert_eq!(entry.record().swap, None);
        keep_raw(&host.registry, &entry).unwrap();
        assert_eq!(host.files(), ["vm.raw"]);
    }

    /// Somebody else has made a file of the name before the qcow2 could have it.
    #[test]
    fn another_file_of_the_name_is_left_alone() {
        let host = Host::new();
        let entry = host.raw(false);
        std::fs::write(host.names().chain(), QCOW2).unwrap();
        std::fs::write(host.names().image(), "another").unwrap();
        host.recover();
        assert_eq!(entry.record().swap, None);
        keep_raw(&host.registry, &entry).unwrap();
        assert_eq!(host.files(), ["vm.qcow2", "vm.raw"]);
        assert_eq!(std::fs::read(host.names().image()).unwrap(), b"another");
    }

    /// Whoever is let onto the raw image could write what the qcow2 would lack.
    #[test]
    fn a_disk_that_goes_over_is_served_to_nobody_who_comes() {
        let host = Host::new();
        drop(host.raw(false));
        std::fs::write(host.names().chain(), QCOW2).unwrap();
        let exports = ImageExports(Arc::clone(&host.registry));
        let open = || exports.open("vm.raw", &Client::default());
        assert!(open().is_ok(), "its guest may have to end a request");
        std::fs::rename(host.names().chain(), host.names().image()).unwrap();
        assert!(open().is_err());
        host.recover();
        assert!(open().is_err());
    }

    struct NoLog;

    impl LossLog for NoLog {
        fn lost(&self, _: &Loss) -> dray_image::Result<()> {
            Ok(())
        }

        fn settled(&self) -> dray_image::Result<()> {
            Ok(())
        }
    }

    /// QEMU repeats the flush of a stop that an agent has not answered before it died.
    #[test]
    fn what_a_flush_is_told_while_the_guest_is_stopped_the_guest_is_told_again() {
        let host = Host::new();
        let entry = host.raw(false);
        let loss = Loss { why: "the cable was pulled".to_owned(), notes_in_doubt: false };
        entry.file.keep_losses(Arc::new(NoLog), Some(&loss));
        assert!(refuse_untold(&entry).is_err() && Leaving::begin(&entry).is_err());
        let stopped = left_stopped(&host.registry);
        entry.file.flush().unwrap_err();
        assert!(refuse_untold(&entry).is_err(), "QEMU was told");
        drop(stopped);
        entry.file.flush().unwrap_err();
        let leaving = Leaving::begin(&entry).unwrap();
        leaving.check_copied().unwrap();
        drop(leaving);
        entry.file.flush().unwrap();
        assert_eq!(left_stopped(&host.registry).len(), 1);
        host.registry.update(&entry, |record| record.swap = None).unwrap();
        assert!(left_stopped(&host.registry).is_empty());
    }

    #[test]
    fn the_name_of_another_image_is_refused() {
        let host = Host::new();
        let entry = host.raw(false);
        let taken = |name| refuse_used(&host.registry, &host.pool().join("vm.raw"), name);
        assert!(taken("vm.raw").is_ok());
        assert!(taken("other").unwrap_err().to_string().contains("it is image 'vm.raw'"));
        host.registry.update(&entry, |record| record.state = CopyState::Replica).unwrap();
        assert!(taken("other").is_ok(), "a replica has another name");
    }
}
