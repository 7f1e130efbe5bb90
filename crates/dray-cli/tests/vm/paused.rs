//! A guest that its operator has paused moves as it is, is paused where it arrives, and moves again.

use crate::failures::copying;
use crate::hand_back::dies_before;
use crate::home::assert_back_home;
use crate::released::{await_release, move_back, settle_there};
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::lab::Answer;
use std::path::Path;

const KINDS: [Kind; 2] = [Kind::Plain, Kind::Qcow2];

fn pause(stage: &Stage) {
    qmp(&stage.source.qmp_path(), "{\"execute\":\"stop\"}");
}

/// Lets the guest run behind a socket, which it did not.
fn go_on(socket: &Path) {
    let answer = qmp(socket, "{\"execute\":\"query-status\"}");
    assert_eq!(answer["return"]["running"], false, "{answer}");
    let answer = qmp(socket, "{\"execute\":\"cont\"}");
    assert!(answer.get("return").is_some(), "{answer}");
}

/// A paused guest goes to host b and comes back.
fn there_and_back(name: &str, more: &[&str]) {
    let Some(mut stage) = Stage::new(name, &KINDS, 2_000_000) else { return };
    stage.assert_guest_is_well();
    pause(&stage);
    stage.prepare();
    let summary = stage.migrate(more).expect("moves there");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    settle_there(&mut stage);
    if more.is_empty() {
        await_release(&stage);
    }
    move_back(&mut stage, "back", &[]);
    go_on(&stage.target.as_ref().expect("target").qmp_path());
    stage.assert_guest_is_well();
    stage.finish_guest();
    // It may still serve them, and lock them for that.
    stage.lab.host("a").stop().expect("stop");
    stage.assert_images("a");
}

#[test]
fn a_paused_guest_comes_back_from_files() {
    there_and_back("paused", &[]);
}

#[test]
#[ignore = "long: make long"]
fn a_paused_guest_comes_back_from_drays_socket() {
    there_and_back("paused-never", &["--release", "never"]);
}

/// It stays, paused, and has its disks. QEMU does not send it again before it has run.
#[test]
fn a_paused_guest_that_cannot_go_stays_paused() {
    let Some(mut stage) = Stage::new("paused-back", &KINDS, 2_000_000) else { return };
    stage.assert_guest_is_well();
    pause(&stage);
    dies_before("b", "ReachGuest", &mut stage);
    let answer = stage.prepared_with(&[]);
    assert_eq!(answer.code, 6, "{answer:?}");
    assert!(answer.stderr.contains("`cont`"), "it must say what to do: {answer:?}");
    go_on(&stage.source.qmp_path());
    assert_back_home(&mut stage);
}

/// Its user pauses it while its disks are on their way: it arrives as its user has left it.
#[test]
fn a_guest_that_is_paused_on_the_way_arrives_paused() {
    let Some(mut stage) = Stage::new("paused-on-the-way", &[Kind::Plain], 2_000_000) else {
        return;
    };
    stage.prepare();
    let migrate = stage.spawn(&["--bandwidth", "60Mbit"]);
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    qmp(&stage.other_monitor(), "{\"execute\":\"stop\"}");
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    go_on(&stage.target.as_ref().expect("target").qmp_path());
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}
