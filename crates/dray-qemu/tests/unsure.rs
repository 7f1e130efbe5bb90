//! A monitor that goes wrong at any command of an adoption or a release: what is told afterwards is so, the disk
//! works, and the same step again comes to its end. `DRAY_WRONG=1` runs every command with everything that can go
//! wrong; without it one of eleven is run.

mod support;

use dray_qemu::{
    AdoptOptions, Error, ErrorKind, LayerPlan, NodeOptions, Qmp, adopt, graph, is_released, release,
};
use dray_testkit::guest::{GuestVm, tools};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use support::NbdServer;
use support::proxy::{ALL, Proxy, Wrong};

const SIZE: u64 = 16 << 20;
const KEEP: AdoptOptions = AdoptOptions { drop_bitmaps: false };
/// How long the client waits for an answer.
const PATIENCE: Duration = Duration::from_millis(400);
const LATE: Duration = Duration::from_millis(700);
/// One of so many runs in `make test`.
const SOME: usize = 11;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Adopt,
    Release,
}

/// QEMU makes its monitors one after the other.
async fn connect(monitor: &Path) -> Qmp {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match Qmp::connect(monitor).await {
            Err(why) if why.kind() == ErrorKind::Connect => {
                assert!(Instant::now() < deadline, "{why}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            connected => return connected.expect("qmp"),
        }
    }
}

/// A VM with one disk that nobody uses but the test.
struct Bench {
    vm: GuestVm,
    /// A monitor for the test alone.
    own: Qmp,
    server: NbdServer,
    plan: LayerPlan,
    image: PathBuf,
    format: &'static str,
    dir: tempfile::TempDir,
}

impl Bench {
    async fn new(format: &'static str) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let image = dir.path().join(format!("disk.{format}"));
        let path = image.to_string_lossy();
        tools::run("qemu-img", &["create", "-f", format, &path, &SIZE.to_string()])
            .expect("create");
        let node = match format {
            "raw" => format!("driver=file,node-name=disk,filename={path}"),
            _ => format!("driver={format},node-name=disk,file.driver=file,file.filename={path}"),
        };
        let own = dir.path().join("own.qmp");
        let monitor = format!("unix:{},server=on,wait=off", own.display());
        let builder = GuestVm::builder(dir.path(), "vm").memory_mib(32).bare();
        let builder = builder.blockdev(node).disk("disk0", "disk").arg("-qmp").arg(&monitor);
        let vm = builder.start().expect("start");
        let own = connect(&own).await;
        let known = NodeOptions::of_process(own.pid().expect("pid")).expect("command line");
        let disk = graph::disk(&own, "disk0").await.expect("disk");
        let plan = LayerPlan::of_active(&disk, &known).expect("plan");
        let server = NbdServer::start(&image, &dir.path().join("disk.nbd"));
        Self { vm, own, server, plan, image, format, dir }
    }

    /// The guest's device reads or writes, as QEMU's own tool does it.
    async fn io(&self, command: &str) {
        let line = format!("qemu-io -d /machine/peripheral/disk0/virtio-backend \"{command}\"");
        let said = self.own.execute("human-monitor-command", json!({ "command-line": line })).await;
        let said = said.expect("qemu-io").to_string();
        let fine = !said.contains("rror") && !said.contains("verification failed");
        assert!(fine, "{command}: {said}");
    }

    async fn step(&self, step: Step, qmp: &Qmp) -> Result<(), Error> {
        match step {
            Step::Adopt => adopt(qmp, &self.plan, &self.server.export(), KEEP).await.map(drop),
            Step::Release => {
                self.server.make_room();
                release(qmp, &self.plan).await.map(drop)
            }
        }
    }

    /// Whether the disk is where the step puts it.
    async fn is_done(&self, step: Step) -> bool {
        let on_file = is_released(&self.own, &self.plan).await.expect("a look");
        on_file == (step == Step::Release)
    }

    /// Carries the step out through a monitor that goes wrong at command `at`; how many commands there were.
    async fn run(self, step: Step, at: usize, wrong: Wrong) -> usize {
        let what = format!("{step:?} of {}, {wrong:?} at {at}", self.format);
        self.io("write -P 1 0 1M").await;
        if step == Step::Release {
            self.step(Step::Adopt, &self.own).await.expect("adopt");
        }
        self.io("write -P 2 64k 1M").await;
        let (monitor, socket) = (self.vm.qmp_path(), self.dir.path().join("proxy.qmp"));
        let proxy = Proxy::start(&monitor, socket, at, wrong, LATE);
        let qmp = Qmp::connect_with(proxy.socket(), PATIENCE * 10, PATIENCE).await.expect("qmp");
        let told = self.step(step, &qmp).await;
        let heard = proxy.commands();
        // What was asked late is carried out late.
        tokio::time::sleep(LATE).await;
        match &told {
            Ok(()) => assert!(self.is_done(step).await, "{what}: it is not done"),
            Err(why) if !why.kind().is_unknown() => {
                assert!(!self.is_done(step).await, "{what}: it is done, and told is {why}");
            }
            Err(_) => {}
        }
        drop((qmp, proxy));
        self.io("write -P 3 128k 1M").await;
        self.finish(step, &what).await;
        heard
    }

    /// The same once more, and the other way, over a monitor that does as it is told.
    async fn finish(self, step: Step, what: &str) {
        for step in [step, Step::Release] {
            if !self.is_done(step).await || step == Step::Release {
                let again = self.step(step, &self.own).await;
                again.unwrap_or_else(|why| panic!("{what}: and then {step:?}: {why}"));
            }
            assert!(self.is_done(step).await, "{what}: {step:?} is not done");
        }
        self.io("write -P 4 192k 64k").await;
        for (number, range) in [(1, "0 64k"), (2, "64k 64k"), (3, "128k 64k"), (4, "192k 64k")] {
            self.io(&format!("read -P {number} {range}")).await;
        }
        let nodes = self.own.execute("query-named-block-nodes", json!({ "flat": true })).await;
        let nodes = nodes.expect("nodes").to_string();
        assert!(!nodes.contains("\"nbd\""), "{what}: a node is left: {nodes}");
        self.own.execute("quit", json!({})).await.ok();
        let Self { mut vm, image, format, .. } = self;
        vm.wait_exit(Duration::from_secs(20)).expect("it quits");
        let path = image.to_string_lossy();
        if format == "qcow2" {
            tools::run("qemu-img", &["check", &path]).expect("a sound qcow2");
        }
        for (number, range) in [(1, "0 64k"), (2, "64k 64k"), (3, "128k 64k"), (4, "192k 64k")] {
            let read = format!("read -P {number} {range}");
            let said = tools::run("qemu-io", &["-f", format, "-c", &read, &path]).expect("qemu-io");
            let said = String::from_utf8_lossy(&said.stdout).into_owned();
            assert!(!said.contains("verification failed"), "{what}: {read}: {said}");
        }
    }
}

/// Everything that can go wrong at each command of a step, or some of it.
async fn goes_wrong(step: Step, format: &'static str) {
    if !tools::available(&[tools::QEMU, "qemu-img", "qemu-io"]) {
        return;
    }
    let all = std::env::var_os("DRAY_WRONG").is_some();
    // One that is so late that it never comes.
    let commands = Bench::new(format).await.run(step, usize::MAX, Wrong::Refused).await;
    let runs = (0..commands).flat_map(|at| ALL.map(|wrong| (at, wrong)));
    let mut count = 0;
    for (at, wrong) in
        runs.enumerate().filter(|(nth, _)| all || nth % SOME == 3).map(|(_, run)| run)
    {
        Bench::new(format).await.run(step, at, wrong).await;
        count += 1;
    }
    println!("{step:?} of {format}: {commands} commands, {count} runs");
}

#[tokio::test]
async fn an_adoption_of_a_raw_disk() {
    goes_wrong(Step::Adopt, "raw").await;
}

#[tokio::test]
async fn an_adoption_of_a_qcow2() {
    goes_wrong(Step::Adopt, "qcow2").await;
}

#[tokio::test]
async fn a_release_of_a_raw_disk() {
    goes_wrong(Step::Release, "raw").await;
}

#[tokio::test]
async fn a_release_of_a_qcow2() {
    goes_wrong(Step::Release, "qcow2").await;
}
