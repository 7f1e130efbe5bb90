//! A disk goes over to its fresh qcow2, and its QEMU does not say whether it did: it hangs, it ends, or its
//! connection breaks. Neither file goes before it is known which one is the truth, and the guest goes on then.

use crate::gone_on::CONT;
use crate::restart::start_with;
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use crate::unanswered::Eavesdropper;
use dray_testkit::lab::Answer;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const QCOW2: [&str; 4] = ["--chain", "flatten", "--target-format", "qcow2"];
/// Two of dray's questions that QEMU does not answer, 30 s each, and some more.
const HANGS: Duration = Duration::from_secs(150);
/// A qcow2 that was given up.
const HIDDEN: &str = ".disk0.qcow2.dray-chain";
const STOP: &str = "{\"execute\":\"stop\"}";

/// A guest on a chain, and a QEMU that waits for it. The target's agent will stand still before `step`.
fn prepared(name: &str, step: &str) -> Option<Stage> {
    let mut stage = Stage::new(name, &[Kind::Chain], 2_000_000)?;
    start_with(stage.lab.host("b"), "DRAY_STOP_BEFORE", step);
    let answer = stage.prepared_with(&QCOW2);
    let prepared = answer.json().unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    stage.start_target(&prepared);
    Some(stage)
}

/// What is in the target's pool, hidden or not.
fn files(stage: &Stage) -> Vec<String> {
    let pool = std::fs::read_dir(stage.lab.host("b").pool()).expect("pool");
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.expect("entry").file_name().to_string_lossy().into_owned()
    };
    let mut names: Vec<_> = pool.map(name).collect();
    names.sort();
    names
}

