//! A VM whose QEMU is not root's, as everywhere under a manager: it gets its disks back at the target, because their
//! files belong there to whom they belonged here.

use crate::stage::{PATIENCE, qmp};
use dray_testkit::guest::{GuestVm, tools};
use dray_testkit::lab::{Answer, Host, Lab};
use serde_json::{Value, json};
use std::fs::Permissions;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// `nobody`, and the group of the same number.
const USER: u32 = 65534;
/// Somebody without a name.
const STRANGER: u32 = 64_999;
const BLOCK: usize = 4096;
const BLOCKS: u64 = 256;

fn group() -> String {
    let groups = std::fs::read_to_string("/etc/group").expect("groups");
    let of = |line: &&str| line.split(':').nth(2) == Some("65534");
    groups.lines().find(of).and_then(|line| line.split(':').next()).expect("a group").to_owned()
}

/// Two hosts whose NBD sockets are for that group, and a folder in which its QEMUs make their sockets.
fn lab(name: &str) -> Option<(Lab, PathBuf)> {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: only root starts processes of other users");
        return None;
    }
    let lab = Lab::new(name, Path::new(env!("CARGO_BIN_EXE_dray"))).expect("lab");
    let open = |path: &Path| std::fs::set_permissions(path, Permissions::from_mode(0o755));
    open(&lab.dir()).expect("mode");
    for letter in ["a", "b"] {
        let host = lab.host(letter);
        let config = host.dir().join("dray.toml");
        let text = std::fs::read_to_string(&config).expect("configuration");
        let guests = format!("[agent]\nguests = '{}'\n", group());
        std::fs::write(&config, text.replace("[agent]\n", &guests)).expect("configuration");
        [host.dir().to_owned(), host.pool()].iter().for_each(|dir| open(dir).expect("mode"));
    }
    let sockets = lab.dir().join("vms");
    std::fs::create_dir(&sockets).expect("folder");
    chown(&sockets, Some(USER), Some(USER)).expect("owner");
    lab.start().expect("agents");
    Some((lab, sockets))
}

/// An image of that user's, of blocks that begin with their numbers.
fn make_image(path: &Path) {
    let bytes: Vec<u8> = (0..BLOCKS).flat_map(|block| [block as u8; BLOCK]).collect();
    std::fs::write(path, bytes).expect("image");
    std::fs::set_permissions(path, Permissions::from_mode(0o640)).expect("mode");
    chown(path, Some(USER), Some(USER)).expect("owner");
}

/// The VM writes a block through its disk.
fn write(vm: &GuestVm, block: u64) {
    let device = "/machine/peripheral/disk0/virtio-backend";
    for command in [format!("write -P 200 {} {BLOCK}", block * BLOCK as u64), "flush".to_owned()] {
        let line = format!("qemu-io -d {device} \"{command}\"");
        let command =
            json!({ "execute": "human-monitor-command", "arguments": { "command-line": line } });
        let said = qmp(&vm.qmp_path(), &command.to_string());
        assert!(!said.to_string().contains("rror"), "{said}");
    }
}

/// A bystander looks at the file: its owner and mode, and every block, of which these were written.
fn look(path: &Path, written: &[u64]) {
    let meta = path.metadata().expect("the image");
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (USER, USER, 0o640));
    has(path, written);
}

