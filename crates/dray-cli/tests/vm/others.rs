//! Other programs act on the VM while it migrates: nothing is handed over that lacks the guest's writes.

use crate::failures::copying;
use crate::home::{assert_back_home, assert_nothing_left};
use crate::restart::start_with;
use crate::stage::{self, Kind, PATIENCE, Stage, qmp};
use dray_testkit::guest::{GuestVm, tools};
use dray_testkit::lab::{Answer, Host};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How a migration is in Copy for some ten seconds.
const SLOWLY: [&str; 4] = ["--strategy", "pre-copy", "--bandwidth", "30Mbit"];

/// The monitor that is not dray's.
struct Other(PathBuf);

impl Other {
    fn of(stage: &Stage) -> Self {
        Self(stage.other_monitor())
    }

    fn ask(&self, command: &str, arguments: &Value) -> Value {
        let line = json!({ "execute": command, "arguments": arguments });
        let mut answer = qmp(&self.0, &line.to_string());
        assert!(answer.get("error").is_none(), "{command}: {answer}");
        answer["return"].take()
    }

    /// The node that the first disk sits on.
    fn top(&self) -> String {
        let blocks = self.ask("query-block", &json!({}));
        let blocks = blocks.as_array().expect("a list");
        let disk =
            blocks.iter().find(|block| block["qdev"].as_str().is_some_and(|q| q.contains("disk0")));
        disk.expect("disk0")["inserted"]["node-name"].as_str().expect("a node").to_owned()
    }