fn wait(what: &str, stage: &Stage, so: impl Fn(&Stage) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !so(stage) {
        assert!(Instant::now() < deadline, "{what}: {:?}\n{}", files(stage), stage.logs());
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn runs(stage: &Stage) -> bool {
    let answer = qmp(&stage.others_target_monitor(), "{\"execute\":\"query-status\"}");
    answer["return"]["running"].as_bool().unwrap_or_else(|| panic!("{answer}"))
}

fn assert_stays_raw(answer: &Answer, stage: &Stage) {
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    assert!(answer.stdout.contains("stays_raw"), "{answer:?}\n{}", stage.logs());
}

/// The guest goes on over the raw image, and its QEMU ends before it could say so: only the raw image has what was
/// written since.
#[test]
fn a_qemu_that_ends_when_its_qcow2_was_given_up_leaves_the_raw_image() {
    let Some(mut stage) = prepared("swap-ends", "Qcow2Named") else { return };
    let migrate = stage.spawn(&[]);
    stage.lab.host("b").wait_stopped(PATIENCE).expect("it comes to the step");
    qmp(&stage.others_target_monitor(), CONT);
    std::thread::sleep(Duration::from_millis(100));
    stage.target.as_ref().expect("target").pause().expect("SIGSTOP");
    stage.lab.host("b").go_on().expect("go on");
    let named = "disk0.qcow2".to_owned();
    wait("the qcow2 is not given up", &stage, |stage| !files(stage).contains(&named));
    stage.target.as_mut().expect("target").kill().expect("kill");
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(files(&stage), ["disk0.raw"], "{answer:?}\n{}", stage.logs());
    assert_eq!(answer.code, 9, "nobody runs on it: {answer:?}\n{}", stage.logs());
    assert!(answer.stderr.contains("QEMU at the target has ended"), "{answer:?}");
    let known = stage.lab.host("b").json(&["images"]).expect("images");
    assert_eq!(known[0]["name"], "disk0.raw", "{known}");
}

/// What dray reaches QEMU through breaks in the middle of the exchange, and QEMU goes on with the raw image. Before
/// dray has reached it again, the user may let the guest go on.
fn breaks(name: &str, is_let_go_on: bool) {
    let Some(mut stage) = prepared(name, "Never") else { return };
    let between = Eavesdropper::once(&stage, "blockdev-mirror");
    let (source, target) = (stage.source_qmp(), between.socket.to_str().expect("text").to_owned());
    let args = ["migrate", "--qmp", &source, "--to", "hostb", "--target-qmp", &target];
    let migrate = stage.lab.host("a").spawn(&args).expect("migrate");
    if is_let_go_on {
        wait("it does not break", &stage, |_| between.is_broken());
        qmp(&stage.others_target_monitor(), CONT);
    }
    let answer = Answer::of(migrate).expect("answer");
    assert_stays_raw(&answer, &stage);
    assert!(answer.stdout.contains("the agent did not know where the disk was"), "{answer:?}");
    assert_eq!(files(&stage), ["disk0.raw"], "{}", stage.logs());
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

#[test]
#[ignore = "long: make long"]
fn a_connection_that_breaks_says_nothing_of_where_the_disk_is() {
    breaks("swap-breaks", false);
}

/// QEMU would wait for the guest's writes with all that it does.
#[test]
#[ignore = "long: make long"]
fn a_guest_that_is_let_go_on_when_the_connection_broke_writes() {
    breaks("swap-breaks-cont", true);
}

/// QEMU hangs for longer than dray waits for an answer, and comes back.
#[test]
#[ignore = "long: make long"]
fn a_guest_whose_qemu_hangs_while_its_disk_goes_over_goes_on() {
    let Some(mut stage) = prepared("swap-hangs", "Qcow2Named") else { return };
    let migrate = stage.spawn(&[]);
    stage.lab.host("b").wait_stopped(PATIENCE).expect("it comes to the step");
    stage.target.as_ref().expect("target").pause().expect("SIGSTOP");
    stage.lab.host("b").go_on().expect("go on");
    let waits = |status: &Value| status["error"].to_string().contains("waits for QEMU");
    let status = stage.lab.host("b").wait_status(HANGS, waits).expect("it waits");
    assert_eq!(status["state"], "running", "{status}");
    assert_eq!(files(&stage), [HIDDEN, ".disk0.raw.dray-partial"]);
    stage.target.as_ref().expect("target").go_on().expect("SIGCONT");
    let answer = Answer::of(migrate).expect("answer");
    assert_stays_raw(&answer, &stage);
    assert_eq!(files(&stage), ["disk0.raw"], "{}", stage.logs());
    let ended = |status: &Value| status["state"] == "completed" && status["error"].is_null();
    stage.lab.host("b").wait_status(PATIENCE, ended).expect("nothing is shown any more");
    stage.assert_guest_is_well();
    // It is let go on once.
    qmp(&stage.others_target_monitor(), STOP);
    std::thread::sleep(Duration::from_secs(12));
    assert!(!runs(&stage), "its user has stopped it\n{}", stage.logs());
    qmp(&stage.others_target_monitor(), CONT);
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// Somebody takes a snapshot in the middle of the exchange: the disk is on the raw image, below the overlay.
#[test]
#[ignore = "long: make long"]
fn a_guest_of_which_a_snapshot_is_taken_while_its_disk_goes_over_goes_on() {
    let Some(mut stage) = prepared("swap-snapshot", "Qcow2Named") else { return };
    let migrate = stage.spawn(&[]);
    stage.lab.host("b").wait_stopped(PATIENCE).expect("it comes to the step");
    let disks = qmp(&stage.others_target_monitor(), "{\"execute\":\"query-block\"}");
    let of_disk = |one: &&Value| one["qdev"].as_str().is_some_and(|qdev| qdev.contains("disk0"));
    let disk = disks["return"].as_array().expect("disks").iter().find(of_disk).expect("the disk");
    let overlay = stage.lab.dir().join("snapshot.qcow2");
    let snapshot = json!({
        "execute": "blockdev-snapshot-sync",
        "arguments": {
            "node-name": disk["inserted"]["node-name"], "snapshot-file": overlay,
            "snapshot-node-name": "snapshot",
        },
    });
    let (b, monitor) = (stage.lab.host("b"), stage.others_target_monitor());
    // QEMU flushes what it has on dray, which has to answer.
    let taken = std::thread::scope(|scope| {
        let taken = scope.spawn(|| qmp(&monitor, &snapshot.to_string()));
        std::thread::sleep(Duration::from_millis(500));
        b.go_on().expect("go on");
        taken.join().expect("a snapshot")
    });
    assert!(taken["error"].is_null(), "{taken}");
    let answer = Answer::of(migrate).expect("answer");
    assert_stays_raw(&answer, &stage);
    wait("the guest was left stopped", &stage, runs);
    assert_eq!(files(&stage), ["disk0.raw"], "{}", stage.logs());
    stage.assert_guest_is_well();
}
