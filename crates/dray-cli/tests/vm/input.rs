//! Bad input: one clear error each, and the guest goes on.

use crate::stage::{Kind, Stage};
use dray_testkit::guest::GuestVm;
use dray_testkit::lab::Answer;
use std::os::unix::net::UnixListener;

#[test]
fn nothing_that_does_not_fit_disturbs_the_guest() {
    let Some(mut stage) = Stage::new("input", &[Kind::Plain], 2_000_000) else { return };
    let a = stage.lab.host("a");
    let dir = stage.lab.dir();

    let other = dir.join("other.sock");
    let listener = UnixListener::bind(&other).expect("bind");
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let answer = a.dray(&["prepare", "--qmp", other.to_str().expect("text"), "--to", "hostb"]);
    let answer = answer.expect("prepare");
    assert!(answer.code != 0 && answer.stderr.contains("other.sock"), "{answer:?}");

    let answer = Answer::of(stage.spawn(&[])).expect("answer");
    assert!(answer.code != 0, "{answer:?}");
    assert!(answer.stdout.contains("prepare") || answer.stderr.contains("prepare"), "{answer:?}");

    // Prepared, but nobody waits; then a QEMU that does not wait; then one without the disk.
    for what in ["nobody", "running", "diskless"] {
        stage.prepare_exports();
        let builder = GuestVm::builder(&dir, "target").memory_mib(192);
        stage.target = match what {
            "running" => Some(builder.bare().start().expect("qemu")),
            "diskless" => Some(builder.incoming().start().expect("qemu")),
            _ => None,
        };
        let answer = Answer::of(stage.spawn(&[])).expect("answer");
        assert!(answer.code != 0, "{what}: {answer:?}");
        stage.target = None;
        stage.assert_guest_is_well();
    }
    assert_eq!(stage.lab.host("b").pool_files().expect("pool"), [""; 0]);
    stage.finish_guest();
    stage.assert_images("a");
}
