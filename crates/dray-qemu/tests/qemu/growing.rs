//! An adopted qcow2 file grows like any other: QEMU resizes the image, takes an internal snapshot,
//! and writes past what was the file's end.

use std::path::Path;
use std::time::Duration;

use crate::support::NbdServer;
use crate::support::idle::Idle;
use crate::support::proxy::{At, Proxy, Wrong};
use dray_qemu::{
    AdoptOptions, Error, ErrorKind, LayerPlan, NodeOptions, Qmp, adopt, adopt_keeping, graph,
    release, release_tracked, resize, status,
};
use dray_testkit::guest::{GuestVm, tools};
use serde_json::json;

/// The length of a disk that is resized.
const OLD: u64 = 4 << 20;
/// No answer is late.
const LATE: Duration = Duration::ZERO;

/// Runs a qemu-io command as the disk's device.
async fn io(vm: &GuestVm, qmp: &Qmp, command: &str) {
    let device = "/machine/peripheral/disk0/virtio-backend";
    let line = format!("qemu-io -d {device} \"{command}\"");
    qmp.execute("human-monitor-command", json!({ "command-line": line })).await.expect("qemu-io");
    let said = vm.log();
    assert!(!said.contains("failed") && !said.contains("rror"), "{command}: {said}");
}

/// A VM without a guest whose disk is on this node, and the plan of that disk.
async fn start(dir: &Path, blockdev: String) -> (GuestVm, Qmp, LayerPlan) {
    let builder = GuestVm::builder(dir, "vm").memory_mib(32).bare();
    let vm = builder.blockdev(blockdev).disk("disk0", "active").start().expect("start");
    let qmp = Qmp::connect(&vm.qmp_path()).await.expect("qmp");
    let known = NodeOptions::of_process(qmp.pid().expect("pid")).expect("command line");
    let disk = graph::disk(&qmp, "disk0").await.expect("disk");
    let plan = LayerPlan::of_active(&disk, &known).expect("plan");
    (vm, qmp, plan)
}

fn run(args: &[&str]) -> String {
    let output = tools::run("qemu-img", args).expect("qemu-img");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test]
async fn a_qcow2_grows_under_dray() {
    if !tools::available(&[tools::QEMU, "qemu-img"]) {
        return;
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let top = dir.path().join("top.qcow2");
    let name = top.to_string_lossy();
    run(&["create", "-f", "qcow2", &name, "16M"]);
    // A relative name, as people write them.
    let relative = relative_to_here(&top);
    let file = format!(
        "driver=qcow2,node-name=active,discard=unmap,file.driver=file,file.filename={relative}"
    );
    let (vm, qmp, plan) = start(dir.path(), file).await;
    assert_eq!(plan.path().canonicalize().expect("path"), top.canonicalize().expect("path"));
    let server = NbdServer::start(&top, &dir.path().join("disk.nbd"));
    let small = size(&top);
    adopt(&qmp, &plan, &server.export(), AdoptOptions::default()).await.expect("adopt");

    io(&vm, &qmp, "write -P 1 0 8M").await;
    status::resize(&qmp, "disk0", 64 << 20).await.expect("resize");
    assert_eq!(graph::disk(&qmp, "disk0").await.expect("disk").size(), 64 << 20);
    let snapshot = json!({ "device": "active", "name": "before" });
    qmp.execute("blockdev-snapshot-internal-sync", snapshot).await.expect("snapshot");
    io(&vm, &qmp, "write -P 2 0 4M").await;
    io(&vm, &qmp, "write -P 3 40M 8M").await;
    io(&vm, &qmp, "read -P 2 0 4M").await;
    assert!(size(&top) > small + (19 << 20), "{} bytes", size(&top));

    let error = release(&qmp, &plan).await.expect_err("the file may grow");
    assert!(error.to_string().contains("would be lost"), "{error}");
    let graph = graph::Graph::read(&qmp).await.expect("graph");
    assert!(!graph.has_node(plan.local_node()), "the file's node is gone");
    server.make_room();
    release(&qmp, &plan).await.expect("release");
    drop(server);
    io(&vm, &qmp, "read -P 3 40M 8M").await;
    io(&vm, &qmp, "write -P 4 60M 4M").await;
    status::quit(&qmp).await.expect("quit");
    drop(vm);
    run(&["check", "-f", "qcow2", &name]);
    assert!(run(&["snapshot", "-l", &name]).contains("before"));
    run(&["snapshot", "-a", "before", &name]);
    let raw = dir.path().join("raw");
    run(&["convert", "-O", "raw", &name, &raw.to_string_lossy()]);
    let bytes = std::fs::read(&raw).expect("read");
    assert!(bytes[..8 << 20].iter().all(|b| *b == 1), "the snapshot holds what was there before");
}

/// A guest goes on writing while its disk is released. QEMU asks a file for its length once, when it opens it,
/// and takes everything behind that for zeros: also what went there through the export until the pivot.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_qcow2_that_grows_while_it_is_released_keeps_what_was_written() {
    if !tools::available(&[tools::QEMU, "qemu-img"]) {
        return;
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let top = dir.path().join("top.qcow2");
    run(&["create", "-f", "qcow2", &top.to_string_lossy(), "4G"]);
    let file = format!(
        "driver=qcow2,node-name=active,discard=unmap,file.driver=file,file.filename={}",
        top.display()
    );
    let (vm, qmp, plan) = start(dir.path(), file).await;
    let server = NbdServer::start(&top, &dir.path().join("disk.nbd"));
    adopt(&qmp, &plan, &server.export(), AdoptOptions::default()).await.expect("adopt");
    io(&vm, &qmp, "write -P 1 0 1M").await;

    let write = || {
        // Into the place of an L2 table that is there, and of one that is not.
        let writes = async {
            io(&vm, &qmp, "write -P 2 8M 1M").await;
            io(&vm, &qmp, "write -P 3 3G 1M").await;
        };
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(writes));
        Ok(())
    };
    server.make_room();
    release_tracked(&qmp, &plan, None, async || Ok(()), &write).await.expect("release");
    server.wait_left();
    for read in ["read -P 1 0 1M", "read -P 2 8M 1M", "read -P 3 3G 1M"] {
        io(&vm, &qmp, read).await;
    }
    io(&vm, &qmp, "write -P 4 3073M 1M").await;
    io(&vm, &qmp, "read -P 3 3G 1M").await;
    status::quit(&qmp).await.expect("quit");
    drop(vm);
    run(&["check", "-f", "qcow2", &top.to_string_lossy()]);
}

