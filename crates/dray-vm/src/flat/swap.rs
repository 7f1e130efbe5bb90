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

use super::daemon_place;
use super::fresh::{Fresh, Progress, qcow2_path};
use super::held_back;
use crate::leaving::{Leaving, refuse_untold};
use crate::look::process_of;
use crate::own;
use crate::released::note_made;
use dray_host::abort;
use dray_host::flat::Purpose;
use dray_host::record::{CopyState, ImageRecord, MODE, NameKind, Swap};
use dray_host::refusals::random_id;
use dray_host::registry::{Entry, Registry};
use dray_image::{ImageNames, Quiesced};
use dray_qemu::flatten::{self, On};
use dray_qemu::{LayerPlan, Qmp, Stopped, status};
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
async fn ask(qmp: &Qmp, entry: &Entry, swap: &Swap) -> io::Result<On> {
    let plan = plan_of(swap)?;
    let layers = slice::from_ref(&plan);
    let seen = flatten::look(qmp, layers).await.map_err(io::Error::other)?;
    if seen != Some(On::Chain) {
        // A guest that was let go on may wait for its writes, and QEMU for them with what it is asked to remove. As
        // long as the mirror is there both files get what the guest writes, and it is cancelled now.
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
        names(swap)?.thaw_chain(MODE).map_err(io::Error::other)?;
    }
    Ok(on)
}

/// The raw image is the truth, and may be written to.
fn open_raw(entry: &Entry, swap: &Swap) -> io::Result<()> {
    hide(swap)?;
    entry.disk.unpark();
    Ok(())
}

