//! A VM has left, and its old QEMU was not ended. The VM comes back in another one, and somebody lets the old one go
//! on: it writes to the same image.

use crate::gone_on::CONT;
use crate::released::{prepare_back, text};
use crate::stage::{Kind, Stage, qmp};
use dray_testkit::guest::GuestVm;
use dray_testkit::lab::Answer;
use std::time::Duration;

/// The VM moves to host b and back, and nobody ends the QEMU that it had at first: this is returned.
fn there_and_back(stage: &mut Stage) -> GuestVm {
    stage.prepare();
    let summary = stage.migrate(&[]).expect("moves there");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    let old = std::mem::replace(&mut stage.source, stage.target.take().expect("target"));
    prepare_back(stage, "back", &[]);
    let (from, to) = (&stage.source, stage.target.as_ref().expect("a waiting qemu"));
    let (from, to) = (text(from.qmp_path()), text(to.qmp_path()));
    let args =
        ["migrate", "--qmp", &from, "--to", "hosta", "--target-qmp", &to, "--release", "never"];
    let moved = Answer::of(stage.lab.host("b").spawn(&args).expect("migrate")).expect("answer");
    assert_eq!(moved.code, 0, "{moved:?}\n{}", stage.logs());
    stage.quit_source();
    old
}

#[test]
fn an_old_qemu_that_is_let_go_on_writes_nothing_and_can_be_ended() {
    let Some(mut stage) = Stage::new("past", &[Kind::Resident], 2_000_000) else { return };
    let mut old = there_and_back(&mut stage);
    let monitor = stage.other_monitor();
    for restarted in [false, true] {
        if restarted {
            let a = stage.lab.host("a");
            a.kill9().expect("kill");
            a.start().expect("restart");
        }
        qmp(&monitor, CONT);
        std::thread::sleep(Duration::from_secs(2));
        stage.assert_guest_is_well();
    }
    let a = stage.lab.host("a");
    let guest = text(stage.target.as_ref().expect("the guest's qemu").qmp_path());
    let of_the_guest = a.dray(&["quit", "--qmp", &guest]).expect("quit");
    assert_eq!(of_the_guest.code, 6, "{of_the_guest:?}");
    let ended = a.json(&["quit", "--qmp", &text(monitor)]).expect("quit");
    assert_eq!(ended["ended"], true, "{ended}");
    old.wait_exit(Duration::from_secs(10)).expect("it quits");
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}
