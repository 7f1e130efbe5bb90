//! What fails before the handover leaves the guest at the source, on its own file.

use crate::home::assert_back_home;
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::lab::Answer;
use std::path::Path;
use std::process::Child;

#[test]
fn the_target_qemu_dies_during_copy() {
    let Some(mut stage) = Stage::new("dies-copy", &[Kind::Plain], 3_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--bandwidth", "40Mbit"]);
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    stage.target.as_mut().expect("target").kill().expect("kill");
    let answer = Answer::of(migrate).expect("answer");
    assert_ne!(answer.code, 0, "{answer:?}");
    assert_back_home(&mut stage);
}

pub fn copying(status: &serde_json::Value) -> bool {
    let done = status["progress"]["total"]["bytes_done"].as_u64();
    status["progress"]["phase"] == "copy" && done.is_some_and(|done| done > 1 << 20)
}

/// Begins a migration whose copy takes ten seconds, and does something in the middle of it.
fn during_copy(name: &str, kinds: &[Kind], act: impl FnOnce(&Stage)) -> Option<(Stage, Child)> {
    let mut stage = Stage::new(name, kinds, 3_000_000)?;
    stage.prepare();
    let migrate = stage.spawn(&["--bandwidth", "30Mbit"]);
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    act(&stage);
    Some((stage, migrate))
}

/// What the source asks the target about its QEMU is asked when the target is back.
#[test]
fn a_target_that_is_away_when_a_migration_begins_is_waited_for() {
    let Some(mut stage) = Stage::new("begins-alone", &[Kind::Plain], 3_000_000) else { return };
    stage.prepare();
    let (source, target) = (stage.lab.host("a"), stage.lab.host("b"));
    // A QEMU that has not opened its disks yet would not wait for them.
    qmp(Path::new(&stage.target_qmp()), "{\"execute\":\"query-status\"}");
    target.kill9().expect("kill");
    let migrate = stage.spawn(&[]);
    let begun = |status: &serde_json::Value| status["state"] == "running";
    source.wait_status(PATIENCE, begun).expect("it begins");
    // Long enough for a question into the void.
    std::thread::sleep(std::time::Duration::from_secs(2));
    target.start().expect("restart");
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

#[test]
fn a_cancel_during_copy() {
    let kinds = [Kind::Plain, Kind::Qcow2];
    let cancel = |stage: &Stage| {
        stage.lab.host("a").json(&["cancel"]).expect("cancel");
    };
    let Some((mut stage, migrate)) = during_copy("cancel-copy", &kinds, cancel) else { return };
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 12, "{answer:?}");
    assert_back_home(&mut stage);
}

/// The guest goes on at the source, and when the agent is back so does the migration.
fn copy_goes_on_without(letter: &str) {
    let restart = |stage: &Stage| {
        stage.lab.host(letter).kill9().expect("kill");
        // Long enough for the guest to notice, if it could.
        std::thread::sleep(std::time::Duration::from_millis(500));
        stage.lab.host(letter).start().expect("restart");
    };
    let name = format!("copy-{letter}");
    let Some((stage, migrate)) = during_copy(&name, &[Kind::Plain], restart) else { return };
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it goes on copying");
    stage.completes(migrate);
}

#[test]
fn the_source_agent_dies_during_copy() {
    copy_goes_on_without("a");
}

#[test]
#[ignore = "long: make long"]
fn the_target_agent_dies_during_copy() {
    copy_goes_on_without("b");
}

#[test]
fn the_target_qemu_dies_during_memory() {
    let Some(mut stage) = Stage::new("dies-memory", &[Kind::Plain], 3_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", "post-copy", "--bandwidth", "40Mbit"]);
    let sending = |status: &serde_json::Value| {
        status["progress"]["memory_bytes"].as_u64().is_some_and(|sent| sent > 1 << 20)
    };
    stage.lab.host("a").wait_status(PATIENCE, sending).expect("it sends memory");
    stage.target.as_mut().expect("target").kill().expect("kill");
    let answer = Answer::of(migrate).expect("answer");
    assert_ne!(answer.code, 0, "{answer:?}");
    assert_back_home(&mut stage);
}

#[test]
fn a_cancel_during_memory() {
    let Some(mut stage) = Stage::new("cancel", &[Kind::Plain], 3_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", "post-copy", "--bandwidth", "40Mbit"]);
    let sending = |status: &serde_json::Value| {
        status["progress"]["memory_bytes"].as_u64().is_some_and(|sent| sent > 1 << 20)
    };
    stage.lab.host("a").wait_status(PATIENCE, sending).expect("it sends memory");
    stage.lab.host("a").json(&["cancel"]).expect("cancel");
    let answer = Answer::of(migrate).expect("answer");
    assert_ne!(answer.code, 0, "{answer:?}");
    assert_back_home(&mut stage);
}

fn stays_home_without(letter: &str) {
    let name = format!("agent-{letter}");
    let Some(mut stage) = Stage::new(&name, &[Kind::Plain], 3_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", "post-copy", "--bandwidth", "40Mbit"]);
    let sending = |status: &serde_json::Value| {
        status["progress"]["memory_bytes"].as_u64().is_some_and(|sent| sent > 1 << 20)
    };
    stage.lab.host("a").wait_status(PATIENCE, sending).expect("it sends memory");
    stage.lab.host(letter).kill9().expect("kill");
    stage.lab.host(letter).start().expect("restart");
    Answer::of(migrate).expect("answer");
    let ended = |status: &serde_json::Value| {
        matches!(status["state"].as_str(), Some("failed" | "cancelled" | "completed"))
    };
    let status = stage.lab.host("a").wait_status(PATIENCE, ended).expect("it ends");
    assert_ne!(status["state"], "completed", "the memory was lost: {status}");
    assert_back_home(&mut stage);
}

#[test]
fn the_source_agent_dies_during_memory() {
    stays_home_without("a");
}

#[test]
#[ignore = "long: make long"]
fn the_target_agent_dies_during_memory() {
    stays_home_without("b");
}
