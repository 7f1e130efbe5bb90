//! Disks whose device runs in an iothread. QEMU before 9.0 ends itself in some commands on their nodes, and its guest
//! with it: dray gives none of these.

use crate::stage::{Kind, Stage};
use dray_testkit::lab::Answer;

/// The bitmap of a released disk is read while the guest writes in its thread, again and again: QEMU 7.2 ended
/// itself in one such reading of three.
const ROUNDS: usize = 6;

fn on_source(stage: &Stage, command: &[&str]) -> Answer {
    let qmp = stage.source_qmp();
    let command = [command, &["--qmp", &qmp]].concat();
    stage.lab.host("a").dray(&command).expect("dray")
}

fn succeeds(stage: &mut Stage, command: &str) {
    let answer = on_source(stage, &[command]);
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    stage.assert_guest_is_well();
}

fn back_up(stage: &Stage) {
    let a = stage.lab.host("a");
    a.json(&["backup", "disk0.qcow2", "--to", "nas"]).expect("a backup");
}

/// Runs `rounds`, with a repository called `nas`.
fn with_backups(name: &str, kind: Kind, rounds: impl FnOnce(&mut Stage)) {
    let shelf = tempfile::tempdir().expect("a directory");
    let settings =
        format!("[[backup]]\nname = 'nas'\nurl = 'file://{}/repository'\n", shelf.path().display());
    let Some(mut stage) = Stage::with_settings(name, &[kind], 2_000_000, &settings) else { return };
    stage.lab.host("a").json(&["backups", "init", "nas"]).expect("a repository");
    rounds(&mut stage);
    stage.finish_guest();
    stage.assert_images("a");
}

fn comes_and_goes(name: &str, kind: Kind) {
    with_backups(name, kind, |stage| {
        for _ in 0..ROUNDS {
            succeeds(stage, "adopt");
            back_up(stage);
            succeeds(stage, "release");
        }
        let log = stage.lab.host("a").log();
        let known = log.lines().filter(|line| line.contains("a released image is on dray again"));
        let known: Vec<_> = known.collect();
        assert_eq!(known.len(), ROUNDS - 1, "{log}");
        assert!(known.iter().all(|line| line.contains("blocks=")), "{known:#?}");
    });
}

/// It is known what was written to the released disk, too: the bitmap counts.
#[test]
fn a_disk_in_an_iothread_comes_under_dray_and_goes_back_again_and_again() {
    comes_and_goes("iothread", Kind::Threaded);
}

#[test]
fn a_disk_in_an_iothread_whose_file_was_made_with_its_format_does_so_as_well() {
    comes_and_goes("iothread-inline", Kind::ThreadedInline);
}

/// The nodes that dray names for the target are safe. Nothing of a target that waits is worked on in a thread.
#[test]
fn a_disk_in_an_iothread_moves() {
    let Some(mut stage) = Stage::new("iothread-move", &[Kind::Threaded], 2_000_000) else { return };
    stage.assert_guest_is_well();
    stage.moves();
}
