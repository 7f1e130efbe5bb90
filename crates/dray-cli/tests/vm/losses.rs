//! Writes of a guest that are lost: QEMU itself flushes when it stops a guest to move it, and what that
//! flush is told the guest has not heard. A disk whose guest has not heard of a loss stays under dray: no
//! other can tell it.

use crate::failures::copying;
use crate::released::{begin_back, move_back, prepare_back, settle_there, text};
use crate::restart::{dies, start_with};
use crate::stage::{Kind, PATIENCE, Stage};
use dray_testkit::lab::{Answer, Host};
use dray_testkit::losses;
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

/// Exit code of `data_at_risk`.
const AT_RISK: i32 = 15;

/// Says in the files of a host that an earlier process of this boot has lost writes of image `name`.
fn write_loss(host: &Host, name: &str) {
    losses::write_loss(&host.dir().join("state"), name, "flushing: the cable was pulled");
}

fn first_image(host: &Host) -> Value {
    host.json(&["images"]).expect("images")[0].clone()
}

/// Writes of the first image of a host are lost, and its agent is another process afterwards.
fn lose_at(host: &Host) {
    let name = first_image(host)["name"].as_str().expect("name").to_owned();
    host.kill9().expect("kill");
    write_loss(host, &name);
    host.start().expect("start");
}

fn lose(stage: &Stage) {
    lose_at(stage.lab.host("b"));
}

fn told_at(host: &Host) -> Value {
    first_image(host)["write_back_error"]["told"].clone()
}

fn told(stage: &Stage) -> Value {
    told_at(stage.lab.host("b"))
}

/// Gives the disks of the VM that runs now back to its QEMU.
fn release(stage: &mut Stage, letter: &str) -> Answer {
    let qmp = text(stage.guest().qmp_path());
    stage.lab.host(letter).dray(&["release", "--qmp", &qmp]).expect("release")
}

/// The disk stays under dray and its guest is told, once; then the disk goes.
fn stays_until_told(stage: &mut Stage, letter: &str) {
    let refused = release(stage, letter);
    assert_eq!(refused.code, AT_RISK, "{refused:?}\n{}", stage.logs());
    let said = &refused.stderr;
    assert!(said.contains("the cable was pulled") && said.contains("`sync`"), "{refused:?}");
    assert_eq!(told_at(stage.lab.host(letter)), false, "{refused:?}\n{}", stage.logs());
    is_told_once(stage, letter);
    let released = release(stage, letter);
    assert_eq!(released.code, 0, "{released:?}\n{}", stage.logs());
    assert_ne!(first_image(stage.lab.host(letter))["state"], "owner");
}

fn is_told_once(stage: &mut Stage, letter: &str) {
    let flushed = stage.guest().console().command("flush");
    assert!(
        flushed.is_err() || !stage.guest().console().complaints().is_empty(),
        "{flushed:?}\n{}",
        stage.logs()
    );
    assert_eq!(told_at(stage.lab.host(letter)), true);
}

/// A guest at host b that writes nothing, on a disk that dray serves.
fn quiet_at_b(name: &str) -> Option<Stage> {
    let mut stage = Stage::new(name, &[Kind::Plain], 2_000_000)?;
    stage.assert_guest_is_well();
    stage.prepare();
    stage.migrate(&["--release", "never"]).expect("moves there");
    settle_there(&mut stage);
    stage.guest().console().command("stop").expect("stop");
    Some(stage)
}

#[test]
fn a_disk_whose_guest_has_not_heard_of_a_loss_is_not_released() {
    let Some(mut stage) = quiet_at_b("loss-release") else { return };
    lose(&stage);
    stays_until_told(&mut stage, "b");
}

/// The agent dies when QEMU has the disk, and writes were lost by then: who looks next takes it back.
#[test]
fn a_loss_while_a_disk_was_released_brings_it_back_under_dray() {
    let Some(mut stage) = quiet_at_b("loss-pivot") else { return };
    let host = stage.lab.host("b");
    let name = first_image(host)["name"].as_str().expect("name").to_owned();
    start_with(host, "DRAY_ABORT_BEFORE", "ReleasePivoted");
    assert_ne!(release(&mut stage, "b").code, 0, "it dies");
    let host = stage.lab.host("b");
    host.kill9().expect("reap");
    write_loss(host, &name);
    host.start().expect("start");
    stays_until_told(&mut stage, "b");
}