fn relative_to_here(path: &Path) -> String {
    let here = std::env::current_dir().expect("directory");
    let up = "../".repeat(here.components().count() - 1);
    format!("{up}{}", path.strip_prefix("/").expect("absolute").display())
}

/// A raw disk does not grow by itself: it is cut off and finds a larger export, in both ways of adoption. The
/// guest asks for nothing meanwhile.
#[tokio::test]
async fn a_raw_disk_that_is_cut_off_finds_a_larger_export() {
    if !tools::available(&[tools::QEMU, "qemu-img"]) {
        return;
    }
    for named in [true, false] {
        let dir = tempfile::tempdir().expect("temporary directory");
        let image = dir.path().join("image.raw");
        std::fs::File::create(&image).expect("create").set_len(16 << 20).expect("size");
        let path = image.display();
        let mut builder = GuestVm::builder(dir.path(), "vm").memory_mib(32).bare();
        if named {
            let file = format!("driver=file,node-name=storage,filename={path}");
            builder = builder.blockdev(file).blockdev("driver=raw,node-name=active,file=storage");
        } else {
            builder = builder.blockdev(format!("driver=file,node-name=active,filename={path}"));
        }
        let vm = builder.disk("disk0", "active").start().expect("start");
        let qmp = Qmp::connect(&vm.qmp_path()).await.expect("qmp");
        let known = NodeOptions::of_process(qmp.pid().expect("pid")).expect("command line");
        let disk = graph::disk(&qmp, "disk0").await.expect("disk");
        let plan = LayerPlan::of_active(&disk, &known).expect("plan");
        let socket = dir.path().join("disk.nbd");
        let small = NbdServer::start(&image, &socket);
        adopt(&qmp, &plan, &small.export(), AdoptOptions::default()).await.expect("adopt");
        io(&vm, &qmp, "write -P 1 0 16M").await;

        std::fs::File::options()
            .write(true)
            .open(&image)
            .expect("open")
            .set_len(32 << 20)
            .expect("grow");
        drop(small);
        let large = NbdServer::start(&image, &socket);
        resize::grown(&qmp, &plan, &large.export(), 32 << 20).await.expect("told");
        assert_eq!(graph::disk(&qmp, "disk0").await.expect("disk").size(), 32 << 20);
        resize::grown(&qmp, &plan, &large.export(), 32 << 20).await.expect("a second time");
        resize::grown(&qmp, &plan, &large.export(), 64 << 20).await.expect_err("it is not as long");
        io(&vm, &qmp, "write -P 2 16M 16M").await;
        release(&qmp, &plan).await.expect("release");
        drop(large);
        io(&vm, &qmp, "read -P 1 0 16M").await;
        io(&vm, &qmp, "read -P 2 16M 16M").await;
        let after = graph::disk(&qmp, "disk0").await.expect("disk");
        let differences = release::differences(&disk, &after);
        assert!(differences.iter().all(|d| d.contains("size")), "{differences:?}");
        let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true })).await;
        assert!(!nodes.expect("nodes").to_string().contains("dray-"), "nothing of dray's is left");
    }
}

