//! Two VMs and three images with one command: shortest first, two at a time, one budget; and one
//! of them fails.

use crate::stage::{PATIENCE, quit};
use dray_testkit::guest::{Bystander, GuestVm, initramfs};
use dray_testkit::lab::{Answer, Host, Lab};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Bytes a second for all together.
const BUDGET: u64 = 24 << 20;
const SIZE: u64 = 64 << 20;
/// Exit code: not all came through.
const NOT_ALL: i32 = 16;

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// A VM with one disk, and the QEMU that waits for it.
struct Moved {
    name: &'static str,
    bystander: Bystander,
    source: GuestVm,
    target: Option<GuestVm>,
}

impl Moved {
    /// A guest on a raw file of its own that writes.
    fn start(lab: &Lab, name: &'static str, id: u64, seeded: u64) -> Self {
        let bystander = Bystander::new(id, SIZE, seeded);
        let path = lab.host("a").pool().join(format!("{name}.raw"));
        bystander.create_raw(&path).expect("image");
        let node = format!("driver=file,node-name=root,filename={},discard=unmap", path.display());
        let builder = GuestVm::builder(&lab.dir(), name).memory_mib(160).booted();
        let mut source = builder.blockdev(node).disk("disk0", "root").start().expect("qemu");
        source.wait_ready().expect("boot");
        let console = source.console();
        console.command(&bystander.open_command("vda")).expect("open");
        console
            .command("start disk=vda span=8388608 block=16384 rate=500000 flush=32")
            .expect("start");
        Self { name, bystander, source, target: None }
    }

    fn waiting_name(&self) -> String {
        format!("{}-there", self.name)
    }

    fn target_qmp(&self, lab: &Lab) -> PathBuf {
        lab.dir().join(format!("{}.qmp", self.waiting_name()))
    }

    /// Prepares it, and starts the QEMU that waits.
    fn prepare(&mut self, lab: &Lab, more: &[&str]) {
        let qmp = self.source.qmp_path();
        let args = [&["prepare", "--qmp", text(&qmp), "--to", "hostb"], more].concat();
        let prepared = lab.host("a").json(&args).expect("prepare");
        let waiting = GuestVm::builder(&lab.dir(), &self.waiting_name());
        let mut builder = waiting.memory_mib(160).incoming();
        for line in prepared["images"][0]["blockdev"].as_array().expect("lines") {
            builder = builder.blockdev(line.as_str().expect("text"));
        }
        self.target = Some(builder.disk("disk0", "root").start().expect("the waiting qemu"));
    }

    /// The guest has seen nothing bad, and the image there holds what it wrote.
    fn check(mut self, there: &Host) {
        let guest = self.target.as_mut().expect("it was moved");
        let console = guest.console();
        console.command("stop").expect("stop");
        console.command("verify").expect("verify");
        console.command("flush").expect("flush");
        assert_eq!(console.complaints(), [""; 0]);
        let dump = console.command("dump disk=vda").expect("dump");
        console.send("poweroff").expect("poweroff");
        guest.wait_exit(PATIENCE).expect("the guest's qemu ends");
        self.bystander.apply_dump("vda", &dump).expect("dump");
        self.bystander.check_raw(&there.pool().join(format!("{}.raw", self.name))).expect("equal");
        quit(&self.source.qmp_path());
    }
}

/// An image full of data that no VM uses.
fn add_image(host: &Host, id: u64, name: &str, bytes: u64) {
    let path = host.pool().join(name);
    Bystander::new(id, bytes, bytes).create_raw(&path).expect("image");
    host.json(&["images", "add", name, text(&path)]).expect("images add");
}

/// The last line of the output of a command that has not gone well all over.
fn result(answer: &Answer) -> Value {
    let last = answer.stdout.lines().next_back().expect("a result");
    serde_json::from_str(last).expect("json")
}

fn one<'a>(ended: &'a Value, name: &str) -> &'a Value {
    let moves = ended["moves"].as_array().expect("moves");
    moves.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name}: {ended:#}"))
}

#[test]
fn several_vms_and_images_move_together() {
    if !initramfs::available() {
        return;
    }
    let lab =
        Lab::with_settings("several", Path::new(env!("CARGO_BIN_EXE_dray")), "").expect("lab");
    lab.start().expect("agents");
    let (a, b) = (lab.host("a"), lab.host("b"));
    let mut large = Moved::start(&lab, "large", 1, 48 << 20);
    let mut small = Moved::start(&lab, "small", 2, 8 << 20);
    add_image(a, 3, "data", 96 << 20);
    add_image(a, 4, "note", 4 << 20);
    // One is told where its QEMU waits when it is prepared, the other with the move.
    let there = small.target_qmp(&lab);
    small.prepare(&lab, &["--target-qmp", text(&there)]);
    large.prepare(&lab, &[]);
    let large_qmp = large.source.qmp_path();
    let untold = ["migrate", "--qmp", text(&large_qmp), "--to", "hostb"];
    let untold = a.dray(&untold).expect("an answer");
    assert!(untold.code == 4 && untold.stderr.contains("--target-qmp"), "{untold:?}");
    let small_qmp = small.source.qmp_path();
    let both = format!("{}={}", text(&large_qmp), text(&large.target_qmp(&lab)));
    let budget = format!("{}MiB/s", BUDGET >> 20);
    let child = a.spawn(&[
        "migrate",
        "--vm",
        &both,
        "--vm",
        text(&small_qmp),
        "--each",
        "--image",
        "data",
        "--image",
        "gone",
        "--image",
        "note",
        "--to",
        "hostb",
        "--jobs",
        "2",
        "--bandwidth",
        &budget,
        "--verify",
    ]);
    let answer = Answer::of(child.expect("migrate")).expect("an answer");
    let logs = || format!("{}\n{}", a.log(), b.log());
    assert_eq!(answer.code, NOT_ALL, "{answer:?}\n{}", logs());
    let ended = result(&answer);
    println!("{ended:#}");
    for name in ["large", "small", "data", "note"] {
        let one = one(&ended, name);
        assert_eq!(one["state"], "completed", "{one:#}\n{}", logs());
        assert_eq!(one["summary"]["verified"], true, "{one:#}");
    }
    assert_eq!(one(&ended, "gone")["error"]["kind"], "not-found");
    // As predicted, the shortest first; of what is not there nothing can be.
    let moves = ended["moves"].as_array().expect("moves");
    let predicted: Vec<f64> =
        moves.iter().map_while(|one| one["predicted_seconds"].as_f64()).collect();
    assert_eq!(predicted.len(), 4, "{ended:#}");
    assert!(predicted.is_sorted(), "{predicted:?}");
    // Two begin together; each of the others when it is the next and a place is free.
    let at = |nth: usize, what: &str| moves[nth]["summary"][what].as_u64().expect("a time");
    assert!(at(2, "started_unix_ms") <= at(3, "started_unix_ms"), "{ended:#}");
    for nth in [2, 3] {
        let begun = at(nth, "started_unix_ms");
        let running = (0..nth).filter(|&other| at(other, "ended_unix_ms") > begun).count();
        assert!(running < 2, "{running} others run when {nth} begins: {ended:#}");
    }
    let sent = moves.iter().filter_map(|one| one["summary"]["wire_bytes"]["total"].as_u64());
    let average = sent.sum::<u64>() as f64 / ended["elapsed_seconds"].as_f64().expect("a time");
    println!("{average} bytes a second on average, of {BUDGET}");
    assert!(average < BUDGET as f64 * 1.05, "{average} bytes a second");
    large.check(b);
    small.check(b);
}
