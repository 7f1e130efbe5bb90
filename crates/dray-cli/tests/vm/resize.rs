//! `dray resize` under a guest that writes and verifies all the time. What is behind the old end is written by
//! the guest, and compared in the file.

use crate::restart::{dies_and_returns, start_with};
use crate::stage::{HIDDEN, Kind, SEEDED, SIZE, Stage};
use dray_testkit::guest::{Bystander, tools};
use dray_testkit::lab::Answer;
use serde_json::Value;
use std::os::unix::fs::FileExt;

const GROWN: u64 = SIZE + (32 << 20);
const BLOCK: u64 = 4096;
/// What the guest writes to, and how much a second.
const SPAN: u64 = 48 << 20;
const RATE: u64 = 4 << 20;
/// Where the guest writes behind the old end.
const BEHIND: u64 = SIZE + (8 << 20);

fn resize(stage: &Stage, host: &str, name: &str, more: &[&str]) -> Answer {
    resize_to(stage, host, name, GROWN, more)
}

fn resize_to(stage: &Stage, host: &str, name: &str, len: u64, more: &[&str]) -> Answer {
    let size = len.to_string();
    let args = [&["--json", "resize", name, &size], more].concat();
    stage.lab.host(host).dray(&args).expect("resize")
}

/// Grows the disk under its guest, which is served all the while and then writes behind the old end.
fn grow(stage: &mut Stage, host: &str, name: &str) {
    grow_behind(stage, host, name, 0);
}

/// The same for a disk that begins `hidden` bytes behind the start of its file.
fn grow_behind(stage: &mut Stage, host: &str, name: &str, hidden: u64) {
    let qmp = stage.guest().qmp_path();
    let qmp = ["--qmp", qmp.to_str().expect("text")];
    let len = GROWN + hidden;
    let image = resize_to(stage, host, name, len, &qmp).json();
    let image = image.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    assert_eq!(image["size"], len);
    stage.assert_guest_is_well();
    let again = resize_to(stage, host, name, len, &qmp);
    assert!(again.stderr.contains("does not make an image shorter"), "{again:?}");
    go_on_behind(stage);
    let file = stage.lab.host(host).pool().join(name);
    let mut behind = vec![0; BLOCK as usize];
    std::fs::File::open(file)
        .and_then(|file| file.read_exact_at(&mut behind, hidden + BEHIND))
        .expect("read");
    assert!(behind.iter().any(|byte| *byte != 0), "the guest has written behind the old end");
}

/// The guest verifies what it has written, finds the disk as long as it is now, and writes behind the old end.
fn go_on_behind(stage: &mut Stage) {
    let grown = Bystander::new(1, GROWN, SEEDED);
    let open = format!("{} learn=1", grown.open_command("vda"));
    let fill = format!("fill disk=vda offset={BEHIND} length={BLOCK}");
    let start = format!("start disk=vda span={SPAN} block=16384 rate={RATE} flush=32");
    for command in ["stop", "verify", &open, &fill, "flush", &start] {
        stage.guest().console().command(command).expect(command);
    }
    stage.disks[0].bystander = grown;
    stage.assert_guest_is_well();
}

fn image(stage: &Stage, host: &str) -> Value {
    let images = stage.lab.host(host).json(&["images"]).expect("images");
    images.as_array().and_then(|all| all.first()).cloned().expect("an image")
}

/// Nobody else may write to the file.
fn is_locked(stage: &Stage, host: &str, name: &str) {
    let file = stage.lab.host(host).pool().join(name);
    let args = ["-f", "raw", "-c", "write 0 512", file.to_str().expect("text")];
    assert!(tools::run("qemu-io", &args).is_err(), "{name} is not locked");
}

#[test]
fn a_resident_disk_grows_under_its_guest() {
    let Some(mut stage) = Stage::new("resize-resident", &[Kind::Resident], RATE) else { return };
    stage.assert_guest_is_well();
    grow(&mut stage, "a", "disk0.raw");
    is_locked(&stage, "a", "disk0.raw");
    stage.finish_guest();
    stage.assert_images("a");
}

#[test]
fn an_adopted_disk_grows_under_its_guest_and_goes_home_as_it_is() {
    let Some(mut stage) = Stage::new("resize-adopted", &[Kind::Plain], RATE) else { return };
    stage.assert_guest_is_well();
    let qmp = stage.source_qmp();
    stage.lab.host("a").json(&["adopt", "--qmp", &qmp]).expect("adopt");
    grow(&mut stage, "a", "disk0.raw");
    is_locked(&stage, "a", "disk0.raw");
    stage.lab.host("a").json(&["release", "--qmp", &qmp]).expect("release");
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}