/// A disk that somebody has put on another file is not made as long as the image: QEMU would cut that file.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_is_on_another_file_by_now_is_not_resized() {
    if !tools::available(&[tools::QEMU]) {
        return;
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let [image, other] = ["image.raw", "other.raw"].map(|name| dir.path().join(name));
    for (path, len) in [(&image, 16 << 20), (&other, 64 << 20)] {
        std::fs::File::create(path).expect("create").set_len(len).expect("size");
    }
    let file = format!("driver=file,node-name=storage,filename={}", image.display());
    let builder = GuestVm::builder(dir.path(), "vm").memory_mib(32).bare().blockdev(file);
    let builder = builder.blockdev("driver=raw,node-name=active,file=storage");
    let vm = builder.disk("disk0", "active").start().expect("start");
    let qmp = Qmp::connect(&vm.qmp_path()).await.expect("qmp");
    let known = NodeOptions::of_process(qmp.pid().expect("pid")).expect("command line");
    let disk = graph::disk(&qmp, "disk0").await.expect("disk");
    let plan = LayerPlan::of_active(&disk, &known).expect("plan");
    let server = NbdServer::start(&image, &dir.path().join("disk.nbd"));
    adopt(&qmp, &plan, &server.export(), AdoptOptions::default()).await.expect("adopt");

    let node = json!({ "driver": "file", "node-name": "other", "filename": other });
    qmp.execute("blockdev-add", node).await.expect("add");
    let options =
        json!({ "options": [{ "driver": "raw", "node-name": "active", "file": "other" }] });
    qmp.execute("blockdev-reopen", options).await.expect("reopen");
    let told = resize::grown(&qmp, &plan, &server.export(), 32 << 20).await;
    let why = told.expect_err("it is elsewhere");
    assert_eq!(why.kind(), ErrorKind::Mismatch, "{why}");
    assert!(why.to_string().contains("not on the export of image"), "{why}");
    assert_eq!(size(&other), 64 << 20);
}

fn size(path: &Path) -> u64 {
    std::fs::metadata(path).expect("metadata").len()
}

/// Somebody makes a raw disk longer, and its guest writes there, while dray takes the disk over. At whichever
/// command that happens the guest keeps what it wrote: on its own file, or, if it came first, refused before.
#[tokio::test]
async fn a_disk_that_is_resized_while_it_is_adopted_stays_on_its_file() {
    if !tools::available(&[tools::QEMU, "qemu-io"]) {
        return;
    }
    let mut met = 0;
    for file in [
        "driver=raw,node-name=active,file.driver=file,file.node-name=file,file.filename=",
        "driver=file,node-name=active,filename=",
    ] {
        for nth in 0.. {
            let dir = tempfile::tempdir().expect("temporary directory");
            let raw = dir.path().join("disk.raw");
            std::fs::write(&raw, vec![1; OLD as usize]).expect("image");
            let builder =
                Idle::builder(dir.path(), "vm").blockdev(format!("{file}{}", raw.display()));
            let vm = Idle::start(builder.disk("disk0", "active"), dir.path(), "vm").await;
            let plan = vm.layers().await.remove(0);
            let server = NbdServer::start(&raw, &dir.path().join("disk.nbd"));
            let (at, wrong) = (At::Nth(nth), Wrong::Resized);
            let proxy = Proxy::start(&vm.monitor(), dir.path().join("proxy"), at, wrong, LATE);
            let qmp = Qmp::connect(proxy.socket()).await.expect("qmp");
            let is_whole = || match std::fs::metadata(&raw).expect("length").len() {
                OLD => Ok(()),
                _ => Err(Error::new(ErrorKind::Mismatch, "somebody resized it")),
            };
            let options = AdoptOptions::default();
            let adopted = adopt_keeping(&qmp, &plan, &server.export(), options, &is_whole).await;
            if proxy.commands().len() <= nth {
                drop(adopted.expect("nobody has resized it"));
                break;
            }
            drop(qmp);
            // Of a disk on an export QEMU says that it does not grow.
            if vm.disk().await.size() == 8 << 20 {
                met += 1;
                let why = adopted.expect_err("its file is longer than the export").to_string();
                assert!(why.contains("resized") || why.contains("size"), "{nth}: {why}");
                assert!(!vm.nodes().await.contains(&plan.nbd_node()), "{nth}: {why}");
                vm.io("write -P 7 6M 64k").await;
            } else {
                drop(adopted.expect("it was resized in vain"));
            }
            vm.check(&[(1, "0 4M")]).await;
        }
    }
    assert!(met > 4, "{met}");
}
