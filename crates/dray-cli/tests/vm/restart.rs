//! The source's agent dies when ownership has long been decided, and is started again: it must
//! neither start the guest a second time (I5) nor leave it stopped where it stays (I4).

use crate::home::assert_back_home;
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::lab::{Answer, Host};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Starts the agent of `host` anew with a variable.
pub fn start_with(host: &Host, variable: &str, effect: &str) {
    host.kill9().expect("kill");
    host.start_with(&[(variable, effect)]).expect("restart");
}

/// Waits until the agent has died by itself, and starts it again.
pub fn dies_and_returns(host: &Host) {
    dies(host);
    host.start().expect("restart");
}

/// Waits until the agent has died by itself.
pub fn dies(host: &Host) {
    let pid = host.pid().expect("an agent");
    let deadline = Instant::now() + PATIENCE;
    let dead = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.is_empty() || stat.contains(") Z ")
    };
    while !dead() {
        assert!(Instant::now() < deadline, "it does not die: {}", host.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    host.kill9().expect("reap");
}

pub fn runs(stage: &Stage) -> bool {
    let answer = qmp(&stage.source.qmp_path(), "{\"execute\":\"query-status\"}");
    answer["return"]["running"].as_bool().unwrap_or_else(|| panic!("{answer}"))
}

/// The target has everything and verifies; its guest runs. The source's guest never runs again.
#[test]
#[ignore = "long: make long"]
fn a_source_that_restarts_when_all_is_done_keeps_its_guest_stopped() {
    let Some(mut stage) = Stage::new("done", &[Kind::Plain, Kind::Resident], 2_000_000) else {
        return;
    };
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", "Notice-Done");
    stage.prepare();
    let migrate = stage.spawn(&["--verify"]);
    dies_and_returns(stage.lab.host("a"));
    Answer::of(migrate).expect("answer");
    let deadline = Instant::now() + PATIENCE;
    // Until both have forgotten it, and as long again as anything may take that comes after.
    while stage.lab.host("a").open_migrations().expect("state") > 0 {
        assert!(Instant::now() < deadline, "it does not end\n{}", stage.logs());
        assert!(!runs(&stage), "the guest runs twice\n{}", stage.logs());
    }
    let after = Instant::now();
    while after.elapsed() < Duration::from_secs(2) {
        assert!(!runs(&stage), "the guest runs twice\n{}", stage.logs());
    }
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// The guest's memory was sent, its QEMU hangs, and the agent is started again meanwhile: as soon as QEMU answers the
/// guest goes on here. The QEMU that has received the memory takes it no second time: the migration says so and ends.
#[test]
fn a_guest_whose_qemu_hangs_while_its_agent_restarts_goes_on_when_it_answers() {
    let Some(mut stage) = Stage::new("hangs", &[Kind::Plain], 2_000_000) else { return };
    start_with(stage.lab.host("a"), "DRAY_STOP_BEFORE", "Quiesce");
    stage.prepare();
    let migrate = stage.spawn(&[]);
    stage.lab.host("a").wait_stopped(PATIENCE).expect("it comes to the effect");
    stage.source.pause().expect("SIGSTOP");
    let a = stage.lab.host("a");
    a.kill9().expect("kill");
    a.start().expect("restart");
    let waits = |status: &Value| {
        let said = status["error"].to_string();
        said.contains("waits until the guest's QEMU answers") && status["state"] == "running"
    };
    a.wait_status(PATIENCE, waits).unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    stage.source.go_on().expect("SIGCONT");
    let ended = a.wait_status(PATIENCE, |status| status["state"] == "failed");
    let ended = ended.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    assert!(ended["error"].to_string().contains("its state is paused, not inmigrate"), "{ended}");
    Answer::of(migrate).expect("answer");
    assert_back_home(&mut stage);
}

/// The target gives the images back, and the source's agent dies before it has done `step` of what
/// brings the guest home.
fn comes_home_although(name: &str, step: &str) {
    let Some(mut stage) = Stage::new(name, &[Kind::Plain], 2_000_000) else { return };
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", step);
    start_with(stage.lab.host("b"), "DRAY_STOP_BEFORE", "ReachGuest");
    stage.prepare();
    let migrate = stage.spawn(&[]);
    stage.lab.host("b").wait_stopped(PATIENCE).expect("it comes to the effect");
    stage.target.as_mut().expect("target").kill().expect("kill");
    stage.lab.host("b").go_on().expect("go on");
    dies_and_returns(stage.lab.host("a"));
    Answer::of(migrate).expect("answer");
    assert_back_home(&mut stage);
}

#[test]
fn a_source_that_dies_before_the_guest_goes_on_lets_it_go_on() {
    comes_home_although("dies-back", "BringBack");
}

#[test]
fn a_source_that_dies_before_the_disks_go_back_gives_them_back() {
    comes_home_although("dies-unadopt", "Unadopt");
}

#[test]
#[ignore = "long: make long"]
fn a_source_that_dies_before_the_target_forgets_asks_again() {
    comes_home_although("dies-forget", "ForgetThere");
}
