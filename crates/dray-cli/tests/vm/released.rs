//! A disk that QEMU has taken back at the target comes home: what the guest wrote meanwhile is known
//! from a dirty bitmap in QEMU, or, whenever that is in doubt, everything is sent. Bytes are compared by
//! the guest's own account.

use crate::restart::{dies_and_returns, start_with};
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::guest::{GuestVm, tools};
use dray_testkit::lab::Answer;
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant, SystemTime};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;
/// What the guest writes while the disk is QEMU's: scattered blocks, and a longer run.
const WRITTEN: [(u64, u64); 4] =
    [(4 * MIB, BLOCK), (13 * MIB + BLOCK, 3 * BLOCK), (40 * MIB, MIB), (90 * MIB, 2 * BLOCK)];

fn written_blocks() -> u64 {
    WRITTEN.iter().map(|(_, len)| len / BLOCK).sum()
}

/// Moves the VM to host b, where QEMU takes its disks back. The guest is quiet meanwhile, so that what
/// it writes there is known to the block. The summary's images.
fn move_there(stage: &mut Stage) -> Vec<Value> {
    stage.assert_guest_is_well();
    stage.guest().console().command("stop").expect("stop");
    stage.prepare();
    let summary = stage.migrate(&[]).expect("moves there");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    settle_there(stage);
    summary["images"].as_array().cloned().expect("images")
}

/// The VM is at host b, and nothing of it is left at host a but replicas.
pub fn settle_there(stage: &mut Stage) {
    stage.quit_source();
    let target = stage.target.take().expect("target");
    stage.source = target;
}

/// The images of host b that QEMU has taken back.
fn released(stage: &Stage) -> Vec<Value> {
    let images = stage.lab.host("b").json(&["images"]).expect("images");
    let all = images.as_array().cloned().unwrap_or_default();
    all.into_iter().filter(|image| image["state"] == "released").collect()
}

