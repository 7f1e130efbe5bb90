//! A VM, a socket or a waiting QEMU that does not fit: a clear error, and nothing has happened.

use crate::home::assert_nothing_left;
use crate::stage::{Kind, PATIENCE, Stage, qmp};
use dray_testkit::guest::{GuestVm, GuestVmBuilder};
use dray_testkit::lab::Answer;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;

/// What is said of a QEMU that waits for something else.
const NO_EXPORT: &[&str] = &["no disk on an export of this migration", "dray prepare"];
/// A QEMU before those that can do what dray asks for.
const TOO_OLD: &str = "{\"QMP\": {\"version\": {\"qemu\": {\"micro\": 1, \"minor\": 1, \
    \"major\": 7}, \"package\": \"\"}, \"capabilities\": []}}\r\n";
/// Longest wait for whoever hangs up first.
const QUIET: usize = 4096;

/// A socket on which everybody is told the same and then waited for.
fn says(path: &Path, text: &'static str) {
    // The one of a QEMU that has gone may still be there.
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).expect("bind");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                // Whoever has heard enough may leave at any time.
                let _ = stream.write_all(text.as_bytes());
                while !text.is_empty() && stream.read(&mut [0; QUIET]).is_ok_and(|n| n > 0) {}
            });
        }
    });
}

/// The command failed with this code and said what, why and what to do.
fn assert_refused(answer: &Answer, code: i32, words: &[&str]) {
    let text = format!("{}{}", answer.stdout, answer.stderr);
    assert_eq!(answer.code, code, "{text}");
    assert!(answer.stderr.contains("hint: "), "it must say what to do: {text}");
    for word in words {
        assert!(text.contains(word), "it must name '{word}': {text}");
    }
}

#[test]
fn a_vm_that_cannot_be_moved_is_refused() {
    let Some(mut stage) = Stage::new("refused", &[Kind::Plain], 2_000_000) else { return };
    let dir = stage.lab.dir();
    let outside = tempfile::tempdir().expect("directory");
    let prepare = |socket: &Path| {
        let args = ["prepare", "--qmp", socket.to_str().expect("text"), "--to", "hostb"];
        stage.lab.host("a").dray(&args).expect("prepare")
    };
    let other = dir.join("other.sock");
    says(&other, "");
    assert_refused(&prepare(&other), 9, &["other.sock"]);
    says(&other, "NBDMAGIC\n");
    assert_refused(&prepare(&other), 9, &["other.sock", "not a QMP message"]);
    says(&other, TOO_OLD);
    assert_refused(&prepare(&other), 14, &["QEMU 7.1.1 is too old", "7.2.0 or newer is needed"]);
    assert_refused(&prepare(&dir.join("none.sock")), 9, &["none.sock", "No such file"]);

    let disk = outside.path().join("disk.raw");
    std::fs::write(&disk, [7; 4096]).expect("disk");
    let stray = GuestVm::builder(&dir, "stray").bare();
    let stray = stray.blockdev(format!("driver=file,node-name=n,filename={}", disk.display()));
    let stray = stray.disk("disk0", "n").start().expect("qemu");
    assert_refused(&prepare(&stray.qmp_path()), 7, &["disk.raw", "pool"]);
    drop(stray);

    let source = stage.source_qmp();
    let a = stage.lab.host("a");
    let unknown = a.dray(&["adopt", "--qmp", &source, "--disk", "disk9"]).expect("adopt");
    assert_refused(&unknown, 5, &["no disk 'disk9'", "its disks are disk0"]);
    assert_eq!(a.dray(&["adopt", "--qmp", &source]).expect("adopt").code, 0);
    let alone = a.dray(&["migrate", "--image", "disk0.raw", "--to", "hostb"]).expect("migrate");
    assert_refused(&alone, 6, &["a vm uses it", "move the vm with --qmp"]);
    assert_eq!(a.dray(&["release", "--qmp", &source]).expect("release").code, 0);

    stage.assert_guest_is_well();
    assert_nothing_left(&stage);
    stage.finish_guest();
    stage.assert_images("a");
}

