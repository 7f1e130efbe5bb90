//! The last step of a migration: QEMU at the target gets its disks as plain files.

use crate::restart::{dies, start_with};
use crate::stage::{Kind, Stage};
use dray_testkit::guest::tools;
use dray_testkit::lab::Answer;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Opens the image at the target over and over, as a program that watches disks does.
fn look_at(path: &Path, until: &AtomicBool) {
    let path = path.to_str().expect("text");
    while !until.load(Ordering::SeqCst) {
        // Refused while somebody writes to it.
        let _ = tools::run("qemu-img", &["info", path]);
    }
}

/// QEMU before 9.0 ends itself where a disk in an iothread cannot be put on its file because another program has
/// the file locked, and is not guarded against that.
#[test]
fn a_program_that_looks_at_the_disk_ends_no_qemu() {
    let Some(mut stage) = Stage::new("last-step-locked", &[Kind::Threaded], 2_000_000) else {
        return;
    };
    stage.prepare();
    let (path, until) = (stage.image("b", 0), AtomicBool::new(false));
    let summary = std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| look_at(&path, &until));
        }
        let summary = stage.migrate(&[]);
        until.store(true, Ordering::SeqCst);
        summary
    });
    let summary = summary.expect("moves");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    stage.assert_guest_is_well();
    let b = stage.lab.host("b");
    let images = b.json(&["images"]).expect("images");
    let is_released = images[0]["state"] == "released";
    assert_eq!(summary["not_released"].is_null(), is_released, "{summary:#} {images:#}");
    if !is_released {
        let answer = b.dray(&["release", "--qmp", &stage.target_qmp()]).expect("dray");
        assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    }
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// The disks have moved, but nobody runs on them: that is no success.
#[test]
fn a_qemu_that_ends_before_it_has_its_disk_is_told() {
    let Some(mut stage) = Stage::new("last-step-ended", &[Kind::Qcow2], 2_000_000) else { return };
    start_with(stage.lab.host("b"), "DRAY_ABORT_BEFORE", "ReleaseNote");
    stage.prepare();
    let migrate = stage.spawn(&[]);
    dies(stage.lab.host("b"));
    stage.target.as_mut().expect("it waits").kill().expect("kill");
    stage.lab.host("b").start().expect("restart");
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 9, "{answer:?}\n{}", stage.logs());
    assert!(answer.stderr.contains("QEMU at the target has ended"), "{answer:?}");
    assert!(answer.stderr.contains("hint: its disks are at the target"), "{answer:?}");
}

/// The agent ends between its lock and QEMU's, and the next one gives the disk back. Nobody has watched the file
/// meanwhile, so QEMU's bitmap counts for nothing.
#[test]
fn a_last_step_that_was_cut_off_does_not_believe_the_bitmap() {
    let Some(mut stage) = Stage::new("last-step-cut", &[Kind::Plain], 2_000_000) else { return };
    start_with(stage.lab.host("b"), "DRAY_ABORT_BEFORE", "ReleasePivot");
    stage.prepare();
    let migrate = stage.spawn(&[]);
    dies(stage.lab.host("b"));
    let path = stage.image("b", 0);
    let write = ["-f", "raw", "-c", "read 0 4096", path.to_str().expect("text")];
    tools::run("qemu-io", &write).expect("the file is free");
    stage.lab.host("b").start().expect("restart");
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    let images = stage.lab.host("b").json(&["images"]).expect("images");
    assert_eq!(images[0]["state"], "released", "{images:#}");
    assert!(images[0]["tracked_by"].is_null(), "{images:#}");
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}
