//! A disk that arrived flattened moves on: a cancel on the way leaves a VM that can be prepared, and
//! moved, again.

use crate::failures::copying;
use crate::released::{await_release, prepare_back, settle_there, text};
use crate::stage::{Kind, PATIENCE, Stage};
use dray_testkit::lab::Answer;

/// Begins to move the VM from host b to host a.
fn begin(stage: &Stage, more: &[&str]) -> std::process::Child {
    let from = text(stage.source.qmp_path());
    let to = text(stage.target.as_ref().expect("a waiting qemu").qmp_path());
    let args = ["migrate", "--qmp", &from, "--to", "hosta", "--target-qmp", &to];
    stage.lab.host("b").spawn(&[&args, more].concat()).expect("migrate")
}

/// A flattened disk arrives at host b with the options `first` of `prepare` and `there` of `migrate`.
/// It moves on with `onward`, is cancelled, and moves on again.
fn moves_on_after_a_cancel(name: &str, first: &[&str], there: &[&str], onward: &[&str]) {
    let Some(mut stage) = Stage::new(name, &[Kind::Chain], 2_000_000) else { return };
    let prepared = stage.prepared_with(&[&["--chain", "flatten"], first].concat()).json();
    stage.start_target(&prepared.expect("prepare"));
    let summary = stage.migrate(there).expect("moves there");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    settle_there(&mut stage);
    if there.is_empty() && first.is_empty() {
        await_release(&stage);
    }
    let onward = [&["--name", "disk0=onward.img"], onward].concat();
    prepare_back(&mut stage, "first", &onward);
    let migrate = begin(&stage, &["--bandwidth", "30Mbit"]);
    let copies = stage.lab.host("b").wait_status(PATIENCE, copying);
    copies.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    stage.lab.host("b").json(&["cancel", "--discard"]).expect("cancel");
    assert_eq!(Answer::of(migrate).expect("answer").code, 12);
    stage.target = None;
    stage.assert_guest_is_well();

    prepare_back(&mut stage, "second", &onward);
    let summary = Answer::of(begin(&stage, &["--verify"])).expect("answer").json();
    let summary = summary.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    assert_eq!(summary["verified"], true, "{summary:#}");
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
}

#[test]
#[ignore = "long: make long"]
fn a_raw_image_of_its_own() {
    moves_on_after_a_cancel("onward-raw", &[], &[], &[]);
}

#[test]
#[ignore = "long: make long"]
fn a_raw_image_on_drays_socket() {
    moves_on_after_a_cancel("onward-never", &[], &["--release", "never"], &[]);
}

#[test]
fn a_fresh_qcow2() {
    moves_on_after_a_cancel("onward-q", &["--target-format", "qcow2"], &[], &[]);
}

#[test]
#[ignore = "long: make long"]
fn a_fresh_qcow2_that_is_flattened_again() {
    let qcow2 = ["--target-format", "qcow2"];
    moves_on_after_a_cancel("onward-qf", &qcow2, &[], &["--chain", "flatten"]);
}
