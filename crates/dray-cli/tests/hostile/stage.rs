//! Two agents, a stopped QEMU with a qcow2, and files that only root has.

use dray_testkit::guest::{GuestVm, Monitor, tools};
use dray_testkit::lab::{Answer, Lab};
use rustix::fd::OwnedFd;
use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const NAME: &str = "disk.qcow2";
const SIZE: &str = "64M";
const PATIENCE: Duration = Duration::from_secs(60);

pub fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// 8 MiB of which no part is like another, nor small when it is compressed.
fn numbers(factor: u32) -> Vec<u8> {
    (1..=2u32 << 20)
        .flat_map(|n| n.wrapping_mul(n | 1).wrapping_mul(factor).to_le_bytes())
        .collect()
}

/// Something that only root may open, and who looks whether anybody does.
pub struct Secret {
    pub path: PathBuf,
    content: Option<Vec<u8>>,
    watch: OwnedFd,
}

impl Secret {
    fn watched(path: PathBuf, content: Option<Vec<u8>>) -> Self {
        let watch = init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).expect("inotify");
        let any = WatchFlags::OPEN | WatchFlags::ACCESS | WatchFlags::MODIFY;
        add_watch(&watch, &path, any).expect("watch");
        Self { path, content, watch }
    }

    /// Nobody has opened it, and it is what it was.
    pub fn assert_untouched(&self, stage: &Stage) {
        let mut events = [0; 4096];
        let seen = rustix::io::read(&self.watch, &mut events);
        let shown = self.path.display();
        // Which it was: the second word of an event.
        let what = u32::from_ne_bytes([events[4], events[5], events[6], events[7]]);
        let log = stage.lab.host("a").log();
        assert!(seen.is_err(), "somebody has opened {shown} ({what:#x})\n{log}");
        if let Some(content) = &self.content {
            assert!(fs::read(&self.path).expect("secret") == *content, "{shown} was written");
            // That was this test.
            let _ = rustix::io::read(&self.watch, &mut events);
        }
    }
}

pub struct Stage {
    pub lab: Lab,
    pub vm: GuestVm,
    target: Option<GuestVm>,
}

impl Stage {
    /// None where there is no QEMU, or this is not root.
    pub fn new(name: &str) -> Option<Self> {
        if !tools::available(&[tools::QEMU, "qemu-img", "qemu-io", "qemu-storage-daemon"]) {
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            println!("SKIP: only root has files that others may not open");
            return None;
        }
        let lab = Lab::new(name, Path::new(env!("CARGO_BIN_EXE_dray"))).expect("lab");
        lab.start().expect("agents");
        let disk = lab.host("a").pool().join(NAME);
        tools::run("qemu-img", &["create", "-q", "-f", "qcow2", text(&disk), SIZE]).expect("disk");
        let content = lab.dir().join("content");
        fs::write(&content, numbers(0x9e37_79b1)).expect("content");
        let fill = format!("write -s {} 0 8M", content.display());
        tools::run("qemu-io", &["-c", &fill, text(&disk)]).expect("content");
        let vm = GuestVm::builder(&lab.dir(), "source").memory_mib(64).bare();
        let vm = vm.blockdev(format!(
            "driver=qcow2,node-name=node0,discard=unmap,file.driver=file,file.filename={}",
            disk.display()
        ));
        let vm = vm.disk("disk0", "node0").start().expect("qemu");
        // It listens before it opens its disk, and greets after: from now on it does not look at the head.
        drop(Monitor::connect(&vm.qmp_path(), PATIENCE).expect("a greeting"));
        Some(Self { lab, vm, target: None })
    }

    pub fn disk(&self) -> PathBuf {
        self.lab.host("a").pool().join(NAME)
    }

    fn kept(&self) -> PathBuf {
        let dir = self.lab.dir().join("kept");
        fs::create_dir_all(&dir).expect("folder");
        fs::set_permissions(&dir, Permissions::from_mode(0o700)).expect("mode");
        dir
    }

    /// A raw file that only root may open.
    pub fn secret_file(&self) -> Secret {
        let path = self.kept().join("secret.raw");
        let content = numbers(0x85eb_ca77);
        fs::write(&path, &content).expect("secret");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("mode");
        Secret::watched(path, Some(content))
    }

    /// The node of a device that only root may open: zeros without an end.
    pub fn secret_device(&self) -> Secret {
        let path = self.kept().join("device");
        tools::run("mknod", &["-m", "600", text(&path), "c", "1", "5"]).expect("mknod");
        Secret::watched(path, None)
    }

    pub fn qmp(&self) -> String {
        text(&self.vm.qmp_path()).to_owned()
    }

    pub fn prepare(&self) -> Answer {
        let qmp = self.qmp();
        let args = ["--json", "prepare", "--qmp", &qmp, "--to", "hostb", "--chain", "flatten"];
        self.lab.host("a").dray(&args).expect("prepare")
    }

    /// Starts the QEMU that waits for the guest.
    pub fn start_target(&mut self, prepared: &Value) {
        let waiting = GuestVm::builder(&self.lab.dir(), "target").memory_mib(64).bare();
        let waiting = waiting.waiting(prepared, "").expect("what was prepared");
        self.target = Some(waiting.start().expect("target qemu"));
    }

    pub fn migrate(&self, more: &[&str]) -> std::process::Child {
        let (source, target) = (self.qmp(), self.lab.dir().join("target.qmp"));
        let args = ["migrate", "--qmp", &source, "--to", "hostb", "--target-qmp", text(&target)];
        self.lab.host("a").spawn(&[&args, more].concat()).expect("migrate")
    }
}
