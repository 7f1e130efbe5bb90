//! The last step gives one disk back to QEMU, and cannot give back the other: each is whose it is.

use crate::restart::start_with;
use crate::stage::{Kind, PATIENCE, Stage};
use dray_testkit::lab::Answer;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A program that has a file open for writing until it is told to quit.
struct Stranger(Child);

impl Stranger {
    fn at(stage: &Stage, path: &Path) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw"]).arg(path).stdin(Stdio::piped()).stdout(Stdio::null());
        let stranger = Self(command.spawn().expect("qemu-io"));
        let deadline = Instant::now() + PATIENCE;
        while !has_open(stranger.0.id(), path) {
            assert!(Instant::now() < deadline, "it does not open it\n{}", stage.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
        stranger
    }

    fn quits(mut self) {
        let mut to = self.0.stdin.take().expect("its input");
        to.write_all(b"quit\n").expect("quit");
        drop(to);
        self.0.wait().expect("it ends");
    }
}

fn has_open(pid: u32, path: &Path) -> bool {
    let Ok(dir) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let mut open = dir.flatten().flat_map(|entry| std::fs::read_link(entry.path()));
    open.any(|link| link == path)
}

fn image(stage: &Stage, name: &str) -> Option<Value> {
    let images = stage.lab.host("b").json(&["images"]).expect("images");
    images.as_array().expect("a list").iter().find(|image| image["name"] == name).cloned()
}

/// QEMU has locks of its own on the disk that it has back: dray takes none there, and closes nothing. The other one
/// stays on dray and is served; that its file is not locked is said, and it is locked when the program has ended.
#[test]
fn a_disk_that_qemu_has_back_is_not_locked_when_another_cannot_be_released() {
    let kinds = [Kind::Plain, Kind::Plain];
    let Some(mut stage) = Stage::new("half-released", &kinds, 1_000_000) else { return };
    start_with(stage.lab.host("b"), "DRAY_STOP_BEFORE", "ReleasePivot:1");
    stage.prepare();
    let migrate = stage.spawn(&[]);
    stage.lab.host("b").wait_stopped(PATIENCE).expect("it comes to the second disk");
    let stranger = Stranger::at(&stage, &stage.image("b", 1));
    stage.lab.host("b").go_on().expect("go on");
    let answer = Answer::of(migrate).expect("answer");
    let given = image(&stage, "disk0.raw");
    let told = given.as_ref().is_none_or(|given| given["state"] == "released");
    assert!(told, "QEMU has it: {given:?}; {answer:?}\n{}", stage.logs());
    let left = image(&stage, "disk1.raw").expect("it is on dray");
    assert_eq!((&left["state"], &left["closed"]), (&"owner".into(), &Value::Null), "{left}");
    let why = left["not_locked"]["why"].as_str().unwrap_or_default();
    assert!(why.contains("another program has the file") && why.contains("qemu-io"), "{left}");
    stage.assert_guest_is_well();
    stranger.quits();
    let deadline = Instant::now() + PATIENCE;
    while !image(&stage, "disk1.raw").expect("it is on dray")["not_locked"].is_null() {
        assert!(Instant::now() < deadline, "it is not locked\n{}", stage.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    let target = stage.target_qmp();
    let released = stage.lab.host("b").dray(&["release", "--qmp", &target]).expect("release");
    assert_eq!(released.code, 0, "{released:?}\n{}", stage.logs());
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}