/// Waits until all images at host b are QEMU's.
pub fn await_release(stage: &Stage) -> Vec<Value> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = released(stage);
        if found.len() == stage.disks.len() {
            return found;
        }
        assert!(Instant::now() < deadline, "not released: {found:?}\n{}", stage.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The guest writes to every disk.
fn write(stage: &mut Stage) {
    for i in 0..stage.disks.len() {
        let disk = format!("vd{}", char::from(b'a' + i as u8));
        for (offset, length) in WRITTEN {
            let fill = format!("fill disk={disk} offset={offset} length={length}");
            stage.source.console().command(&fill).expect("fill");
        }
    }
    stage.source.console().command("flush").expect("flush");
}

pub fn text(path: std::path::PathBuf) -> String {
    path.to_str().expect("text").to_owned()
}

/// Prepares the way back to host a and starts the QEMU that waits there, called `name`.
pub fn prepare_back(stage: &mut Stage, name: &str, more: &[&str]) {
    let qmp = text(stage.source.qmp_path());
    let args = [&["prepare", "--qmp", &qmp, "--to", "hosta"], more].concat();
    let prepared = stage.lab.host("b").json(&args);
    let prepared = prepared.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    stage.start_waiting(name, &prepared);
}

/// What is planned for the way back, of the first disk.
fn planned_back(stage: &Stage) -> Value {
    let args = ["plan", "--qmp", &text(stage.source.qmp_path()), "--to", "hosta"];
    let plan = stage.lab.host("b").json(&args).expect("a plan");
    plan["images"][0].clone()
}

pub fn begin_back(stage: &Stage) -> Answer {
    let (from, to) = (text(stage.source.qmp_path()), stage.target.as_ref().map(GuestVm::qmp_path));
    let to = text(to.expect("a waiting qemu"));
    let args = ["migrate", "--qmp", &from, "--to", "hosta", "--target-qmp", &to, "--verify"];
    Answer::of(stage.lab.host("b").spawn(&args).expect("migrate")).expect("answer")
}

/// The VM moves back; the summary's images.
pub fn move_back(stage: &mut Stage, name: &str, more: &[&str]) -> Vec<Value> {
    prepare_back(stage, name, more);
    let summary = begin_back(stage).json();
    let summary = summary.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    assert_eq!(summary["result"], "completed", "{summary:#}");
    assert_eq!(summary["verified"], true, "{summary:#}");
    stage.quit_source();
    summary["images"].as_array().cloned().expect("images")
}

fn sent(image: &Value) -> u64 {
    image["blocks_sent"].as_u64().expect("blocks")
}

fn finish(mut stage: Stage) {
    stage.finish_guest();
    stage.assert_images("a");
}

/// The acceptance's bound: 1.05 times what was written and 1 MiB.
fn bound(blocks: u64) -> u64 {
    blocks + blocks / 20 + MIB / BLOCK
}

#[test]
fn only_what_was_written_goes_back_twice_over() {
    let Some(mut stage) = Stage::new("released", &[Kind::Plain], 2_000_000) else { return };
    move_there(&mut stage);
    let found = await_release(&stage);
    assert_eq!(found[0]["tracked_by"], stage.source.pid(), "{found:?}");
    let lineage = stage.lab.host("b").json(&["lineage", "disk0.raw"]).expect("lineage");
    assert_eq!(
        (&lineage["state"], lineage["past"][0]["host"].as_str()),
        (&"released".into(), Some("hosta"))
    );
    let claim = ["claim", "disk0.raw", "--source-is-fenced"];
    let refused = stage.lab.host("b").dray(&claim).expect("claim");
    assert_eq!(refused.code, 6, "{refused:?}");
    assert!(refused.stderr.contains("`dray adopt --qmp /"), "it is not unknown: {refused:?}");
    write(&mut stage);
    let planned = planned_back(&stage);
    let images = move_back(&mut stage, "back", &[]);
    let sent = sent(&images[0]);
    assert!(sent <= bound(written_blocks()), "{sent} blocks were sent: {images:?}");
    // What QEMU wrote was counted without touching the disk.
    let source = planned["source"].as_u64().expect("bytes") / BLOCK;
    assert!(source <= bound(sent) && sent <= bound(source), "{sent} were sent: {planned}");
    assert!(planned["at_target"].as_u64() > planned["source"].as_u64(), "{planned}");
    assert!(sent >= written_blocks(), "{sent} blocks were sent: {images:?}");
    assert_eq!(released(&stage), [Value::Null; 0]);
    finish(stage);
}

/// The base image at a host: which file, how long, and when it was written.
fn base(stage: &Stage, host: &str) -> (u64, u64, SystemTime) {
    let path = stage.lab.host(host).pool().join("base.qcow2");
    let meta = std::fs::metadata(path).expect("the base");
    (meta.ino(), meta.len(), meta.modified().expect("a time"))
}

/// Of the base image nothing was sent: the host has it.
fn assert_in_place(images: &[Value]) {
    let base = images.iter().find(|image| image["image"] == "base.qcow2").expect("the base");
    assert_eq!((&base["blocks_sent"], &base["name_at_target"]), (&0.into(), &"base.qcow2".into()));
    assert_eq!(base["bytes_in_place"].as_u64(), base["bytes"].as_u64(), "{base}");
}

/// A qcow2 counts in clusters and metadata: what was tracked are bytes of the file. Its base image is on
/// both hosts all the time.
#[test]
fn only_what_was_written_of_a_chain_goes_back() {
    let Some(mut stage) = Stage::new("released-q", &[Kind::Qcow2], 2_000_000) else { return };
    let pools = ["a", "b"].map(|host| stage.lab.host(host).pool().join("base.qcow2"));
    std::fs::copy(&pools[0], &pools[1]).expect("copy");
    let bases = (base(&stage, "a"), base(&stage, "b"));
    let images = move_there(&mut stage);
    assert_in_place(&images);
    await_release(&stage);
    let before = std::fs::metadata(stage.image("b", 0)).expect("image").len();
    write(&mut stage);
    let after = std::fs::metadata(stage.image("b", 0)).expect("image").len();
    let images = move_back(&mut stage, "back", &[]);
    assert_in_place(&images);
    let active = images.iter().find(|image| image["image"] == "disk0.qcow2").expect("the disk");
    // Each of the four writes may begin and end inside a cluster of 64 KiB, and needs an entry in a
    // table of 64 KiB; what was appended is new.
    let clusters = 4 * 2 * 16 + 4 * 16 + (after - before) / BLOCK;
    let sent = sent(active);
    assert!(sent <= bound(written_blocks() + clusters), "{sent} blocks were sent: {images:?}");
    assert_eq!((base(&stage, "a"), base(&stage, "b")), bases, "nobody has touched the base images");
    assert_eq!(std::fs::read(&pools[0]).ok(), std::fs::read(&pools[1]).ok());
    finish(stage);
}

/// QEMU was started again by its operator: nobody knows what was written, so everything is sent. The
/// new guest knows nothing of the old one's account: a copy of the disk tells what it held.
#[test]
#[ignore = "long: make long"]
fn a_bitmap_that_is_gone_makes_everything_count() {
    let Some(mut stage) = Stage::new("released-r", &[Kind::Plain], 2_000_000) else { return };
    move_there(&mut stage);
    await_release(&stage);
    stage.source.console().send("poweroff").expect("poweroff");
    stage.source.wait_exit(PATIENCE).expect("ends");
    let path = stage.image("b", 0);
    let node = format!("driver=file,node-name=again,filename={},discard=unmap", path.display());
    let builder = GuestVm::builder(&stage.lab.dir(), "again").memory_mib(192).booted();
    stage.source = builder.blockdev(node).disk("disk0", "again").start().expect("qemu");
    stage.source.wait_ready().expect("boot");
    let found = await_release(&stage);
    assert_eq!(found[0]["tracked_by"], Value::Null, "{found:?}");
    let open = stage.disks[0].bystander.open_command("vda");
    stage.source.console().command(&open).expect("open");
    write(&mut stage);
    let copy = stage.lab.dir().join("copy.raw");
    std::fs::copy(&path, &copy).expect("copy");
    let images = move_back(&mut stage, "back", &[]);
    assert_nothing_trusted(&images[0]);
    same_as(&mut stage, &copy);
}

/// Nothing came from the replica unseen: all data was sent, or compared by hash with what is there.
fn assert_nothing_trusted(image: &Value) {
    let compared = image["bytes_from_target"].as_u64().expect("a count");
    // The seeded part alone is this much.
    assert!(sent(image) * BLOCK + compared >= crate::stage::SEEDED, "{image}");
    // Left out unseen were holes at most; `--verify` and the bystander have seen the rest.
    assert!(compared > 0 || sent(image) > 0, "{image}");
}

/// The disk at host a, which the guest has left, is equal to `copy`.
fn same_as(stage: &mut Stage, copy: &std::path::Path) {
    let guest = stage.guest();
    guest.console().send("poweroff").expect("poweroff");
    guest.wait_exit(PATIENCE).expect("ends");
    let (home, copy) = (text(stage.image("a", 0)), text(copy.to_owned()));
    tools::run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &home, &copy]).expect("equal");
}

