//! A lab with a VM on host a, ready to be moved to host b.

use crate::turn::Turn;
use dray_testkit::guest::{Bystander, GuestVm, GuestVmBuilder, Monitor, initramfs, tools};
use dray_testkit::lab::{Answer, Lab};
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

pub const SIZE: u64 = 96 << 20;
pub const SEEDED: u64 = 24 << 20;
/// How long a whole migration may take on a busy machine; 3 s on an idle one.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The bytes of its file that a [`Kind::Part`] does not show.
pub const HIDDEN: usize = 1 << 20;
/// The name of the second monitor's socket.
const OTHER_MONITOR: &str = "other.qmp";

/// How a disk is attached at the source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Raw, on dray's socket from the start.
    Resident,
    /// Raw, on a file of its own.
    Plain,
    /// The same, from a `-drive` that names no node.
    Drive,
    /// Raw, in a file of which the node shows what comes after the first MiB.
    Part,
    /// The same with a size, which the node keeps when the file grows.
    Piece,
    /// A qcow2 with a backing file, a persistent bitmap and an internal snapshot, on its file.
    Qcow2,
    /// The top of three qcow2 images, whose lower ones hold what was overwritten since.
    Chain,
    /// As [`Self::Qcow2`], with a node of its own for the file; the device runs in an iothread.
    Threaded,
    /// As [`Self::Qcow2`], whose file's node comes and goes with that of the format; the device runs in an iothread.
    ThreadedInline,
}

pub struct Disk {
    pub kind: Kind,
    pub bystander: Bystander,
}

/// The lab, the source's QEMU, and the target's once it is started.
pub struct Stage {
    pub source: GuestVm,
    /// How the source's QEMU was started.
    builder: GuestVmBuilder,
    rate: u64,
    /// The source's QEMU was killed: clusters of a qcow2 that it had not entered in its tables yet leak.
    was_killed: bool,
    pub target: Option<GuestVm>,
    pub disks: Vec<Disk>,
    pub lab: Lab,
    /// Given back when all else has ended.
    _turn: Turn,
}

impl Kind {
    /// The name of the image's file.
    fn file(self, i: usize) -> String {
        match self {
            Self::Resident | Self::Plain | Self::Drive | Self::Part | Self::Piece => {
                format!("disk{i}.raw")
            }
            Self::Qcow2 | Self::Chain | Self::Threaded | Self::ThreadedInline => {
                format!("disk{i}.qcow2")
            }
        }
    }

