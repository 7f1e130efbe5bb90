//! QEMU drops its lock on a released disk, and another program may write to the file: QEMU's bitmap lacks that, and
//! the next backup has it all the same, because dray does not believe the bitmap.

use crate::released::text;
use crate::stage::{PATIENCE, qmp};
use dray_testkit::guest::{GuestVm, tools};
use dray_testkit::lab::{Host, Lab};
use serde_json::{Value, json};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub const SIZE: u64 = 16 << 20;
pub const CHUNK: u64 = 64 << 10;
/// Where QEMU writes before the release, where it writes after it, and where the other program does.
pub const BEFORE: u64 = CHUNK;
pub const AFTER: u64 = 4 * CHUNK;
const OUTSIDE: u64 = 8 * CHUNK;

pub const SCSI: &str = "scsi-hd,bus=scsi.0";
/// Its drive stays when it is unplugged, and has a name by which it is plugged in again.
const NVME: &str = "nvme,serial=1";
/// It is on a raw node over its file's node, which QEMU reopens when its disk changes place.
pub const ON_RAW: &str = "scsi-hd,bus=scsi.0,serial=raw";

/// QEMU does not lock its file.
pub const UNLOCKED: &str = "scsi-hd,bus=scsi.0,serial=unlocked";

/// A stopped VM without a guest, with disks that were released after a backup.
pub struct Scene {
    vm: GuestVm,
    devices: Vec<String>,
    lab: Lab,
}

impl Scene {
    pub fn new(name: &str, devices: &[&str]) -> Self {
        let lab = Lab::new(name, Path::new(env!("CARGO_BIN_EXE_dray"))).expect("lab");
        lab.start().expect("agents");
        let builder = GuestVm::builder(&lab.dir(), "vm").memory_mib(64).bare();
        let mut builder = builder
            .arg("-object")
            .arg("iothread,id=thread")
            .arg("-device")
            .arg("virtio-scsi-pci,id=scsi,iothread=thread");
        let device = |(i, device)| format!("{device},id=disk{i},drive=node{i}");
        let devices: Vec<_> = devices.iter().enumerate().map(device).collect();
        for (i, device) in devices.iter().enumerate() {
            let path = lab.host("a").pool().join(format!("disk{i}.raw"));
            File::create(&path).and_then(|file| file.set_len(SIZE)).expect("image");
            let (path, node) = (path.display(), format!("node{i}"));
            builder = match device.starts_with(NVME) {
                true => {
                    let drive = format!("file={path},format=raw,if=none,id={node}");
                    builder.arg("-drive").arg(&drive)
                }
                false if device.starts_with(ON_RAW) => builder.blockdev(format!(
                    "driver=raw,node-name={node},file.driver=file,file.filename={path}"
                )),
                false => {
                    let locking = if device.starts_with(UNLOCKED) { "off" } else { "auto" };
                    builder.blockdev(format!(
                        "driver=file,node-name={node},filename={path},locking={locking}"
                    ))
                }
            };
            builder = builder.arg("-device").arg(device);
        }
        let vm = builder.start().expect("qemu");
        let scene = Self { vm, devices, lab };
        scene.disks().for_each(|disk| scene.write(disk, BEFORE));
        scene.dray(&["backups", "init", &scene.repository()]);
        scene
    }

    fn disks(&self) -> Range<usize> {
        0..self.devices.len()
    }

    pub fn dray(&self, command: &[&str]) -> Value {
        let a = self.lab.host("a");
        a.json(command).unwrap_or_else(|why| panic!("{command:?}: {why}\n{}", a.log()))
    }

    pub fn on_vm(&self, command: &str) {
        self.dray(&[command, "--qmp", &text(self.vm.qmp_path())]);
    }

    /// Whether a command that may be refused has done what it was to do.
    pub fn try_on_vm(&self, command: &str) -> bool {
        self.lab.host("a").json(&[command, "--qmp", &text(self.vm.qmp_path())]).is_ok()
    }

    /// A command about the VM fails because something is not as it has to be, which it names.
    pub fn is_refused(&self, command: &[&str], why: &str) {
        let qmp = self.qmp();
        let args = [command, &["--qmp", &qmp]].concat();
        let answer = self.agent().dray(&args).expect("dray");
        assert_eq!(answer.code, 6, "{command:?}: {answer:?}");
        assert!(answer.stderr.contains(why), "{command:?}: {answer:?}");
    }

    pub fn qmp(&self) -> String {
        text(self.vm.qmp_path())
    }

    pub fn repository(&self) -> String {
        format!("file://{}", self.lab.dir().join("backups").display())
    }

    pub fn path(&self, disk: usize) -> PathBuf {
        self.lab.host("a").pool().join(format!("disk{disk}.raw"))
    }

    pub fn ask(&self, command: &str, arguments: &Value) -> Value {
        let line = json!({ "execute": command, "arguments": arguments });
        let mut answer = qmp(&self.vm.qmp_path(), &line.to_string());
        assert!(answer.get("error").is_none(), "{command}: {answer}");
        answer["return"].take()
    }

    fn wait(&self, command: &str, wanted: impl Fn(&Value) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !wanted(&self.ask(command, &json!({}))) {
            assert!(Instant::now() < deadline, "{}", self.ask(command, &json!({})));
        }
    }

    /// Ends QEMU at once.
    pub fn kill(&mut self) {
        self.vm.kill().expect("kill");
    }

    pub fn agent(&self) -> &Host {
        self.lab.host("a")
    }

