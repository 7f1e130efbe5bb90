//! A running VM whose disk begins with a backup at the target: the source sends what the guest wrote
//! since, and the guest sees nothing of it.

use crate::stage::{Kind, SEEDED, Stage};
use serde_json::Value;

/// What the guest may have written between backup and handover: 4 MB/s for a while, and the memory map.
const SINCE: u64 = SEEDED / 2;

fn moves(strategy: &str) {
    let shelf = tempfile::tempdir().expect("a folder for the repository");
    let settings =
        format!("[[backup]]\nname = 'nas'\nurl = 'file://{}/repository'\n", shelf.path().display());
    let name = format!("backups-{strategy}");
    let stage = Stage::with_settings(&name, &[Kind::Resident], 400_000, &settings);
    let Some(mut stage) = stage else { return };
    let a = stage.lab.host("a");
    a.json(&["backups", "init", "nas"]).expect("a repository");
    a.json(&["backup", "disk0.raw", "--to", "nas"]).expect("a backup of a running guest");
    let prepared = stage.prepare();
    println!("{prepared:#}");
    let summary = stage.migrate(&["--strategy", strategy, "--verify"]).expect("moves");
    println!("{summary:#}");
    assert_eq!(summary["verified"], true, "{summary}");
    let sent = summary["blocks_sent"].as_u64().expect("a count") * 4096;
    assert!(sent < SINCE, "{sent} bytes sent of {SEEDED} that the backup has: {summary}");
    let kept = summary["images"][0]["bytes_from_replica"].as_u64().expect("a count");
    assert!(kept > SINCE, "{summary}");
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

#[test]
#[ignore = "long: make long"]
fn before_pre_copy() {
    moves("pre-copy");
}

#[test]
fn before_post_copy() {
    moves("post-copy");
}

/// A disk in a qcow2 on a base image: both files begin with their backups, the base with nothing else.
#[test]
fn a_chain_begins_with_the_backups_of_its_layers() {
    let shelf = tempfile::tempdir().expect("a folder for the repository");
    let settings =
        format!("[[backup]]\nname = 'nas'\nurl = 'file://{}/repository'\n", shelf.path().display());
    let stage = Stage::with_settings("backups-chain", &[Kind::Qcow2], 400_000, &settings);
    let Some(mut stage) = stage else { return };
    let a = stage.lab.host("a");
    a.json(&["adopt", "--qmp", &stage.source_qmp()]).expect("its disk is on dray");
    a.json(&["backups", "init", "nas"]).expect("a repository");
    let first = a.json(&["backup", "disk0.qcow2", "--to", "nas"]).expect("a backup");
    let names = |done: &Value| -> Vec<String> {
        let images = done["images"].as_array().expect("images").iter();
        images.map(|image| image["image"].as_str().expect("a name").to_owned()).collect()
    };
    assert_eq!(names(&first), ["base.qcow2", "disk0.qcow2"], "{first}");
    let base = stage.lab.host("a").pool().join("base.qcow2");
    let before = std::fs::read(&base).expect("the base");
    stage.prepare();
    let summary = stage.migrate(&["--verify", "--release", "always"]).expect("moves");
    println!("{summary:#}");
    assert_eq!(summary["verified"], true, "{summary}");
    let images = summary["images"].as_array().expect("images");
    let of = |name: &str| images.iter().find(|image| image["image"] == name).expect("an image");
    assert_eq!(of("base.qcow2")["blocks_sent"], 0, "{summary}");
    assert!(of("disk0.qcow2")["bytes_from_replica"].as_u64() > Some(0), "{summary}");
    assert!(summary["blocks_sent"].as_u64() < Some(SINCE / 4096), "{summary}");
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    let arrived = stage.lab.host("b").pool().join("base.qcow2");
    assert!(std::fs::read(arrived).expect("the base there") == before);
    assert!(std::fs::read(&base).expect("the base") == before, "the source keeps its own");
    stage.assert_images("b");
}