    fn is_threaded(self) -> bool {
        matches!(self, Self::Threaded | Self::ThreadedInline)
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

fn device(i: usize) -> String {
    format!("vd{}", char::from(b'a' + i as u8))
}

/// Makes the image of a disk and tells QEMU about it.
fn attach(lab: &Lab, builder: GuestVmBuilder, i: usize, disk: &Disk) -> GuestVmBuilder {
    let a = lab.host("a");
    let path = a.pool().join(disk.kind.file(i));
    let (qdev, node) = (format!("disk{i}"), format!("node{i}"));
    let builder = match disk.kind {
        Kind::Resident => {
            disk.bystander.create_raw(&path).expect("image");
            let name = disk.kind.file(i);
            a.json(&["images", "add", &name, text(&path)]).expect("images add");
            let socket = a.nbd_socket();
            builder.blockdev(format!(
                "driver=nbd,node-name={node},server.type=unix,server.path={},export={name},\
                 reconnect-delay=300,discard=unmap",
                socket.display()
            ))
        }
        Kind::Plain => {
            disk.bystander.create_raw(&path).expect("image");
            let path = path.display();
            builder.blockdev(format!("driver=file,node-name={node},filename={path},discard=unmap"))
        }
        Kind::Drive => {
            disk.bystander.create_raw(&path).expect("image");
            let path = path.display();
            builder.arg("-drive").arg(&format!("file={path},format=raw,if=none,id={node}"))
        }
        Kind::Part | Kind::Piece => {
            disk.bystander.create_raw(&path).expect("image");
            let shown = std::fs::read(&path).expect("image");
            std::fs::write(&path, [vec![0xa5; HIDDEN], shown].concat()).expect("image");
            let (file, path) = (format!("file{i}"), path.display());
            let below = format!("driver=file,node-name={file},filename={path},discard=unmap");
            let above = format!("driver=raw,node-name={node},discard=unmap,file={file}");
            let end =
                if disk.kind == Kind::Piece { format!(",size={SIZE}") } else { String::new() };
            builder.blockdev(below).blockdev(format!("{above},offset={HIDDEN}{end}"))
        }
        Kind::Threaded => {
            make_qcow2(&a.pool(), &path, &disk.bystander);
            let (file, path) = (format!("file{i}"), path.display());
            let below = format!("driver=file,node-name={file},filename={path},discard=unmap");
            let above = format!("driver=qcow2,node-name={node},discard=unmap,file={file}");
            builder.blockdev(below).blockdev(above)
        }
        Kind::Qcow2 | Kind::Chain | Kind::ThreadedInline => {
            match disk.kind {
                Kind::Chain => make_chain(&a.pool(), &path, &disk.bystander),
                _ => make_qcow2(&a.pool(), &path, &disk.bystander),
            }
            let path = path.display();
            builder.blockdev(format!(
                "driver=qcow2,node-name={node},discard=unmap,file.driver=file,file.filename={path}"
            ))
        }
    };
    if !disk.kind.is_threaded() {
        return builder.disk(&qdev, &node);
    }
    let thread = format!("thread{i}");
    let builder = builder.arg("-object").arg(&format!("iothread,id={thread}"));
    builder.disk_with(&qdev, &node, &format!(",iothread={thread}"))
}

fn make_qcow2(pool: &Path, path: &Path, bystander: &Bystander) {
    let (seed, base) = (pool.join("seed.raw"), pool.join("base.qcow2"));
    bystander.create_raw(&seed).expect("seed");
    let run = |args: &[&str]| tools::run("qemu-img", args).expect("qemu-img");
    run(&["convert", "-f", "raw", "-O", "qcow2", text(&seed), text(&base)]);
    std::fs::remove_file(&seed).expect("remove");
    run(&["create", "-f", "qcow2", "-b", text(&base), "-F", "qcow2", text(path)]);
    run(&["bitmap", "--add", text(path), "backup"]);
    run(&["snapshot", "-c", "before", text(path)]);
}

/// Random bytes below what the guest sees, which is in the middle: its writes go to the top.
fn make_chain(pool: &Path, path: &Path, bystander: &Bystander) {
    let (seed, base, middle) =
        (pool.join("seed.raw"), pool.join("base.qcow2"), pool.join("middle.qcow2"));
    let run = |args: &[&str]| tools::run("qemu-img", args).expect("qemu-img");
    let old: Vec<u8> =
        (0..SIZE as u32 / 4).flat_map(|n| n.wrapping_mul(0x9e37_79b1).to_le_bytes()).collect();
    std::fs::write(&seed, old).expect("old content");
    run(&["convert", "-f", "raw", "-O", "qcow2", text(&seed), text(&base)]);
    bystander.create_raw(&seed).expect("seed");
    run(&["create", "-f", "qcow2", "-b", text(&base), "-F", "qcow2", text(&middle)]);
    run(&["convert", "-n", "-f", "raw", "-O", "qcow2", text(&seed), text(&middle)]);
    std::fs::remove_file(&seed).expect("remove");
    run(&["create", "-f", "qcow2", "-b", text(&middle), "-F", "qcow2", text(path)]);
}

impl Stage {
    /// Starts agents and a guest that writes `rate` bytes a second to each disk; none where a
    /// guest cannot be started here.
    pub fn new(name: &str, kinds: &[Kind], rate: u64) -> Option<Self> {
        Self::with_settings(name, kinds, rate, "")
    }

    pub fn with_settings(name: &str, kinds: &[Kind], rate: u64, settings: &str) -> Option<Self> {
        if !initramfs::available() {
            return None;
        }
        let turn = Turn::wait();
        let dray = Path::new(env!("CARGO_BIN_EXE_dray"));
        let lab = Lab::with_settings(name, dray, settings).expect("lab");
        lab.start().expect("agents");
        let disks: Vec<Disk> = kinds
            .iter()
            .zip(1..)
            .map(|(&kind, id)| Disk { kind, bystander: Bystander::new(id, SIZE, SEEDED) })
            .collect();
        let mut builder = GuestVm::builder(&lab.dir(), "source").memory_mib(192).booted();
        for (i, disk) in disks.iter().enumerate() {
            builder = attach(&lab, builder, i, disk);
        }
        let other = lab.dir().join(OTHER_MONITOR);
        let other = format!("unix:{},server=on,wait=off", other.display());
        let builder = builder.arg("-qmp").arg(&other);
        let source = builder.start().expect("source qemu");
        let (was_killed, target, _turn) = (false, None, turn);
        let mut stage = Self { source, builder, rate, was_killed, target, disks, lab, _turn };
        stage.begin_writing("");
        Some(stage)
    }

    /// Waits until the source's guest has booted, and has it write. `learn`: what it finds on its disks is what
    /// was written before.
    fn begin_writing(&mut self, learn: &str) {
        self.source.wait_ready().expect("boot");
        for (i, disk) in self.disks.iter().enumerate() {
            let (name, rate) = (device(i), self.rate);
            let console = self.source.console();
            let open = disk.bystander.open_command(&name);
            console.command(&format!("{open}{learn}")).expect("open");
            let span = 48 << 20;
            let start = format!("start disk={name} span={span} block=16384 rate={rate} flush=32");
            console.command(&start).expect("start");
        }
    }

    /// The VM is started again at the source, by somebody who knows nothing of dray.
    pub fn start_source_again(&mut self) {
        self.was_killed = true;
        self.source = self.builder.start().expect("source qemu");
        self.begin_writing(" learn=1");
    }

    /// A second monitor of the source's QEMU, for whoever is not dray.
    pub fn other_monitor(&self) -> PathBuf {
        self.lab.dir().join(OTHER_MONITOR)
    }

    /// The same of the QEMU that waits at the target.
    pub fn others_target_monitor(&self) -> PathBuf {
        self.lab.dir().join("other-target.qmp")
    }

    pub fn source_qmp(&self) -> String {
        text(&self.source.qmp_path()).to_owned()
    }

    pub fn target_qmp(&self) -> String {
        text(&self.lab.dir().join("target.qmp")).to_owned()
    }

    /// `dray prepare`, and the waiting QEMU started with what it printed.
    pub fn prepare(&mut self) -> Value {
        let prepared = self.prepare_exports();
        self.start_target(&prepared);
        prepared
    }

    pub fn prepare_exports(&self) -> Value {
        self.prepared_with(&[]).json().expect("prepare")
    }

    /// What `dray prepare` answers to more arguments.
    pub fn prepared_with(&self, more: &[&str]) -> Answer {
        let qmp = self.source_qmp();
        let mut args = vec!["--json", "prepare", "--qmp", &qmp, "--to", "hostb"];
        args.extend(more);
        self.lab.host("a").dray(&args).expect("prepare")
    }

    pub fn start_target(&mut self, prepared: &Value) {
        self.start_waiting("target", prepared);
    }

    /// Starts the waiting QEMU, called `name`, with what `dray prepare` printed.
    pub fn start_waiting(&mut self, name: &str, prepared: &Value) {
        let other = self.lab.dir().join(format!("other-{name}.qmp"));
        let other = format!("unix:{},server=on,wait=off", other.display());
        let builder =
            GuestVm::builder(&self.lab.dir(), name).memory_mib(192).arg("-qmp").arg(&other);
        let builder = builder.waiting(prepared, "").expect("what was prepared");
        self.target = Some(builder.start().expect("target qemu"));
    }

    /// Migrates to another waiting QEMU than that of the stage.
    pub fn migrate_to(&self, target: &Path) -> Answer {
        let (source, target) = (self.source_qmp(), text(target));
        let args = ["migrate", "--qmp", &source, "--to", "hostb", "--target-qmp", target];
        self.lab.host("a").dray(&args).expect("migrate")
    }

    /// `dray release` at the source: its QEMU has its disks back, and its guest has seen nothing.
    pub fn release(&mut self) {
        let qmp = self.source_qmp();
        let released = self.lab.host("a").dray(&["release", "--qmp", &qmp]).expect("release");
        assert_eq!(released.code, 0, "{released:?}\n{}", self.logs());
        self.assert_guest_is_well();
    }

    /// Starts `dray migrate`.
    pub fn spawn(&self, more: &[&str]) -> Child {
        let (source, target) = (self.source_qmp(), self.target_qmp());
        let mut args = vec!["migrate", "--qmp", &source, "--to", "hostb", "--target-qmp", &target];
        args.extend(more);
        self.lab.host("a").spawn(&args).expect("migrate")
    }

    /// Migrates and returns the summary.
    pub fn migrate(&self, more: &[&str]) -> io::Result<Value> {
        let summary = Answer::of(self.spawn(more))?.json();
        summary.map_err(|why| io::Error::other(format!("{why}\n{}", self.logs())))
    }

    pub fn logs(&self) -> String {
        let host = |letter| format!("--- {letter}\n{}", self.lab.host(letter).log());
        let target = self.target.as_ref().map(GuestVm::log).unwrap_or_default();
        format!("{}{}--- target qemu\n{target}", host("a"), host("b"))
    }

    /// The guest's program writes and verifies on the VM that runs now.
    pub fn guest(&mut self) -> &mut GuestVm {
        match &mut self.target {
            Some(target) => target,
            None => &mut self.source,
        }
    }

    /// The guest goes on writing at the host it is on, and has seen nothing bad. It may stand still
    /// first: an agent that was away comes back, and QEMU connects to it again in its own time.
    pub fn assert_guest_is_well(&mut self) {
        let before = self.writes();
        let deadline = Instant::now() + PATIENCE;
        let behind =
            |after: &[u64]| before.iter().zip(after).any(|(before, after)| after <= before);
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let after = self.writes();
            if !behind(&after) {
                break;
            }
            if Instant::now() > deadline {
                panic!("the guest stands still: {before:?} {after:?}\n{}", self.logs());
            }
        }
        assert_eq!(self.guest().console().complaints(), [""; 0]);
    }

    /// The writes of each disk so far, from the guest itself.
    fn writes(&mut self) -> Vec<u64> {
        let count = self.disks.len();
        let guest = self.guest();
        let mut report = |i| match guest.console().report(&device(i)) {
            Ok(line) => line.value("writes", 0).expect("writes"),
            Err(why) => panic!("no report: {why}; {:?}\n{}", guest.exited(), guest.log()),
        };
        (0..count).map(&mut report).collect()
    }

    /// The guest stops, verifies everything, tells what it wrote, and its QEMU quits.
    pub fn finish_guest(&mut self) {
        let count = self.disks.len();
        let guest = self.guest();
        guest.console().command("stop").expect("stop");
        guest.console().command("verify").expect("verify");
        guest.console().command("flush").expect("flush");
        assert_eq!(guest.console().complaints(), [""; 0]);
        let dumps: Vec<Vec<String>> = (0..count)
            .map(|i| guest.console().command(&format!("dump disk={}", device(i))).expect("dump"))
            .collect();
        guest.console().send("poweroff").expect("poweroff");
        guest.wait_exit(PATIENCE).expect("the guest's qemu ends");
        for (i, dump) in dumps.iter().enumerate() {
            self.disks[i].bystander.apply_dump(&device(i), dump).expect("dump");
        }
    }

    pub fn image(&self, host: &str, i: usize) -> PathBuf {
        self.lab.host(host).pool().join(self.disks[i].kind.file(i))
    }

    /// Where the image of a disk that moved flattened is at the target.
    pub fn flat_image(&self, i: usize) -> PathBuf {
        self.lab.host("b").pool().join(format!("disk{i}.raw"))
    }

    /// What the guest wrote is what the images at `host` hold, byte for byte.
    pub fn assert_images(&self, host: &str) {
        for (i, disk) in self.disks.iter().enumerate() {
            let path = self.image(host, i);
            if disk.kind == Kind::Chain {
                let flat = if host == "b" { self.flat_image(i) } else { self.merged(&path) };
                disk.bystander.check_raw(&flat).expect("what the guest saw");
            } else if matches!(disk.kind, Kind::Part | Kind::Piece) {
                let flat = self.lab.dir().join("shown.raw");
                let file = std::fs::read(&path).expect("the image");
                let (hidden, shown) = file.split_at(HIDDEN);
                assert!(hidden.iter().all(|&byte| byte == 0xa5), "nobody writes there");
                std::fs::write(&flat, shown).expect("what the guest saw");
                disk.bystander.check_raw(&flat).expect("the image");
            } else if disk.kind == Kind::Qcow2 || disk.kind.is_threaded() {
                self.assert_qcow2(host, &path, &disk.bystander);
            } else {
                disk.bystander.check_raw(&path).expect("the image");
            }
        }
    }

    /// What a sound chain holds, as QEMU's own tool reads it.
    fn merged(&self, path: &Path) -> PathBuf {
        let flat = self.lab.dir().join("merged.raw");
        tools::run("qemu-img", &["check", text(path)]).expect("a sound qcow2");
        tools::run("qemu-img", &["convert", "-O", "raw", text(path), text(&flat)])
            .expect("convert");
        flat
    }

    fn assert_qcow2(&self, host: &str, path: &Path, bystander: &Bystander) {
        let pool = self.lab.host(host).pool();
        let run = |args: &[&str]| {
            let output = tools::run("qemu-img", args).expect("qemu-img");
            String::from_utf8(output.stdout).expect("text")
        };
        // The image names its backing file by the source's path; look at it here.
        if host == "b" {
            let base = pool.join("base.qcow2");
            run(&["rebase", "-u", "-b", text(&base), "-F", "qcow2", text(path)]);
        }
        // Leaks are repaired first; anything worse is an error either way.
        let repair: &[&str] = if self.was_killed { &["-r", "leaks"] } else { &[] };
        run(&[&["check"], repair, &[text(path)]].concat());
        let info = run(&["info", "--output=json", text(path)]);
        let info: Value = serde_json::from_str(&info).expect("json");
        assert_eq!(info["snapshots"][0]["name"], "before", "{info}");
        let bitmaps = &info["format-specific"]["data"]["bitmaps"];
        assert_eq!(bitmaps[0]["name"], "backup", "{info}");
        let flat = self.lab.dir().join("flat.raw");
        run(&["convert", "-O", "raw", text(path), text(&flat)]);
        bystander.check_raw(&flat).expect("the qcow2's contents");
        run(&["compare", text(path), text(&flat)]);
        std::fs::remove_file(flat).expect("remove");
    }

    /// The VM moves as it is, and the guest has seen nothing of it.
    pub fn moves(&mut self) {
        self.prepare();
        let summary = self.migrate(&[]).expect("moves");
        assert_eq!(summary["result"], "completed", "{summary:#}");
        self.assert_guest_is_well();
        self.quit_source();
        self.finish_guest();
        self.assert_images("b");
    }

    /// A migration ends well at the target, without a brake.
    pub fn completes(mut self, migrate: Child) {
        let source = self.lab.host("a");
        let deadline = Instant::now() + PATIENCE;
        while source.json(&["limit", "none"]).is_err() {
            assert!(Instant::now() < deadline, "no limit can be set\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(50));
        }
        let ended = source.wait_status(PATIENCE, |status| status["state"] == "completed");
        ended.unwrap_or_else(|why| panic!("{why}\n{}", self.logs()));
        // Whoever watched through an agent that ended has lost sight of it.
        Answer::of(migrate).expect("answer");
        self.assert_guest_is_well();
        self.quit_source();
        self.finish_guest();
        self.assert_images("b");
    }

    /// Tells the source's QEMU to quit, as whoever manages it does, and waits for its end.
    pub fn quit_source(&mut self) {
        quit(&self.source.qmp_path());
        self.source.wait_exit(Duration::from_secs(10)).expect("the source's qemu quits");
    }
}

/// One QMP command and its answer.
pub fn qmp(path: &Path, command: &str) -> Value {
    let mut monitor = Monitor::connect(path, PATIENCE).expect("a monitor");
    monitor.ask(command).expect("qmp")
}

/// Tells a QEMU to quit, as whoever manages it does.
pub fn quit(path: &Path) {
    qmp(path, "{\"execute\":\"quit\"}");
}
