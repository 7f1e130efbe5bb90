//! Two QEMUs, one set of files behind NBD: the whole switchover in its order, and what happens when
//! the target dies in each of its steps.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::NbdServer;
use dray_qemu::migrate::{Incoming, Limits, Outgoing};
use dray_qemu::{
    AdoptOptions, LayerPlan, NbdExport, NodeOptions, Qmp, activate, adopt, blockdev, graph,
    release, status, was_started,
};
use dray_testkit::guest::{Bystander, GuestVm, GuestVmBuilder, initramfs, tools};

const SIZE: u64 = 64 << 20;
const SPAN: u64 = 16 << 20;
const LIMITS: Limits = Limits { max_bandwidth: 0, downtime_limit: Duration::from_millis(300) };
/// Slow enough that the memory is still on its way when the test acts.
const SLOW: Limits = Limits { max_bandwidth: 1 << 20, downtime_limit: Duration::from_millis(1) };
const LOAD: Duration = Duration::from_secs(20);

/// A guest with a raw disk and a qcow2 disk with a backing file and a persistent bitmap.
struct Lab {
    dir: tempfile::TempDir,
    raw: PathBuf,
    base: PathBuf,
    top: PathBuf,
    bystanders: [Bystander; 2],
}

impl Lab {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = |name: &str| dir.path().join(name);
        let (raw, base, top) = (path("raw.raw"), path("base.qcow2"), path("top.qcow2"));
        let bystanders = [Bystander::new(1, SIZE, SPAN), Bystander::new(2, SIZE, SPAN)];
        bystanders[0].create_raw(&raw).expect("image");
        bystanders[1].create_raw(&path("seed.raw")).expect("image");
        let text = |p: &Path| p.to_string_lossy().into_owned();
        let (seed, base_name, top_name) = (text(&path("seed.raw")), text(&base), text(&top));
        let convert = ["convert", "-f", "raw", "-O", "qcow2", &seed, &base_name];
        tools::run("qemu-img", &convert).expect("convert");
        let create = ["create", "-f", "qcow2", "-b", &base_name, "-F", "qcow2", &top_name];
        tools::run("qemu-img", &create).expect("create");
        tools::run("qemu-img", &["bitmap", "--add", &top_name, "backup"]).expect("bitmap");
        Self { dir, raw, base, top, bystanders }
    }

    fn builder(&self, name: &str) -> GuestVmBuilder {
        GuestVm::builder(self.dir.path(), name)
    }

    fn source(&self) -> GuestVm {
        let builder = self
            .builder("source")
            .blockdev(format!(
                "driver=file,node-name=plain,filename={},discard=unmap",
                self.raw.display()
            ))
            .blockdev(format!(
                "driver=qcow2,node-name=active,discard=unmap,file.driver=file,file.filename={}",
                self.top.display()
            ))
            .disk("disk0", "plain")
            .disk("disk1", "active")
            .booted();
        let mut vm = builder.start().expect("start");
        vm.wait_ready().expect("boot");
        for (disk, bystander) in ["vda", "vdb"].into_iter().zip(&self.bystanders) {
            let console = vm.console();
            console.command(&bystander.open_command(disk)).expect("open");
            let start = format!("start disk={disk} span={SPAN} block=16384 rate=2000000 flush=64");
            console.command(&start).expect("start");
        }
        vm
    }

    /// Serves every image, plans every layer, and adopts the two active ones.
    async fn adopt(&self, qmp: &Qmp) -> Adopted {
        let known = NodeOptions::of_process(qmp.pid().expect("pid")).expect("command line");
        let mut adopted = Adopted { servers: Vec::new(), disks: Vec::new() };
        for disk in graph::disks(qmp).await.expect("disks") {
            let plans = LayerPlan::of_disk(&disk, &known).expect("plan");
            let mut layers = Vec::new();
            for plan in plans {
                let socket = self.dir.path().join(format!("{}-{}.nbd", plan.qdev, plan.depth));
                let server = NbdServer::start(&plan.path(), &socket);
                layers.push((plan, server.export()));
                adopted.servers.push(server);
            }
            let (plan, export) = &layers[0];
            adopt(qmp, plan, export, AdoptOptions::default()).await.expect("adopt");
            adopted.disks.push(layers);
        }
        adopted
    }

    /// A QEMU that waits for the migration, started with the lines that `blockdev` made, on exports
    /// that are not yet the owner's.
    fn target(&self, adopted: &Adopted) -> Target {
        self.target_called("target", adopted)
    }

    fn target_called(&self, called: &str, adopted: &Adopted) -> Target {
        let mut builder = self.builder(called).incoming();
        let mut target = Vec::new();
        for plan in adopted.disks.iter().flatten().map(|(plan, _)| plan) {
            let name = format!("{called}-{}-{}.nbd", plan.qdev, plan.depth);
            let server = NbdServer::start_incoming(&plan.path(), &self.dir.path().join(name));
            target.push((plan.for_target(&plan.path()), server));
        }
        for disk in target.chunk_by(|a, b| a.0.qdev == b.0.qdev) {
            let layers: Vec<_> = disk.iter().map(|(p, s)| (p.clone(), s.export())).collect();
            for argument in blockdev::arguments(&layers) {
                builder = builder.blockdev(argument);
            }
            let active = &layers[0].0;
            builder = builder.disk(&active.qdev, &blockdev::top_node(active));
        }
        Target { vm: builder.start().expect("start the target"), layers: target }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("migration.sock")
    }
}

