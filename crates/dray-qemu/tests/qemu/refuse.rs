//! What is refused, and that the VM is as before afterwards. These QEMUs run no guest.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use crate::support::bench::{Bench, SIZE, connect, plan};
use crate::support::{NbdServer, locks};
use dray_qemu::migrate::{Incoming, Limits, Outgoing};
use dray_qemu::{
    AdoptOptions, Error, ErrorKind, LayerPlan, NbdExport, NodeOptions, Qmp, adopt, graph, release,
    release_tracked, status,
};
use dray_testkit::guest::{GuestVm, tools};
use serde_json::json;

const KEEP: AdoptOptions = AdoptOptions { drop_bitmaps: false };
const DROP: AdoptOptions = AdoptOptions { drop_bitmaps: true };

/// The disk is exactly as it was, and dray's node is gone.
async fn as_before(qmp: &Qmp, before: &graph::VmDisk) {
    let now = graph::Graph::read(qmp).await.expect("graph");
    assert_eq!(&now.disk("disk0").expect("disk"), before);
    assert!(!now.has_node("dray-nbd-disk0-0"));
}

async fn refused(qmp: &Qmp, plan: &LayerPlan, export: &NbdExport) -> Error {
    let before = graph::disk(qmp, "disk0").await.expect("disk");
    let error = adopt(qmp, plan, export, KEEP).await.expect_err("refused");
    as_before(qmp, &before).await;
    error
}

#[tokio::test]
async fn bitmaps_jobs_and_exports() {
    let Some(bench) = Bench::new() else { return };
    let vm = bench.raw_vm();
    let qmp = connect(&vm).await;
    let plan = plan(&qmp).await.expect("plan");
    let server = bench.serve();

    let bitmap = json!({ "node": "disk", "name": "backup0" });
    qmp.execute("block-dirty-bitmap-add", bitmap).await.expect("bitmap");
    let error = refused(&qmp, &plan, &server.export()).await;
    assert_eq!(error.kind(), ErrorKind::Refused);
    let text = error.to_string();
    assert!(text.contains("node disk has the dirty bitmap backup0"), "{text}");
    assert!(text.contains("--drop-bitmaps"), "{text}");

    let job = json!({ "job-id": "j", "device": "disk", "target": "other", "sync": "full",
        "speed": 1 });
    let other = json!({ "driver": "null-co", "node-name": "other", "size": SIZE });
    qmp.execute("blockdev-add", other).await.expect("node");
    qmp.execute("blockdev-backup", job).await.expect("job");
    let error = adopt(&qmp, &plan, &server.export(), KEEP).await.expect_err("a job");
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("driver copy-before-write"), "{error}");
    let mut events = qmp.events();
    let cancel = json!({ "device": "j", "force": true });
    qmp.execute("block-job-cancel", cancel).await.expect("cancel");
    let ended = |e: &dray_qemu::Event| e.name == "BLOCK_JOB_CANCELLED";
    events.wait_for(Duration::from_secs(5), "the job", ended).await.expect("ended");

    let own = json!({ "type": "unix", "data": { "path": bench.dir.path().join("own.nbd") } });
    qmp.execute("nbd-server-start", json!({ "addr": own })).await.expect("qemu's own server");
    let export = json!({ "type": "nbd", "id": "e", "node-name": "disk", "writable": false });
    qmp.execute("block-export-add", export).await.expect("export");
    let error = refused(&qmp, &plan, &server.export()).await;
    assert!(error.to_string().contains("a job or export; end it first"), "{error}");
    qmp.execute("nbd-server-stop", json!({})).await.expect("stop");

    adopt(&qmp, &plan, &server.export(), DROP).await.expect("the bitmap may go");
    release(&qmp, &plan).await.expect("release");
    let after = graph::disk(&qmp, "disk0").await.expect("disk");
    assert!(after.active().protocol.bitmaps.is_empty());
}

