//! The test guest itself: it boots, writes at the rate asked for, verifies, trims, and notices when
//! somebody changes its disk; and the bystander computes the same image.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use dray_testkit::guest::{Bystander, GuestVm, initramfs};
use tempfile::TempDir;

const SIZE: u64 = 128 << 20;
const SPAN: u64 = 32 << 20;

/// A guest that is ready, with its disk open.
struct Booted {
    vm: GuestVm,
    bystander: Bystander,
    image: PathBuf,
    _dir: TempDir,
}

impl Booted {
    /// None where a guest cannot be started here.
    fn new(name: &str) -> Option<Self> {
        if !initramfs::available() {
            return None;
        }
        let dir = tempfile::tempdir().expect("temporary directory");
        let image = dir.path().join("image.raw");
        let bystander = Bystander::new(1, SIZE, SPAN);
        bystander.create_raw(&image).expect("image");
        let file = format!("driver=file,node-name=disk,filename={},discard=unmap", image.display());
        let builder = GuestVm::builder(dir.path(), name).blockdev(file).disk("disk0", "disk");
        let mut vm = builder.start().expect("start");
        vm.wait_ready().expect("boot");
        vm.console().command(&bystander.open_command("vda")).expect("open");
        Some(Self { vm, bystander, image, _dir: dir })
    }

    /// The guest, stopped, finds what it wrote, and so does the bystander; the blocks written.
    fn check(&mut self) -> u64 {
        let console = self.vm.console();
        console.command("verify").expect("verify");
        console.command("flush").expect("flush");
        let dump = console.command("dump disk=vda").expect("dump");
        self.bystander.apply_dump("vda", &dump).expect("apply");
        self.bystander.check_raw(&self.image).expect("the bystander's image");
        self.bystander.written_blocks()
    }
}

#[test]
fn a_guest_writes_and_the_bystander_agrees() {
    let Some(mut booted) = Booted::new("vm") else { return };
    let console = booted.vm.console();
    let start = format!("start disk=vda block=65536 span={SPAN} rate=2000000 flush=16 verify=2");
    console.command(&start).expect("start");
    for _ in 0..2 {
        console.wait_for(Duration::from_secs(5), |l| l.starts_with("STAT ")).expect("statistics");
    }
    console.command(&format!("trim disk=vda offset={SPAN} length=1048576")).expect("trim");
    console.command(&format!("fill disk=vda offset={SPAN} length=524288")).expect("fill");
    console.command("zero disk=vda offset=0 length=65536").expect("zero");
    console.command("stop").expect("stop");
    let report = console.report("vda").expect("report");
    println!("{report}");
    assert!(report.value("rate", 0u64).expect("rate") > 1_500_000, "{report}");
    assert!(report.value("verified", 0u64).expect("verified") > 50, "{report}");
    assert!(booted.check() > 200);

    let other = OpenOptions::new().write(true).open(&booted.image).expect("open");
    other.write_all_at(&[1; 512], SPAN + 4096).expect("damage");
    let error = booted.vm.console().command("verify").expect_err("damage is noticed").to_string();
    assert!(error.contains("1 blocks are wrong"), "{error}");
    assert!(booted.bystander.check_raw(&booted.image).is_err());
    booted.vm.kill().expect("kill");
}

#[test]
fn a_guest_does_the_steps_of_a_trace() {
    let Some(mut booted) = Booted::new("steps") else { return };
    let console = booted.vm.console();
    let steps = ["T 0 W 100 2", "T 100 R 100 2", "T 200 W 9000 4", "T 900 R 7 1"];
    steps.iter().for_each(|step| console.send(step).expect("step"));
    let error = console.command("replay disk=vda steps=3").expect_err("one is missing");
    assert!(error.to_string().contains("4 steps"), "{error}");
    steps.iter().for_each(|step| console.send(step).expect("step"));
    console.command("replay disk=vda steps=4 threads=2").expect("replay");
    let early = console.report("vda").expect("report");
    assert!(early.value("verified", 0u64).expect("verified") < 3, "the last is not due: {early}");
    let done = |line: &str| line.contains(" verified=1 ") || line.contains(" verified=3 ");
    console.wait_for(Duration::from_secs(10), done).expect("the last step");
    let report = console.report("vda").expect("report");
    let count = |key| report.value(key, 0u64).expect(key);
    assert_eq!((count("writes"), count("bytes"), count("verified")), (2, 6 * 4096, 3), "{report}");
    console.command("stop").expect("stop");
    assert_eq!(booted.check(), 6);
    booted.vm.kill().expect("kill");
}

#[test]
fn guests_go_on_from_one_saved_state_with_disks_of_their_own() {
    if !initramfs::available() {
        return;
    }
    for (name, size) in [("small", 8 << 20), ("large", 24 << 20)] {
        let dir = tempfile::tempdir().expect("temporary directory");
        let image = dir.path().join("image.raw");
        let mut bystander = Bystander::new(1, size, 0);
        bystander.create_raw(&image).expect("image");
        let file = format!("driver=file,node-name=disk,filename={}", image.display());
        let builder = GuestVm::builder(dir.path(), name).memory_mib(160).booted();
        let mut vm = builder.blockdev(file).disk("disk0", "disk").start().expect("start");
        vm.wait_ready().expect("it goes on");
        assert_eq!(vm.log(), "", "it has not booted");
        let console = vm.console();
        console.command(&bystander.open_command("vda")).expect("open");
        let last = size - 4096;
        console.command(&format!("fill disk=vda offset={last} length=4096")).expect("fill");
        console.command(&format!("fill disk=vda offset={size} length=4096")).expect_err("the end");
        console.command("flush").expect("flush");
        let dump = console.command("dump disk=vda").expect("dump");
        bystander.apply_dump("vda", &dump).expect("apply");
        bystander.check_raw(&image).expect("the bystander's image");
        assert_eq!(bystander.written_blocks(), 1);
        vm.kill().expect("kill");
    }
}