    fn wait_job(&self, wanted: impl Fn(&Value) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let jobs = self.ask("query-block-jobs", &json!({}));
            if wanted(&jobs) {
                return;
            }
            assert!(Instant::now() < deadline, "{jobs}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A migration whose copy takes some seconds, and what another program does in the middle of it; the
/// migration's answer.
fn migrate_beside(stage: &mut Stage, act: impl FnOnce(&Other)) -> Answer {
    stage.prepare();
    let migrate = stage.spawn(&["--strategy", "pre-copy", "--bandwidth", "120Mbit"]);
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    act(&Other::of(stage));
    Answer::of(migrate).expect("answer")
}

/// The guest's newest writes are in the overlay: without it the target would have an old disk.
#[test]
fn a_snapshot_during_copy_ends_the_migration_before_the_handover() {
    for (name, kind) in [("snapshot-raw", Kind::Plain), ("snapshot-qcow2", Kind::Qcow2)] {
        let Some(mut stage) = Stage::new(name, &[kind], 2_000_000) else { return };
        let overlay = stage.lab.host("a").pool().join("overlay.qcow2");
        let mut below = String::new();
        let answer = migrate_beside(&mut stage, |other| {
            below = other.top();
            let snapshot = json!({
                "node-name": below, "snapshot-file": overlay, "snapshot-node-name": "overlay",
            });
            other.ask("blockdev-snapshot-sync", &snapshot);
        });
        assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
        assert!(answer.stderr.contains("disk disk0: it consists of"), "{answer:?}");
        assert!(answer.stderr.contains("overlay.qcow2"), "{answer:?}");
        stage.target = None;
        stage.assert_guest_is_well();

        // The way out: the overlay goes, then dray gives the disk back.
        let other = Other::of(&stage);
        let commit = json!({ "job-id": "merge", "device": "overlay", "base-node": below });
        other.ask("block-commit", &commit);
        other.wait_job(|jobs| jobs[0]["ready"] == true);
        other.ask("job-complete", &json!({ "id": "merge" }));
        other.wait_job(|jobs| jobs == &json!([]));
        stage.release();
        stage.finish_guest();
        if kind == Kind::Qcow2 {
            let image = stage.image("a", 0);
            tools::run("qemu-img", &["check", &image.to_string_lossy()]).expect("a sound image");
        }
        stage.assert_images("a");
    }
}

/// What waits at the target has the old size.
#[test]
fn a_disk_that_is_resized_during_copy_ends_the_migration() {
    let Some(mut stage) = Stage::new("resize-beside", &[Kind::Qcow2], 2_000_000) else { return };
    let answer = migrate_beside(&mut stage, |other| {
        other.ask("block_resize", &json!({ "node-name": other.top(), "size": 128 << 20 }));
    });
    assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
    assert!(answer.stderr.contains("disk disk0: it was resized"), "{answer:?}");
    stage.target = None;
    stage.assert_guest_is_well();
    assert_nothing_left(&stage);
}

/// What the mirror has gets the guest's writes as well, and may become its disk at any time.
#[test]
fn a_mirror_that_somebody_begins_during_copy_ends_the_migration() {
    let Some(mut stage) = Stage::new("mirror-beside", &[Kind::Plain], 2_000_000) else { return };
    let copy = stage.lab.dir().join("copy.raw");
    let answer = migrate_beside(&mut stage, |other| {
        let mirror = json!({
            "job-id": "copy", "device": other.top(), "target": copy, "sync": "full", "format": "raw",
            "speed": 1 << 20,
        });
        other.ask("drive-mirror", &mirror);
    });
    assert_ne!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    stage.target = None;
    stage.assert_guest_is_well();
    let other = Other::of(&stage);
    other.ask("block-job-cancel", &json!({ "device": "copy", "force": true }));
    other.wait_job(|jobs| jobs == &json!([]));
    stage.release();
    stage.finish_guest();
    stage.assert_images("a");
}

/// The guest is on another file for good: what dray has of the disk is a file that nobody writes any more.
#[test]
fn a_disk_that_another_program_has_moved_away_is_let_go() {
    let kinds = [Kind::Plain, Kind::Qcow2];
    let Some(mut stage) = Stage::new("moved-away", &kinds, 2_000_000) else { return };
    let copy = stage.lab.dir().join("copy.raw");
    let answer = migrate_beside(&mut stage, |other| {
        let mirror = json!({
            "job-id": "copy", "device": other.top(), "target": copy, "sync": "full", "format": "raw",
        });
        other.ask("drive-mirror", &mirror);
        other.wait_job(|jobs| jobs[0]["ready"] == true);
        other.ask("job-complete", &json!({ "id": "copy" }));
        other.wait_job(|jobs| jobs == &json!([]));
    });
    assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
    assert!(answer.stderr.contains("copy.raw, and not on the export"), "{answer:?}");
    stage.target = None;
    stage.assert_guest_is_well();
    assert_nothing_left(&stage);
    // Nobody has the file any more: without -U it is not opened beside a writer.
    let left = stage.image("a", 0);
    tools::run("qemu-img", &["info", "-f", "raw", &left.to_string_lossy()]).expect("it is free");
    stage.finish_guest();
    stage.disks[0].bystander.check_raw(&copy).expect("what the guest wrote");
}

/// The same without any migration: what dray has is not what the guest has, so a backup would be of an old disk.
#[test]
fn a_disk_that_was_moved_away_unnoticed_is_neither_backed_up_nor_moved() {
    let Some((mut stage, repository)) = adopted("moved-unnoticed") else { return };
    let refused = |stage: &Stage, args: &[&str], code: i32, said: &str| {
        let answer = stage.lab.host("a").dray(args).expect("dray");
        assert_eq!(answer.code, code, "{args:?}: {answer:?}");
        assert!(answer.stderr.contains(said), "{args:?}: {answer:?}");
    };
    let backup = ["backup", "disk0.raw", "--to", &repository];
    // A VM that does not say where its disk is may have it anywhere.
    stage.source.pause().expect("SIGSTOP");
    refused(&stage, &backup, 9, "the agent does not know where the vm has its disks");
    stage.source.go_on().expect("SIGCONT");
    stage.lab.host("a").json(&backup).expect("its disk is on dray");
    let copy = stage.lab.dir().join("copy.raw");
    let other = Other::of(&stage);
    let mirror = json!({
        "job-id": "copy", "device": other.top(), "target": copy, "sync": "full", "format": "raw",
    });
    other.ask("drive-mirror", &mirror);
    other.wait_job(|jobs| jobs[0]["ready"] == true);
    other.ask("job-complete", &json!({ "id": "copy" }));
    other.wait_job(|jobs| jobs == &json!([]));
    refused(&stage, &backup, 6, "the vm has the disk of image 'disk0.raw' on another file");
    refused(
        &stage,
        &["migrate", "--image", "disk0.raw", "--to", "hostb"],
        6,
        "it was released: QEMU",
    );
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.disks[0].bystander.check_raw(&copy).expect("what the guest wrote");
}

/// What the guest writes while its disk is on another node than dray released it to, dray's bitmap does not know.
#[test]
fn a_released_disk_that_comes_back_on_another_node_counts_as_changed() {
    let Some(mut stage) = Stage::new("other-node", &[Kind::Plain], 2_000_000) else { return };
    let adopt = |stage: &Stage| {
        let qmp = stage.source_qmp();
        let adopted = stage.lab.host("a").dray(&["adopt", "--qmp", &qmp]).expect("adopt");
        assert_eq!(adopted.code, 0, "{adopted:?}\n{}", stage.logs());
    };
    // A backup is what the next one goes on from.
    let repository = format!("file://{}", stage.lab.dir().join("backups").display());
    let back_up = |stage: &Stage| {
        let a = stage.lab.host("a");
        a.json(&["backup", "disk0.raw", "--to", &repository]).expect("backup")
    };
    adopt(&stage);
    stage.lab.host("a").json(&["backups", "init", &repository]).expect("a repository");
    back_up(&stage);
    stage.release();
    // Away and back: full copies, so that the bytes are the guest's.
    let other = Other::of(&stage);
    let (away, home) = (stage.lab.dir().join("away.raw"), stage.image("a", 0));
    for target in [&away, &home] {
        let mode = if target == &home { "existing" } else { "absolute-paths" };
        let mirror = json!({
            "job-id": "copy", "device": other.top(), "target": target, "sync": "full", "format": "raw",
            "mode": mode,
        });
        other.ask("drive-mirror", &mirror);
        other.wait_job(|jobs| jobs[0]["ready"] == true);
        other.ask("job-complete", &json!({ "id": "copy" }));
        other.wait_job(|jobs| jobs == &json!([]));
        stage.assert_guest_is_well();
    }
    adopt(&stage);
    let made = back_up(&stage);
    assert_eq!(made["images"][0]["changed_bytes"], stage::SIZE, "{made:#}");
    assert!(made["images"][0]["full_because"].is_null(), "it goes on from the first: {made:#}");
    stage.release();
    stage.finish_guest();
    stage.assert_images("a");
}

/// The name that a file keeps when another one takes its own.
fn kept(path: &Path) -> PathBuf {
    path.with_extension("kept")
}

/// Another file has the name: a copy, with what the disk held when it was made.
fn replace(path: &Path) {
    let copy = path.with_extension("copy");
    std::fs::copy(path, &copy).expect("copy");
    std::fs::hard_link(path, kept(path)).expect("link");
    std::fs::rename(&copy, path).expect("rename");
}

fn put_back(path: &Path) {
    std::fs::rename(kept(path), path).expect("back");
}

/// A guest whose disk is on dray, and where it is backed up to.
fn adopted(name: &str) -> Option<(Stage, String)> {
    let stage = Stage::new(name, &[Kind::Plain], 2_000_000)?;
    let a = stage.lab.host("a");
    a.json(&["adopt", "--qmp", &stage.source_qmp()]).expect("adopt");
    let at = format!("file://{}", stage.lab.dir().join("backups").display());
    a.json(&["backups", "init", &at]).expect("a repository");
    Some((stage, at))
}

/// QEMU has a file open that has lost its name to another one. On dray, or back on its file, the guest would go on
/// with the other one, or at another host on a base image that it has never seen.
#[test]
fn a_file_that_has_lost_its_name_is_not_taken_for_the_one_that_has_it() {
    let kinds = [Kind::Plain, Kind::Qcow2];
    let Some(mut stage) = Stage::new("renamed", &kinds, 2_000_000) else { return };
    let qmp = stage.source_qmp();
    let (raw, base) = (stage.image("a", 0), stage.image("a", 1).with_file_name("base.qcow2"));
    [&raw, &base].into_iter().for_each(|path| replace(path));
    let refused = |stage: &Stage, args: &[&str], path: &Path| {
        let answer = stage.lab.host("a").dray(args).expect("dray");
        assert_eq!(answer.code, 6, "{args:?}: {answer:?}\n{}", stage.logs());
        let said = format!("{} is not the file that its QEMU has open", path.display());
        assert!(answer.stderr.contains(&said), "{args:?}: {answer:?}");
    };
    let adopt = ["adopt", "--qmp", &qmp];
    refused(&stage, &[&adopt[..], &["--disk", "disk0"]].concat(), &raw);
    for more in [&[][..], &["--chain", "flatten"]] {
        let prepare = [&["prepare", "--qmp", &qmp, "--to", "hostb"][..], more].concat();
        refused(&stage, &prepare, &raw);
    }
    put_back(&raw);
    refused(&stage, &["prepare", "--qmp", &qmp, "--to", "hostb"], &base);
    put_back(&base);
    let adopted = stage.lab.host("a").dray(&adopt).expect("adopt");
    assert_eq!(adopted.code, 0, "{adopted:?}");
    // On dray its file can lose its name as well, and so can what is below it.
    [&raw, &base].into_iter().for_each(|path| replace(path));
    let at = format!("file://{}", stage.lab.dir().join("backups").display());
    stage.lab.host("a").json(&["backups", "init", &at]).expect("a repository");
    refused(&stage, &["backup", "disk1.qcow2", "--to", &at], &base);
    let answer = stage.lab.host("a").dray(&["release", "--qmp", &qmp]).expect("release");
    assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
    stage.assert_guest_is_well();
    [&raw, &base].into_iter().for_each(|path| put_back(path));
    stage.release();
    stage.finish_guest();
    stage.assert_images("a");
}

/// While no agent ran the file was replaced by an older copy, and the VM still runs: its guest waits for the file that
/// it has written to, and is not given the other one.
#[test]
fn a_guest_is_not_served_a_file_that_replaced_its_own_while_no_agent_ran() {
    let Some((mut stage, _)) = adopted("replaced") else { return };
    stage.assert_guest_is_well();
    let path = stage.image("a", 0);
    for ends in [Host::stop, Host::kill9] {
        let a = stage.lab.host("a");
        ends(a).expect("it ends");
        replace(&path);
        a.start().expect("start");
        let images = a.json(&["images"]).expect("images");
        assert!(images.to_string().contains("another file is at"), "{images}");
        put_back(&path);
        stage.assert_guest_is_well();
    }
    stage.release();
    stage.finish_guest();
    stage.assert_images("a");
}

/// The writes that a guest has flushed are in an overlay that dray knows nothing of.
#[test]
fn a_disk_under_an_overlay_is_not_backed_up() {
    let Some((mut stage, at)) = adopted("overlaid") else { return };
    let (other, overlay) = (Other::of(&stage), stage.lab.dir().join("overlay.qcow2"));
    let snapshot = json!({ "node-name": other.top(), "snapshot-file": overlay,
        "snapshot-node-name": "overlay", "format": "qcow2" });
    other.ask("blockdev-snapshot-sync", &snapshot);
    let answer = stage.lab.host("a").dray(&["backup", "disk0.raw", "--to", &at]).expect("dray");
    assert_eq!(answer.code, 6, "{answer:?}");
    assert!(answer.stderr.contains("merge the overlay into the image below it"), "{answer:?}");
    stage.assert_guest_is_well();
}

/// Another VM has taken the path of the monitor: it knows nothing of the disk, which its own VM has put elsewhere.
#[test]
fn a_disk_whose_monitor_another_vm_has_taken_is_not_backed_up() {
    let Some((mut stage, at)) = adopted("taken") else { return };
    let taken = format!("unix:{},server=on,wait=off", stage.source.qmp_path().display());
    let builder = GuestVm::builder(&stage.lab.dir(), "thief").memory_mib(16).bare();
    let thief = builder.arg("-qmp").arg(&taken).start().expect("qemu");
    let (other, overlay) = (Other::of(&stage), stage.lab.dir().join("overlay.qcow2"));
    let snapshot = json!({ "node-name": other.top(), "snapshot-file": overlay,
        "snapshot-node-name": "overlay", "format": "qcow2" });
    other.ask("blockdev-snapshot-sync", &snapshot);
    let answer = stage.lab.host("a").dray(&["backup", "disk0.raw", "--to", &at]).expect("dray");
    assert_eq!(answer.code, 9, "{answer:?}");
    assert!(answer.stderr.contains("another vm answers at"), "{answer:?}");
    drop(thief);
    stage.assert_guest_is_well();
}

/// The same of a disk that has come here, and is on its export still: dray knows which VM it has come for.
#[test]
fn a_disk_that_has_arrived_and_is_under_an_overlay_is_not_backed_up() {
    let Some(mut stage) = Stage::new("overlaid-there", &[Kind::Plain], 2_000_000) else { return };
    stage.prepare();
    stage.migrate(&["--release", "never"]).expect("moves");
    let (b, other) = (stage.lab.host("b"), Other(stage.others_target_monitor()));
    let at = format!("file://{}", stage.lab.dir().join("backups").display());
    b.json(&["backups", "init", &at]).expect("a repository");
    let backup = ["backup", "disk0.raw", "--to", &at];
    b.json(&backup).expect("its disk is on dray");
    let overlay = stage.lab.dir().join("overlay.qcow2");
    let snapshot = json!({ "node-name": other.top(), "snapshot-file": overlay,
        "snapshot-node-name": "overlay", "format": "qcow2" });
    other.ask("blockdev-snapshot-sync", &snapshot);
    for restarts in [false, true] {
        if restarts {
            b.kill9().expect("kill");
            b.start().expect("start");
        }
        let answer = b.dray(&backup).expect("dray");
        assert_eq!(answer.code, 6, "{answer:?}");
        assert!(answer.stderr.contains("merge the overlay into the image below it"), "{answer:?}");
    }
    stage.assert_guest_is_well();
}

/// The second disk got a bitmap since the vm was prepared: the first one is back on its file when that is said.
#[test]
fn if_one_disk_cannot_be_adopted_those_before_it_go_back() {
    let kinds = [Kind::Plain, Kind::Plain];
    let Some(mut stage) = Stage::new("second-disk", &kinds, 1_000_000) else { return };
    stage.prepare();
    let other = Other::of(&stage);
    other.ask("block-dirty-bitmap-add", &json!({ "node": "node1", "name": "mine" }));
    let answer = Answer::of(stage.spawn(&[])).expect("answer");
    assert_eq!(answer.code, 6, "{answer:?}\n{}", stage.logs());
    let nodes = other.ask("query-named-block-nodes", &json!({})).to_string();
    assert!(!nodes.contains("nbd.sock"), "{nodes}");
    stage.target = None;
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}

/// A move in which the agent of `letter` stands still before `effect`, and what another program does meanwhile; the
/// migration's answer.
fn move_standing_at(
    stage: &mut Stage,
    letter: &str,
    effect: &str,
    act: impl FnOnce(&Stage),
) -> Answer {
    start_with(stage.lab.host(letter), "DRAY_STOP_BEFORE", effect);
    stage.prepare();
    let migrate = stage.spawn(&[]);
    stage.lab.host(letter).wait_stopped(PATIENCE).expect("it comes to the effect");
    act(stage);
    stage.lab.host(letter).go_on().expect("go on");
    Answer::of(migrate).expect("answer")
}

/// Its user lets the guest go on at the source when its memory was sent and its disks are not at rest yet: what it
/// writes then, its memory at the target does not know of.
#[test]
fn a_guest_that_is_let_go_on_when_its_memory_was_sent_stays() {
    let Some(mut stage) = Stage::new("cont-source", &[Kind::Plain], 2_000_000) else { return };
    let answer = move_standing_at(&mut stage, "a", "Quiesce", |stage| {
        Other::of(stage).ask("cont", &json!({}));
        std::thread::sleep(Duration::from_millis(300));
    });
    assert_ne!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    let said = format!("{}{}", answer.stdout, answer.stderr);
    assert!(said.contains("somebody has let the guest go on at the source"), "{answer:?}");
    assert_back_home(&mut stage);
}

/// Its user lets the guest go on at the target when its disks are there: it has been started, by its user. What it
/// has written since is not handed back.
#[test]
fn a_guest_that_is_let_go_on_at_its_target_has_been_started() {
    let Some(mut stage) = Stage::new("cont-target", &[Kind::Plain], 2_000_000) else { return };
    let answer = move_standing_at(&mut stage, "b", "ReachGuest", |stage| {
        Other(stage.others_target_monitor()).ask("cont", &json!({}));
    });
    assert_eq!(answer.code, 0, "{answer:?}\n{}", stage.logs());
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}

/// Nothing is under way at either host any more, and the guest that was started again has its own disk.
fn assert_left_alone(stage: &mut Stage) {
    stage.target = None;
    stage.assert_guest_is_well();
    assert_nothing_left(stage);
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}

/// The agent and the VM at the source die in the middle of Copy, and come back in the order of `back`.
fn dies_in_copy(name: &str, back: impl Fn(&mut Stage)) {
    for kind in [Kind::Plain, Kind::Qcow2] {
        let name = format!("{name}-{kind:?}").to_lowercase();
        let Some(mut stage) = Stage::new(&name, &[kind], 2_000_000) else { return };
        stage.prepare();
        let migrate = stage.spawn(&SLOWLY);
        stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
        stage.lab.host("a").kill9().expect("kill");
        stage.source.kill().expect("kill");
        back(&mut stage);
        drop(Answer::of(migrate));
        assert_left_alone(&mut stage);
    }
}

/// A power failure, and a manager that is quicker than dray. What dray knew is of the VM before.
#[test]
fn a_vm_that_is_back_before_the_agent_is_not_moved() {
    dies_in_copy("back-first", |stage| {
        stage.start_source_again();
        stage.lab.host("a").start().expect("start");
    });
}

/// The other way round: dray does not stand in the way of a VM that is started again.
#[test]
#[ignore = "long: make long"]
fn a_vm_that_is_back_after_the_agent_starts() {
    dies_in_copy("back-last", |stage| {
        stage.lab.host("a").start().expect("start");
        stage.start_source_again();
    });
}

/// Its user powers a VM off that was adopted, and starts it again, with and without a migration under way.
#[test]
fn an_adopted_vm_that_ends_can_be_started_again() {
    for moves in [false, true] {
        let name = format!("ends-adopted-{moves}");
        let Some(mut stage) = Stage::new(&name, &[Kind::Plain, Kind::Qcow2], 2_000_000) else {
            return;
        };
        let migrate = moves.then(|| {
            stage.prepare();
            let migrate = stage.spawn(&SLOWLY);
            stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
            migrate
        });
        if !moves {
            let qmp = stage.source_qmp();
            let adopted = stage.lab.host("a").dray(&["adopt", "--qmp", &qmp]).expect("adopt");
            assert_eq!(adopted.code, 0, "{adopted:?}");
        }
        stage.source.kill().expect("kill");
        if let Some(migrate) = migrate {
            let answer = Answer::of(migrate).expect("answer");
            assert_eq!(answer.code, 9, "{answer:?}");
            assert!(answer.stderr.contains("cannot move the vm"), "{answer:?}");
        }
        wait_unlocked(&stage);
        stage.start_source_again();
        assert_left_alone(&mut stage);
    }
}

/// QEMU has not connected again yet when the agent is back: the disk is its VM's all the same.
#[test]
fn an_adopted_disk_is_not_removed_when_the_agent_has_just_come_back() {
    let Some(mut stage) = Stage::new("remove-adopted", &[Kind::Plain], 2_000_000) else { return };
    let qmp = stage.source_qmp();
    let host = stage.lab.host("a");
    host.json(&["adopt", "--qmp", &qmp]).expect("adopt");
    host.kill9().expect("kill");
    std::thread::sleep(Duration::from_secs(2));
    host.start().expect("start");
    let removed = host.dray(&["images", "remove", "disk0.raw"]).expect("an answer");
    assert_eq!(removed.code, 6, "{removed:?}");
    assert!(removed.stderr.contains("release its disk"), "{removed:?}");
    host.json(&["release", "--qmp", &qmp]).expect("release");
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}

fn image_format(image: &Path) -> &str {
    image.extension().and_then(|name| name.to_str()).expect("a format")
}

/// Waits until QEMU's own tool may write to the disks: half a minute is long for whoever restarts a VM.
fn wait_unlocked(stage: &Stage) {
    let deadline = Instant::now() + Duration::from_secs(30);
    for nth in 0..stage.disks.len() {
        let image = stage.image("a", nth);
        let path = image.to_string_lossy();
        while let Err(why) =
            tools::run("qemu-io", &["-f", image_format(&image), "-c", "quit", &path])
        {
            assert!(Instant::now() < deadline, "{why}\n{}", stage.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// An agent dies when QEMU has a disk back and the agent has not forgotten it: what it knows of the disk is not
/// what is in it, so it is neither backed up nor moved from dray's records alone.
#[test]
fn a_disk_that_is_in_use_elsewhere_is_neither_backed_up_nor_moved() {
    let Some(mut stage) = Stage::new("elsewhere", &[Kind::Plain], 2_000_000) else { return };
    let qmp = stage.source_qmp();
    let a = stage.lab.host("a");
    let adopted = a.dray(&["adopt", "--qmp", &qmp]).expect("adopt");
    assert_eq!(adopted.code, 0, "{adopted:?}");
    a.stop().expect("stop");
    a.start_with(&[("DRAY_STOP_BEFORE", "ReleasePivoted")]).expect("start");
    let release = a.spawn(&["release", "--qmp", &qmp]).expect("release");
    a.wait_stopped(PATIENCE).expect("it comes to the pivot");
    a.kill9().expect("kill");
    drop(Answer::of(release));
    // As long as QEMU does not answer nobody can know where the disk is.
    stage.source.pause().expect("SIGSTOP");
    let a = stage.lab.host("a");
    a.start().expect("start");
    let images = a.json(&["images"]).expect("images");
    assert_eq!(images[0]["state"], "owner", "{images}");
    let name = images[0]["name"].as_str().expect("a name").to_owned();
    let at = format!("file://{}", stage.lab.dir().join("backups").display());
    let made = a.dray(&["backups", "init", &at]).expect("init");
    assert_eq!(made.code, 0, "{made:?}");
    for args in
        [vec!["backup", &name, "--to", &at], vec!["migrate", "--image", &name, "--to", "hostb"]]
    {
        let answer = a.dray(&args).expect("dray");
        assert_eq!(answer.code, 6, "{args:?}: {answer:?}");
        assert!(answer.stderr.contains("in use elsewhere"), "{args:?}: {answer:?}");
        assert!(answer.stderr.contains("dray release --qmp"), "{args:?}: {answer:?}");
    }
    let uri = format!("nbd+unix:///{name}?socket={}", a.nbd_socket().display());
    let read = tools::run("qemu-io", &["-f", "raw", "-c", "read 0 4k", &uri]);
    let why = read.expect_err("nobody new is let in").to_string();
    assert!(why.contains("in use elsewhere"), "{why}");
    stage.source.go_on().expect("SIGCONT");
    stage.assert_guest_is_well();
    // The hint is true: it was released all the time, and a look says so.
    let released = stage.lab.host("a").dray(&["release", "--qmp", &qmp]).expect("release");
    assert!(
        released.stderr.contains("no disk of the vm is on this agent's socket"),
        "{released:?}"
    );
    assert_left_alone(&mut stage);
}
