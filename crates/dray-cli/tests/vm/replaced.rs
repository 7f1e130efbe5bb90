//! The QEMU that waits at the target is replaced by another one after an attempt that came to nothing. It has the memory
//! of that attempt, and somebody lets it go on beside the guest that has arrived since.

use crate::gone_on::CONT;
use crate::restart::{dies_and_returns, start_with};
use crate::stage::{Kind, PATIENCE, Stage, qmp, quit};
use dray_testkit::lab::Answer;
use std::time::Duration;

#[test]
fn a_qemu_that_an_attempt_left_behind_writes_nothing_and_can_be_ended() {
    let Some(mut stage) = Stage::new("replaced", &[Kind::Resident], 2_000_000) else { return };
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", "Journal-HandedOver");
    stage.prepare();
    let migrate = stage.spawn(&[]);
    dies_and_returns(stage.lab.host("a"));
    let answer = Answer::of(migrate).expect("answer");
    assert_ne!(answer.code, 0, "{answer:?}");
    let (old, monitor) = (stage.target.take(), stage.others_target_monitor());
    let mut old = old.expect("the first qemu");
    stage.assert_guest_is_well();
    let state = qmp(&monitor, "{\"execute\":\"query-status\"}");
    assert_eq!(state["return"]["status"], "paused", "it has no memory: {state}");
    let failed = stage.lab.host("a").wait_status(PATIENCE, |status| status["state"] == "failed");
    failed.expect("the attempt is over");
    let prepared = stage.prepare_exports();
    stage.start_waiting("second", &prepared);
    let second = stage.target.as_ref().expect("a second qemu").qmp_path();
    let moved = stage.migrate_to(&second);
    assert_eq!(moved.code, 0, "{moved:?}\n{}", stage.logs());
    qmp(&monitor, CONT);
    std::thread::sleep(Duration::from_secs(2));
    stage.assert_guest_is_well();
    quit(&monitor);
    old.wait_exit(Duration::from_secs(10)).expect("it quits");
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// One that has waited for a VM that did not come in the end can wait for another try.
#[test]
fn a_qemu_whose_vm_was_cancelled_takes_it_in_at_the_next_try() {
    let Some(mut stage) = Stage::new("awaited", &[Kind::Resident], 2_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--bandwidth", "1MiB/s"]);
    let copies = |status: &serde_json::Value| status["progress"]["phase"] == "copy";
    stage.lab.host("a").wait_status(PATIENCE, copies).expect("it copies");
    let cancelled = stage.lab.host("a").dray(&["cancel", "--discard"]).expect("cancel");
    assert_eq!(cancelled.code, 0, "{cancelled:?}");
    assert_ne!(Answer::of(migrate).expect("answer").code, 0);
    stage.prepare_exports();
    let migrate = stage.spawn(&[]);
    stage.completes(migrate);
}