/// What waits at the target is not what was prepared.
enum Waiting {
    Nobody,
    Said(&'static str),
    Qemu(fn(GuestVmBuilder) -> GuestVmBuilder),
}

#[test]
fn a_waiting_qemu_that_does_not_fit_is_refused() {
    let Some(mut stage) = Stage::new("input", &[Kind::Plain], 2_000_000) else { return };
    let answer = Answer::of(stage.spawn(&[])).expect("answer");
    assert_refused(&answer, 5, &["nothing is prepared", "dray prepare"]);

    let small = |builder: GuestVmBuilder| {
        let disk = "driver=null-co,node-name=small,size=67108864,read-zeroes=on";
        builder.blockdev(disk).disk("disk0", "small").incoming()
    };
    let old = |builder: GuestVmBuilder| {
        let disk = "driver=null-co,node-name=old,size=100663296,read-zeroes=on";
        builder.blockdev(disk).disk("disk0", "old").incoming()
    };
    let two = |builder: GuestVmBuilder| {
        let disk = |node| format!("driver=null-co,node-name={node},size=100663296,read-zeroes=on");
        let builder = builder.blockdev(disk("one")).blockdev(disk("two"));
        builder.disk("disk0", "one").disk("disk1", "two").incoming()
    };
    let cases: [(Waiting, i32, &[&str]); 8] = [
        (Waiting::Nobody, 9, &["target.qmp"]),
        (Waiting::Said("NBDMAGIC\n"), 9, &["target.qmp", "not a QMP message"]),
        (Waiting::Said(TOO_OLD), 9, &["QEMU 7.1.1 is too old", "7.2.0 or newer is needed"]),
        // Of a VM that has nothing to do with the migration nothing else is told.
        (Waiting::Qemu(GuestVmBuilder::bare), 9, NO_EXPORT),
        (Waiting::Qemu(GuestVmBuilder::incoming), 9, NO_EXPORT),
        (Waiting::Qemu(small), 9, NO_EXPORT),
        (Waiting::Qemu(two), 9, NO_EXPORT),
        (Waiting::Qemu(old), 9, NO_EXPORT),
    ];
    let prepared = stage.prepare_exports();
    for (waiting, code, words) in cases {
        let dir = stage.lab.dir();
        let socket = dir.join("target.qmp");
        // The one of the case before.
        let _ = std::fs::remove_file(&socket);
        match waiting {
            Waiting::Nobody => {}
            Waiting::Said(text) => says(&socket, text),
            Waiting::Qemu(of) => {
                let builder = of(GuestVm::builder(&dir, "target").memory_mib(192));
                stage.target = Some(builder.start().expect("qemu"));
            }
        }
        let answer = Answer::of(stage.spawn(&[])).expect("answer");
        assert_refused(&answer, code, words);
        stage.target = None;
        stage.assert_guest_is_well();
        assert_only_prepared(&stage, &prepared);
    }
    // A peer may name only what the operator of the target has opened to it.
    let outside = tempfile::tempdir().expect("directory");
    let elsewhere = outside.path().join("vm.sock");
    says(&elsewhere, TOO_OLD);
    let answer = stage.migrate_to(&elsewhere);
    assert_refused(&answer, 9, &["vm.sock", "qmp_dirs"]);
    assert_only_prepared(&stage, &prepared);
    // The one that fits comes at last.
    let _ = std::fs::remove_file(stage.lab.dir().join("target.qmp"));
    stage.start_target(&prepared);
    let migrate = stage.spawn(&[]);
    stage.completes(migrate);
}

/// The same command has the same answer, and another one says what differs.
#[test]
fn a_vm_that_is_prepared_twice_is_prepared_once() {
    let Some(stage) = Stage::new("twice", &[Kind::Plain], 2_000_000) else { return };
    let prepared = stage.prepare_exports();
    assert_only_prepared(&stage, &prepared);
    let other = ["--name", "disk0=other.raw"];
    assert_refused(&stage.prepared_with(&other), 6, &["and not other.raw", "--replace"]);
    assert_refused(&stage.prepared_with(&["--pool", "none"]), 7, &["pool"]);
    assert_only_prepared(&stage, &prepared);
    let replaced = stage.prepared_with(&[&other[..], &["--replace"]].concat());
    let replaced = replaced.json().expect("prepare");
    assert_ne!(replaced["migration"], prepared["migration"]);
    assert_eq!(stage.lab.host("b").pool_files().expect("pool"), [".other.raw.dray-partial"]);
    let id = replaced["migration"].as_str().expect("id");
    stage.lab.host("a").json(&["cancel", id]).expect("cancel");
    assert_nothing_left(&stage);
}

/// What was prepared is there and nothing else: the disk is on its file.
fn assert_only_prepared(stage: &Stage, prepared: &Value) {
    let host = stage.lab.host("a");
    let mut open = host.json(&["status"]).expect("status");
    let open = open.as_array_mut().expect("migrations");
    open.retain(|one| one["state"] != "cancelled");
    assert_eq!(open.len(), 1, "{open:?}");
    assert_eq!(
        (&open[0]["state"], &open[0]["migration"]),
        (&json!("prepared"), &prepared["migration"])
    );
    assert_eq!(host.json(&["images"]).expect("images"), json!([]));
    let nodes = qmp(&stage.source.qmp_path(), "{\"execute\":\"query-named-block-nodes\"}");
    assert!(!nodes.to_string().contains("nbd.sock"), "a disk is still under dray: {nodes}");
    assert_eq!(&stage.prepare_exports(), prepared);
}

/// The guest would find the content of one disk on the other.
#[test]
fn a_waiting_qemu_whose_disks_are_swapped_is_refused() {
    let kinds = [Kind::Plain, Kind::Plain];
    let Some(mut stage) = Stage::new("swapped", &kinds, 2_000_000) else { return };
    let mut prepared = stage.prepare_exports();
    let devices = [0, 1].map(|nth: usize| prepared["images"][nth]["device"].clone());
    for (nth, device) in devices.iter().rev().enumerate() {
        prepared["images"][nth]["device"] = device.clone();
    }
    stage.start_target(&prepared);
    let answer = Answer::of(stage.spawn(&[])).expect("answer");
    assert_refused(&answer, 9, &["disk0: it is on the export of image", "and its image is"]);
    stage.target = None;
    stage.assert_guest_is_well();
    assert_only_prepared(&stage, &stage.prepare_exports());
    stage.finish_guest();
    stage.assert_images("a");
}

/// A chain whose waiting QEMU is not there fails at once, and not after a time limit.
#[test]
fn a_waiting_qemu_that_is_missing_is_missed_at_once() {
    let kinds = [Kind::Qcow2, Kind::Resident];
    let Some(mut stage) = Stage::new("missing", &kinds, 2_000_000) else { return };
    stage.prepare_exports();
    let began = std::time::Instant::now();
    let answer = Answer::of(stage.spawn(&[])).expect("answer");
    assert_refused(&answer, 9, &["target.qmp"]);
    assert!(began.elapsed() < PATIENCE / 3, "it took {:?}", began.elapsed());
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}
