//! Disks in an iothread: QEMU before 9.0 ends itself in an exchange of their nodes that is not guarded.

use crate::support::bench::{Bench, connect, plan};
use crate::support::locks;
use dray_qemu::{AdoptOptions, LayerPlan, Qmp, adopt, graph, iothread, release, release_tracked};
use dray_testkit::guest::{GuestVm, GuestVmBuilder, Monitor};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the firmware may take to come to the disk.
const BOOT: Duration = Duration::from_secs(60);
const THREAD: &str = "iothread,id=io";
const KEEP: AdoptOptions = AdoptOptions { drop_bitmaps: false };

fn with(builder: GuestVmBuilder, args: &[&str]) -> GuestVmBuilder {
    args.iter().fold(builder, |builder, arg| builder.arg(arg))
}

/// Waits until the firmware has read the disk: its device works in its thread from then on.
async fn run(qmp: &Qmp) {
    qmp.execute("cont", Value::Null).await.expect("cont");
    let deadline = Instant::now() + BOOT;
    loop {
        let stats = qmp.execute("query-blockstats", Value::Null).await.expect("statistics");
        if stats[0]["stats"]["rd_operations"].as_u64() > Some(0) {
            return;
        }
        assert!(Instant::now() < deadline, "{stats}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn is_on_export(qmp: &Qmp, plan: &LayerPlan) -> bool {
    graph::disk(qmp, "disk0").await.expect("QEMU answers").active().protocol.name == plan.nbd_node()
}

async fn count_nodes(qmp: &Qmp) -> usize {
    let nodes = qmp.execute("query-named-block-nodes", Value::Null).await.expect("nodes");
    nodes.as_array().expect("a list").len()
}

/// Disk `disk0` comes under dray and goes back, also after another program had its file locked.
async fn comes_and_goes(bench: &Bench, vm: &GuestVm, qmp: &Qmp) {
    let server = bench.serve();
    let plan = plan(qmp).await.expect("plan");
    let nodes = count_nodes(qmp).await;
    for round in 0..3 {
        adopt(qmp, &plan, &server.export(), KEEP).await.expect("adopt");
        let theirs = locks::hold(&bench.image).expect("locks");
        let error = release(qmp, &plan).await.expect_err("another program has the file locked");
        assert!(error.to_string().contains("lock"), "round {round}: {error}");
        assert!(is_on_export(qmp, &plan).await, "round {round}");
        drop(theirs);
        release(qmp, &plan).await.expect("release");
        assert!(!is_on_export(qmp, &plan).await, "round {round}");
    }
    assert_eq!(count_nodes(qmp).await, nodes);
    assert!(vm.pid() > 0);
}

#[tokio::test]
async fn a_device_with_a_thread_of_its_own() {
    let Some(bench) = Bench::new() else { return };
    let builder = with(bench.builder().blockdev(bench.qcow2()), &["-object", THREAD]);
    let vm = builder.disk_with("disk0", "disk", ",iothread=io").start().expect("start");
    let qmp = connect(&vm).await;
    // Its guest stands still.
    comes_and_goes(&bench, &vm, &qmp).await;
    run(&qmp).await;
    comes_and_goes(&bench, &vm, &qmp).await;
    qmp.execute("stop", Value::Null).await.expect("stop");
    comes_and_goes(&bench, &vm, &qmp).await;
}

#[tokio::test]
async fn a_running_device_whose_file_was_made_with_its_format() {
    let Some(bench) = Bench::new() else { return };
    let builder = with(bench.builder().blockdev(bench.qcow2()), &["-object", THREAD]);
    let vm = builder.disk_with("disk0", "disk", ",iothread=io").start().expect("start");
    let qmp = connect(&vm).await;
    run(&qmp).await;
    comes_and_goes(&bench, &vm, &qmp).await;
}

#[tokio::test]
async fn a_device_on_a_controller_with_a_thread() {
    let Some(bench) = Bench::new() else { return };
    let builder = with(bench.builder().blockdev(bench.qcow2()), &["-object", THREAD]);
    let builder = with(builder, &["-device", "virtio-scsi-pci,id=bus,iothread=io"]);
    let vm = with(builder, &["-device", "scsi-hd,id=disk0,drive=disk"]).start().expect("start");
    let qmp = connect(&vm).await;
    comes_and_goes(&bench, &vm, &qmp).await;
    run(&qmp).await;
    comes_and_goes(&bench, &vm, &qmp).await;
}

/// As another program's, on the second monitor; what follows from a reset has happened on return.
fn tell(monitor: &Path, command: &str) {
    let mut monitor = Monitor::connect(monitor, BOOT).expect("a monitor");
    let answer = monitor.ask(&json!({ "execute": command }).to_string()).expect("qmp");
    assert!(answer.get("return").is_some(), "{command}: {answer}");
    std::thread::sleep(Duration::from_millis(100));
}

/// QEMU moves the disk out of its thread, or into it, when everything is ready for the reopen.
#[tokio::test]
async fn a_guest_that_is_reset_or_stopped_just_before_the_reopen() {
    let Some(bench) = Bench::new() else { return };
    let other = bench.dir.path().join("other.qmp");
    let monitor = format!("unix:{},server=on,wait=off", other.display());
    let builder = with(bench.builder().blockdev(bench.qcow2()), &["-object", THREAD]);
    let builder = with(builder, &["-qmp", &monitor]);
    let vm = builder.disk_with("disk0", "disk", ",iothread=io").start().expect("start");
    let qmp = connect(&vm).await;
    run(&qmp).await;
    let (server, plan) = (bench.serve(), plan(&qmp).await.expect("plan"));
    for event in ["system_reset", "stop", "cont", "system_reset"] {
        adopt(&qmp, &plan, &server.export(), KEEP).await.expect("adopt");
        let meanwhile = || {
            tell(&other, event);
            Ok(())
        };
        let released = release_tracked(&qmp, &plan, None, async || Ok(()), &meanwhile).await;
        released.unwrap_or_else(|why| panic!("{event}: {why}\n{}", vm.log()));
        assert!(!is_on_export(&qmp, &plan).await, "{event}");
    }
    assert_eq!(count_nodes(&qmp).await, 2);
}

/// QEMU refuses the node that ties both files, as one does that has no `blkverify`: here its name is taken.
#[tokio::test]
async fn a_running_device_whose_nodes_cannot_be_tied() {
    let Some(bench) = Bench::new() else { return };
    let builder = with(bench.builder().blockdev(bench.qcow2()), &["-object", THREAD]);
    let builder = builder.blockdev("driver=null-co,node-name=dray-from-disk0-0");
    let vm = builder.disk_with("disk0", "disk", ",iothread=io").start().expect("start");
    let qmp = connect(&vm).await;
    run(&qmp).await;
    comes_and_goes(&bench, &vm, &qmp).await;
}

#[tokio::test]
async fn the_thread_of_a_device_or_of_its_controller_is_found() {
    let Some(bench) = Bench::new() else { return };
    let node = |name: &str| format!("driver=null-co,node-name={name},size=1048576");
    let builder = (0..4).fold(bench.builder(), |b, i| b.blockdev(node(&format!("n{i}"))));
    let builder = with(builder.disk("plain", "n0"), &["-object", THREAD]);
    let builder = builder.disk_with("own", "n1", ",iothread=io");
    let builder = with(builder, &["-device", "virtio-scsi-pci,id=threaded,iothread=io"]);
    let builder = with(builder, &["-device", "scsi-hd,id=below,drive=n2,bus=threaded.0"]);
    let builder = with(builder, &["-device", "virtio-scsi-pci,id=main"]);
    let vm = with(builder, &["-device", "scsi-hd,id=other,drive=n3,bus=main.0"]).start();
    let vm = vm.expect("start");
    let qmp = connect(&vm).await;
    for (disk, thread) in
        [("plain", None), ("own", Some("io")), ("below", Some("io")), ("other", None)]
    {
        assert_eq!(iothread::of(&qmp, disk).await.expect("told").as_deref(), thread, "{disk}");
    }
    // Without a thread nothing is looked for.
    let vm = bench.raw_vm();
    let without = iothread::of(&connect(&vm).await, "disk0").await;
    assert_eq!(without.expect("told"), None);
}
