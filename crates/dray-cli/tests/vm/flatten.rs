//! A qcow2 disk moves flattened: its guest notices nothing, the target has what the guest saw in a
//! raw file, and a guest that stays has its chain back.

use crate::failures::copying;
use crate::gone_on::CONT;
use crate::home::assert_back_home;
use crate::restart::{dies, dies_and_returns, runs, start_with};
use crate::stage::{Kind, PATIENCE, SEEDED, Stage, qmp};
use dray_testkit::guest::tools;
use dray_testkit::lab::Answer;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const RATE: u64 = 2_000_000;
const FLATTEN: [&str; 2] = ["--chain", "flatten"];

/// A guest on a chain of three images, and a QEMU that waits for it.
fn prepared(name: &str) -> Option<Stage> {
    let mut stage = Stage::new(name, &[Kind::Chain], RATE)?;
    let answer = stage.prepared_with(&FLATTEN);
    let prepared = answer.json().unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    assert_eq!(prepared["images"].as_array().map(Vec::len), Some(1), "{prepared}");
    assert_eq!(prepared["images"][0]["export"], "disk0.raw", "{prepared}");
    assert!(!prepared["images"][0]["blockdev"].to_string().contains("qcow2"), "{prepared}");
    stage.start_target(&prepared);
    Some(stage)
}

/// Begins a migration whose copy takes seven seconds, and waits until it copies.
fn copied(name: &str) -> Option<(Stage, Child)> {
    let stage = prepared(name)?;
    let migrate = stage.spawn(&["--bandwidth", "30Mbit"]);
    let copies = stage.lab.host("a").wait_status(PATIENCE, copying);
    copies.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    Some((stage, migrate))
}

/// The pid of the storage daemon that serves the chain.
fn daemon(stage: &Stage) -> u32 {
    let run = stage.lab.host("a").dir().join("run/chain-");
    let run = run.to_str().expect("text");
    let serves = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        line.starts_with("qemu-storage-daemon") && line.contains(run)
    };
    let pids = fs::read_dir("/proc").expect("proc").filter_map(|entry| {
        entry.expect("entry").file_name().to_str().and_then(|name| name.parse().ok())
    });
    pids.into_iter().find(serves).expect("a storage daemon")
}

fn run_files(stage: &Stage) -> Vec<PathBuf> {
    let run = stage.lab.host("a").dir().join("run");
    let all = fs::read_dir(run).expect("run").map(|entry| entry.expect("entry").path());
    let of_daemon = |path: &PathBuf| {
        ["chain-", "peek-"].iter().any(|kind| path.to_string_lossy().contains(kind))
    };
    all.filter(of_daemon).collect()
}

