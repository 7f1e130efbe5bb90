//! The VM's user changes it while it moves: adds and removes devices, resets it, ends it.

use crate::failures::copying;
use crate::home::assert_nothing_left;
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::lab::Answer;
use serde_json::{Value, json};
use std::path::Path;

/// How a migration is in Copy, or in Backfill, for some seconds.
const SLOWLY: [&str; 2] = ["--bandwidth", "60Mbit"];

fn ask(monitor: &Path, command: &str, arguments: &Value) {
    let line = json!({ "execute": command, "arguments": arguments }).to_string();
    let answer = qmp(monitor, &line);
    assert!(answer.get("error").is_none(), "{command}: {answer}");
}

/// A migration that is in Copy when `act` is called with the source's monitor; its answer.
fn beside_copy(stage: &mut Stage, act: impl FnOnce(&Path)) -> Answer {
    stage.prepare();
    let migrate = stage.spawn(&[&SLOWLY[..], &["--strategy", "pre-copy"]].concat());
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    act(&stage.other_monitor());
    Answer::of(migrate).expect("answer")
}

fn stays(mut stage: Stage) {
    stage.target = None;
    stage.assert_guest_is_well();
    assert_nothing_left(&stage);
    stage.finish_guest();
    stage.assert_images("a");
}

/// The target's QEMU does not have it, and nobody would move its content.
#[test]
#[ignore = "long: make long"]
fn a_disk_that_is_added_during_copy_ends_the_attempt() {
    let Some(mut stage) = Stage::new("user-disk", &[Kind::Qcow2], 2_000_000) else { return };
    let answer = beside_copy(&mut stage, |monitor| {
        let node = json!({ "driver": "null-co", "node-name": "more", "size": 1 << 20 });
        ask(monitor, "blockdev-add", &node);
        let device = json!({ "driver": "virtio-blk-pci", "id": "more", "drive": "more" });
        ask(monitor, "device_add", &device);
    });
    assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
    assert!(answer.stderr.contains("the vm has another disk, more"), "{answer:?}");
    stays(stage);
}

/// QEMU itself refuses a state that has a device more than the one that waits for it.
#[test]
#[ignore = "long: make long"]
fn a_device_that_is_added_during_copy_brings_the_guest_back() {
    let Some(mut stage) = Stage::new("user-device", &[Kind::Qcow2], 2_000_000) else { return };
    let answer = beside_copy(&mut stage, |monitor| {
        let device = json!({ "driver": "virtio-balloon-pci", "id": "more" });
        ask(monitor, "device_add", &device);
    });
    assert_eq!(answer.code, 9, "{answer:?}\n{}", stage.logs());
    stays(stage);
}

/// Every block comes all the same, but the guest runs nowhere.
#[test]
fn a_vm_that_is_ended_during_backfill_is_told() {
    let Some(mut stage) = Stage::new("user-quit", &[Kind::Qcow2], 2_000_000) else { return };
    stage.prepare();
    let migrate = stage.spawn(&[&SLOWLY[..], &["--strategy", "post-copy"]].concat());
    let fills = |status: &Value| status["progress"]["phase"] == "backfill";
    stage.lab.host("a").wait_status(PATIENCE, fills).expect("it fills");
    ask(&stage.others_target_monitor(), "quit", &json!({}));
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 9, "{answer:?}\n{}", stage.logs());
    assert!(answer.stderr.contains("QEMU at the target has ended"), "{answer:?}");
    let images = stage.lab.host("b").json(&["images"]).expect("images");
    assert_eq!(images[0]["state"], "owner", "{images:#}");
    assert_eq!(images[0]["missing_blocks"], 0, "{images:#}");
}

/// Two disks of one size exchange their nodes in the QEMU that waits, after it was looked at.
#[test]
fn disks_that_are_exchanged_in_the_waiting_qemu_during_copy_end_the_attempt() {
    let kinds = [Kind::Plain, Kind::Plain];
    let Some(mut stage) = Stage::new("user-exchange", &kinds, 2_000_000) else { return };
    let prepared = stage.prepare();
    let migrate = stage.spawn(&SLOWLY);
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    let top = |nth: usize| -> Value {
        let lines = prepared["images"][nth]["blockdev"].as_array().expect("lines");
        let text = lines.last().and_then(Value::as_str).expect("a line");
        serde_json::from_str(text).expect("json")
    };
    let (mut first, mut second) = (top(0), top(1));
    std::mem::swap(&mut first["file"], &mut second["file"]);
    let monitor = stage.others_target_monitor();
    ask(&monitor, "blockdev-reopen", &json!({ "options": [first, second] }));
    let answer = Answer::of(migrate).expect("answer");
    assert_eq!(answer.code, 9, "{answer:?}\n{}", stage.logs());
    assert!(answer.stdout.contains("it is on the export of image"), "{}", answer.stdout);
    stays(stage);
}
