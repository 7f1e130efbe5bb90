//! The target's QEMU is gone at the moment in which its guest is to be started: until dray has let
//! the guest run there, the disks go back and it goes on at the source (I5).

use crate::home::assert_back_home;
use crate::restart::start_with;
use crate::stage::{Kind, PATIENCE, Stage};
use dray_testkit::lab::Answer;
use std::time::{Duration, Instant};

/// Somebody who is gone is seen to be gone: nothing waits for a time limit.
const SOON: Duration = Duration::from_secs(25);

/// Longer than dray waits for an answer of QEMU.
const HANGS: Duration = Duration::from_secs(40);

/// Kills the target's QEMU while the agent of `letter` stands still before `effect`; the answer of
/// `dray migrate`.
pub fn dies_before(letter: &str, effect: &str, stage: &mut Stage) -> Answer {
    start_with(stage.lab.host(letter), "DRAY_STOP_BEFORE", effect);
    stage.prepare();
    let migrate = stage.spawn(&[]);
    stage.lab.host(letter).wait_stopped(PATIENCE).expect("it comes to the effect");
    stage.target.as_mut().expect("target").kill().expect("kill");
    stage.lab.host(letter).go_on().expect("go on");
    let gone = Instant::now();
    let answer = Answer::of(migrate).expect("answer");
    let text = format!("{}{}", answer.stdout, answer.stderr);
    assert_eq!(answer.code, 9, "{text}");
    assert!(text.contains("\"hint\""), "it must say what to do: {text}");
    let took = gone.elapsed();
    assert!(took < SOON, "it took {took:?} to fail\n{}", stage.logs());
    answer
}

fn goes_home(name: &str, kind: Kind, letter: &str, effect: &str) {
    let Some(mut stage) = Stage::new(name, &[kind], 3_000_000) else { return };
    dies_before(letter, effect, &mut stage);
    assert_back_home(&mut stage);
}

/// The target owns the images and has said so: they are handed back.
#[test]
fn the_target_qemu_dies_at_the_commit() {
    goes_home("back-raw", Kind::Plain, "b", "ReachGuest");
}

#[test]
fn the_target_qemu_dies_at_the_commit_with_a_qcow2_chain() {
    goes_home("back-qcow2", Kind::Qcow2, "b", "ReachGuest");
}

/// The copy is there and the guest's memory is to move: nobody listens for it.
#[test]
fn the_target_qemu_dies_in_sync_with_a_qcow2_chain() {
    goes_home("back-sync", Kind::Qcow2, "a", "Notice-Ready");
}

/// The guest is stopped and its memory was sent: the source is about to ask for the promise.
#[test]
#[ignore = "long: make long"]
fn the_target_qemu_dies_when_the_memory_has_moved() {
    goes_home("back-moved", Kind::Qcow2, "a", "Journal-Attempt");
}

/// The target has promised and the source has not handed over yet.
#[test]
fn the_target_qemu_dies_before_the_commit() {
    goes_home("back-early", Kind::Qcow2, "b", "Send-Prepared");
}

/// QEMU answers nothing for longer than anybody waits for an answer, just when its guest is to go on here.
#[test]
#[ignore = "long: make long"]
fn a_guest_whose_qemu_hangs_goes_on_when_it_answers_again() {
    let Some(mut stage) = Stage::new("hangs", &[Kind::Plain, Kind::Qcow2], 3_000_000) else {
        return;
    };
    start_with(stage.lab.host("b"), "DRAY_STOP_BEFORE", "ReachGuest");
    stage.prepare();
    let migrate = stage.spawn(&[]);
    stage.lab.host("b").wait_stopped(PATIENCE).expect("it comes to the effect");
    stage.target.as_mut().expect("target").kill().expect("kill");
    stage.source.pause().expect("pause");
    stage.lab.host("b").go_on().expect("go on");
    std::thread::sleep(HANGS);
    stage.source.go_on().expect("go on");
    let answer = Answer::of(migrate).expect("answer");
    assert_ne!(answer.code, 0, "{answer:?}");
    assert_back_home(&mut stage);
}