    /// QEMU writes to a disk.
    pub fn write(&self, disk: usize, at: u64) {
        self.monitor(&format!("qemu-io -d disk{disk} \"write -P 7 {at} {CHUNK}\""));
    }

    /// Another program writes to the file, and minds QEMU's lock.
    fn write_outside(&self, disk: usize) {
        let write = format!("write -P 9 {OUTSIDE} {CHUNK}");
        let path = text(self.path(disk));
        tools::run("qemu-io", &["-f", "raw", "-c", &write, "-c", "flush", &path]).expect("a write");
    }

    pub fn monitor(&self, line: &str) {
        let said = self.ask("human-monitor-command", &json!({ "command-line": line }));
        assert!(!said.to_string().contains("Error"), "{line}: {said}");
    }

    pub fn unplug(&self, disk: usize) {
        let id = format!("disk{disk}");
        self.ask("device_del", &json!({ "id": id }));
        // No guest lets a PCI device go.
        self.ask("system_reset", &json!({}));
        self.wait("query-block", |blocks| {
            let mut devices = blocks.as_array().expect("a list").iter();
            !devices.any(|block| block["qdev"].as_str().is_some_and(|device| device.contains(&id)))
        });
    }

    fn plug(&self, disk: usize) {
        self.monitor(&format!("device_add {}", self.devices[disk]));
    }

    pub fn back_up(&self, disk: usize) -> Value {
        let made = self.dray(&["backup", &format!("disk{disk}.raw"), "--to", &self.repository()]);
        made["images"][0].clone()
    }

    /// The disks are backed up, and go back to QEMU.
    pub fn release(&self) {
        self.on_vm("adopt");
        self.disks().for_each(|disk| drop(self.back_up(disk)));
        self.on_vm("release");
        self.disks().for_each(|disk| self.write(disk, AFTER));
    }

    /// The disks come back. How many bytes of each count as changed; the last backup is as its file.
    pub fn changed(&self) -> Vec<u64> {
        self.on_vm("adopt");
        let changed = self.disks().map(|disk| {
            let made = self.back_up(disk);
            self.assert_restored(disk);
            made["changed_bytes"].as_u64().expect("bytes")
        });
        let changed = changed.collect();
        self.on_vm("release");
        changed
    }

    pub fn assert_restored(&self, disk: usize) {
        let (name, copy) = (format!("disk{disk}.raw"), format!("copy{disk}.raw"));
        self.dray(&["restore", &name, "--from", &self.repository(), "--as", &copy]);
        let restored = self.lab.host("a").pool().join(&copy);
        let found = std::fs::read(&restored).expect("the copy");
        self.dray(&["images", "remove", &copy]);
        std::fs::remove_file(&restored).expect("remove");
        let file = std::fs::read(self.path(disk)).expect("the file");
        assert!(found == file, "the backup of disk {disk} is not as its file");
    }
}

/// What was written of a disk whose bitmap is believed; the rest of its file is holes, which count as changed.
fn known() -> u64 {
    SIZE - CHUNK
}

#[test]
fn a_device_that_was_unplugged_or_shares_its_file_is_not_believed() {
    let shared = format!("{SCSI},share-rw=on");
    let scene = Scene::new("unlocked", &[SCSI, SCSI, &shared, NVME]);
    scene.release();
    for disk in [1, 3] {
        scene.unplug(disk);
        scene.write_outside(disk);
        scene.plug(disk);
    }
    let shared = File::options().write(true).open(scene.path(2)).expect("open");
    shared.write_all_at(&[9; CHUNK as usize], OUTSIDE).expect("a write");
    assert_eq!(scene.changed(), [known(), SIZE, SIZE, SIZE]);
}

/// Each time anew: the mark of a device is found again, and one that was plugged in again gets another one.
#[test]
fn a_device_that_stays_is_believed_again_and_again() {
    let scene = Scene::new("locked", &[SCSI]);
    for _ in 0..2 {
        scene.release();
        scene.ask("system_reset", &json!({}));
        assert_eq!(scene.changed(), [known()]);
    }
    scene.unplug(0);
    scene.plug(0);
    scene.release();
    assert_eq!(scene.changed(), [known()]);
}

#[test]
fn disks_that_were_inactive_are_not_believed() {
    let scene = Scene::new("inactive", &[SCSI]);
    scene.release();
    scene.ask("migrate", &json!({ "uri": "exec:cat > /dev/null" }));
    scene.wait("query-migrate", |record| record["status"] == "completed");
    scene.write_outside(0);
    scene.ask("cont", &json!({}));
    assert_eq!(scene.changed(), [SIZE]);
    // The next such migration would leave the same record.
    scene.release();
    assert_eq!(scene.changed(), [SIZE]);
}

/// Whoever watches all latencies keeps the histograms.
#[test]
fn histograms_of_others_stay() {
    let scene = Scene::new("histograms", &[SCSI]);
    scene.ask("block-latency-histogram-set", &json!({ "id": "disk0", "boundaries-flush": [1000] }));
    scene.release();
    assert_eq!(scene.changed(), [known()]);
    let stats = scene.ask("query-blockstats", &json!({}));
    let flush = &stats[0]["stats"]["flush_latency_histogram"]["boundaries"];
    assert_eq!(flush, &json!([1000]), "{stats:#}");
    scene.release();
    scene.ask("block-latency-histogram-set", &json!({ "id": "disk0", "boundaries": [1000] }));
    assert_eq!(scene.changed(), [SIZE]);
    scene.release();
    assert_eq!(scene.changed(), [SIZE]);
}
