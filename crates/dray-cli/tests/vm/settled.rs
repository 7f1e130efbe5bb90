//! An agent dies while a disk comes under dray or goes back to QEMU. The next one asks the VM where the disk is, by
//! itself; until it knows, nobody new uses the image.

use crate::restart::{dies, start_with};
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::guest::{GuestVm, tools};
use dray_testkit::lab::{Answer, Lab};
use serde_json::{Value, json};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Where the disk is when all is settled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum On {
    Dray,
    File,
}

/// What dray has of the disk; none when it has nothing.
fn image(stage: &Stage) -> Option<Value> {
    let images = stage.lab.host("a").json(&["images"]).expect("images");
    images.as_array().and_then(|all| all.first().cloned())
}

/// Whether a client that was not there before is served.
fn serves_new(stage: &Stage) -> bool {
    let socket = stage.lab.host("a").nbd_socket();
    let uri = format!("nbd+unix:///disk0.raw?socket={}", socket.display());
    tools::run("qemu-img", &["info", "-f", "raw", &uri]).is_ok()
}

/// `dray COMMAND` dies with its agent before `step`. The next agent settles what is left, and the disk is in the end
/// where `on` says.
fn dies_at(command: &str, step: &str, on: On) {
    let name = format!("settled-{}", step.to_lowercase());
    let Some(mut stage) = Stage::new(&name, &[Kind::Plain], 2_000_000) else { return };
    let qmp = stage.source_qmp();
    if command == "release" {
        stage.lab.host("a").json(&["adopt", "--qmp", &qmp]).expect("adopt");
    }
    start_with(stage.lab.host("a"), "DRAY_ABORT_BEFORE", step);
    let asked = stage.lab.host("a").spawn(&[command, "--qmp", &qmp]).expect("spawn");
    dies(stage.lab.host("a"));
    assert_ne!(Answer::of(asked).expect("answer").code, 0);
    // QEMU does not answer at first, so that nobody can know.
    stage.source.pause().expect("SIGSTOP");
    stage.lab.host("a").start().expect("start");
    if let Some(image) = image(&stage) {
        assert!(!serves_new(&stage), "{step}: it is not known where the disk is: {image}");
    }
    stage.source.go_on().expect("SIGCONT");
    let deadline = Instant::now() + PATIENCE;
    let settled = |stage: &Stage| match on {
        On::File => image(stage).is_none(),
        On::Dray => image(stage).is_some() && serves_new(stage),
    };
    while !settled(&stage) {
        assert!(Instant::now() < deadline, "{step}: {:?}\n{}", image(&stage), stage.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    stage.assert_guest_is_well();
    if on == On::Dray {
        stage.release();
    }
    stage.finish_guest();
    stage.assert_images("a");
}

#[test]
fn an_adoption_that_did_not_come_to_its_pivot_has_not_been() {
    dies_at("adopt", "AdoptPivot", On::File);
}

#[test]
fn an_adoption_that_came_to_its_pivot_ends_at_the_next_start() {
    dies_at("adopt", "AdoptClose", On::Dray);
}

#[test]
#[ignore = "long: make long"]
fn a_release_that_did_not_come_to_its_pivot_has_not_been() {
    dies_at("release", "ReleasePivot", On::Dray);
}

#[test]
#[ignore = "long: make long"]
fn a_release_that_came_to_its_pivot_ends_at_the_next_start() {
    dies_at("release", "ReleasePivoted", On::File);
}

/// A VM whose disk was adopted, and a second client of its export.
struct Shared {
    lab: Lab,
    file: String,
    first: GuestVm,
    other: GuestVm,
}

impl Shared {
    fn new(name: &str) -> Self {
        let lab = Lab::new(name, Path::new(env!("CARGO_BIN_EXE_dray"))).expect("lab");
        lab.start().expect("agents");
        let a = lab.host("a");
        let path = a.pool().join("disk0.raw");
        File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("image");
        let file = format!("driver=file,node-name=disk,filename={}", path.display());
        let first = vm(&lab, "first", &file).expect("it starts");
        a.json(&["adopt", "--qmp", first.qmp_path().to_str().expect("text")]).expect("adopt");
        let export = format!(
            "driver=nbd,node-name=disk,export=disk0.raw,reconnect-delay=300,server.type=unix,\
             server.path={}",
            a.nbd_socket().display()
        );
        let other = vm(&lab, "other", &export).expect("a second client");
        // It is attached to its export when its monitor answers.
        qmp(&other.qmp_path(), "{\"execute\":\"query-status\"}");
        Self { lab, file, first, other }
    }

    /// The second client writes.
    fn write(&self, number: u32) {
        let device = "/machine/peripheral/disk0/virtio-backend";
        let line = format!("qemu-io -d {device} \"write -P {number} {} 4096\"", number * 4096);
        let command =
            json!({ "execute": "human-monitor-command", "arguments": { "command-line": line } });
        qmp(&self.other.qmp_path(), &command.to_string());
    }

    fn clients(&self) -> Value {
        self.lab.host("a").json(&["images"]).expect("images")[0]["clients"].clone()
    }
}

fn vm(lab: &Lab, name: &str, node: &str) -> io::Result<GuestVm> {
    let builder = GuestVm::builder(&lab.dir(), name).memory_mib(16).bare();
    builder.blockdev(node).disk("disk0", "disk").start()
}

/// The VM has ended, but another client writes to its image through dray: nobody opens the file beside that, also
/// after an agent that was started again has found the client and not the VM.
#[test]
fn a_file_that_another_client_writes_to_is_locked_after_its_vm_has_ended() {
    let mut shared = Shared::new("left-to");
    shared.write(1);
    shared.first.kill().expect("kill");
    let a = shared.lab.host("a");
    a.kill9().expect("kill");
    a.start().expect("start");
    shared.write(2);
    // QEMU says so after it has made its monitor.
    let again = vm(&shared.lab, "first", &shared.file).and_then(|mut vm| vm.wait_exit(PATIENCE));
    let refused = again.is_err() || again.is_ok_and(|status| !status.success());
    assert!(refused, "two write to one file\n{}", a.log());
    shared.write(3);
    let mut block = [0; 4096];
    let file = File::open(a.pool().join("disk0.raw")).expect("the file");
    for number in 1..4 {
        file.read_exact_at(&mut block, number * 4096).expect("read");
        assert!(block == [number as u8; 4096], "block {number}");
    }
}

/// The VM was started on its file again while no agent ran: the client that dray has is not let in beside it, and is
/// when that VM has ended.
#[test]
fn a_client_waits_while_its_vm_has_the_file_again() {
    let mut shared = Shared::new("taken-from");
    shared.first.kill().expect("kill");
    let a = shared.lab.host("a");
    a.kill9().expect("kill");
    let mut again = vm(&shared.lab, "first", &shared.file).expect("it starts");
    // It has its file when its monitor answers.
    qmp(&again.qmp_path(), "{\"execute\":\"query-status\"}");
    a.start().expect("start");
    std::thread::scope(|scope| {
        // QEMU connects again as long as a request waits.
        let write = scope.spawn(|| shared.write(1));
        std::thread::sleep(Duration::from_secs(3));
        assert!(
            !write.is_finished() && shared.clients() == 0,
            "two write to one file\n{}",
            a.log()
        );
        again.kill().expect("kill");
    });
    assert_eq!(shared.clients(), 1, "it is not let in again\n{}", a.log());
}
