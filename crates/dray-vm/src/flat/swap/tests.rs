//! Exchanges of a raw image for a qcow2, cut off at each step, and who is let in meanwhile.

use super::*;
use crate::exports::ImageExports;
use crate::flat::Pools;
use crate::leaving::left_stopped;
use dray_config::Config;
use dray_host::process::QemuProcess;
use dray_host::record::Adopted;
use dray_host::store::Store;
use dray_image::{Client as Connection, Image, Loss, LossLog, Past, working_for};
use dray_qemu::Pivot;
use dray_serve::{Client, Exports};
use serde_json::json;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
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

/// A process that was attached to the raw image, with another file open.
fn attached(exports: &ImageExports, open: impl Into<Stdio>) -> (Child, Arc<Connection>) {
    let child = Command::new("cat").stdin(Stdio::piped()).stdout(open).spawn().unwrap();
    let process = dray_serve::Process::find(child.id()).unwrap();
    exports.attached("vm.raw", &Client { process: Some(process), user: Some(0) }, 1);
    (child, Connection::of(Some(process.origin()), Arc::new(|| true)))
}

/// What a client writes to the raw image, when that is done.
fn writes(
    entry: &Arc<Entry>,
    client: &Arc<Connection>,
) -> std::thread::JoinHandle<dray_image::Result<()>> {
    let (entry, client) = (Arc::clone(entry), Arc::clone(client));
    std::thread::spawn(move || working_for(&client, || entry.disk.write_at(&[5; 512], 0, true)))
}

/// Somebody lets the guest go on when QEMU was asked to complete the mirror: what another client writes would be in
/// the raw image alone.
#[test]
fn only_the_qemu_of_a_disk_that_goes_over_writes_to_the_raw_image() {
    for (on, goes_through) in [(On::Chain, false), (On::Export, true)] {
        let host = Host::new();
        let entry = host.raw(false);
        let exports = ImageExports(Arc::clone(&host.registry));
        std::fs::write(host.names().image(), QCOW2).unwrap();
        let (mut other, others) = attached(&exports, Stdio::null());
        let (mut qemu, vm) = attached(&exports, File::open(host.names().image()).unwrap());
        let remote = Connection::new(Arc::new(|| true));
        let quiet = entry.disk.quiesce(QUIET).unwrap();
        let waiting = [&others, &remote].map(|client| writes(&entry, client));
        let guests = writes(&entry, &vm);
        hold_others_back(&host.registry, &entry, &entry.record().swap.unwrap()).unwrap();
        drop(quiet);
        guests.join().unwrap().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        assert!(waiting.iter().all(|write| !write.is_finished()), "{on:?}");
        if on == On::Export {
            assert!(give_up(&entry.record().swap.unwrap()));
        }
        host.recover();
        for write in waiting {
            assert_eq!(write.join().unwrap().is_ok(), goes_through, "{on:?}");
        }
        for child in [&mut other, &mut qemu] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

/// None has the qcow2 open, and the monitor belongs to none.
#[test]
fn clients_of_which_none_is_known_to_be_qemu_do_not_write() {
    for count in [1, 2] {
        let host = Host::new();
        let entry = host.raw(false);
        let exports = ImageExports(Arc::clone(&host.registry));
        std::fs::write(host.names().image(), QCOW2).unwrap();
        let swap = entry.record().swap.unwrap();
        let clients: Vec<_> = (0..count).map(|_| attached(&exports, Stdio::null())).collect();
        hold_others_back(&host.registry, &entry, &swap).unwrap_err();
        entry.disk.fail_parked();
        for (mut child, client) in clients {
            writes(&entry, &client).join().unwrap().unwrap_err();
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
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
        exports.open("disk.raw", &Client { process, user: Some(0) }).is_ok()
    };
    let cat =
        |output: Stdio| Command::new("cat").stdin(Stdio::piped()).stdout(output).spawn().unwrap();
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

    fn begun_anew(&self) -> dray_image::Result<()> {
        Ok(())
    }

    fn settled(&self, _: &str) -> dray_image::Result<()> {
        Ok(())
    }
}

/// QEMU repeats the flush of a stop that an agent has not answered before it died.
#[test]
fn what_a_flush_is_told_while_the_guest_is_stopped_the_guest_is_told_again() {
    let host = Host::new();
    let entry = host.raw(false);
    let loss = Loss { why: "the cable was pulled".to_owned(), notes_in_doubt: false };
    entry.file.keep_losses(Arc::new(NoLog), &Past::owing(Some(loss)));
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