/// The guest is at the target, which has what it saw; the chain at the source cannot be opened.
fn assert_moved(stage: &mut Stage) {
    stage.assert_guest_is_well();
    stage.quit_source();
    let path = stage.image("a", 0);
    let opened = tools::run("qemu-img", &["info", path.to_str().expect("text")]);
    assert!(opened.is_err(), "the chain's name still opens at the source");
    stage.finish_guest();
    stage.assert_images("b");
    let deadline = Instant::now() + PATIENCE;
    while !run_files(stage).is_empty() {
        assert!(Instant::now() < deadline, "the daemon stays: {:?}", run_files(stage));
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn moves_with(name: &str, strategy: &str) {
    let Some(mut stage) = prepared(name) else { return };
    let summary = stage.migrate(&["--strategy", strategy, "--verify"]).expect("moves");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    let written = stage.disks[0].bystander.written_blocks() * 4096;
    let blocks = summary["guest_bytes"].as_u64().expect("bytes");
    // The layers hold five times as much.
    assert!(blocks < SEEDED + written + SEEDED, "{blocks} bytes: {summary:#}");
    assert_moved(&mut stage);
}

#[test]
#[ignore = "long: make long"]
fn a_chain_arrives_flat_with_hybrid() {
    moves_with("flat-hybrid", "hybrid");
}

#[test]
#[ignore = "long: make long"]
fn a_chain_arrives_flat_with_pre_copy() {
    moves_with("flat-pre", "pre-copy");
}

#[test]
#[ignore = "long: make long"]
fn a_chain_arrives_flat_with_post_copy() {
    moves_with("flat-post", "post-copy");
}

#[test]
fn a_cancel_brings_the_chain_home() {
    let Some((mut stage, migrate)) = copied("flat-cancel") else { return };
    stage.lab.host("a").json(&["cancel"]).expect("cancel");
    assert_eq!(Answer::of(migrate).expect("answer").code, 12);
    assert_back_home(&mut stage);
}

/// Ends the migration's copy soon and waits for its end.
fn goes_on(stage: &mut Stage, migrate: Child) {
    let source = stage.lab.host("a");
    source.wait_status(PATIENCE, copying).expect("it goes on copying");
    source.json(&["limit", "none"]).expect("limit");
    let ended = source.wait_status(PATIENCE, |status: &Value| status["state"] == "completed");
    ended.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    Answer::of(migrate).expect("answer");
    assert_moved(stage);
}

#[test]
#[ignore = "long: make long"]
fn the_storage_daemon_dies_during_copy() {
    let Some((mut stage, migrate)) = copied("flat-daemon") else { return };
    let pid = rustix::process::Pid::from_raw(daemon(&stage) as i32).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
    goes_on(&mut stage, migrate);
}

fn agent_dies(name: &str, letter: &str) {
    let Some((mut stage, migrate)) = copied(name) else { return };
    stage.lab.host(letter).kill9().expect("kill");
    std::thread::sleep(Duration::from_millis(500));
    stage.lab.host(letter).start().expect("restart");
    goes_on(&mut stage, migrate);
}

#[test]
#[ignore = "long: make long"]
fn the_source_agent_dies_while_a_chain_is_copied() {
    agent_dies("flat-a", "a");
}

#[test]
#[ignore = "long: make long"]
fn the_target_agent_dies_while_a_chain_is_copied() {
    agent_dies("flat-b", "b");
}

/// No storage daemon can be started when the source's agent returns: it starts and answers all the
/// same, and the copy goes on as soon as there is one.
#[test]
#[ignore = "long: make long"]
fn an_agent_that_cannot_read_a_chain_starts_and_goes_on_later() {
    let Some((mut stage, migrate)) = copied("flat-none") else { return };
    let source = stage.lab.host("a");
    start_with(source, "PATH", "/nonexistent");
    source.json(&["status"]).expect("it answers");
    source.kill9().expect("kill");
    source.start().expect("restart");
    goes_on(&mut stage, migrate);
}

/// The source's agent dies before `step` of what a cancelled migration brings home.
fn comes_home_although(name: &str, step: &str) {
    let Some(mut stage) = prepared(name) else { return };
    assert_seen(look(&stage));
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", step);
    let migrate = stage.spawn(&["--bandwidth", "30Mbit"]);
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    stage.lab.host("a").json(&["cancel"]).expect("cancel");
    dies_and_returns(stage.lab.host("a"));
    Answer::of(migrate).expect("answer");
    assert_back_home(&mut stage);
}

#[test]
fn an_agent_that_dies_when_all_is_merged_brings_the_chain_home() {
    comes_home_although("flat-merged", "HomeMerged");
}

#[test]
fn an_agent_that_dies_while_the_guest_is_stopped_brings_the_chain_home() {
    comes_home_although("flat-stopped", "HomeStopped");
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_before_the_chain_is_opened_brings_it_home() {
    comes_home_although("flat-named", "HomeNamed");
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_when_the_guest_is_on_its_chain_lets_it_go_on() {
    comes_home_although("flat-pivoted", "HomePivoted");
}

/// The agent is killed while QEMU puts the disk on its chain, for which it flushes the export: QEMU does not wait for
/// an agent that waits for QEMU to say where the disk is.
#[test]
fn an_agent_that_dies_while_qemu_flushes_the_export_answers_the_flush() {
    let Some(mut stage) = prepared("flat-flush") else { return };
    start_with(stage.lab.host("a"), "DRAY_STOP_BEFORE", "HomePivots");
    let migrate = stage.spawn(&["--bandwidth", "30Mbit"]);
    let a = stage.lab.host("a");
    a.wait_status(PATIENCE, copying).expect("it copies");
    let cancel = a.spawn(&["cancel"]).expect("cancel");
    a.wait_stopped(PATIENCE).expect("it comes to the step");
    let jobs = qmp(&stage.other_monitor(), "{\"execute\":\"query-jobs\"}");
    let id = &jobs["return"][0]["id"];
    let complete = json!({ "execute": "job-complete", "arguments": { "id": id } });
    qmp(&stage.other_monitor(), &complete.to_string());
    // Until QEMU has begun with it.
    std::thread::sleep(Duration::from_millis(300));
    a.kill9().expect("kill");
    a.start().expect("restart");
    a.json(&["status"]).expect("it answers");
    assert!(!a.log().contains("is between two places"), "{}", stage.logs());
    drop((Answer::of(migrate), Answer::of(cancel)));
    assert_back_home(&mut stage);
}

/// The source's agent dies before `step` of flattening, with the guest stopped: it goes on.
fn goes_on_although(name: &str, step: &str) -> Option<Stage> {
    let mut stage = prepared(name)?;
    // The daemon that this begins outlives the agent.
    assert_seen(look(&stage));
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", step);
    let migrate = stage.spawn(&[]);
    dies_and_returns(stage.lab.host("a"));
    Answer::of(migrate).expect("answer");
    // Its sockets are there before; it answers once it has looked after its guests.
    stage.lab.host("a").json(&["status"]).expect("an agent");
    assert!(runs(&stage), "the guest was left stopped\n{}", stage.logs());
    stage.target = None;
    stage.assert_guest_is_well();
    cancel_prepared(&stage);
    Some(stage)
}

fn cancel_prepared(stage: &Stage) {
    let source = stage.lab.host("a");
    let waits = source.wait_status(PATIENCE, |status: &Value| status["state"] == "prepared");
    let migration =
        waits.expect("a prepared migration")["migration"].as_str().expect("id").to_owned();
    source.json(&["cancel", &migration]).expect("the prepared migration goes");
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_before_it_flattens_leaves_the_chain() {
    let Some(mut stage) = goes_on_although("flat-stop", "FlattenStopped") else { return };
    assert_back_home(&mut stage);
}

#[test]
#[ignore = "long: make long"]
fn an_agent_that_dies_just_after_it_has_flattened_lets_the_guest_go_on() {
    let Some(mut stage) = goes_on_although("flat-onto", "FlattenPivoted") else { return };
    assert_merged_alone(&mut stage);
}

#[test]
fn an_agent_that_dies_before_a_flattened_guest_goes_on_lets_it_go_on() {
    let Some(mut stage) = goes_on_although("flat-hidden", "FlattenHidden") else { return };
    assert_merged_alone(&mut stage);
}

#[test]
fn what_an_agent_that_died_has_flattened_is_released() {
    let Some(mut stage) = goes_on_although("flat-release", "FlattenPivoted") else { return };
    let qmp = stage.source_qmp();
    let answer = stage.lab.host("a").dray(&["release", "--qmp", &qmp]).expect("release");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    assert_back_home(&mut stage);
}

/// An agent died with the guest stopped and its disk over the chain, and QEMU does not answer when the next agent
/// starts. Nothing is known then, so nothing is undone: when it answers, the guest goes on where its disk is.
#[test]
fn a_qemu_that_hangs_while_the_agent_restarts_has_not_ended() {
    let Some(mut stage) = prepared("flat-hangs") else { return };
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", "FlattenPivoted");
    let migrate = stage.spawn(&[]);
    let a = stage.lab.host("a");
    dies(a);
    drop(Answer::of(migrate));
    stage.source.pause().expect("SIGSTOP");
    let a = stage.lab.host("a");
    a.start().expect("restart");
    let wait = |what: &str, so: &dyn Fn(&Stage) -> bool, stage: &Stage| {
        let deadline = Instant::now() + PATIENCE;
        while !so(stage) {
            assert!(Instant::now() < deadline, "{what}\n{}", stage.logs());
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let tried = |stage: &Stage| stage.lab.host("a").log().contains("the exchange of the disk");
    wait("it is not tried", &tried, &stage);
    stage.source.go_on().expect("SIGCONT");
    wait("the guest was left stopped", &runs, &stage);
    stage.target = None;
    stage.assert_guest_is_well();
    cancel_prepared(&stage);
    let qmp = stage.source_qmp();
    let answer = stage.lab.host("a").dray(&["release", "--qmp", &qmp]).expect("release");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    assert_back_home(&mut stage);
}

/// The same with a monitor that somebody else has, who lets the guest go on: until it is known where the disk is
/// nobody is let in to it, and the chain keeps its name. A VM that was started on that meanwhile would be undone.
#[test]
#[ignore = "long: make long"]
fn a_disk_of_which_it_is_not_known_where_it_is_is_not_served() {
    let Some(mut stage) = prepared("flat-unknown") else { return };
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", "FlattenPivoted");
    let migrate = stage.spawn(&[]);
    dies(stage.lab.host("a"));
    drop(Answer::of(migrate));
    let taken = UnixStream::connect(stage.source.qmp_path()).expect("the monitor");
    qmp(&stage.other_monitor(), CONT);
    let a = stage.lab.host("a");
    a.start().expect("restart");
    let deadline = Instant::now() + PATIENCE;
    while !a.log().contains("the exchange of the disk") {
        assert!(Instant::now() < deadline, "it is not tried\n{}", stage.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
    let export = format!("nbd+unix:///disk0.qcow2?socket={}", a.nbd_socket().display());
    let tried = Command::new("qemu-io").args(["-f", "raw", "-c", "flush", &export]).output();
    let said = String::from_utf8_lossy(&tried.expect("qemu-io").stderr).into_owned();
    assert!(said.contains("does not know yet"), "{said}\n{}", stage.logs());
    assert!(stage.image("a", 0).exists(), "{}", stage.logs());
    drop(taken);
    stage.target = None;
    stage.assert_guest_is_well();
    cancel_prepared(&stage);
    assert!(!stage.image("a", 0).exists(), "it is on the overlay now\n{}", stage.logs());
    let qmp = stage.source_qmp();
    let answer = stage.lab.host("a").dray(&["release", "--qmp", &qmp]).expect("release");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    assert_back_home(&mut stage);
}

/// Reads the start of the disk at the target, as a QEMU does that opens it before the handover.
fn look(stage: &Stage) -> Child {
    let socket = stage.lab.host("b").nbd_socket();
    let export = format!("nbd+unix:///disk0.raw?socket={}", socket.display());
    let mut command = Command::new("qemu-io");
    command.args(["-r", "-f", "raw", "-c", "read 0 4096", &export]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("qemu-io")
}

fn assert_seen(look: Child) {
    let done = look.wait_with_output().expect("qemu-io");
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success() && said.contains("read 4096/4096"), "{said} {done:?}");
}

/// Somebody at the target looks at the disk when its chain has just got another name: the look is
/// answered, and the migration goes on.
#[test]
#[ignore = "long: make long"]
fn a_look_at_a_chain_that_is_being_flattened_is_answered() {
    let Some(mut stage) = prepared("flat-look") else { return };
    assert_seen(look(&stage));
    let source = stage.lab.host("a");
    assert!(!run_files(&stage).is_empty(), "a daemon has read it");
    source.stop().expect("stop");
    let left = run_files(&stage);
    assert!(left.is_empty(), "an agent ends its daemons: {left:?}");
    source.start_with(&[("DRAY_STOP_BEFORE", "FlattenHidden")]).expect("restart");
    let migrate = stage.spawn(&[]);
    source.wait_stopped(PATIENCE).expect("it comes to hide the chain");
    let looking = look(&stage);
    // Until the question has come to the agent that stands still.
    std::thread::sleep(Duration::from_millis(500));
    source.go_on().expect("go on");
    assert_seen(looking);
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    assert_moved(&mut stage);
}

/// The VM ends while its newer writes lie over the chain: they are merged without it.
fn assert_merged_alone(stage: &mut Stage) {
    stage.finish_guest();
    let path = stage.image("a", 0);
    let deadline = Instant::now() + PATIENCE;
    while !path.exists() {
        assert!(Instant::now() < deadline, "it does not come home\n{}", stage.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    stage.assert_images("a");
}

#[test]
fn a_vm_that_ends_has_its_writes_in_the_chain() {
    let Some((mut stage, migrate)) = copied("flat-gone") else { return };
    stage.target = None;
    stage.lab.host("a").json(&["cancel"]).expect("cancel");
    drop(Answer::of(migrate));
    stage.assert_guest_is_well();
    assert_merged_alone(&mut stage);
}

/// The agent dies before `step` of the way home, and `cont` lets the guest go on if it stands; the VM ends before the
/// next agent starts: nothing older is merged over what the guest wrote to its chain.
fn keeps_what_it_wrote_at_home(name: &str, step: &str) {
    let Some(mut stage) = prepared(name) else { return };
    assert_seen(look(&stage));
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", step);
    let migrate = stage.spawn(&["--bandwidth", "30Mbit"]);
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    let cancel = stage.lab.host("a").spawn(&["cancel"]).expect("cancel");
    stage.target = None;
    dies(stage.lab.host("a"));
    drop((Answer::of(migrate), Answer::of(cancel)));
    qmp(&stage.other_monitor(), CONT);
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.lab.host("a").start().expect("restart");
    let images = stage.lab.host("a").json(&["images"]).expect("images");
    assert_eq!(images, json!([]), "{}", stage.logs());
    stage.assert_images("a");
}

#[test]
#[ignore = "long: make long"]
fn a_vm_that_ends_on_its_chain_keeps_what_it_wrote_there() {
    keeps_what_it_wrote_at_home("flat-ends", "HomeForget");
}

/// The agent does not even know that the disk is on its chain.
#[test]
fn a_vm_whose_user_lets_it_go_on_on_its_chain_keeps_what_it_wrote_there() {
    keeps_what_it_wrote_at_home("flat-user", "HomePivoted");
}

/// The agent and the VM die at `step` of the way home. If the chain has its name then, somebody writes to it before
/// the next agent starts: nothing older is merged over that.
fn is_the_truth_when_it_has_its_name(name: &str, step: &str) {
    let Some(mut stage) = prepared(name) else { return };
    assert_seen(look(&stage));
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", step);
    let migrate = stage.spawn(&["--bandwidth", "30Mbit"]);
    let a = stage.lab.host("a");
    a.wait_status(PATIENCE, copying).expect("it copies");
    let cancel = a.spawn(&["cancel"]).expect("cancel");
    stage.target = None;
    dies(stage.lab.host("a"));
    drop((Answer::of(migrate), Answer::of(cancel)));
    stage.source.kill().expect("kill");
    let chain = stage.image("a", 0);
    // The dead agent's storage daemon may be there still, with its locks.
    let image =
        format!("driver=qcow2,file.driver=file,file.locking=off,file.filename={}", chain.display());
    let io = |command: &str| {
        let args = ["--image-opts", &image, "-c", command, "-c", "flush"];
        tools::run("qemu-io", &args).is_ok()
    };
    let written = chain.exists();
    // Where the guest writes all the time.
    let (write, read) = ("write -P 0xee 0 1M", "read -P 0xee 0 1M");
    if written {
        assert!(io(write));
    }
    stage.lab.host("a").start().expect("restart");
    let deadline = Instant::now() + PATIENCE;
    let images = || stage.lab.host("a").json(&["images"]).expect("images");
    while images() != json!([]) || !chain.exists() {
        assert!(Instant::now() < deadline, "{}\n{}", images(), stage.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(io(read), written, "{step}: what was written to the chain is in it");
}

#[test]
fn a_chain_is_recorded_to_be_the_truth_before_it_has_its_name() {
    is_the_truth_when_it_has_its_name("flat-shows", "HomeShows");
}

#[test]
#[ignore = "long: make long"]
fn a_chain_that_has_its_name_is_the_truth() {
    is_the_truth_when_it_has_its_name("flat-shown", "HomeNamed");
}

#[test]
fn what_a_flat_copy_cannot_have_is_refused() {
    let Some(stage) = Stage::new("flat-refused", &[Kind::Qcow2], RATE) else { return };
    let answer = stage.prepared_with(&FLATTEN);
    assert_ne!(answer.code, 0, "{answer:?}");
    assert!(answer.stderr.contains("internal snapshot before"), "{answer:?}");
    let answer = stage
        .lab
        .host("a")
        .dray(&["prepare", "--image", "x", "--to", "hostb", "--chain", "flatten"]);
    let answer = answer.expect("prepare");
    assert!(answer.stderr.contains("qemu-img convert"), "{answer:?}");
}