/// QEMU serves something else over NBD, and has one server only: its bitmap cannot be read.
#[test]
fn a_bitmap_that_cannot_be_read_makes_everything_count() {
    let Some(mut stage) = Stage::new("released-n", &[Kind::Plain], 2_000_000) else { return };
    move_there(&mut stage);
    await_release(&stage);
    write(&mut stage);
    let socket = stage.lab.dir().join("other.sock");
    let start = serde_json::json!({ "execute": "nbd-server-start", "arguments": {
        "addr": { "type": "unix", "data": { "path": text(socket) } } } });
    let started = qmp(&stage.source.qmp_path(), &start.to_string());
    assert!(started.get("return").is_some(), "{started}");
    let images = move_back(&mut stage, "back", &[]);
    assert_nothing_trusted(&images[0]);
    finish(stage);
}

/// The target's agent dies before a step of the release, is started again and finishes it. What the
/// guest writes then comes home, whatever else is sent.
fn dies_at_release(step: &str) {
    let name = format!("rel-{}", step.to_lowercase());
    let Some(mut stage) = Stage::new(&name, &[Kind::Plain], 2_000_000) else { return };
    start_with(stage.lab.host("b"), "DRAY_ABORT_BEFORE", step);
    stage.prepare();
    let migrate = stage.spawn(&[]);
    dies_and_returns(stage.lab.host("b"));
    Answer::of(migrate).expect("answer");
    await_release(&stage);
    stage.assert_guest_is_well();
    stage.guest().console().command("stop").expect("stop");
    settle_there(&mut stage);
    write(&mut stage);
    move_back(&mut stage, "back", &[]);
    finish(stage);
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_before_it_notes_a_release_notes_it() {
    dies_at_release("ReleaseNote");
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_before_the_pivot_of_a_release_does_it() {
    dies_at_release("ReleasePivot");
}

#[test]
fn an_agent_that_dies_after_the_pivot_of_a_release_finishes_it() {
    dies_at_release("ReleaseLine");
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_before_a_release_is_done_finishes_it() {
    dies_at_release("ReleaseDone");
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_before_it_forgets_a_released_image_forgets_it() {
    dies_at_release("ReleaseForget");
}

/// The agent dies before a step of taking the disk again, is started again, and the same command goes
/// through.
fn dies_at_adoption(step: &str) -> Option<Vec<Value>> {
    let name = format!("rel-{}", step.to_lowercase());
    let mut stage = Stage::new(&name, &[Kind::Plain], 2_000_000)?;
    move_there(&mut stage);
    await_release(&stage);
    write(&mut stage);
    start_with(stage.lab.host("b"), "DRAY_ABORT_BEFORE", step);
    prepare_back(&mut stage, "back", &[]);
    assert_ne!(begin_back(&stage).code, 0, "it dies");
    dies_and_returns(stage.lab.host("b"));
    let summary = begin_back(&stage).json();
    let summary = summary.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    assert_eq!(summary["verified"], true, "{summary:#}");
    stage.quit_source();
    finish(stage);
    summary["images"].as_array().cloned()
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_before_it_takes_a_released_disk_takes_it() {
    let Some(images) = dies_at_adoption("AdoptPivot") else { return };
    assert!(sent(&images[0]) <= bound(written_blocks()), "the bitmap went on: {images:?}");
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_before_it_reads_the_bitmap_reads_it() {
    let Some(images) = dies_at_adoption("AdoptAbsorb") else { return };
    assert!(sent(&images[0]) <= bound(written_blocks()), "the bitmap is still there: {images:?}");
}

#[test]
fn an_agent_that_dies_before_it_writes_down_what_it_read_does_not_forget_it() {
    dies_at_adoption("AdoptSettle");
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_before_the_note_goes_does_not_believe_too_much() {
    dies_at_adoption("AdoptNote");
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_before_qemu_lets_the_file_go_goes_on() {
    dies_at_adoption("AdoptClose");
}

/// It was adopted when it was here before, from a QEMU that has gone: how it was on its file then says nothing
/// about how it is on dray now.
#[test]
#[ignore = "long: make long"]
fn a_disk_that_came_back_is_released_as_it_is_now() {
    let kinds = [Kind::Plain, Kind::Qcow2];
    let Some(mut stage) = Stage::new("back-release", &kinds, 2_000_000) else { return };
    stage.prepare();
    let summary = stage.migrate(&["--release", "never"]).expect("moves there");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    settle_there(&mut stage);
    move_back(&mut stage, "back", &[]);
    let qmp = text(stage.guest().qmp_path());
    let released = stage.lab.host("a").dray(&["release", "--qmp", &qmp]).expect("release");
    assert_eq!(released.code, 0, "{released:?}\n{}", stage.logs());
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}

/// Its nodes have names that only dray knows once it was released: QEMU's command line has none of them.
#[test]
fn a_disk_of_a_drive_without_node_names_comes_under_dray_and_goes_back_again_and_again() {
    let Some(mut stage) = Stage::new("released-drive", &[Kind::Drive], 2_000_000) else { return };
    let qmp = stage.source_qmp();
    for _ in 0..3 {
        let adopted = stage.lab.host("a").json(&["adopt", "--qmp", &qmp]);
        adopted.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
        stage.release();
    }
    stage.moves();
}
