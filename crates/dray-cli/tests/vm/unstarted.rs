//! The target's QEMU does not answer when the guest is to be started. The guest's memory is in it alone by then: it
//! is asked until it answers or has ended.

use crate::restart::{dies, start_with};
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use crate::unanswered::Eavesdropper;
use dray_testkit::guest::{GuestVm, tools};
use dray_testkit::lab::Answer;
use serde_json::Value;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::Duration;

/// What both hosts say meanwhile.
const WAITS: &str = "the guest is not started yet";
/// Longer than dray waits for the answer to a command.
const LONG: Duration = Duration::from_secs(40);
/// So long that a QEMU that hangs has as many clients waiting for it as it can have.
const SOME: Duration = Duration::from_secs(25);

fn others(stage: &Stage, command: &str) -> Value {
    qmp(&stage.others_target_monitor(), &format!("{{\"execute\":\"{command}\"}}"))
}

fn state(stage: &Stage) -> String {
    others(stage, "query-status")["return"]["status"].as_str().expect("a state").to_owned()
}

fn target(stage: &Stage) -> &GuestVm {
    stage.target.as_ref().expect("target")
}

/// A host says that the guest is not started yet, and that nothing has failed or is over.
fn says_so(stage: &Stage, letter: &str) {
    let waits = |status: &Value| {
        let said = status["error"].to_string();
        said.contains(WAITS) && said.contains("QMP socket") && status["state"] == "running"
    };
    let waits = stage.lab.host(letter).wait_status(PATIENCE, waits);
    waits.unwrap_or_else(|why| panic!("{letter}: {why}\n{}", stage.logs()));
}

/// A migration whose target's agent dies right before it starts the guest.
fn dies_before_start(stage: &mut Stage) -> Child {
    dies_before(stage, "StartGuest")
}

fn dies_before(stage: &mut Stage, step: &str) -> Child {
    start_with(stage.lab.host("b"), "DRAY_ABORT_BEFORE", step);
    stage.prepare();
    let migrate = stage.spawn(&[]);
    dies(stage.lab.host("b"));
    migrate
}

/// A migration whose target has not reached the guest, because somebody else has its monitor, and does `meanwhile`.
fn waits_unreached(stage: &mut Stage, meanwhile: impl FnOnce(&Stage)) -> (Child, UnixStream) {
    let migrate = dies_before(stage, "Journal-GuestStarting");
    let taken = UnixStream::connect(stage.target_qmp()).expect("the monitor");
    meanwhile(stage);
    stage.lab.host("b").start().expect("restart");
    says_so(stage, "b");
    (migrate, taken)
}

/// The migration ends well, and says nothing of what it has waited for.
fn is_moved(stage: &Stage, migrate: Child) {
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    for letter in ["a", "b"] {
        let status = stage.lab.host(letter).json(&["status"]).expect("status").to_string();
        assert!(!status.contains(WAITS), "{letter}: {status}");
    }
}

