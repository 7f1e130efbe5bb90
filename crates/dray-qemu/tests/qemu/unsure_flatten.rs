//! A monitor that goes wrong at any command with which a disk leaves its chain, goes home, or is settled after
//! that was broken off: the nodes are as before or as after once it is settled, what is told is so, no byte that
//! was flushed is lost, and the same step again, and its undoing, come to their end.

use crate::support::NbdServer;
use crate::support::idle::Idle;
use crate::support::proxy::{At, Wrong};
use crate::support::walk::{Slip, walk};
use dray_qemu::flatten::{On, flatten, settle, unflatten};
use dray_qemu::{Error, ErrorKind, LayerPlan, Qmp, VmDisk, release, status};
use dray_testkit::guest::tools;
use std::path::{Path, PathBuf};

const SIZE: u64 = 4 << 20;
const PIECE: u64 = 64 << 10;
/// One of so many runs in `make test`.
const SOME: usize = 150;

/// What puts the disk elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Flatten,
    Unflatten,
}

impl Step {
    /// Where it puts the disk.
    fn goal(self) -> On {
        match self {
            Self::Flatten => On::Export,
            Self::Unflatten => On::Chain,
        }
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug)]
enum Task {
    Step(Step),
    /// The step was cut off when QEMU had carried out this command of it.
    Settle(Step, &'static str),
}

impl Task {
    fn step(self) -> Step {
        match self {
            Self::Step(step) | Self::Settle(step, _) => step,
        }
    }
}

/// A VM with one disk that is on an overlay, and the export that has the same bytes when the guest stops.
struct Bench {
    vm: Idle,
    server: NbdServer,
    layers: Vec<LayerPlan>,
    before: VmDisk,
    /// How many nodes there are with the disk on its chain, and on its export.
    nodes: (usize, usize),
    /// What the guest has written, as it sees it.
    bytes: Vec<u8>,
    dir: tempfile::TempDir,
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// A base that is full, and an empty overlay of it.
fn create_chain(base: &Path, top: &Path) {
    let size = SIZE.to_string();
    tools::run("qemu-img", &["create", "-f", "qcow2", &text(base), &size]).expect("create");
    tools::run("qemu-io", &["-f", "qcow2", "-c", &format!("write -P 9 0 {SIZE}"), &text(base)])
        .expect("write");
    let create = ["create", "-f", "qcow2", "-b", &text(base), "-F", "qcow2", &text(top)];
    tools::run("qemu-img", &create).expect("create");
}

impl Bench {
    /// The chain's base has nodes of its own, or QEMU has opened it by itself.
    async fn new(named: bool) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let at = |name: &str| dir.path().join(name);
        let (base, top) = (at("base.qcow2"), at("top.qcow2"));
        create_chain(&base, &top);
        let mut builder = Idle::builder(dir.path(), "vm");
        let (mut disk, mut nodes) = (String::new(), (4, 1));
        if named {
            builder = builder.blockdev(format!(
                "driver=qcow2,node-name=base,read-only=on,file.driver=file,file.filename={}",
                base.display()
            ));
            disk.push_str(",backing=base");
            nodes.1 += 2;
        }
        let builder = builder.blockdev(format!(
            "driver=qcow2,node-name=disk,discard=unmap,file.driver=file,file.filename={}{disk}",
            top.display()
        ));
        let vm = Idle::start(builder.disk("disk0", "disk"), dir.path(), "vm").await;
        let (layers, before) = (vm.layers().await, vm.disk().await);
        std::fs::File::create(at("flat.raw")).expect("create").set_len(SIZE).expect("size");
        let server = NbdServer::start(&at("flat.raw"), &at("disk.nbd"));
        let bytes = vec![9; SIZE as usize];
        Self { vm, server, layers, before, nodes, bytes, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The guest goes on, writes its piece of that number, and stops.
    async fn write(&mut self, number: u8) {
        status::cont(&self.vm.own).await.expect("cont");
        let start = u64::from(number) * PIECE;
        self.vm.io(&format!("write -P {number} {start} {PIECE}")).await;
        status::stop(&self.vm.own).await.expect("stop");
        self.bytes[start as usize..(start + PIECE) as usize].fill(number);
    }

    /// The guest reads what it has written.
    async fn read(&self) {
        for (number, piece) in self.bytes.chunks(PIECE as usize).enumerate() {
            let start = number as u64 * PIECE;
            self.vm.io(&format!("read -P {} {start} {PIECE}", piece[0])).await;
        }
    }

    /// Whoever reads the files finds there what the guest has written.
    fn compare(&self, on: On, what: &str) {
        let expected = self.path("expected.raw");
        std::fs::write(&expected, &self.bytes).expect("write");
        let (format, name) = match on {
            On::Chain => ("qcow2", "top.qcow2"),
            On::Export => ("raw", "flat.raw"),
        };
        let (expected, found) = (text(&expected), text(&self.path(name)));
        let compare = ["compare", "-U", "-f", "raw", "-F", format, &expected, &found];
        tools::run("qemu-img", &compare).unwrap_or_else(|why| panic!("{what}: {why}"));
    }

    /// What the disk is to be put on gets the bytes of what it is on, as an agent sees to it.
    fn make_equal(&self, goal: On) {
        let chain = ("qcow2", text(&self.path("top.qcow2")));
        let export = ("raw", text(&self.path("flat.raw")));
        let (from, to) = match goal {
            On::Export => (chain, export),
            On::Chain => (export, chain),
        };
        let convert = ["convert", "-U", "-n", "-f", from.0, "-O", to.0, &from.1, &to.1];
        tools::run("qemu-img", &convert).expect("convert");
    }

    async fn step(&self, step: Step, qmp: &Qmp) -> Result<On, Error> {
        // Its guest is not let go on by anybody.
        let nobody = || Ok(());
        match step {
            Step::Flatten => flatten(qmp, &self.layers, &self.server.export(), &nobody).await?,
            Step::Unflatten => unflatten(qmp, &self.layers, &nobody).await?,
        };
        Ok(step.goal())
    }

    /// The step over a monitor that does as it is told.
    async fn do_well(&self, step: Step, what: &str) {
        self.make_equal(step.goal());
        let done = self.step(step, &self.vm.own).await;
        done.unwrap_or_else(|why| panic!("{what}: and then {step:?}: {why}"));
        self.check_nodes(step.goal(), what).await;
    }

    /// The task over a monitor that goes wrong; where it says that the disk is.
    async fn attempt(&self, task: Task, qmp: &Qmp) -> Result<On, Error> {
        match task {
            Task::Step(step) => self.step(step, qmp).await,
            Task::Settle(..) => settle(qmp, &self.layers).await,
        }
    }

    /// Where the disk is, whatever else is there.
    async fn place(&self) -> On {
        let top = self.vm.disk().await.active().top().name.clone();
        if top == self.layers[0].flattened().nbd_node() { On::Export } else { On::Chain }
    }

    /// Nothing is half done.
    async fn check_nodes(&self, on: On, what: &str) {
        assert_eq!(self.place().await, on, "{what}");
        let (nodes, jobs) = (self.vm.nodes().await, status::block_jobs(&self.vm.own).await);
        assert_eq!(jobs.expect("jobs"), [], "{what}");
        let expected = if on == On::Chain { self.nodes.0 } else { self.nodes.1 };
        assert_eq!(nodes.len(), expected, "{what}: {nodes:?}");
        if on == On::Chain {
            let now = self.vm.disk().await;
            assert_eq!(release::differences(&self.before, &now), Vec::<String>::new(), "{what}");
        }
    }

    /// The disk is where what was told says.
    async fn check_told(&self, step: Step, told: &Result<On, Error>, what: &str) {
        match told {
            Ok(on) => self.check_nodes(*on, what).await,
            Err(why) if why.kind().is_unknown() => {}
            Err(why) => {
                let what = format!("{what}: told is {why}");
                assert_ne!(self.place().await, step.goal(), "{what}");
                self.check_nodes(self.place().await, &what).await;
            }
        }
    }

    /// The step is cut off when QEMU has carried out a command of it.
    async fn break_off(&self, step: Step, command: &'static str) {
        let slip = Slip::new(At::First(command), Wrong::CutAfter);
        let line = slip.connect(&self.vm.monitor(), &self.path("broken.qmp")).await;
        let told = self.step(step, &line.qmp).await;
        assert_eq!(told.expect_err(command).kind(), ErrorKind::Closed);
        line.end().await;
    }

    /// Carries the task out through a monitor that goes wrong; the commands that it takes.
    async fn run(mut self, task: Task, slip: Slip) -> Vec<String> {
        let what = format!("{task:?}, {slip}");
        let step = task.step();
        self.write(1).await;
        if step == Step::Unflatten {
            self.do_well(Step::Flatten, "at first").await;
            self.write(2).await;
        }
        self.make_equal(step.goal());
        if let Task::Settle(step, command) = task {
            self.break_off(step, command).await;
        }
        let line = slip.connect(&self.vm.monitor(), &self.path("proxy.qmp")).await;
        let told = self.attempt(task, &line.qmp).await;
        let heard = line.end().await;
        assert!(!slip.is_none() || told.is_ok(), "{what}: {told:?}");
        if let Task::Step(step) = task {
            self.check_told(step, &told, &what).await;
        } else if let Ok(on) = told {
            self.check_nodes(on, &what).await;
        }
        self.finish(step, &what).await;
        heard
    }

    /// Settled, the same once more, and undone.
    async fn finish(&mut self, step: Step, what: &str) {
        let on = settle(&self.vm.own, &self.layers).await;
        let on = on.unwrap_or_else(|why| panic!("{what}: settle: {why}"));
        self.check_nodes(on, what).await;
        for on in [On::Chain, On::Export] {
            self.compare(on, what);
        }
        self.write(3).await;
        self.compare(on, what);
        if on != step.goal() {
            self.do_well(step, what).await;
        }
        self.write(4).await;
        if step.goal() == On::Export {
            self.do_well(Step::Unflatten, what).await;
        }
        self.write(5).await;
        self.read().await;
        self.server.wait_left();
        self.compare(On::Chain, what);
        self.vm.quit().await;
        tools::run("qemu-img", &["check", &text(&self.path("top.qcow2"))]).expect("a sound qcow2");
    }
}

async fn goes_wrong(task: Task, named: bool) {
    if tools::available(&[tools::QEMU, "qemu-img", "qemu-io"]) {
        let what = format!("{task:?}, nodes with names {named}");
        walk(&what, SOME, async |slip| Bench::new(named).await.run(task, slip).await).await;
    }
}

#[tokio::test]
async fn a_disk_that_leaves_its_chain_is_on_one_of_both() {
    goes_wrong(Task::Step(Step::Flatten), false).await;
}

#[tokio::test]
async fn a_disk_that_leaves_a_chain_of_named_nodes_is_on_one_of_both() {
    goes_wrong(Task::Step(Step::Flatten), true).await;
}

#[tokio::test]
async fn a_disk_that_goes_home_is_on_one_of_both() {
    goes_wrong(Task::Step(Step::Unflatten), false).await;
}

#[tokio::test]
async fn a_disk_that_goes_home_to_a_chain_of_named_nodes_is_on_one_of_both() {
    goes_wrong(Task::Step(Step::Unflatten), true).await;
}

#[tokio::test]
async fn a_disk_that_was_about_to_leave_is_settled_in_the_end() {
    goes_wrong(Task::Settle(Step::Flatten, "blockdev-mirror"), false).await;
}

#[tokio::test]
async fn a_disk_that_had_just_left_is_settled_in_the_end() {
    goes_wrong(Task::Settle(Step::Flatten, "job-complete"), false).await;
}

#[tokio::test]
async fn a_disk_that_was_about_to_come_home_is_settled_in_the_end() {
    goes_wrong(Task::Settle(Step::Unflatten, "blockdev-mirror"), true).await;
}

#[tokio::test]
async fn a_disk_that_had_just_come_home_is_settled_in_the_end() {
    goes_wrong(Task::Settle(Step::Unflatten, "job-complete"), true).await;
}
