//! What fails before the handover leaves the guest at the source, on its own file.

use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::lab::Answer;
use std::fs;

/// Everything is as before the migration, and the guest is well.
fn assert_back_home(stage: &mut Stage) {
    stage.target = None;
    stage.assert_guest_is_well();
    let nodes = qmp(&stage.source.qmp_path(), "{\"execute\":\"query-named-block-nodes\"}");
    assert!(!nodes.to_string().contains("nbd.sock"), "a disk is still under dray: {nodes}");
    let images = stage.lab.host("a").json(&["images"]).expect("images");
    assert_eq!(images.as_array().map(Vec::len), Some(0), "{images}");
    assert_eq!(stage.lab.host("b").pool_files().expect("pool"), [""; 0]);
    for letter in ["a", "b"] {
        let run = stage.lab.host(letter).dir().join("run");
        let names = fs::read_dir(run).expect("run").map(|e| e.expect("entry").file_name());
        let mut left: Vec<_> = names.map(|n| n.to_string_lossy().into_owned()).collect();
        left.sort();
        assert_eq!(left, ["api.sock", "nbd.sock"]);
    }
    stage.finish_guest();
    stage.assert_images("a");
}

#[test]
fn the_target_qemu_dies_during_copy() {
    let Some(mut stage) = Stage::new("dies-copy", &[Kind::Plain], 3_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--bandwidth", "40Mbit"]);
    let copying = |status: &serde_json::Value| {
        status["progress"]["total"]["bytes_done"].as_u64().is_some_and(|done| done > 1 << 20)
    };
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    stage.target.as_mut().expect("target").kill().expect("kill");
    let answer = Answer::of(migrate).expect("answer");
    assert_ne!(answer.code, 0, "{answer:?}");
    assert_back_home(&mut stage);
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
    // Wherever its disk is served from, the guest has lost nothing.
    stage.target = None;
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}

#[test]
fn the_source_agent_dies_during_memory() {
    stays_home_without("a");
}

#[test]
fn the_target_agent_dies_during_memory() {
    stays_home_without("b");
}
