//! What lies below a disk is read once: another program that changes it meanwhile is noticed, and the guest stays.

use crate::failures::copying;
use crate::home::assert_back_home;
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::lab::Answer;
use serde_json::json;
use std::path::PathBuf;

/// What its migration says.
const WRITTEN: &str = "another program has written to it, and nobody may";

fn staged(name: &str) -> Option<Stage> {
    Stage::new(name, &[Kind::Qcow2], 2_000_000)
}

fn base(stage: &Stage) -> PathBuf {
    stage.lab.host("a").pool().join("base.qcow2")
}

/// QEMU writes what is in the active image to the one below it; the chain looks as before.
fn commit(stage: &Stage) {
    let arguments = json!({ "command-line": "commit all" });
    let line = json!({ "execute": "human-monitor-command", "arguments": arguments });
    assert_eq!(qmp(&stage.other_monitor(), &line.to_string())["return"], "");
}

#[test]
fn a_base_image_that_was_written_to_since_the_vm_was_prepared_is_not_moved() {
    let Some(mut stage) = staged("below-prepared") else { return };
    let id = stage.prepare()["migration"].as_str().expect("id").to_owned();
    commit(&stage);
    let answer = Answer::of(stage.spawn(&[])).expect("answer");
    assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
    assert!(answer.stderr.contains(WRITTEN), "{answer:?}");
    assert!(answer.stderr.contains("prepare again"), "{answer:?}");
    stage.lab.host("a").json(&["cancel", &id]).expect("cancel");
    assert_back_home(&mut stage);
}

#[test]
fn a_base_image_that_is_written_to_during_copy_ends_the_migration() {
    let Some(mut stage) = staged("below-copy") else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", "pre-copy", "--bandwidth", "60Mbit"]);
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    commit(&stage);
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
    assert!(answer.stderr.contains(WRITTEN), "{answer:?}");
    assert_back_home(&mut stage);
}

/// QEMU has the old file open still; the next agent would open the new one.
#[test]
fn a_base_image_that_is_replaced_while_the_agent_restarts_ends_the_migration() {
    let Some(mut stage) = staged("below-replaced") else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", "pre-copy", "--bandwidth", "60Mbit"]);
    let a = stage.lab.host("a");
    a.wait_status(PATIENCE, copying).expect("it copies");
    a.kill9().expect("kill");
    let (base, aside) = (base(&stage), stage.lab.dir().join("aside.qcow2"));
    std::fs::copy(&base, &aside).expect("copy");
    std::fs::rename(&base, stage.lab.dir().join("old.qcow2")).expect("rename");
    std::fs::rename(&aside, &base).expect("rename");
    a.start().expect("start");
    let ended = a.wait_status(PATIENCE, |status| status["state"] == "failed");
    let ended = ended.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    let said = ended["error"].to_string();
    assert!(said.contains("another file was put there"), "{ended}");
    Answer::of(migrate).expect("answer");
    assert_back_home(&mut stage);
}

/// The way home of a flattened disk opens what lies below it by its path.
#[test]
fn a_flattened_disk_stays_on_dray_when_its_base_image_was_replaced() {
    let Some(mut stage) = Stage::new("below-home", &[Kind::Chain], 2_000_000) else { return };
    let prepared = stage.prepared_with(&["--chain", "flatten"]).json().expect("prepare");
    stage.start_target(&prepared);
    let (base, old) = (base(&stage), stage.lab.dir().join("old.qcow2"));
    let migrate = stage.spawn(&["--strategy", "pre-copy", "--bandwidth", "60Mbit"]);
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    std::fs::copy(&base, stage.lab.dir().join("new.qcow2")).expect("copy");
    std::fs::rename(&base, &old).expect("rename");
    std::fs::rename(stage.lab.dir().join("new.qcow2"), &base).expect("rename");
    stage.lab.host("a").json(&["cancel"]).expect("cancel");
    Answer::of(migrate).expect("answer");
    stage.target = None;
    let images = stage.lab.host("a").json(&["images"]).expect("images");
    assert!(images.to_string().contains("disk0"), "it is on dray: {images}");
    stage.assert_guest_is_well();
    std::fs::rename(&old, &base).expect("rename");
    stage.release();
    assert_back_home(&mut stage);
}
