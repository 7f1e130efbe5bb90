//! The guest already runs at the target while blocks are missing, and an agent dies.

use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::lab::Answer;

fn goes_on_without(letter: &str) {
    let name = format!("after-{letter}");
    let kinds = [Kind::Resident, Kind::Plain];
    let Some(mut stage) = Stage::new(&name, &kinds, 2_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", "post-copy", "--bandwidth", "200Mbit"]);
    // The guest runs at the target, and the source has seen it.
    let over = |status: &serde_json::Value| {
        let backfill = matches!(status["progress"]["phase"].as_str(), Some("backfill" | "release"));
        backfill && status["progress"]["downtime_ms"].is_number()
    };
    let before = stage.lab.host("a").wait_status(PATIENCE, over).expect("it hands over");
    stage.lab.host(letter).kill9().expect("kill");
    stage.lab.host(letter).start().expect("restart");
    Answer::of(migrate).expect("answer");
    let ended = |status: &serde_json::Value| status["state"].as_str() == Some("completed");
    let status = stage.lab.host("a").wait_status(PATIENCE, ended).expect("it completes");
    assert_summary(&status["summary"], &before["progress"]);
    stage.assert_guest_is_well();
    // Whoever manages it tells the source's QEMU to go, and it does.
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// A summary holds what was measured before an agent was restarted.
fn assert_summary(summary: &serde_json::Value, before: &serde_json::Value) {
    let number =
        |value: &serde_json::Value| value.as_f64().unwrap_or_else(|| panic!("{summary:#}"));
    let downtime = &summary["downtime_ms"];
    assert_eq!(number(&downtime["total"]), number(&before["downtime_ms"]), "{summary:#}");
    let parts =
        ["memory", "quiesce", "map", "commit", "resume"].map(|part| number(&downtime[part]));
    let sum: f64 = parts.iter().sum();
    assert!((sum - number(&downtime["total"])).abs() < 1.0, "{summary:#}");
    assert!(parts[0] > 0.0, "the guest's memory moved: {summary:#}");
    assert!(number(&summary["wire_bytes"]["memory"]) > 1e6, "{summary:#}");
    assert!(number(&summary["wire_bytes"]["total"]) >= number(&before["wire_bytes"]) * 0.9);
    assert!(number(&summary["total_seconds"]) >= number(&before["elapsed_seconds"]), "{summary:#}");
}

#[test]
fn the_source_agent_dies_right_after_handover() {
    goes_on_without("a");
}

#[test]
fn the_target_agent_dies_right_after_handover() {
    goes_on_without("b");
}

/// An adopted disk is on a plain file again, under the node name it had; a resident one is not.
#[test]
fn disks_end_as_they_began() {
    let kinds = [Kind::Plain, Kind::Resident, Kind::Qcow2];
    let Some(mut stage) = Stage::new("release", &kinds, 2_000_000) else { return };
    stage.prepare();
    stage.migrate(&[]).expect("moves");
    stage.assert_guest_is_well();
    let target = stage.guest().qmp_path();
    let nodes = qmp(&target, "{\"execute\":\"query-named-block-nodes\"}");
    let nodes = nodes["return"].as_array().expect("nodes");
    let file = |name: &str| {
        let node = nodes.iter().find(|node| node["node-name"] == name);
        node.unwrap_or_else(|| panic!("no node {name}: {nodes:#?}"))["file"].to_string()
    };
    assert!(file("node0").contains("b/pool/disk0.raw"), "{}", file("node0"));
    assert!(file("node2").contains("b/pool/disk2.qcow2"), "{}", file("node2"));
    let sockets = nodes.iter().filter(|node| node["file"].to_string().contains("nbd.sock"));
    println!("{} nodes on dray's socket", sockets.count());
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// The target's QEMU is gone when its guest is to be started: the images are handed back.
#[test]
fn the_target_qemu_dies_at_the_handover() {
    let Some(mut stage) = Stage::new("hand-back", &[Kind::Plain], 2_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&[]);
    let memory = |status: &serde_json::Value| {
        status["progress"]["memory_bytes"].as_u64().is_some_and(|sent| sent > 0)
            && status["progress"]["phase"].as_str() != Some("copy")
    };
    stage.lab.host("a").wait_status(PATIENCE, memory).expect("it is nearly there");
    // A stopped process takes no memory and answers nobody: it dies with everything half done.
    stage.target.as_mut().expect("target").kill().expect("kill");
    let answer = Answer::of(migrate).expect("answer");
    assert_ne!(answer.code, 0, "{answer:?}");
    stage.target = None;
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}
