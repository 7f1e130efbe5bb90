//! A running guest's disks go under an NBD server and back: every kind of disk, under load.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::{NbdServer, allocated, is_hole, locks};
use dray_image::{Hold, QemuLocks};
use dray_qemu::{AdoptOptions, LayerPlan, NodeOptions, Qmp, VmDisk, adopt, graph, release};
use dray_testkit::guest::{Bystander, Console, GuestVm, initramfs, tools};

const SIZE: u64 = 64 << 20;
const SPAN: u64 = 16 << 20;
const TRIM: (u64, u64) = (SPAN, 8 << 20);

struct Case {
    name: &'static str,
    path: PathBuf,
    format: &'static str,
    bystander: Bystander,
}

impl Case {
    fn new(dir: &Path, index: u64, name: &'static str, format: &'static str) -> Self {
        let path = dir.join(format!("{name}.{format}"));
        let bystander = Bystander::new(index + 1, SIZE, SPAN);
        let raw = dir.join("seed.raw");
        bystander.create_raw(&raw).expect("image");
        if format == "raw" {
            std::fs::rename(&raw, &path).expect("rename");
        } else {
            let (base, top) = (dir.join("base.qcow2"), path.to_string_lossy());
            let (from, base) = (raw.to_string_lossy(), base.to_string_lossy());
            let convert = ["convert", "-f", "raw", "-O", "qcow2", &from, &base];
            tools::run("qemu-img", &convert).expect("convert");
            let create = ["create", "-f", "qcow2", "-b", &base, "-F", "qcow2", &top];
            tools::run("qemu-img", &create).expect("create");
            tools::run("qemu-img", &["bitmap", "--add", &top, "backup"]).expect("bitmap");
        }
        Self { name, path, format, bystander }
    }

    fn check(&self) {
        let checked = match self.format {
            "raw" => self.bystander.check_raw(&self.path),
            format => self.bystander.check_format(&self.path, format),
        };
        checked.unwrap_or_else(|e| panic!("{}: {e}", self.name));
    }
}

fn start_guest(dir: &Path, cases: &[Case]) -> GuestVm {
    let file = |i: usize| cases[i].path.display().to_string();
    let builder = GuestVm::builder(dir, "vm")
        .blockdev(format!(
            "driver=file,node-name=plain,filename={},discard=unmap,detect-zeroes=unmap",
            file(0)
        ))
        .blockdev(format!(
            "driver=file,node-name=storage,filename={},discard=unmap,aio=threads,cache.direct=on",
            file(1)
        ))
        .blockdev("driver=raw,node-name=format,file=storage,discard=unmap,cache.direct=on")
        .blockdev(format!(
            "driver=qcow2,node-name=active,discard=unmap,lazy-refcounts=on,file.driver=file,\
             file.filename={}",
            file(2)
        ))
        .arg("-drive")
        .arg(&format!("if=none,id=old,file={},format=raw,cache=none,discard=unmap", file(3)))
        .disk("disk0", "plain")
        .disk("disk1", "format")
        .disk("disk2", "active")
        .disk("disk3", "old")
        .booted();
    let mut vm = builder.start().expect("start");
    vm.wait_ready().expect("boot");
    for (i, case) in cases.iter().enumerate() {
        let (disk, console) = (device(i), vm.console());
        console.command(&case.bystander.open_command(&disk)).expect("open");
        let start = format!("start disk={disk} span={SPAN} block=16384 rate=2000000 flush=64");
        console.command(&start).expect("start");
    }
    vm
}

fn device(index: usize) -> String {
    format!("vd{}", char::from(b'a' + index as u8))
}

/// Fills a range, trims it, and looks at the file: QEMU drops trims silently when an option is
/// missing on any node in between.
fn trim_punches(console: &mut Console, disk: &str, case: &Case) {
    let (offset, length) = TRIM;
    let range = format!("disk={disk} offset={offset} length={length}");
    console.command(&format!("fill {range}")).expect("fill");
    let before = allocated(&case.path);
    console.command(&format!("trim {range}")).expect("trim");
    if case.format == "raw" {
        assert!(is_hole(&case.path, offset, length), "{}: the trim vanished", case.name);
    } else {
        let now = allocated(&case.path);
        assert!(now + length * 3 / 4 < before, "{}: {before} → {now}", case.name);
    }
}

fn held(path: &Path) -> bool {
    locks::WRITE_BYTES.iter().any(|byte| locks::is_held(path, *byte))
}