/// The file has every block as it was made, but those that were written.
fn has(path: &Path, written: &[u64]) {
    let file = std::fs::File::open(path).expect("the image");
    let mut bytes = [0; BLOCK];
    for block in 0..BLOCKS {
        file.read_exact_at(&mut bytes, block * BLOCK as u64).expect("read");
        let byte = if written.contains(&block) { 200 } else { block as u8 };
        assert!(bytes == [byte; BLOCK], "block {block}");
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// The VM goes from one host to the other, with its disk's file at the end. Its manager ends the source's QEMU.
fn migrate(
    [from, to]: [&Host; 2],
    vm: GuestVm,
    sockets: &Path,
    name: &str,
    more: &[&str],
) -> GuestVm {
    let source = vm.qmp_path();
    let prepare = ["prepare", "--qmp", text(&source), "--to", &to.name()];
    let prepared = from.json(&[&prepare[..], more].concat()).expect("prepare");
    let builder = GuestVm::builder(sockets, name).memory_mib(16).bare().user(USER);
    let target = builder.waiting(&prepared, "").and_then(|vm| vm.start()).expect("the target");
    let there = target.qmp_path();
    let args =
        ["migrate", "--qmp", text(&source), "--to", &to.name(), "--target-qmp", text(&there)];
    let child = from.spawn(&args).expect("migrate");
    let answer = Answer::within(child, PATIENCE).expect("answer").expect("it ends");
    assert_eq!(answer.code, 0, "{answer:?}\n{}\n{}", from.log(), to.log());
    target
}

fn nodes(vm: &GuestVm) -> Vec<String> {
    let blocks = qmp(&vm.qmp_path(), "{\"execute\":\"query-named-block-nodes\"}");
    let driver = |node: &Value| node["drv"].as_str().unwrap_or_default().to_owned();
    blocks["return"].as_array().or(blocks.as_array()).expect("nodes").iter().map(driver).collect()
}

#[test]
fn an_ordinary_users_vm_has_its_disk_as_a_file_again_at_each_host() {
    let Some((lab, sockets)) = lab("ordinary") else { return };
    let (a, b) = (lab.host("a"), lab.host("b"));
    let path = a.pool().join("disk0.raw");
    make_image(&path);
    let node = format!("driver=file,node-name=node0,filename={}", path.display());
    let builder = GuestVm::builder(&sockets, "first").memory_mib(16).bare().user(USER);
    let vm = builder.blockdev(node).disk("disk0", "node0").start().expect("it starts");
    write(&vm, 3);
    let vm = migrate([a, b], vm, &sockets, "second", &[]);
    assert!(!nodes(&vm).contains(&"nbd".to_owned()), "it has its file: {:?}", nodes(&vm));
    write(&vm, 7);
    look(&b.pool().join("disk0.raw"), &[3, 7]);
    let vm = migrate([b, a], vm, &sockets, "third", &[]);
    write(&vm, 9);
    look(&path, &[3, 7, 9]);
}

#[test]
fn a_disk_that_is_under_dray_keeps_the_name_of_its_files_node() {
    let Some((lab, sockets)) = lab("names") else { return };
    let (a, b) = (lab.host("a"), lab.host("b"));
    let path = a.pool().join("disk0.raw");
    make_image(&path);
    let node = format!("driver=file,node-name=node0,filename={}", path.display());
    let builder = GuestVm::builder(&sockets, "first").memory_mib(16).bare().user(USER);
    let vm = builder.blockdev(node).disk("disk0", "node0").start().expect("it starts");
    let source = vm.qmp_path();
    a.json(&["adopt", "--qmp", text(&source)]).expect("adopt");
    let prepared = a.json(&["prepare", "--qmp", text(&source), "--to", &b.name()]);
    let prepared = prepared.expect("prepare");
    let lines = prepared["images"][0]["blockdev"].as_array().expect("lines");
    let top: Value = serde_json::from_str(lines.last().unwrap().as_str().unwrap()).expect("json");
    assert_eq!(top["node-name"], "node0", "{prepared}");
    let id = prepared["migration"].as_str().expect("id").to_owned();
    a.json(&["cancel", &id]).expect("cancel");
    write(&vm, 3);
    let vm = migrate([a, b], vm, &sockets, "second", &[]);
    write(&vm, 7);
    look(&b.pool().join("disk0.raw"), &[3, 7]);
}

/// The qcow2 that the target makes belongs to whom the disk belonged, too.
#[test]
fn an_ordinary_users_vm_gets_a_qcow2_of_its_own() {
    let Some((lab, sockets)) = lab("ordinary-qcow2") else { return };
    let (a, b) = (lab.host("a"), lab.host("b"));
    let (base, path) = (a.pool().join("base.raw"), a.pool().join("disk0.qcow2"));
    make_image(&base);
    let backing = ["-F", "raw", "-b", text(&base)];
    let create = [&["create", "-q", "-f", "qcow2"][..], &backing, &[text(&path)]].concat();
    tools::run("qemu-img", &create).expect("qemu-img");
    std::fs::set_permissions(&path, Permissions::from_mode(0o640)).expect("mode");
    chown(&path, Some(USER), Some(USER)).expect("owner");
    let node =
        format!("driver=qcow2,node-name=node0,file.driver=file,file.filename={}", path.display());
    let builder = GuestVm::builder(&sockets, "first").memory_mib(16).bare().user(USER);
    let vm = builder.blockdev(node).disk("disk0", "node0").start().expect("it starts");
    write(&vm, 3);
    let flatten = ["--chain", "flatten", "--target-format", "qcow2"];
    let vm = migrate([a, b], vm, &sockets, "second", &flatten);
    assert!(!nodes(&vm).contains(&"nbd".to_owned()), "it has its file: {:?}", nodes(&vm));
    write(&vm, 7);
    let made = b.pool().join("disk0.qcow2");
    let meta = made.metadata().expect("the qcow2");
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (USER, USER, 0o640));
    drop(vm);
    let seen = lab.dir().join("seen.raw");
    tools::run("qemu-img", &["convert", "-O", "raw", text(&made), text(&seen)]).expect("qemu-img");
    has(&seen, &[3, 7]);
}

/// Said before anything moves, with the way out.
#[test]
fn an_owner_whom_the_target_does_not_know_can_be_replaced() {
    let Some((lab, _)) = lab("owner") else { return };
    let (a, b) = (lab.host("a"), lab.host("b"));
    let path = a.pool().join("disk0.raw");
    make_image(&path);
    a.json(&["images", "add", "disk0.raw", text(&path)]).expect("images add");
    let args = ["migrate", "--image", "disk0.raw", "--to", "hostb"];
    let refused = a.dray(&[&args[..], &["--owner", "nobody-is-called-so"]].concat()).expect("dray");
    assert_eq!(refused.code, 5, "{refused:?}");
    assert!(refused.stderr.contains("there is no user 'nobody-is-called-so'"), "{refused:?}");
    assert!(refused.stderr.contains("--owner USER[:GROUP]"), "{refused:?}");
    assert!(b.pool_files().expect("files").is_empty(), "nothing is left there");
    let owner = format!("{STRANGER}:{STRANGER}");
    // Whoever owns a file may change its mode: it is root's until it is complete.
    let slowly = ["--owner", &owner, "--bandwidth", "2Mbit", "--no-reuse"];
    let moving = a.spawn(&[&args[..], &slowly].concat()).expect("dray");
    let partial = b.pool().join(".disk0.raw.dray-partial");
    let deadline = Instant::now() + PATIENCE;
    while !partial.metadata().is_ok_and(|meta| meta.blocks() > 0) {
        assert!(Instant::now() < deadline, "nothing arrives");
        std::thread::sleep(Duration::from_millis(5));
    }
    let meta = partial.metadata().expect("it comes");
    assert_eq!((meta.uid(), meta.mode() & 0o7777), (0, 0));
    let moved = Answer::of(moving).expect("answer");
    assert_eq!(moved.code, 0, "{moved:?}");
    let meta = b.pool().join("disk0.raw").metadata().expect("the image");
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (STRANGER, STRANGER, 0o640));
}