fn finish(mut stage: Stage) {
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// Nobody hears that QEMU has started its guest, whose user stops it at once. It was started, and stays as its user
/// has left it.
#[test]
fn a_guest_that_was_started_unheard_is_not_started_again() {
    let Some(mut stage) = Stage::new("unstarted-heard", &[Kind::Plain], 2_000_000) else { return };
    stage.prepare();
    let between = Eavesdropper::once(&stage, "cont");
    let (source, target) = (stage.source_qmp(), between.socket.to_str().expect("text").to_owned());
    let args = ["migrate", "--qmp", &source, "--to", "hostb", "--target-qmp", &target];
    let migrate = stage.lab.host("a").spawn(&args).expect("migrate");
    assert!(between.is_broken(), "it was never asked to start it\n{}", stage.logs());
    others(&stage, "stop");
    is_moved(&stage, migrate);
    assert_eq!(state(&stage), "paused", "it goes on against its user's will");
    others(&stage, "cont");
    finish(stage);
}

/// Somebody else has its monitor, longer than dray waits for it.
#[test]
fn a_guest_is_started_when_its_monitor_is_free_again() {
    let Some(mut stage) = Stage::new("unstarted-taken", &[Kind::Plain], 2_000_000) else { return };
    let migrate = dies_before_start(&mut stage);
    let taken = UnixStream::connect(stage.target_qmp()).expect("the monitor");
    stage.lab.host("b").start().expect("restart");
    says_so(&stage, "b");
    says_so(&stage, "a");
    assert_eq!(state(&stage), "paused");
    drop(taken);
    is_moved(&stage, migrate);
    finish(stage);
}

/// The same before it is recorded that the guest is started. Who has the monitor lets it go on: what it writes is nowhere
/// else, and the images do not go back.
#[test]
fn a_guest_that_its_user_started_before_it_was_reached_stays() {
    let Some(mut stage) = Stage::new("unstarted-gone-on", &[Kind::Plain], 2_000_000) else {
        return;
    };
    let (migrate, taken) = waits_unreached(&mut stage, |stage| {
        others(stage, "cont");
    });
    says_so(&stage, "a");
    assert_eq!(state(&stage), "running");
    drop(taken);
    is_moved(&stage, migrate);
    finish(stage);
}

/// The same, and it is another client that writes before the guest is reached, whose QEMU then ends. What was written
/// is nowhere else.
#[test]
fn what_another_client_has_written_before_the_guest_was_reached_stays() {
    let Some(mut stage) = Stage::new("unstarted-written", &[Kind::Resident], 2_000_000) else {
        return;
    };
    let (migrate, taken) = waits_unreached(&mut stage, |_| ());
    let socket = stage.lab.host("b").nbd_socket();
    let uri = format!("nbd+unix:///disk0.raw?socket={}", socket.display());
    let io = |command: &str| tools::run("qemu-io", &["-f", "raw", "-c", command, &uri]);
    io("write -f -P 0x5a 0 64k").expect("it is written and flushed");
    stage.target.as_mut().expect("target").kill().expect("kill");
    drop(taken);
    let answer = Answer::of(migrate).expect("answer");
    let said = format!("{}{}", answer.stdout, answer.stderr);
    assert_ne!(answer.code, 0, "{said}");
    assert!(said.contains("has ended") && said.contains("start the vm there"), "{said}");
    let read = io("read -P 0x5a 0 64k").expect("it is served");
    let printed = String::from_utf8_lossy(&read.stdout);
    assert!(!printed.contains("verification failed"), "{printed}");
}

/// The same of one that its user had paused before it moved.
#[test]
#[ignore = "long: make long"]
fn a_paused_guest_whose_monitor_is_free_again_stays_paused() {
    let Some(mut stage) = Stage::new("unstarted-paused", &[Kind::Plain], 2_000_000) else { return };
    stage.assert_guest_is_well();
    qmp(&stage.other_monitor(), "{\"execute\":\"stop\"}");
    let migrate = dies_before_start(&mut stage);
    let taken = UnixStream::connect(stage.target_qmp()).expect("the monitor");
    stage.lab.host("b").start().expect("restart");
    says_so(&stage, "b");
    drop(taken);
    is_moved(&stage, migrate);
    assert_eq!(state(&stage), "paused");
    others(&stage, "cont");
    finish(stage);
}

/// QEMU hangs when it is to start its guest, for longer than a command may take.
#[test]
#[ignore = "long: make long"]
fn a_guest_whose_qemu_hangs_is_started_when_it_answers() {
    let Some(mut stage) = Stage::new("unstarted-hangs", &[Kind::Plain], 2_000_000) else { return };
    start_with(stage.lab.host("b"), "DRAY_STOP_BEFORE", "StartGuest");
    stage.prepare();
    let migrate = stage.spawn(&[]);
    stage.lab.host("b").wait_stopped(PATIENCE).expect("it comes to the effect");
    target(&stage).pause().expect("pause");
    stage.lab.host("b").go_on().expect("go on");
    std::thread::sleep(LONG);
    says_so(&stage, "b");
    target(&stage).go_on().expect("go on");
    is_moved(&stage, migrate);
    finish(stage);
}

/// The agent dies while it waits, and the next one finds a QEMU that hangs still.
#[test]
#[ignore = "long: make long"]
fn an_agent_that_is_restarted_while_it_waits_goes_on_asking() {
    let Some(mut stage) = Stage::new("unstarted-twice", &[Kind::Plain], 2_000_000) else { return };
    let migrate = dies_before_start(&mut stage);
    target(&stage).pause().expect("pause");
    for _ in 0..2 {
        stage.lab.host("b").start().expect("restart");
        says_so(&stage, "b");
        std::thread::sleep(SOME);
        says_so(&stage, "a");
        stage.lab.host("b").kill9().expect("kill");
    }
    stage.lab.host("b").start().expect("restart");
    target(&stage).go_on().expect("go on");
    is_moved(&stage, migrate);
    finish(stage);
}

/// QEMU ends while it is waited for, and the guest's memory with it: that is said, and waited for no longer.
#[test]
#[ignore = "long: make long"]
fn a_guest_whose_qemu_ends_before_it_answers_is_not_waited_for() {
    let Some(mut stage) = Stage::new("unstarted-ends", &[Kind::Plain], 2_000_000) else { return };
    let migrate = dies_before_start(&mut stage);
    let taken = UnixStream::connect(stage.target_qmp()).expect("the monitor");
    stage.lab.host("b").start().expect("restart");
    says_so(&stage, "b");
    stage.target.as_mut().expect("target").kill().expect("kill");
    drop(taken);
    let answer = Answer::of(migrate).expect("answer");
    let said = format!("{}{}", answer.stdout, answer.stderr);
    assert_ne!(answer.code, 0, "{said}");
    assert!(said.contains("has ended") && said.contains("then start the vm"), "{said}");
    let status = stage.lab.host("b").json(&["status"]).expect("status").to_string();
    assert!(status.contains("cannot start the guest") && !status.contains(WAITS), "{status}");
}
