//! A user lets the guest go on while dray holds it still to exchange its disk. Nothing that the guest writes then is
//! lost, and neither it nor its QEMU waits for anything.

use crate::failures::copying;
use crate::home::assert_back_home;
use crate::qcow2::assert_made;
use crate::restart::start_with;
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::lab::Answer;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const FLATTEN: [&str; 2] = ["--chain", "flatten"];
const QCOW2: [&str; 4] = ["--chain", "flatten", "--target-format", "qcow2"];
/// What a user types who sees a guest that stands still.
pub const CONT: &str = "{\"execute\":\"cont\"}";

/// A guest on a chain, and a QEMU that waits for it. The agent of `letter` will stand still before `step`.
fn prepared(name: &str, more: &[&str], (letter, step): (&str, &str)) -> Option<Stage> {
    let mut stage = Stage::new(name, &[Kind::Chain], 2_000_000)?;
    start_with(stage.lab.host(letter), "DRAY_STOP_BEFORE", step);
    let answer = stage.prepared_with(more);
    let prepared = answer.json().unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    stage.start_target(&prepared);
    Some(stage)
}

/// The agent of `letter` stands still before `step`; the guest of the QEMU behind `monitor` is let go on, and writes.
fn go_on_before(stage: &Stage, letter: &str, monitor: &Path) {
    let host = stage.lab.host(letter);
    host.wait_stopped(PATIENCE).expect("it comes to the step");
    qmp(monitor, CONT);
    std::thread::sleep(Duration::from_millis(500));
    host.go_on().expect("go on");
}

/// What the guest writes to its chain between the moment at which that was opened for the copy and the exchange is
/// in no copy.
#[test]
fn a_guest_that_is_let_go_on_while_it_is_flattened_stays_on_its_chain() {
    let Some(mut stage) = prepared("on-flatten", &FLATTEN, ("a", "FlattenStopped")) else { return };
    let migrate = stage.spawn(&[]);
    go_on_before(&stage, "a", &stage.other_monitor());
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
    let said = "somebody has let the guest go on while its disk was being exchanged";
    assert!(format!("{answer:?}").contains(said), "{answer:?}");
    assert_cancelled(&mut stage);
}

/// The same of one that its user has paused, and lets go on when dray has asked whether it runs: dray does not stop it.
#[test]
fn a_paused_guest_that_is_let_go_on_before_it_is_flattened_stays_on_its_chain() {
    let Some(mut stage) = prepared("on-paused", &FLATTEN, ("a", "FlattenStops")) else { return };
    qmp(&stage.other_monitor(), "{\"execute\":\"stop\"}");
    let migrate = stage.spawn(&[]);
    go_on_before(&stage, "a", &stage.other_monitor());
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
    let said = "somebody has let the guest go on while its disk was being exchanged";
    assert!(format!("{answer:?}").contains(said), "{answer:?}");
    assert_cancelled(&mut stage);
}

/// The migration can be cancelled, and the guest is on its chain.
fn assert_cancelled(stage: &mut Stage) {
    let a = stage.lab.host("a");
    let waits = a.wait_status(PATIENCE, |status: &Value| status["state"] == "prepared");
    let id = waits.expect("it is prepared")["migration"].as_str().expect("id").to_owned();
    stage.lab.host("a").json(&["cancel", &id]).expect("cancel");
    assert_back_home(stage);
}

/// The writes of the guest are held back while its disk goes home, and QEMU would wait for them with all that it does.
#[test]
#[ignore = "long: make long"]
fn a_guest_that_is_let_go_on_on_its_way_home_goes_home_later() {
    let Some(mut stage) = prepared("on-home", &FLATTEN, ("a", "HomeNamed")) else { return };
    let migrate = stage.spawn(&["--bandwidth", "30Mbit"]);
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    let cancel = stage.lab.host("a").spawn(&["cancel"]).expect("cancel");
    let monitor = stage.other_monitor();
    go_on_before(&stage, "a", &monitor);
    drop(Answer::of(cancel));
    drop(Answer::of(migrate));
    stage.target = None;
    stage.assert_guest_is_well();
    // It stays over its chain, and goes home when it is told to, if that has not been tried again.
    let source = stage.source_qmp();
    let deadline = Instant::now() + PATIENCE;
    let is_home =
        |stage: &Stage| stage.lab.host("a").json(&["images"]).expect("images") == json!([]);
    while !is_home(&stage) {
        let said = stage.lab.host("a").dray(&["release", "--qmp", &source]).expect("release");
        assert!(Instant::now() < deadline, "it does not go home: {said:?}\n{}", stage.logs());
    }
    assert_back_home(&mut stage);
}