#[tokio::test]
async fn an_export_that_does_not_fit() {
    let Some(bench) = Bench::new() else { return };
    let vm = bench.raw_vm();
    let qmp = connect(&vm).await;
    let plan = plan(&qmp).await.expect("plan");

    let nowhere = NbdExport {
        socket: bench.dir.path().join("nowhere"),
        name: "disk".into(),
        reconnect_delay: 0,
    };
    let error = refused(&qmp, &plan, &nowhere).await;
    assert_eq!(error.kind(), ErrorKind::Command);
    let text = error.to_string();
    assert!(text.starts_with("could not adopt disk disk0: could not add block node"), "{text}");
    assert!(text.contains("nowhere"), "{text}");

    let small = bench.dir.path().join("small.raw");
    std::fs::File::create(&small).expect("create").set_len(SIZE / 2).expect("size");
    let server = NbdServer::start(&small, &bench.dir.path().join("small.nbd"));
    let error = refused(&qmp, &plan, &server.export()).await;
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    let text = error.to_string();
    assert!(text.ends_with("the export has 8388608 bytes, but the file has 16777216"), "{text}");

    let elsewhere = LayerPlan { local: plan.for_target(&small).local, ..plan.clone() };
    let error = refused(&qmp, &elsewhere, &server.export()).await;
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    let missing = LayerPlan { qdev: "disk7".into(), ..plan };
    let error = adopt(&qmp, &missing, &server.export(), KEEP).await.expect_err("refused");
    assert!(error.to_string().ends_with("the vm has no disk disk7: it has disk0"), "{error}");
}

#[tokio::test]
async fn nodes_whose_options_are_not_known() {
    let Some(bench) = Bench::new() else { return };
    let vm = bench.raw_vm();
    let qmp = connect(&vm).await;
    // A node that somebody added after the start, as after an external snapshot.
    let other = bench.dir.path().join("other.raw");
    std::fs::File::create(&other).expect("create").set_len(SIZE).expect("size");
    let file = json!({ "driver": "file", "node-name": "later", "filename": other });
    qmp.execute("blockdev-add", file).await.expect("node");
    let device = json!({ "driver": "virtio-blk-pci", "id": "disk1", "drive": "later" });
    qmp.execute("device_add", device).await.expect("device");
    let known = NodeOptions::of_process(qmp.pid().expect("pid")).expect("command line");
    let later = graph::disk(&qmp, "disk1").await.expect("disk");
    let error = LayerPlan::of_active(&later, &known).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("options of block node later are not known"), "{error}");

    let wrong = r#"{"driver": "host_device", "node-name": "later"}"#;
    let wrong = NodeOptions::of_arguments(&["-blockdev", wrong]);
    let error = LayerPlan::of_active(&later, &wrong);
    assert_eq!(error.expect_err("wrong driver").kind(), ErrorKind::Mismatch);
}

/// The data would stay behind, whether QEMU's nodes name it or the qcow2 does.
/// QEMU's command line says nothing of a node that was reopened since, and dray would show the guest another part
/// of the file.
#[tokio::test]
async fn a_raw_node_that_shows_another_part_by_now() {
    let Some(bench) = Bench::new() else { return };
    let window = json!({
        "driver": "raw", "node-name": "disk", "file": "file", "offset": 1 << 20, "size": 8 << 20,
    });
    let file = format!("driver=file,node-name=file,filename={}", bench.image.display());
    let start = |node: &str| {
        let builder = bench.builder().blockdev(file.clone()).blockdev(node.to_owned());
        builder.disk("disk0", "disk").start().expect("start")
    };
    let vm = start(&window.to_string());
    let qmp = connect(&vm).await;
    plan(&qmp).await.expect("its command line says so");
    drop((qmp, vm));
    let vm = start("driver=raw,node-name=disk,file=file,size=8388608");
    let qmp = connect(&vm).await;
    plan(&qmp).await.expect("its command line says so");
    qmp.execute("blockdev-reopen", json!({ "options": [window] })).await.expect("reopen");
    let why = plan(&qmp).await.expect_err("it shows another part").to_string();
    assert!(why.contains("shows another part of its file now"), "{why}");
}

