//! A VM has left, and its old QEMU was not ended. The VM comes back in another one, and somebody lets the old one go
//! on: it writes to the same image.

use crate::gone_on::CONT;
use crate::released::{prepare_back, text};
use crate::stage::{Kind, PATIENCE, SIZE, Stage, qmp};
use dray_testkit::guest::GuestVm;
use dray_testkit::lab::Answer;
use serde_json::Value;
use std::process::Command;
use std::time::Duration;

/// What whoever comes after a claim writes.
const NEW: u8 = 0x77;

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

/// The host that the VM has moved to is lost. What is claimed at the other one is changed by the first that writes:
/// here not by the QEMU that the VM had there before.
fn is_claimed_and_started_anew(stage: &mut Stage) {
    stage.lab.host("b").kill9().expect("kill");
    stage.target = None;
    let a = stage.lab.host("a");
    let claim = ["claim", "disk0.raw", "--source-is-fenced", "--accept-loss"];
    assert_eq!(a.json(&claim).expect("claim")["writes_may_be_lost"], true);
    let uri = format!("nbd+unix:///disk0.raw?socket={}", a.nbd_socket().display());
    let write = format!("write -P {NEW} 0 {SIZE}");
    let mut new = Command::new("qemu-io");
    let wrote = new.args(["-f", "raw", &uri, "-c", &write, "-c", "flush"]).output();
    let wrote = wrote.expect("qemu-io");
    assert!(wrote.status.success(), "{wrote:?}");
    for restarted in [false, true] {
        if restarted {
            let a = stage.lab.host("a");
            a.kill9().expect("kill");
            a.start().expect("restart");
        }
        qmp(&stage.other_monitor(), CONT);
        std::thread::sleep(Duration::from_secs(2));
        let image = std::fs::read(stage.image("a", 0)).expect("the image");
        assert!(image.iter().all(|&byte| byte == NEW), "the old QEMU has written to it");
    }
}

/// The migration is not over: its guest could go on as it was at the handover.
#[test]
fn once_a_claimed_image_was_changed_its_vms_old_qemu_writes_nothing() {
    let Some(mut stage) = Stage::new("past-claim", &[Kind::Resident], 2_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", "deferred"]);
    let is_there = |status: &Value| status["progress"]["phase"] == "backfill";
    stage.lab.host("a").wait_status(PATIENCE, is_there).expect("it is handed over");
    is_claimed_and_started_anew(&mut stage);
    assert_ne!(Answer::of(migrate).expect("answer").code, 0);
}

/// It still has the connection through which it had the image before the VM left.
#[test]
fn the_old_qemu_of_a_vm_that_has_left_for_good_writes_nothing_to_what_is_claimed() {
    let Some(mut stage) = Stage::new("past-left", &[Kind::Resident], 2_000_000) else { return };
    stage.prepare();
    let summary = stage.migrate(&[]).expect("moves there");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    is_claimed_and_started_anew(&mut stage);
}