/// The same at a target that makes a qcow2: the disk stays on the raw image, which has everything.
#[test]
#[ignore = "long: make long"]
fn a_guest_that_is_let_go_on_before_it_is_on_its_qcow2_stays_raw() {
    let Some(mut stage) = prepared("on-qcow2", &QCOW2, ("b", "Qcow2Named")) else { return };
    let migrate = stage.spawn(&[]);
    go_on_before(&stage, "b", &stage.others_target_monitor());
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    assert!(format!("{answer:?}").contains("stays_raw"), "{answer:?}");
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// A client of the target's export of the raw image, which does what it is told.
fn second_client(stage: &Stage) -> Child {
    let socket = stage.lab.host("b").nbd_socket();
    let uri = format!("nbd+unix:///disk0.raw?socket={}", socket.display());
    let mut client = Command::new("qemu-io");
    client.args(["-f", "raw", &uri]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = client.stderr(Stdio::piped()).spawn().expect("qemu-io");
    // It is there when it has read something.
    tell(&mut client, "read 0 4k");
    std::thread::sleep(Duration::from_secs(1));
    client
}

fn tell(client: &mut Child, command: &str) {
    let said = client.stdin.as_mut().map(|stdin| writeln!(stdin, "{command}"));
    said.expect("stdin").expect("it listens");
}

/// QEMU's mirror does not see what another client writes to the raw image: that would not be in the qcow2. The client
/// is told that it was not written.
#[test]
fn another_clients_writes_are_held_back_from_a_guest_that_is_let_go_on_before_its_pivot() {
    let Some(mut stage) = prepared("on-others", &QCOW2, ("b", "Qcow2Pivots")) else { return };
    let mut client = second_client(&stage);
    let migrate = stage.spawn(&[]);
    stage.lab.host("b").wait_stopped(PATIENCE).expect("it comes to the step");
    tell(&mut client, "write -f -P 0x5a 0 64k");
    qmp(&stage.others_target_monitor(), CONT);
    std::thread::sleep(Duration::from_millis(500));
    stage.lab.host("b").go_on().expect("go on");
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    let said = client.wait_with_output().expect("qemu-io");
    if format!("{answer:?}").contains("stays_raw") {
        // The agent has heard of it in time, and the raw image has everything.
        return;
    }
    let said = format!("{said:?}");
    assert!(said.contains("read 4096/4096"), "it was not there: {said}");
    assert!(!said.contains("wrote") && said.contains("write failed"), "{said}\n{}", stage.logs());
    assert_made(&mut stage);
}

/// The disk stays on its chain, and what another client writes meanwhile is not there: it is told so.
#[test]
#[ignore = "long: make long"]
fn another_clients_writes_are_not_taken_by_a_disk_that_stays_on_its_chain() {
    let Some(mut stage) = prepared("on-stays", &FLATTEN, ("a", "FlattenStopped")) else { return };
    let migrate = stage.spawn(&[]);
    stage.lab.host("a").wait_stopped(PATIENCE).expect("it comes to the step");
    let name = stage.image("a", 0).file_name().expect("a name").to_string_lossy().into_owned();
    let uri = format!("nbd+unix:///{name}?socket={}", stage.lab.host("a").nbd_socket().display());
    let mut client = Command::new("qemu-io");
    client.args(["-f", "raw", "-c", "write -f -P 0x5a 0 64k", &uri]);
    let client = client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("qemu-io");
    go_on_before(&stage, "a", &stage.other_monitor());
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
    let said = format!("{:?}", client.wait_with_output().expect("qemu-io"));
    assert!(!said.contains("wrote"), "{said}\n{}", stage.logs());
    assert_cancelled(&mut stage);
}