struct Adopted {
    /// The active images' servers come first of each disk's.
    servers: Vec<NbdServer>,
    disks: Vec<Vec<(LayerPlan, NbdExport)>>,
}

struct Target {
    vm: GuestVm,
    layers: Vec<(LayerPlan, NbdServer)>,
}

impl Adopted {
    fn active_plans(&self) -> Vec<LayerPlan> {
        self.disks.iter().map(|layers| layers[0].0.clone()).collect()
    }
}

async fn connect(vm: &GuestVm) -> Qmp {
    Qmp::connect(&vm.qmp_path()).await.expect("qmp")
}

async fn incoming(lab: &Lab, target: &Qmp, adopted: &Adopted) -> Incoming {
    let incoming = Incoming::prepare(target, &adopted.active_plans()).await.expect("prepare");
    // Left behind by a target that was killed.
    let _ = std::fs::remove_file(lab.socket());
    incoming.listen(&lab.socket()).await.expect("listen");
    incoming
}

fn image_info(path: &Path) -> String {
    let info = tools::run("qemu-img", &["info", "-U", &path.to_string_lossy()]).expect("info");
    String::from_utf8_lossy(&info.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_vm_moves_with_its_bitmap() {
    if !initramfs::available() {
        return;
    }
    let mut lab = Lab::new();
    let mut source_vm = lab.source();
    let source = connect(&source_vm).await;
    let before = graph::disks(&source).await.expect("disks");
    let adopted = lab.adopt(&source).await;
    let Target { vm: mut target_vm, layers } = lab.target(&adopted);
    let target = connect(&target_vm).await;
    let mut incoming = incoming(&lab, &target, &adopted).await;

    let mut outgoing = Outgoing::start(&source, &lab.socket(), &LIMITS).await.expect("start");
    let mut last = 0;
    outgoing.wait_pre_switchover(|p| last = p.transferred).await.expect("pre-switchover");
    assert!(last > 0, "the progress was reported");
    assert!(!status::status(&source).await.expect("status").running);
    assert!(image_info(&lab.top).contains("in-use"), "qemu has not finished with the image");
    let sent = outgoing.complete().await.expect("complete");
    println!("memory: {} bytes, qemu's downtime {:?}", sent.transferred, sent.downtime);
    incoming.wait_loaded(LOAD).await.expect("loaded");
    assert_eq!(status::status(&source).await.expect("status").state, "postmigrate");
    let info = image_info(&lab.top);
    assert!(info.contains("name: backup") && !info.contains("in-use"), "stored: {info}");
    // The disks' handover; after it the source's exports answer nothing but flushes.
    for server in &adopted.servers {
        let quiesced = server.disk().quiesce(LOAD).expect("nothing is in flight");
        server.disk().park(quiesced);
    }
    for (plan, server) in &layers {
        let (stats, id) = (server.disk().stats(), format!("{} {}", plan.qdev, plan.depth));
        println!("{id} before the handover: {} reads, {} bytes", stats.reads, stats.read_bytes);
        assert_eq!((stats.writes, stats.zeroes), (0, 0), "{id}: the target must not write yet");
        if plan.format == "raw" {
            assert_eq!(stats.read_bytes, 512, "the target looks at a raw disk's first sector");
        }
        server.take_over();
    }
    let resumed = incoming.resume().await.expect("resume");
    let stopped = outgoing.stopped_at().expect("the guest ran");
    println!("downtime by events: {:?}", resumed - stopped);
    // A qcow2 that is closed looks for its bitmaps once more, although it is inactive: QEMU would
    // wait for a parked read for ever. The outcome is known, so it is told that the disk is gone.
    let writes = |a: &Adopted| a.servers.iter().map(|s| s.disk().stats().writes).sum::<u64>();
    let written = writes(&adopted);
    for server in &adopted.servers {
        server.disk().fail_parked();
    }
    status::quit(&source).await.expect("quit");
    source_vm.wait_exit(Duration::from_secs(10)).expect("exit");
    assert_eq!(writes(&adopted), written, "the source wrote nothing after the handover");

    let console = target_vm.console();
    for _ in 0..4 {
        console.wait_for(Duration::from_secs(10), |l| l.starts_with("STAT")).expect("it writes");
    }
    for (plan, server) in layers {
        if !plan.read_only {
            server.make_room();
        }
        let released = release(&target, &plan).await.expect("release");
        println!("released {} layer {}: {released:?}", plan.qdev, plan.depth);
        server.wait_left();
    }
    drop(adopted);
    let after = graph::disks(&target).await.expect("disks");
    assert_eq!(release::differences(&before[1], &after[1]), Vec::<String>::new());
    let raw = ["layer 0: format raw, was none", "layer 0: node name dray-file-disk0-0, was plain"];
    assert_eq!(release::differences(&before[0], &after[0]), raw, "released by a reopen");
    finish(&mut lab, &target, &mut target_vm).await;
    let check = tools::run("qemu-img", &["check", &lab.top.to_string_lossy()]);
    check.expect("a sound image");
    assert!(lab.base.exists());
}

/// The guest verifies everything, and so does the bystander.
async fn finish(lab: &mut Lab, qmp: &Qmp, vm: &mut GuestVm) {
    let console = vm.console();
    console.command("stop").expect("stop");
    if let Err(why) = console.command("verify") {
        panic!("the guest's own check: {why}\n{}", console.complaints().join("\n"));
    }
    console.command("flush").expect("flush");
    assert_eq!(console.complaints(), Vec::<String>::new());
    for (disk, bystander) in ["vda", "vdb"].into_iter().zip(&mut lab.bystanders) {
        let dump = console.command(&format!("dump disk={disk}")).expect("dump");
        bystander.apply_dump(disk, &dump).expect("apply");
        assert!(bystander.written_blocks() > 200, "the guest wrote");
    }
    status::quit(qmp).await.expect("quit");
    vm.wait_exit(Duration::from_secs(10)).expect("exit");
    lab.bystanders[0].check_raw(&lab.raw).expect("raw image");
    lab.bystanders[1].check_format(&lab.top, "qcow2").expect("qcow2 image");
}

async fn guest_goes_on(vm: &mut GuestVm, qmp: &Qmp, when: &str) {
    assert!(status::status(qmp).await.expect("status").running, "{when}");
    let console = vm.console();
    let line = |l: &str| l.starts_with("STAT") && !l.contains("writes=0 ");
    // The first may have been printed before.
    for _ in 0..3 {
        console.wait_for(Duration::from_secs(10), line).expect(when);
    }
    assert_eq!(console.complaints(), Vec::<String>::new(), "{when}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_dead_target_costs_the_guest_nothing() {
    if !initramfs::available() {
        return;
    }
    let mut lab = Lab::new();
    let mut source_vm = lab.source();
    let source = connect(&source_vm).await;
    let adopted = lab.adopt(&source).await;

    for step in [
        "cancelled on the way",
        "killed on the way",
        "cancelled when paused",
        "killed when paused",
        "killed when loaded",
    ] {
        let Target { vm: mut target_vm, layers } = lab.target(&adopted);
        let target = connect(&target_vm).await;
        let mut incoming = incoming(&lab, &target, &adopted).await;
        let limits = if step.ends_with("on the way") { SLOW } else { LIMITS };
        let mut outgoing = Outgoing::start(&source, &lab.socket(), &limits).await.expect("start");
        match step {
            "cancelled on the way" => outgoing.abandon().await.expect(step),
            "killed on the way" => {
                target_vm.kill().expect("kill");
                let error = outgoing.wait_pre_switchover(|_| ()).await.expect_err(step);
                println!("{step}: {error}");
                assert_eq!(error.kind(), dray_qemu::ErrorKind::Failed);
            }
            "cancelled when paused" => {
                outgoing.wait_pre_switchover(|_| ()).await.expect(step);
                target_vm.kill().expect("kill");
                outgoing.abandon().await.expect(step);
            }
            "killed when paused" => {
                outgoing.wait_pre_switchover(|_| ()).await.expect(step);
                target_vm.kill().expect("kill");
                match outgoing.complete().await {
                    Err(error) => println!("{step}: {error}"),
                    // All of it fitted into the socket's buffer.
                    Ok(_) => outgoing.abandon().await.expect(step),
                }
            }
            _ => {
                outgoing.wait_pre_switchover(|_| ()).await.expect(step);
                outgoing.complete().await.expect(step);
                incoming.wait_loaded(LOAD).await.expect(step);
                target_vm.kill().expect("kill");
                let gone = incoming.resume().await.expect_err("a dead target");
                println!("{step}: {gone}");
                outgoing.abandon().await.expect(step);
            }
        }
        drop((target_vm, layers));
        guest_goes_on(&mut source_vm, &source, step).await;
    }
    for ((plan, _), server) in adopted.disks.iter().flatten().zip(&adopted.servers) {
        if plan.depth == 0 {
            server.make_room();
            release(&source, plan).await.expect("release");
        }
    }
    drop(adopted);
    finish(&mut lab, &source, &mut source_vm).await;
}

/// The answer to the first may have been lost: whoever asks again finds it listening.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_vm_that_listens_already_is_found_to() {
    if !initramfs::available() {
        return;
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let vm = GuestVm::builder(dir.path(), "waiting").incoming().start().expect("start");
    let (socket, other) = (dir.path().join("memory.sock"), dir.path().join("other.sock"));
    let qmp = connect(&vm).await;
    let incoming = Incoming::prepare(&qmp, &[]).await.expect("prepare");
    assert!(was_started(&qmp).await.is_err(), "there is no guest yet");
    assert!(!incoming.listens(&socket).await.expect("asked"));
    incoming.listen(&socket).await.expect("listen");
    // An agent that has been restarted since knows nothing of it.
    drop((incoming, qmp));
    let qmp = connect(&vm).await;
    let incoming = Incoming::prepare(&qmp, &[]).await.expect("prepare again");
    assert!(incoming.listens(&socket).await.expect("asked"));
    assert!(!incoming.listens(&other).await.expect("asked"));
    assert!(incoming.listen(&other).await.is_err(), "qemu listens once");
    assert!(incoming.listens(&socket).await.expect("asked"), "and goes on");
}

/// A guest that arrives stopped keeps its disks from QEMU; one that is to be sent on from there must
/// not make QEMU end.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_stopped_guest_moves_twice() {
    if !initramfs::available() {
        return;
    }
    let mut lab = Lab::new();
    let source_vm = lab.source();
    let source = connect(&source_vm).await;
    let adopted = lab.adopt(&source).await;
    status::stop(&source).await.expect("stop");
    let first = lab.target_called("first", &adopted);
    let middle = connect(&first.vm).await;
    pass(&lab, &source, &middle, &adopted).await;
    give_over(adopted.servers.iter(), &first);
    activate(&middle).await.expect("active");
    let graph = graph::Graph::read(&middle).await.expect("graph");
    assert_eq!(graph.held_back(), None);
    activate(&middle).await.expect("nothing is left to do");
    assert_eq!(status::status(&middle).await.expect("status").state, "paused");

    let second = lab.target_called("second", &adopted);
    let last = connect(&second.vm).await;
    pass(&lab, &middle, &last, &adopted).await;
    give_over(first.layers.iter().map(|(_, server)| server), &second);
    assert_eq!(status::status(&middle).await.expect("qemu is still there").state, "postmigrate");
    status::cont(&last).await.expect("cont");
    status::stop(&last).await.expect("stop");
    assert!(was_started(&last).await.expect("asked"), "its user has stopped it since");
    status::cont(&last).await.expect("cont");
    let Target { vm: mut last_vm, layers } = second;
    guest_goes_on(&mut last_vm, &last, "moved twice").await;
    finish(&mut lab, &last, &mut last_vm).await;
    drop((source_vm, first, layers));
}

/// Moves a stopped guest's memory.
async fn pass(lab: &Lab, from: &Qmp, to: &Qmp, adopted: &Adopted) {
    let mut incoming = incoming(lab, to, adopted).await;
    let mut outgoing = Outgoing::start(from, &lab.socket(), &LIMITS).await.expect("start");
    assert!(!outgoing.was_running());
    outgoing.wait_pre_switchover(|_| ()).await.expect("pre-switchover");
    outgoing.complete().await.expect("complete");
    incoming.wait_loaded(LOAD).await.expect("loaded");
    let graph = graph::Graph::read(to).await.expect("graph");
    assert_eq!(graph.held_back(), Some("disk0"));
    assert!(!was_started(to).await.expect("asked"));
}

/// The disks' handover.
fn give_over<'a>(from: impl Iterator<Item = &'a NbdServer>, to: &Target) {
    for server in from {
        let quiesced = server.disk().quiesce(LOAD).expect("nothing is in flight");
        server.disk().park(quiesced);
    }
    to.layers.iter().for_each(|(_, server)| server.take_over());
}
