//! Another file gets the name of a disk's, and QEMU has that one open as well, for another disk or for another
//! program. dray finds out which of them the disk has.

use crate::released::text;
use crate::stage::qmp as ask;
use crate::unlocked::{AFTER, BEFORE, ON_RAW, SCSI, SIZE, Scene, UNLOCKED};
use dray_testkit::guest::{GuestVm, tools};
use dray_testkit::lab::Lab;
use serde_json::json;
use std::fs::{File, copy, metadata, rename};
use std::os::unix::fs::FileExt;
use std::path::Path;

const NOT_ITS: &str = "is not the file that its QEMU has open";

/// Two files exchange their names.
fn exchange(one: &Path, other: &Path) {
    let aside = one.with_extension("aside");
    for (from, to) in [(one, &*aside), (other, one), (&*aside, other)] {
        rename(from, to).expect("rename");
    }
}

fn byte(path: &Path, at: u64) -> u8 {
    let mut found = [0];
    File::open(path).and_then(|file| file.read_exact_at(&mut found, at)).expect("read");
    found[0]
}

/// Nothing of dray's is left in QEMU.
fn is_clean(scene: &Scene) {
    let nodes = scene.ask("query-named-block-nodes", &json!({})).to_string();
    assert!(!nodes.contains("dray-sign") && !nodes.contains("dray-end-mark"), "{nodes}");
}

#[test]
fn disks_whose_files_exchange_their_names_keep_their_own_files() {
    for devices in [[SCSI, SCSI], [ON_RAW, ON_RAW]] {
        let scene = Scene::new("exchanged", &devices);
        let (one, other) = (scene.path(0), scene.path(1));
        exchange(&one, &other);
        let why = format!("{} {NOT_ITS}", one.display());
        scene.is_refused(&["adopt"], &why);
        scene.is_refused(&["adopt", "--disk", "disk1"], NOT_ITS);
        scene.is_refused(&["prepare", "--to", "hostb"], NOT_ITS);
        is_clean(&scene);
        assert_eq!(scene.dray(&["images"]), json!([]));
        exchange(&one, &other);
        scene.on_vm("adopt");
        exchange(&one, &other);
        scene.is_refused(&["release"], &why);
        is_clean(&scene);
        scene.write(0, AFTER);
        exchange(&one, &other);
        scene.on_vm("release");
        is_clean(&scene);
        assert_eq!([byte(&one, AFTER), byte(&other, AFTER)], [7, 0]);
        assert_eq!([byte(&one, BEFORE), byte(&other, BEFORE)], [7, 7]);
    }
}

/// As with the finished target of a backup job, which stays in QEMU until its user removes it.
#[test]
fn a_copy_that_qemu_has_open_is_not_taken_for_the_disk_whose_name_it_gets() {
    for device in [SCSI, ON_RAW] {
        let scene = Scene::new("copied", &[device]);
        let (disk, made) = (scene.path(0), scene.path(0).with_extension("copy"));
        copy(&disk, &made).expect("copy");
        let node = json!({ "driver": "file", "node-name": "copy", "filename": made });
        scene.ask("blockdev-add", &node);
        scene.write(0, AFTER);
        exchange(&disk, &made);
        scene.is_refused(&["adopt"], NOT_ITS);
        exchange(&disk, &made);
        scene.on_vm("adopt");
        scene.ask("blockdev-del", &json!({ "node-name": "copy" }));
        exchange(&disk, &made);
        // QEMU looks at what has the name by now.
        let peek =
            json!({ "driver": "file", "node-name": "peek", "filename": disk, "read-only": true });
        scene.ask("blockdev-add", &peek);
        scene.is_refused(&["release"], NOT_ITS);
        exchange(&disk, &made);
        scene.on_vm("release");
        assert_eq!(byte(&disk, AFTER), 7);
    }
}

/// An agent may die while it looks.
#[test]
fn what_a_dead_agent_has_left_over_a_file_is_removed() {
    let scene = Scene::new("left_over", &[SCSI]);
    let sign = json!({ "driver": "blkdebug", "node-name": "dray-sign", "image": "node0",
        "unshare-child-perms": ["write-unchanged"] });
    scene.ask("blockdev-add", &sign);
    scene.on_vm("adopt");
    is_clean(&scene);
    let file = json!({ "driver": "file", "node-name": "node0", "filename": scene.path(0) });
    scene.ask("blockdev-add", &file);
    scene.ask("blockdev-add", &sign);
    scene.on_vm("release");
    is_clean(&scene);
}