#[tokio::test]
async fn a_qcow2_whose_data_is_in_another_file() {
    let Some(bench) = Bench::new() else { return };
    let (top, data) = (bench.dir.path().join("top.qcow2"), bench.dir.path().join("top.data"));
    let (top, data) = (top.to_string_lossy(), data.to_string_lossy());
    let beside = format!("data_file={data}");
    tools::run("qemu-img", &["create", "-f", "qcow2", "-o", &beside, &top, "16M"]).expect("create");
    let node = format!("driver=qcow2,node-name=disk,file.driver=file,file.filename={top}");
    let named = format!("{node},data-file.driver=file,data-file.filename={data}");
    for options in [node, named] {
        let vm = bench.builder().blockdev(options).disk("disk0", "disk").start().expect("start");
        let error = graph::disk(&connect(&vm).await, "disk0").await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains("has a data-file"), "{error}");
    }
}

#[tokio::test]
async fn a_qcow2_node_without_a_name() {
    let Some(bench) = Bench::new() else { return };
    let top = bench.dir.path().join("top.qcow2");
    let top = top.to_string_lossy();
    tools::run("qemu-img", &["create", "-f", "qcow2", &top, "16M"]).expect("create");
    let drive = format!("if=none,id=old,file={top},format=qcow2");
    let builder = bench.builder().arg("-drive").arg(&drive).disk("disk0", "old");
    let vm = builder.start().expect("start");
    let error = plan(&connect(&vm).await).await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("start the vm with -blockdev"), "{error}");
}

#[tokio::test]
async fn a_target_that_does_not_fit() {
    let Some(bench) = Bench::new() else { return };
    let vm = bench.raw_vm();
    let qmp = connect(&vm).await;
    let plan = plan(&qmp).await.expect("plan");
    let error = Incoming::prepare(&qmp, std::slice::from_ref(&plan)).await.err().expect("refused");
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.to_string().contains("start it with -incoming defer"), "{error}");
    drop((qmp, vm));

    let file = format!("driver=file,node-name=disk,filename={}", bench.image.display());
    let builder = bench.builder().incoming().blockdev(file).disk("disk0", "disk");
    let vm = builder.start().expect("start");
    let qmp = connect(&vm).await;
    let cases = [
        (
            vec![LayerPlan { size: SIZE * 2, ..plan.clone() }],
            "disk disk0 has 16777216 bytes at the target and 33554432 bytes at the source",
        ),
        (
            vec![LayerPlan { qdev: "disk5".into(), ..plan.clone() }],
            "the target vm has no disk with the id disk5",
        ),
        (vec![], "the target vm has a disk disk0 more"),
    ];
    for (plans, want) in cases {
        let error = Incoming::prepare(&qmp, &plans).await.err().expect("refused");
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert_eq!(error.to_string(), format!("the target vm is not ready: {want}"));
    }
    Incoming::prepare(&qmp, &[plan]).await.expect("the right disks");
}

#[tokio::test]
async fn a_migration_that_goes_nowhere() {
    let Some(bench) = Bench::new() else { return };
    let vm = bench.raw_vm();
    let qmp = connect(&vm).await;
    status::cont(&qmp).await.expect("cont");
    let limits = Limits { max_bandwidth: 0, downtime_limit: Duration::from_millis(300) };
    let nowhere = bench.dir.path().join("nowhere.sock");
    let error = match Outgoing::start(&qmp, &nowhere, &limits).await {
        Ok(mut outgoing) => outgoing.wait_pre_switchover(|_| ()).await.expect_err("nobody there"),
        Err(error) => error,
    };
    assert!(error.to_string().contains("No such file"), "{error}");
    assert!(status::status(&qmp).await.expect("status").running);
}

/// Why an agent only probes before the pivot: the same adoption as everywhere, but somebody holds
/// the bytes that QEMU locks for writing.
#[tokio::test]
async fn a_lock_held_during_the_mirror() {
    let Some(bench) = Bench::new() else { return };
    let mut vm = bench.raw_vm();
    let qmp = connect(&vm).await;
    let plan = plan(&qmp).await.expect("plan");
    let server = bench.serve();
    for byte in locks::WRITE_BYTES {
        // Probing is harmless, however often.
        let _ = locks::is_held(&bench.image, byte);
    }
    let mine = locks::hold(&bench.image);
    let result = adopt(&qmp, &plan, &server.export(), KEEP).await;
    mine.expect("shared locks on QEMU's bytes can be had at any time");
    let error = result.expect_err("an adoption under a foreign lock must not succeed");
    println!("adopt: {error}; qemu: {:?}", vm.wait_exit(Duration::from_secs(5)));
}

