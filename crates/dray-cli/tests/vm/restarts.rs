//! Restarts are routine: in each phase the agent is told to end, or is killed, and comes back, again
//! and again under a guest that writes all the time. No request fails, and what the restarts add to
//! the guest's longest write is told.

use crate::home::assert_back_home;
use crate::stage::{Kind, PATIENCE, Stage};
use dray_testkit::lab::{Answer, Host};
use serde_json::Value;
use std::time::Duration;

const KINDS: [Kind; 2] = [Kind::Resident, Kind::Plain];
/// Slow enough for any number of restarts in one phase.
const CRAWL: &str = "1Mbit";
/// How long the longest write without a restart is looked for.
const BASELINE: Duration = Duration::from_secs(1);

/// Restarts in each phase: few, or what `DRAY_RESTARTS` says.
fn count() -> usize {
    std::env::var("DRAY_RESTARTS").ok().and_then(|text| text.parse().ok()).unwrap_or(2)
}

/// A guest that keeps many requests under way on each disk, as fast as it can or at `rate`.
fn under_load(name: &str, kinds: &[Kind], rate: u64) -> Option<Stage> {
    let mut stage = Stage::new(name, kinds, 1_000_000)?;
    for disk in ["vda", "vdb"].iter().take(kinds.len()) {
        let load = format!(
            "start disk={disk} span={} block=4096 rate={rate} flush=32 threads=16",
            48 << 20
        );
        stage.source.console().command(&load).expect("start");
    }
    Some(stage)
}

/// Asked to end, or killed, in turns; then started.
fn restart(host: &Host, nth: usize) {
    if nth.is_multiple_of(2) {
        host.stop().expect("it ends when it is told to");
    } else {
        host.kill9().expect("kill");
    }
    host.start().expect("restart");
}

/// What the guest's longest write took since the last mark, in milliseconds.
fn longest(stage: &mut Stage) -> f64 {
    let count = stage.disks.len();
    let console = stage.guest().console();
    let of = |i| {
        let line = console.report(["vda", "vdb"][i]).expect("a report");
        line.value("max_us", 0.0).expect("a number") / 1000.0
    };
    (0..count).map(of).fold(0.0, f64::max)
}

fn mark(stage: &mut Stage) {
    stage.guest().console().command("mark").expect("mark");
}

/// Restarts the agents of `letters` in turns; after each the guest goes on, and nothing has failed.
fn restart_often(phase: &str, stage: &mut Stage, letters: &[&str], holds: impl Fn(&Stage)) {
    mark(stage);
    std::thread::sleep(BASELINE);
    let before = longest(stage);
    let mut took = Vec::new();
    for nth in 0..count() * letters.len() {
        mark(stage);
        restart(stage.lab.host(letters[nth % letters.len()]), nth / letters.len());
        holds(stage);
        stage.assert_guest_is_well();
        took.push(longest(stage));
    }
    took.sort_by(f64::total_cmp);
    println!(
        "{phase}: {} restarts of {letters:?}; the longest write took {before:.0} ms before, {:.0} ms \
         (median) and {:.0} ms (worst) with a restart",
        took.len(),
        took[took.len() / 2],
        took[took.len() - 1]
    );
}

fn await_shown(stage: &Stage, wanted: impl Fn(&Value) -> bool) {
    let found = stage.lab.host("a").wait_status(PATIENCE, wanted);
    found.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
}

#[test]
fn no_request_fails_when_no_migration_is_under_way() {
    let Some(mut stage) = under_load("again-idle", &[Kind::Resident], 0) else { return };
    restart_often("no migration", &mut stage, &["a"], |_| ());
    stage.finish_guest();
    stage.assert_images("a");
}

fn copies_slowly(status: &Value) -> bool {
    status["progress"]["phase"] == "copy"
}

#[test]
fn no_request_fails_during_copy() {
    let Some(mut stage) = under_load("again-copy", &KINDS, 2_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", "hybrid", "--bandwidth", CRAWL]);
    await_shown(&stage, copies_slowly);
    let copies = |stage: &Stage| await_shown(stage, copies_slowly);
    let waiting = stage.target.take();
    restart_often("copy", &mut stage, &["a", "b"], copies);
    stage.target = waiting;
    stage.completes(migrate);
}

/// An agent that ends while the guest's memory is under way ends the attempt: the guest goes on at home.
fn goes_home_during_memory(letter: &str) {
    let name = format!("again-memory-{letter}");
    let Some(mut stage) = under_load(&name, &[Kind::Plain], 2_000_000) else { return };
    let mut took = Vec::new();
    for nth in 0..count().div_ceil(4) {
        stage.prepare();
        let migrate = stage.spawn(&["--strategy", "post-copy", "--bandwidth", "40Mbit"]);
        await_shown(&stage, |status| {
            let sent = status["progress"]["memory_bytes"].as_u64();
            // Not that of the attempt before.
            status["state"] == "running" && sent.is_some_and(|sent| sent > 1 << 20)
        });
        let waiting = stage.target.take();
        mark(&mut stage);
        restart(stage.lab.host(letter), nth);
        Answer::of(migrate).expect("answer");
        let ended =
            |status: &Value| matches!(status["state"].as_str(), Some("failed" | "cancelled"));
        await_shown(&stage, ended);
        drop(waiting);
        stage.assert_guest_is_well();
        took.push(longest(&mut stage));
    }
    println!("sync, memory under way: restarts of {letter}; the longest writes took {took:.0?} ms");
    assert_back_home(&mut stage);
}

#[test]
fn no_request_fails_when_the_source_restarts_during_sync() {
    goes_home_during_memory("a");
}

#[test]
fn no_request_fails_when_the_target_restarts_during_sync() {
    goes_home_during_memory("b");
}

/// The guest runs at the target, which misses blocks.
fn during_backfill(name: &str, letter: &str) {
    // What the guest writes is not missing any more: some is left to the end.
    let rate = 2_000_000.min(30_000_000 / count().max(1) as u64);
    let Some(mut stage) = under_load(name, &KINDS, rate) else { return };
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", "post-copy", "--bandwidth", "100Mbit"]);
    await_shown(&stage, |status| {
        status["progress"]["phase"] == "backfill" && status["progress"]["downtime_ms"].is_number()
    });
    // A limit that is set later goes with the agent that it was told.
    let crawl = |stage: &Stage| {
        await_shown(stage, |status| status["progress"]["phase"] == "backfill");
        stage.lab.host("a").json(&["limit", CRAWL]).expect("limit");
    };
    crawl(&stage);
    restart_often("backfill", &mut stage, &[letter], crawl);
    stage.completes(migrate);
}

#[test]
#[ignore = "long: make long"]
fn no_request_fails_when_the_target_restarts_during_backfill() {
    during_backfill("again-target", "b");
}

#[test]
#[ignore = "long: make long"]
fn no_request_fails_when_the_source_restarts_after_the_handover() {
    during_backfill("again-source", "a");
}

/// The agent at the source was away when the migration was over: the QEMU there that comes back to it has nothing to
/// wait for.
#[test]
#[ignore = "long: make long"]
fn a_source_whose_agent_restarts_after_the_move_can_quit() {
    for stops in [0, 1] {
        let Some(mut stage) = Stage::new("quits-late", &KINDS, 1_000_000) else { return };
        stage.prepare();
        let moved = stage.migrate(&["--release", "never"]).expect("moves");
        assert_eq!(moved["result"], "completed", "{moved:#}");
        restart(stage.lab.host("a"), stops);
        stage.quit_source();
        stage.assert_guest_is_well();
        stage.finish_guest();
        stage.assert_images("b");
    }
}
