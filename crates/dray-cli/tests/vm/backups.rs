//! A running VM whose disk begins with a backup at the target: the source sends what the guest wrote
//! since, and the guest sees nothing of it.

use crate::stage::{Kind, SEEDED, Stage};

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