/// A mirror that cannot finish is taken back: the disk is where it was.
#[tokio::test]
async fn a_pivot_that_fails() {
    let Some(bench) = Bench::new() else { return };
    let vm = bench.raw_vm();
    let qmp = connect(&vm).await;
    let plan = plan(&qmp).await.expect("plan");
    let server = NbdServer::start_failing(&bench.image, &bench.dir.path().join("bad.nbd"));
    let error = refused(&qmp, &plan, &server.export()).await;
    assert_eq!(error.kind(), ErrorKind::Failed);
    assert!(error.to_string().contains("the mirror job failed: Input/output error"), "{error}");
    drop(server);
    let server = bench.serve();
    adopt(&qmp, &plan, &server.export(), KEEP).await.expect("a second try");
}

#[tokio::test]
async fn a_qemu_that_dies_under_us() {
    let Some(bench) = Bench::new() else { return };
    let mut vm = bench.raw_vm();
    let qmp = connect(&vm).await;
    let plan = plan(&qmp).await.expect("plan");
    let server = bench.serve();
    adopt(&qmp, &plan, &server.export(), KEEP).await.expect("adopt");
    vm.kill().expect("kill");
    let error = release(&qmp, &plan).await.expect_err("gone");
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().starts_with("could not release disk disk0: "), "{error}");
    assert!(error.to_string().ends_with("qemu closed the connection"), "{error}");
}

/// Whoever serves the disk is asked once, when QEMU has the file open already, and may keep the disk.
#[tokio::test]
async fn a_release_that_is_broken_off_at_the_last_moment() {
    for start in [Bench::raw_vm, Bench::qcow2_vm] {
        let Some(bench) = Bench::new() else { return };
        let vm = start(&bench);
        let qmp = connect(&vm).await;
        let plan = plan(&qmp).await.expect("plan");
        let server = bench.serve();
        adopt(&qmp, &plan, &server.export(), KEEP).await.expect("adopt");
        let (asked, open) = (AtomicU32::new(0), AtomicBool::new(false));
        let keep = || {
            asked.fetch_add(1, Ordering::SeqCst);
            open.store(has_open(&vm, &bench.image), Ordering::SeqCst);
            Err(Error::new(ErrorKind::Refused, "it stays"))
        };
        let error =
            release_tracked(&qmp, &plan, None, async || Ok(()), &keep).await.expect_err("kept");
        assert!(error.to_string().contains("it stays"), "{error}");
        assert_eq!((asked.into_inner(), open.into_inner()), (1, true));
        let disk = graph::disk(&qmp, "disk0").await.expect("disk");
        assert_eq!(disk.active().protocol.driver, "nbd");
        assert!(!has_open(&vm, &bench.image), "the file's node is gone");
        release(&qmp, &plan).await.expect("release");
    }
}

/// Whether the vm's process has the file open.
fn has_open(vm: &GuestVm, path: &Path) -> bool {
    let files = std::fs::read_dir(format!("/proc/{}/fd", vm.pid())).expect("fd");
    let is = |entry: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_link(entry.expect("entry").path()).is_ok_and(|to| to == path)
    };
    files.into_iter().any(is)
}

/// An agent is started again after a crash: QEMU waits for it and its guest sees nothing.
#[tokio::test]
async fn a_server_that_comes_back() {
    let Some(bench) = Bench::new() else { return };
    let vm = bench.raw_vm();
    let qmp = connect(&vm).await;
    let plan = plan(&qmp).await.expect("plan");
    let server = bench.serve();
    adopt(&qmp, &plan, &server.export(), KEEP).await.expect("adopt");
    drop(server);
    let restarted = bench.serve();
    release(&qmp, &plan).await.expect("release");
    drop(restarted);
    let image: &Path = &bench.image;
    assert_eq!(
        graph::disk(&qmp, "disk0").await.expect("disk").active().protocol.path(),
        Some(image)
    );
}