async fn there_and_back(
    qmp: &Qmp,
    vm: &mut GuestVm,
    dir: &Path,
    index: usize,
    case: &Case,
) -> (VmDisk, VmDisk) {
    let qdev = format!("disk{index}");
    let known = NodeOptions::of_process(qmp.pid().expect("pid")).expect("command line");
    let before = graph::disk(qmp, &qdev).await.expect("disk");
    let plan = LayerPlan::of_active(&before, &known).expect("plan");
    let stored = serde_json::to_string(&plan).expect("store");
    let server = NbdServer::start(&case.path, &dir.join(format!("{qdev}.nbd")));

    assert!(held(&case.path), "{}: qemu owns the file", case.name);
    let adopted = adopt(qmp, &plan, &server.export(), AdoptOptions::default()).await;
    let adopted = adopted.unwrap_or_else(|e| panic!("{}: {e}", case.name));
    assert!(!held(&case.path), "{}: qemu has left the file", case.name);
    let mine = {
        let file = std::fs::File::open(&case.path).unwrap();
        QemuLocks::take(&file, &case.path, Hold::Owner).expect("the file is free")
    };
    let during = graph::disk(qmp, &qdev).await.expect("disk");
    assert_eq!(during.active().protocol.driver, "nbd", "{}", case.name);
    trim_punches(vm.console(), &device(index), case);
    let again = adopt(qmp, &plan, &server.export(), AdoptOptions::default()).await;
    assert!(again.expect_err("twice").to_string().contains("already"), "{}", case.name);

    drop(mine);
    server.make_room();
    // As an agent does that was killed and knows only its journal.
    let plan: LayerPlan = serde_json::from_str(&stored).expect("load");
    let released = release(qmp, &plan).await;
    let released = released.unwrap_or_else(|e| panic!("{}: {e}", case.name));
    println!("{}: adopted {adopted:?}, released {released:?}", case.name);
    server.wait_left();
    drop(server);
    assert!(held(&case.path), "{}: qemu owns the file again", case.name);
    trim_punches(vm.console(), &device(index), case);
    let after = graph::disk(qmp, &qdev).await.expect("disk");
    release(qmp, &plan).await.expect("what is released is released");
    (before, after)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn every_kind_of_disk_goes_there_and_back() {
    if !initramfs::available() {
        return;
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let dir = dir.path();
    let mut cases = [
        Case::new(dir, 0, "device-on-file", "raw"),
        Case::new(dir, 1, "raw-format", "raw"),
        Case::new(dir, 2, "qcow2", "qcow2"),
        Case::new(dir, 3, "drive", "raw"),
    ];
    let mut vm = start_guest(dir, &cases);
    let qmp = Qmp::connect(&vm.qmp_path()).await.expect("qmp");
    for (index, case) in cases.iter().enumerate() {
        let (before, after) = there_and_back(&qmp, &mut vm, dir, index, case).await;
        let differences = release::differences(&before, &after);
        if case.name == "drive" {
            assert_eq!(differences, ["layer 0: format none, was raw"], "only its raw node is gone");
        } else {
            assert_eq!(differences, Vec::<String>::new(), "{}", case.name);
        }
    }
    let console = vm.console();
    console.wait_for(Duration::from_secs(5), |l| l.starts_with("STAT")).expect("it still writes");
    console.command("stop").expect("stop");
    console.command("verify").expect("the guest's own check");
    console.command("flush").expect("flush");
    assert_eq!(console.complaints(), Vec::<String>::new());
    for (index, case) in cases.iter_mut().enumerate() {
        let dump = console.command(&format!("dump disk={}", device(index))).expect("dump");
        case.bystander.apply_dump(&device(index), &dump).expect("apply");
        assert!(case.bystander.written_blocks() > 200, "{}: the guest wrote", case.name);
    }
    qmp.execute("quit", serde_json::Value::Null).await.expect("quit");
    vm.wait_exit(Duration::from_secs(10)).expect("exit");
    for case in &cases {
        case.check();
    }
    let top = cases[2].path.to_string_lossy();
    let info = tools::run("qemu-img", &["info", &top]).expect("info");
    let info = String::from_utf8_lossy(&info.stdout).into_owned();
    assert!(info.contains("name: backup") && !info.contains("in-use"), "{info}");
    tools::run("qemu-img", &["check", &top]).expect("check");
}
