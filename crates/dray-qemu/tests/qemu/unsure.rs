//! A monitor that goes wrong at any command of an adoption or a release: what is told afterwards is so, the disk
//! works, and the same step again comes to its end.

use crate::support::NbdServer;
use crate::support::idle::{Idle, check_image};
use crate::support::walk::{Slip, walk};
use dray_qemu::{AdoptOptions, Error, LayerPlan, Qmp, adopt, is_released, release};
use dray_testkit::guest::tools;
use std::path::PathBuf;

const SIZE: u64 = 16 << 20;
const KEEP: AdoptOptions = AdoptOptions { drop_bitmaps: false };
/// One of so many runs in `make test`.
const SOME: usize = 13;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Adopt,
    Release,
}

/// A VM with one disk.
struct Bench {
    vm: Idle,
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
        let builder = Idle::builder(dir.path(), "vm").blockdev(node).disk("disk0", "disk");
        let vm = Idle::start(builder, dir.path(), "vm").await;
        let plan = vm.layers().await.remove(0);
        let server = NbdServer::start(&image, &dir.path().join("disk.nbd"));
        Self { vm, server, plan, image, format, dir }
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
        let on_file = is_released(&self.vm.own, &self.plan).await.expect("a look");
        on_file == (step == Step::Release)
    }

    /// Carries the step out through a monitor that goes wrong; the commands that it takes.
    async fn run(self, step: Step, slip: Slip) -> Vec<String> {
        let what = format!("{step:?} of {}, {slip}", self.format);
        self.vm.io("write -P 1 0 1M").await;
        if step == Step::Release {
            self.step(Step::Adopt, &self.vm.own).await.expect("adopt");
        }
        self.vm.io("write -P 2 64k 1M").await;
        let line = slip.connect(&self.vm.monitor(), &self.dir.path().join("proxy.qmp")).await;
        let told = self.step(step, &line.qmp).await;
        let heard = line.end().await;
        match &told {
            Ok(()) => assert!(self.is_done(step).await, "{what}: it is not done"),
            Err(why) if slip.is_none() => panic!("{what}: {why}"),
            Err(why) if !why.kind().is_unknown() => {
                assert!(!self.is_done(step).await, "{what}: it is done, and told is {why}");
            }
            Err(_) => {}
        }
        self.vm.io("write -P 3 128k 1M").await;
        self.finish(step, &what).await;
        heard
    }

    /// The same once more, and the other way, over a monitor that does as it is told.
    async fn finish(self, step: Step, what: &str) {
        for step in [step, Step::Release] {
            if !self.is_done(step).await || step == Step::Release {
                let again = self.step(step, &self.vm.own).await;
                again.unwrap_or_else(|why| panic!("{what}: and then {step:?}: {why}"));
            }
            assert!(self.is_done(step).await, "{what}: {step:?} is not done");
        }
        self.vm.io("write -P 4 192k 64k").await;
        let written = [(1, "0 64k"), (2, "64k 64k"), (3, "128k 64k"), (4, "192k 64k")];
        self.vm.check(&written).await;
        assert_eq!(self.vm.nodes().await.len(), before(self.format), "{what}: a node is left");
        let Self { mut vm, image, format, .. } = self;
        vm.quit().await;
        if format == "qcow2" {
            tools::run("qemu-img", &["check", &image.to_string_lossy()]).expect("a sound qcow2");
        }
        check_image(&image, format, &written, what);
    }
}

/// How many nodes the disk has when nobody has touched it.
fn before(format: &str) -> usize {
    if format == "raw" { 1 } else { 2 }
}

/// Everything that can go wrong at each command of a step, or some of it.
async fn goes_wrong(step: Step, format: &'static str) {
    if tools::available(&[tools::QEMU, "qemu-img", "qemu-io"]) {
        let what = format!("{step:?} of {format}");
        walk(&what, SOME, async |slip| Bench::new(format).await.run(step, slip).await).await;
    }
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