/// A copy of a quiet guest is under way, and its source has lost writes.
fn copied_with_a_loss(name: &str, kind: Kind, more: &[&str]) -> Option<Stage> {
    let mut stage = Stage::new(name, &[kind], 2_000_000)?;
    stage.assert_guest_is_well();
    stage.guest().console().command("stop").expect("stop");
    let prepared = stage.prepared_with(more).json().expect("prepare");
    stage.start_target(&prepared);
    let migrate = stage.spawn(&["--bandwidth", "30Mbit"]);
    let host = stage.lab.host("a");
    host.wait_status(PATIENCE, copying).expect("it copies");
    lose_at(host);
    host.wait_status(PATIENCE, copying).expect("it goes on");
    host.json(&["cancel"]).expect("cancel");
    Answer::of(migrate).expect("answer");
    until(&stage, "it does not stay", |host| host.log().contains("stays under dray"));
    stage.target = None;
    Some(stage)
}

#[test]
fn a_migration_that_came_to_nothing_leaves_a_disk_with_a_loss_under_dray() {
    let Some(mut stage) = copied_with_a_loss("loss-cancel", Kind::Plain, &[]) else { return };
    stays_until_told(&mut stage, "a");
}

#[test]
#[ignore = "long: make long"]
fn a_flattened_disk_with_a_loss_does_not_go_home() {
    let flatten = ["--chain", "flatten"];
    let Some(mut stage) = copied_with_a_loss("loss-home", Kind::Chain, &flatten) else { return };
    stays_until_told(&mut stage, "a");
}

fn until(stage: &Stage, what: &str, done: impl Fn(&Host) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done(stage.lab.host("a")) {
        assert!(Instant::now() < deadline, "{what}\n{}", stage.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The VM ends before its guest has heard of the loss: an operator takes note of it instead.
#[test]
#[ignore = "long: make long"]
fn a_flattened_disk_whose_vm_ended_with_a_loss_is_not_merged_before_somebody_knows() {
    let flatten = ["--chain", "flatten"];
    let Some(mut stage) = copied_with_a_loss("loss-ended", Kind::Chain, &flatten) else { return };
    stage.source.kill().expect("kill");
    until(&stage, "nobody says what to do", |host| host.log().contains("qemu-io -c flush"));
    let socket = stage.lab.host("a").nbd_socket();
    let name = first_image(stage.lab.host("a"))["name"].as_str().expect("name").to_owned();
    let uri = format!("nbd+unix:///{name}?socket={}", socket.display());
    let noted = Command::new("qemu-io").args(["-f", "raw", "-c", "flush", &uri]).output();
    assert!(!noted.expect("qemu-io").status.success());
    until(&stage, "it is not merged", |host| first_image(host).is_null());
    assert!(stage.image("a", 0).exists(), "{}", stage.logs());
}

/// Writes are lost while the guest is stopped to go over to its fresh qcow2: it stays where it is told.
#[test]
#[ignore = "long: make long"]
fn a_disk_with_a_loss_does_not_go_over_to_a_qcow2() {
    let Some(mut stage) = Stage::new("loss-qcow2", &[Kind::Chain], 2_000_000) else { return };
    stage.assert_guest_is_well();
    stage.guest().console().command("stop").expect("stop");
    start_with(stage.lab.host("b"), "DRAY_ABORT_BEFORE", "Qcow2Stopped");
    let flatten = ["--chain", "flatten", "--target-format", "qcow2"];
    let prepared = stage.prepared_with(&flatten).json().expect("prepare");
    stage.start_target(&prepared);
    let migrate = stage.spawn(&[]);
    dies(stage.lab.host("b"));
    write_loss(stage.lab.host("b"), "disk0.raw");
    stage.lab.host("b").start().expect("start");
    Answer::of(migrate).expect("answer");
    stage.quit_source();
    stays_until_told(&mut stage, "b");
}

#[test]
#[ignore = "long: make long"]
fn a_loss_that_only_qemu_heard_is_told_to_the_guest() {
    // It writes nothing and flushes nothing, so QEMU hears of the loss.
    let Some(mut stage) = quiet_at_b("losses") else { return };
    lose(&stage);
    assert_eq!(told(&stage), false);
    prepare_back(&mut stage, "first", &[]);
    let answer = begin_back(&stage);
    assert_ne!(answer.code, 0, "{answer:?}");
    stage.target = None;
    assert_eq!(told(&stage), false, "{answer:?}");
    is_told_once(&mut stage, "b");
    move_back(&mut stage, "second", &[]);
}