/// Finds out where the disk is. `qmp`: its VM; none when that has ended.
///
/// # Errors
/// Why that is not known.
async fn where_is(entry: &Entry, swap: &Swap, qmp: Option<&Qmp>) -> io::Result<On> {
    let asked = match qmp {
        Some(qmp) => Some(ask(qmp, entry, swap).await),
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
    run_dir: &Path,
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
    let mut swap = Swap { qmp: qmp_path, qemu, plan: known, running, done: false };
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
    let may_pivot = || {
        abort::step("Qcow2Pivots");
        stopped.check().map(|()| pivots.store(true, Ordering::SeqCst))
    };
    // What is written after that goes through the mirror, and so to both, until the disk is on the qcow2.
    let may_open = || pivots.load(Ordering::SeqCst) || block_in_place(|| give_up(&swap));
    let pivoted = flatten::unflatten(qmp, slice::from_ref(&plan), &may_pivot);
    let mut quiet = Some(quiet);
    let pivoted = held_back(pivoted, &stopped, &mut quiet, may_open).await;
    abort::step("Qcow2Pivoted");
    if stopped.check().is_err() {
        // Whoever has let the guest go on may stop it.
        runs_again(registry, entry);
        swap.running = false;
    }
    // QEMU was never asked to complete the mirror: the disk is on the raw image, also if QEMU says nothing more. It
    // may have to write there before it can end the mirror.
    let stays = pivoted.is_err() && !pivots.load(Ordering::SeqCst) && give_up(&swap);
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

/// Ends an exchange that failed, because of `why`, where the disk is found to be. Fails when that is not the qcow2.
async fn end_failed(
    registry: &Registry,
    qmp: &Qmp,
    entry: &Entry,
    swap: Swap,
    why: dray_qemu::Error,
) -> io::Result<()> {
    match where_is(entry, &swap, Some(qmp)).await {
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
    match where_is(entry, &swap, qmp).await? {
        On::Chain => end_swap(registry, entry, swap, qmp).await,
        On::Export => stay(registry, entry, swap, qmp).await,
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
mod tests {
    use super::*;
    use crate::exports::ImageExports;
    use crate::flat::Pools;
    use crate::leaving::left_stopped;
    use dray_config::Config;
    use dray_host::process::QemuProcess;
    use dray_host::record::Adopted;
    use dray_host::store::Store;
    use dray_image::{Loss, LossLog};
    use dray_qemu::Pivot;
    use dray_serve::{Client, Exports};
    use serde_json::json;
    use std::fs::File;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::process::{Command, Stdio};
    use std::sync::Arc;

    const QCOW2: &[u8] = b"everything";

    /// A host of which nothing runs, with a complete raw image whose disk goes over.
    struct Host {
        dir: tempfile::TempDir,
        registry: Arc<Registry>,
    }

    impl Host {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let at = dir.path().display();
            let text = format!(
                "[agent]\nname = \"hosta\"\nstate_dir = \"{at}/state\"\nrun_dir = \"{at}/run\"\n\
                 [tls]\ndir = \"{at}\"\n[[pool]]\nname = \"p\"\npath = \"{at}/pool\"\n"
            );
            let config = Config::parse(&text, &dir.path().join("dray.toml")).unwrap();
            std::fs::create_dir(dir.path().join("pool")).unwrap();
            let store = Store::open(&dir.path().join("state")).unwrap();
            let registry = Registry::load(store, Arc::new(Pools(Arc::new(config)))).unwrap();
            Self { dir, registry }
        }

        fn pool(&self) -> PathBuf {
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
                named_for: None,
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
                place: NameKind::Partial,
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

    /// Everything ends after a qcow2 was given up, and somebody has made a file of its name by then.
    #[test]
    fn a_file_in_the_place_of_a_qcow2_that_was_given_up_is_not_the_truth() {
        let host = Host::new();
        let entry = host.raw(false);
        std::fs::write(host.names().image(), QCOW2).unwrap();
        assert!(give_up(&entry.record().swap.unwrap()));
        std::fs::write(host.names().image(), "another").unwrap();
        host.recover();
        assert_eq!(entry.record().swap, None);
        keep_raw(&host.registry, &entry).unwrap();
        assert_eq!(host.files(), ["vm.qcow2", "vm.raw"]);
        assert_eq!(std::fs::read(host.names().image()).unwrap(), b"another");
    }

    /// Where the disk is, for all that its VM may say.
    #[test]
    fn a_vm_that_runs_decides_and_without_one_the_name_does() {
        let (raw, qcow2) = (Some(On::Export), Some(On::Chain));
        // Done and named, done, named, neither.
        let states = [(true, true), (true, false), (false, true), (false, false)];
        let cells = |said| states.map(|(done, named)| decide(said, done, named));
        assert_eq!(cells(Said::On(On::Export)), [raw; 4]);
        assert_eq!(cells(Said::On(On::Chain)), [qcow2, qcow2, qcow2, None]);
        assert_eq!(cells(Said::Ended), [qcow2, qcow2, qcow2, raw]);
        assert_eq!(cells(Said::Nothing), [None; 4]);
    }

    /// Nobody answers at the socket of a VM whose process runs: nothing of the exchange is touched.
    #[test]
    fn a_vm_that_runs_and_is_silent_leaves_both() {
        let host = Host::new();
        let entry = host.raw(false);
        std::fs::write(host.names().image(), QCOW2).unwrap();
        let swap = entry.record().swap.unwrap();
        let me = QemuProcess::find(&swap.qmp, std::process::id() as i32).unwrap();
        let swap = Swap { qemu: Some(me), ..swap };
        set_swap(&host.registry, &entry, Some(swap.clone())).unwrap();
        let listener = UnixListener::bind(&swap.qmp).unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let silent = std::thread::spawn(move || {
            let (qemu, _) = listener.accept().unwrap();
            let version = json!({ "qemu": { "major": 9, "minor": 0, "micro": 0 } });
            writeln!(&qemu, "{}", json!({ "QMP": { "version": version, "capabilities": [] } }))
                .unwrap();
            let mut asked = String::new();
            BufReader::new(&qemu).read_line(&mut asked).unwrap();
            let asked: serde_json::Value = serde_json::from_str(&asked).unwrap();
            writeln!(&qemu, "{}", json!({ "return": {}, "id": asked["id"] })).unwrap();
            // And then the connection breaks.
        });
        let settled = runtime.block_on(async {
            let qmp = Qmp::connect(&swap.qmp).await.unwrap();
            settle_swap(&host.registry, &entry, swap.clone(), Some(&qmp)).await
        });
        silent.join().unwrap();
        settled.unwrap_err();
        assert_eq!(entry.record().swap, Some(swap));
        assert_eq!(host.files(), [".vm.raw.dray-partial", "vm.qcow2"]);
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

    /// While a disk changes place, whoever comes is refused, unless it is the QEMU whose disk it is: that has the file
    /// open, or is the one that was noted.
    #[test]
    fn a_disk_that_changes_place_is_served_to_its_own_qemu_only() {
        let host = Host::new();
        let entry = host.raw(false);
        let path = host.pool().join("disk.raw");
        std::fs::write(&path, [0; 8192]).unwrap();
        drop(entry);
        let qemu = |pid| QemuProcess::find(Path::new("/qmp"), pid);
        let me = std::process::id().cast_signed();
        let record = ImageRecord {
            adopted: Some(Adopted {
                qmp: "/qmp".into(),
                qemu: qemu(me),
                device: "disk0".into(),
                splice: serde_json::Value::Null,
                noted: false,
                done: false,
            }),
            ..ImageRecord::owned("disk.raw".into(), ImageId(8), path.clone(), 8192)
        };
        let file = host.registry.open_file(&record).unwrap();
        let _entry = host.registry.add(record, file).unwrap();
        let _operation = host.registry.operate("disk.raw", "adopt").unwrap();
        let exports = ImageExports(Arc::clone(&host.registry));
        let opens = |pid: i32| {
            let started = qemu(pid).unwrap().started;
            let process = Some(dray_serve::Process { pid: pid.cast_unsigned(), started });
            exports.open("disk.raw", &Client { process }).is_ok()
        };
        let cat = |output: Stdio| {
            Command::new("cat").stdin(Stdio::piped()).stdout(output).spawn().unwrap()
        };
        let mut children = [cat(Stdio::null()), cat(File::open(&path).unwrap().into())];
        let pids = children.each_ref().map(|child| child.id().cast_signed());
        assert_eq!([me, pids[0], pids[1]].map(opens), [true, false, true]);
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
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
