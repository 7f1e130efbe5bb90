//! The target's QEMU is gone at the moment in which its guest is to be started: until dray has let
//! the guest run there, the disks go back and it goes on at the source (I5).

use crate::home::assert_back_home;
use crate::restart::start_with;
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::lab::Answer;
use serde_json::Value;
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
#[ignore = "long: make long"]
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

/// A migration whose target hands the images back, while nobody hears it: the source's agent is dead by then.
fn hands_back_unheard(name: &str, strategy: &str) -> Option<Stage> {
    let mut stage = Stage::new(name, &[Kind::Resident], 3_000_000)?;
    start_with(stage.lab.host("b"), "DRAY_STOP_BEFORE", "ReachGuest");
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", strategy]);
    stage.lab.host("b").wait_stopped(PATIENCE).expect("it comes to the effect");
    stage.lab.host("a").kill9().expect("kill");
    stage.target.as_mut().expect("target").kill().expect("kill");
    stage.lab.host("b").go_on().expect("go on");
    assert_ne!(Answer::of(migrate).expect("answer").code, 0);
    let keeps = |status: &Value| status["error"]["hint"].to_string().contains("keeps its copy");
    let keeps = stage.lab.host("b").wait_status(PATIENCE, keeps);
    keeps.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    Some(stage)
}

/// The source is lost before it has taken its images back: the target has the only copy, and its operator can use it.
#[test]
fn what_was_handed_back_to_a_source_that_is_lost_can_be_claimed() {
    let Some(stage) = hands_back_unheard("back-lost", "pre-copy") else { return };
    let b = stage.lab.host("b");
    let status = b.json(&["status"]).expect("status");
    let id = status[0]["migration"].as_str().expect("an id");
    let refused = b.dray(&["cancel", id]).expect("cancel");
    assert_eq!(refused.code, 6, "{refused:?}");
    assert!(refused.stderr.contains("`dray claim disk0.raw"), "{refused:?}");
    let fenced = ["claim", "disk0.raw", "--source-is-fenced"];
    let refused = b.dray(&fenced).expect("claim");
    assert_eq!(refused.code, 15, "{refused:?}");
    assert!(refused.stderr.contains("has handed it back"), "{refused:?}");
    let claimed = b.json(&[&fenced[..], &["--accept-loss"]].concat()).expect("claim");
    assert_eq!((&claimed["bytes_lost"], &claimed["writes_may_be_lost"]), (&0.into(), &true.into()));
    b.kill9().expect("kill");
    b.start().expect("restart");
    assert_eq!(b.json(&["images"]).expect("images")[0]["state"], "owner");
    let left = stage.lab.host("a").pool_files().expect("pool");
    let left = left.iter().find(|name| name.contains("replica")).expect("a replica");
    let at_source = std::fs::read(stage.lab.host("a").pool().join(left)).expect("the replica");
    let here = std::fs::read(b.pool().join("disk0.raw")).expect("the image");
    assert!(at_source == here, "it is not what was handed over");
}

/// Blocks were still to come when it was handed back.
#[test]
fn what_was_handed_back_with_blocks_missing_can_be_claimed_at_once() {
    let Some(stage) = hands_back_unheard("back-missing", "post-copy") else { return };
    let claim = ["claim", "disk0.raw", "--source-is-fenced", "--accept-loss"];
    let claimed = stage.lab.host("b").json(&claim).expect("claim");
    assert!(claimed["bytes_lost"].as_u64() > Some(0), "{claimed}");
    let image = stage.image("b", 0);
    for lost in claimed["lost"].as_array().expect("ranges") {
        let at = |key: &str| lost[key].as_u64().expect("a number") as usize;
        let bytes = std::fs::read(&image).expect("the image");
        assert!(bytes[at("start")..][..at("len")].iter().all(|&byte| byte == 0), "{lost}");
    }
}

/// The source has claimed its images before it heard that they come back: nobody needs what the target still has.
#[test]
fn what_was_handed_back_goes_when_its_source_has_claimed_it() {
    let Some(mut stage) = hands_back_unheard("back-claimed", "pre-copy") else { return };
    stage.lab.host("b").kill9().expect("kill");
    stage.lab.host("a").start().expect("restart");
    let claim = ["claim", "disk0.raw", "--source-is-fenced", "--accept-loss"];
    let claimed = stage.lab.host("a").json(&claim).expect("claim");
    let qemu = claimed["attached"].as_array().map(Vec::len);
    assert_eq!(qemu, Some(1), "its old QEMU is still there: {claimed}");
    let b = stage.lab.host("b");
    b.start().expect("restart");
    let claimed = |status: &Value| status["error"]["hint"].to_string().contains("`dray cancel ");
    b.wait_status(PATIENCE, claimed).expect("it says what to do");
    let status = b.json(&["status"]).expect("status");
    let cancelled = b.dray(&["cancel", status[0]["migration"].as_str().expect("an id")]);
    assert_eq!(cancelled.expect("cancel").code, 0);
    let deadline = Instant::now() + PATIENCE;
    let left = || stage.lab.host("b").pool_files().expect("pool");
    while !left().is_empty() {
        assert!(Instant::now() < deadline, "left behind: {:?}\n{}", left(), stage.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
    stage.target = None;
    qmp(&stage.other_monitor(), "{\"execute\":\"cont\"}");
    stage.finish_guest();
    stage.assert_images("a");
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