/// QEMU shows by its locks which file a disk has. Without them it is the one that no other disk has.
#[test]
fn of_disks_without_locks_only_the_last_one_is_known() {
    let scene = Scene::new("locks_off", &[UNLOCKED, SCSI]);
    let (one, other) = (scene.path(0), scene.path(1));
    exchange(&one, &other);
    scene.is_refused(&["adopt", "--disk", "disk0"], "it cannot be found out");
    exchange(&one, &other);
    scene.on_vm("adopt");
    scene.on_vm("release");
    let scene = Scene::new("two_locks_off", &[UNLOCKED, UNLOCKED]);
    scene.is_refused(&["adopt"], "it cannot be found out");
    assert_eq!(scene.dray(&["images"]), json!([]));
}

/// What a disk is made of is copied by its names: base images, and every image of a chain that is flattened.
#[test]
fn base_images_that_exchange_their_names_do_not_move_with_the_other_disk() {
    let lab = Lab::new("exchanged_bases", Path::new(env!("CARGO_BIN_EXE_dray"))).expect("lab");
    lab.start().expect("agents");
    let a = lab.host("a");
    let at = |name: &str| a.pool().join(name);
    let mut builder = GuestVm::builder(&lab.dir(), "vm").memory_mib(64).bare();
    for i in 0..2 {
        let (base, top) = (at(&format!("base{i}")), at(&format!("top{i}")));
        let (base, top) = (text(base), text(top));
        let run = |args: &[&str]| drop(tools::run("qemu-img", args).expect("qemu-img"));
        run(&["create", "-q", "-f", "qcow2", &base, "16M"]);
        run(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &base, &top]);
        let node = format!("node-name=node{i},file.driver=file,file.filename={top}");
        builder = builder
            .blockdev(format!("driver=qcow2,{node},discard=unmap"))
            .disk(&format!("disk{i}"), &format!("node{i}"));
    }
    let vm = builder.start().expect("qemu");
    // Its socket is there before it has opened its disks.
    ask(&vm.qmp_path(), "{\"execute\":\"query-status\"}");
    let qmp = text(vm.qmp_path());
    let prepare = |more: &[&str]| {
        let args = [&["prepare", "--qmp", &qmp, "--to", "hostb"][..], more].concat();
        a.dray(&args).expect("dray")
    };
    for (one, other) in [("base0", "base1"), ("top0", "top1")] {
        exchange(&at(one), &at(other));
        for more in [&[][..], &["--chain", "flatten"]] {
            let answer = prepare(more);
            assert_eq!(answer.code, 6, "{one}, {more:?}: {answer:?}");
            assert!(answer.stderr.contains(NOT_ITS), "{one}, {more:?}: {answer:?}");
        }
        exchange(&at(one), &at(other));
    }
    let answer = prepare(&[]);
    assert_eq!(answer.code, 0, "with their own names: {answer:?}\n{}", a.log());
    // The backup of a disk has the images below it.
    a.json(&["adopt", "--qmp", &qmp]).expect("adopt");
    let repository = format!("file://{}", lab.dir().join("backups").display());
    a.json(&["backups", "init", &repository]).expect("a repository");
    let back_up = || a.dray(&["backup", "top0", "--to", &repository]).expect("dray");
    exchange(&at("base0"), &at("base1"));
    let answer = back_up();
    assert!(answer.code == 6 && answer.stderr.contains(NOT_ITS), "{answer:?}");
    exchange(&at("base0"), &at("base1"));
    let answer = back_up();
    assert_eq!(answer.code, 0, "{answer:?}");
}

/// The guest's writes are in the file that is served. Another one that has its name is neither served nor touched.
#[test]
fn a_disk_is_not_resized_into_another_file() {
    let scene = Scene::new("resized", &[SCSI, ON_RAW]);
    scene.on_vm("adopt");
    for disk in [0, 1] {
        let (path, aside) = (scene.path(disk), scene.path(disk).with_extension("aside"));
        let name = format!("disk{disk}.raw");
        for len in [SIZE, 4096] {
            rename(&path, &aside).expect("rename");
            std::fs::write(&path, vec![5; len as usize]).expect("another file");
            scene.is_refused(&["resize", &name, "32MiB"], "another file is at");
            assert_eq!(metadata(&path).expect("it").len(), len);
            scene.write(disk, AFTER);
            assert_eq!([byte(&path, 0), byte(&aside, AFTER)], [5, 7]);
            rename(&aside, &path).expect("rename");
        }
        scene.dray(&["resize", &name, "32MiB", "--qmp", &scene.qmp()]);
        assert_eq!(metadata(&path).expect("it").len(), 32 << 20);
        assert_eq!(byte(&path, AFTER), 7);
    }
    scene.on_vm("release");
}
