//! A chain moves flattened and becomes a fresh qcow2 at the target: its guest notices nothing, whoever
//! dies meanwhile, and a target that cannot make one keeps the raw image.

use crate::restart::{dies_and_returns, start_with};
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::guest::tools;
use dray_testkit::lab::Answer;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const RATE: u64 = 2_000_000;
const FLATTEN: [&str; 4] = ["--chain", "flatten", "--target-format", "qcow2"];

/// A guest on a chain of three images.
fn on_a_chain(name: &str) -> Option<Stage> {
    Stage::new(name, &[Kind::Chain], RATE)
}

/// Room at the target, and what its QEMU is to be started with.
fn prepare(stage: &Stage) -> Value {
    let answer = stage.prepared_with(&FLATTEN);
    let prepared = answer.json().unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    assert_eq!(prepared["images"][0]["export"], "disk0.raw", "{prepared}");
    prepared
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

/// The driver and the name of the node that the guest's disk is on.
fn node(stage: &Stage) -> (Value, Value) {
    let answer = qmp(Path::new(&stage.target_qmp()), "{\"execute\":\"query-block\"}");
    let disks = answer["return"].as_array().expect("disks");
    let of_disk = |one: &&Value| one["qdev"].as_str().is_some_and(|qdev| qdev.contains("disk0"));
    let inserted = &disks.iter().find(of_disk).expect("the disk")["inserted"];
    (inserted["drv"].clone(), inserted["node-name"].clone())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

fn made(stage: &Stage) -> PathBuf {
    stage.lab.host("b").pool().join("disk0.qcow2")
}

/// Waits until the source's agent says that it has ended.
fn completes(stage: &Stage) {
    let ended = |status: &Value| status["state"] == "completed";
    let ended = stage.lab.host("a").wait_status(PATIENCE, ended);
    ended.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    // The target forgets the image in its own time.
    let deadline = Instant::now() + PATIENCE;
    while files(stage) != ["disk0.qcow2"] {
        assert!(Instant::now() < deadline, "{:?}\n{}", files(stage), stage.logs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The guest is on a sound qcow2 of its own, which has what it wrote.
pub fn assert_made(stage: &mut Stage) {
    assert_eq!(files(stage), ["disk0.qcow2"], "{}", stage.logs());
    assert_eq!(node(stage), ("qcow2".into(), "node0".into()), "as at the source");
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    let (path, raw) = (made(stage), stage.lab.dir().join("made.raw"));
    tools::run("qemu-img", &["check", text(&path)]).expect("a sound qcow2");
    let info = tools::run("qemu-img", &["info", "--output=json", text(&path)]).expect("info");
    let info: Value = serde_json::from_slice(&info.stdout).expect("json");
    assert_eq!((&info["format"], &info["backing-filename"]), (&"qcow2".into(), &Value::Null));
    tools::run("qemu-img", &["convert", "-O", "raw", text(&path), text(&raw)]).expect("convert");
    stage.disks[0].bystander.check_raw(&raw).expect("what the guest wrote");
}

#[test]
#[ignore = "long: make long"]
fn a_chain_arrives_as_a_fresh_qcow2() {
    let Some(mut stage) = on_a_chain("qcow2") else { return };
    let prepared = prepare(&stage);
    stage.start_target(&prepared);
    let summary = stage.migrate(&["--verify"]).expect("moves");
    assert_eq!(summary["images"][0]["qcow2"], "disk0.qcow2", "{summary:#}");
    assert_eq!(summary["verified"], true, "{summary:#}");
    // It can leave again, as an image that nobody has a part of, under a name that is free.
    let (b, qmp) = (stage.lab.host("b"), stage.target_qmp());
    let mut back = vec!["--json", "prepare", "--qmp", &qmp, "--to", "hosta"];
    let taken = b.dray(&back).expect("prepare");
    assert!(taken.code != 0 && taken.stderr.contains("exists here already"), "{taken:?}");
    back.extend(["--name", "disk0=back.qcow2"]);
    let prepared = b.json(&back[1..]).unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    assert!(prepared["images"][0]["blockdev"].to_string().contains("qcow2"), "{prepared}");
    let migration = prepared["migration"].as_str().expect("an id");
    b.json(&["cancel", "--discard", migration]).expect("cancel");
    assert_made(&mut stage);
}

/// No command line tells how the nodes of a qcow2 are made that dray made: it knows that itself, also while it
/// has the disk.
#[test]
fn a_disk_on_its_fresh_qcow2_comes_under_dray_and_goes_back() {
    let Some(mut stage) = on_a_chain("qcow2-adopted") else { return };
    let prepared = prepare(&stage);
    stage.start_target(&prepared);
    stage.migrate(&[]).expect("moves");
    completes(&stage);
    let qmp = stage.target_qmp();
    for restarts in [false, true] {
        let b = stage.lab.host("b");
        let spliced = |command: &str| {
            let answer = b.json(&[command, "--qmp", &qmp]);
            let disks = answer.unwrap_or_else(|why| panic!("{command}: {why}\n{}", stage.logs()));
            assert_eq!(disks["disks"][0]["device"], "disk0", "{command}: {disks}");
        };
        spliced("adopt");
        if restarts {
            b.kill9().expect("kill");
            b.start().expect("start");
        }
        let again = b.dray(&["adopt", "--qmp", &qmp]).expect("adopt");
        assert!(again.stderr.contains("not under dray already"), "{again:?}");
        spliced("release");
    }
    assert_made(&mut stage);
}

/// The target's agent dies before `step` of going over to the qcow2.
fn made_although(name: &str, step: &str) {
    let Some(mut stage) = on_a_chain(name) else { return };
    start_with(stage.lab.host("b"), "DRAY_ABORT_BEFORE", step);
    let prepared = prepare(&stage);
    stage.start_target(&prepared);
    let migrate = stage.spawn(&[]);
    dies_and_returns(stage.lab.host("b"));
    Answer::of(migrate).expect("answer");
    completes(&stage);
    assert_made(&mut stage);
}

#[test]
#[ignore = "long: make long"]
fn a_target_that_dies_while_it_makes_a_qcow2_makes_it_again() {
    made_although("qcow2-copied", "Qcow2Copied");
}

#[test]
#[ignore = "long: make long"]
fn a_target_that_dies_while_the_guest_is_stopped_makes_its_qcow2_again() {
    made_although("qcow2-stopped", "Qcow2Stopped");
}

#[test]
#[ignore = "long: make long"]
fn a_target_that_dies_before_the_disk_is_on_its_qcow2_makes_it_again() {
    made_although("qcow2-named", "Qcow2Named");
}

#[test]
#[ignore = "long: make long"]
fn a_target_that_dies_when_the_disk_is_on_its_qcow2_lets_the_guest_go_on() {
    made_although("qcow2-pivoted", "Qcow2Pivoted");
}

#[test]
#[ignore = "long: make long"]
fn a_target_that_dies_when_the_qcow2_is_the_truth_lets_the_guest_go_on() {
    made_although("qcow2-done", "Qcow2Done");
}

/// The target's agent is killed while QEMU puts the disk on its qcow2, for which it flushes the export: QEMU does not
/// wait for an agent that waits for QEMU to say where the disk is.
#[test]
#[ignore = "long: make long"]
fn a_target_that_dies_while_qemu_flushes_the_export_answers_the_flush() {
    let Some(mut stage) = on_a_chain("qcow2-flush") else { return };
    start_with(stage.lab.host("b"), "DRAY_STOP_BEFORE", "Qcow2Pivots");
    let prepared = prepare(&stage);
    stage.start_target(&prepared);
    let migrate = stage.spawn(&[]);
    let (b, monitor) = (stage.lab.host("b"), stage.others_target_monitor());
    b.wait_stopped(PATIENCE).expect("it comes to the step");
    let jobs = qmp(&monitor, "{\"execute\":\"query-jobs\"}");
    let complete =
        json!({ "execute": "job-complete", "arguments": { "id": jobs["return"][0]["id"] } });
    qmp(&monitor, &complete.to_string());
    // Until QEMU has begun with it.
    std::thread::sleep(Duration::from_millis(300));
    b.kill9().expect("kill");
    b.start().expect("restart");
    b.json(&["status"]).expect("it answers");
    Answer::of(migrate).expect("answer");
    assert!(!b.log().contains("is being exchanged for a qcow2"), "{}", stage.logs());
    completes(&stage);
    assert_made(&mut stage);
}

/// The target has lost QEMU's tools: the guest goes on, and its disk is raw.
#[test]
#[ignore = "long: make long"]
fn a_disk_of_which_no_qcow2_can_be_made_arrives_raw() {
    let Some(mut stage) = on_a_chain("qcow2-none") else { return };
    let prepared = prepare(&stage);
    start_with(stage.lab.host("b"), "PATH", "/nonexistent");
    stage.start_target(&prepared);
    let summary = stage.migrate(&[]).expect("it moves all the same");
    let image = &summary["images"][0];
    let why = image["stays_raw"].as_str().unwrap_or_default();
    assert!(why.contains("there is no program") && image["qcow2"].is_null(), "{summary:#}");
    assert_eq!(files(&stage), ["disk0.raw"], "{}", stage.logs());
    assert_eq!(node(&stage).0, "file");
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

#[test]
#[ignore = "long: make long"]
fn what_cannot_become_a_qcow2_is_refused() {
    let Some(stage) = on_a_chain("qcow2-refused") else { return };
    let answer = stage.prepared_with(&FLATTEN[2..]);
    assert!(answer.code == 4 && answer.stderr.contains("--chain flatten"), "{answer:?}");
    let path = made(&stage);
    std::fs::write(&path, "somebody's").expect("a file");
    let answer = stage.prepared_with(&FLATTEN);
    assert!(answer.code == 6 && answer.stderr.contains("exists already"), "{answer:?}");
    std::fs::remove_file(&path).expect("remove");
    stage.prepared_with(&FLATTEN).json().expect("prepared");
    let (qmp, there) = (stage.source_qmp(), stage.target_qmp());
    let migrate =
        ["migrate", "--qmp", &qmp, "--to", "hostb", "--target-qmp", &there, "--release", "never"];
    let answer = stage.lab.host("a").dray(&migrate).expect("migrate");
    assert!(answer.code == 4 && answer.stderr.contains("--target-format"), "{answer:?}");
}