/// The guest sees what comes after the offset of its raw node, also when it is told a second time.
#[test]
fn a_disk_that_is_a_part_of_its_file_grows_under_its_guest() {
    let Some(mut stage) = Stage::new("resize-part", &[Kind::Part], RATE) else { return };
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", "ResizeTell");
    stage.assert_guest_is_well();
    let qmp = stage.source_qmp();
    stage.lab.host("a").json(&["adopt", "--qmp", &qmp]).expect("adopt");
    let len = GROWN + HIDDEN as u64;
    assert_ne!(resize_to(&stage, "a", "disk0.raw", len, &["--qmp", &qmp]).code, 0);
    dies_and_returns(stage.lab.host("a"));
    grow_behind(&mut stage, "a", "disk0.raw", HIDDEN as u64);
    stage.release();
    stage.finish_guest();
    stage.assert_images("a");
}

/// A raw node with a size has it for good.
#[test]
fn a_disk_with_an_end_of_its_own_is_refused() {
    let Some(mut stage) = Stage::new("resize-end", &[Kind::Piece], RATE) else { return };
    let qmp = stage.source_qmp();
    stage.lab.host("a").json(&["adopt", "--qmp", &qmp]).expect("adopt");
    let before = image(&stage, "a");
    let len = GROWN + HIDDEN as u64;
    let refused = resize_to(&stage, "a", "disk0.raw", len, &["--qmp", &qmp]);
    assert!(refused.code == 6 && refused.stderr.contains("size="), "{refused:?}");
    assert_eq!(image(&stage, "a")["size"], before["size"]);
    stage.release();
    stage.finish_guest();
    stage.assert_images("a");
}

#[test]
fn a_disk_that_has_arrived_grows_under_its_guest() {
    let Some(mut stage) = Stage::new("resize-arrived", &[Kind::Resident], RATE) else { return };
    stage.prepare();
    let summary = stage.migrate(&[]).expect("moves");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    grow(&mut stage, "b", "disk0.raw");
    is_locked(&stage, "b", "disk0.raw");
    stage.finish_guest();
    stage.assert_images("b");
}

#[test]
fn a_qcow2_is_left_to_qemu() {
    let Some(mut stage) = Stage::new("resize-qcow2", &[Kind::Qcow2], RATE) else { return };
    let qmp = stage.source_qmp();
    stage.lab.host("a").json(&["adopt", "--qmp", &qmp]).expect("adopt");
    let before = image(&stage, "a");
    let size = (4 << 30_u64).to_string();
    let args = ["resize", "disk0.qcow2", &size, "--qmp", &qmp];
    let refused = stage.lab.host("a").dray(&args).expect("resize");
    assert!(refused.code != 0 && refused.stderr.contains("block_resize"), "{refused:?}");
    assert_eq!(image(&stage, "a")["size"], before["size"]);
    stage.assert_guest_is_well();
    stage.lab.host("a").json(&["release", "--qmp", &qmp]).expect("release");
    stage.finish_guest();
    stage.assert_images("a");
}

/// The image is longer by then; the guest is told by the same command.
#[test]
fn a_guest_that_was_not_told_is_told_the_next_time() {
    let Some(mut stage) = Stage::new("resize-again", &[Kind::Plain], RATE) else { return };
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", "ResizeTell");
    let qmp = stage.source_qmp();
    stage.lab.host("a").json(&["adopt", "--qmp", &qmp]).expect("adopt");
    stage.assert_guest_is_well();
    assert_ne!(resize(&stage, "a", "disk0.raw", &["--qmp", &qmp]).code, 0);
    dies_and_returns(stage.lab.host("a"));
    assert_eq!(image(&stage, "a")["size"], GROWN);
    stage.assert_guest_is_well();
    let refused = stage.lab.host("a").dray(&["release", "--qmp", &qmp]).expect("release");
    let cure = format!("dray resize disk0.raw {GROWN} --qmp {qmp}");
    assert!(refused.code == 6 && refused.stderr.contains(&cure), "{refused:?}");
    grow(&mut stage, "a", "disk0.raw");
    stage.release();
    stage.finish_guest();
    stage.assert_images("a");
}
