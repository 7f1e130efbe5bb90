//! A file is one image's, under whatever name, and nobody else writes to what dray serves or relies on.

use crate::case::IMAGE;
use crate::guest::{BLOCK, content};
use crate::lab::{DRAY, Host, Lab, wait_for};
use crate::moves::result;
use crate::nbd::{Client, FLUSH, READ, WRITE};
use crate::orders::full_lab;
use crate::refusals::{CONFLICT, MIGRATE, refused};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(20);
/// How often several adds of one file are tried.
const TRIES: usize = 10;
const PARTIAL: &str = ".disk.img.dray-partial";
const REPLICA: &str = ".disk.img.dray-replica-2";

/// A bystander that respects QEMU's locks.
fn qemu_io(path: &Path, options: &[&str], command: &str) -> Output {
    let mut tool = Command::new("qemu-io");
    tool.args(options).args(["-f", "raw", "-c", command]).arg(path).output().unwrap()
}

fn cannot_write(path: &Path) {
    let output = qemu_io(path, &[], "write -P 0x51 40960 4096");
    assert!(!output.status.success(), "{} was written: {output:?}", path.display());
}

fn can_read(path: &Path) {
    let output = qemu_io(path, &["-r"], "read 0 4096");
    assert!(output.status.success(), "{output:?}");
}

fn not_added(host: &Host, path: &Path, image: &str) {
    refused(host, &["images", "add", "second", path.to_str().unwrap()], CONFLICT, &[image]);
}

/// A hard link of a file, in the same folder.
fn linked(path: &Path) -> PathBuf {
    let link = path.with_file_name("link");
    std::fs::hard_link(path, &link).unwrap();
    link
}

fn block(host: &Host, nth: u64) -> Vec<u8> {
    let mut client = Client::connect(&host.nbd(), IMAGE).unwrap();
    client.request(READ, nth * BLOCK, BLOCK as u32, &[], &|| true).unwrap()
}

/// The image is handed over, and all of its blocks are still at the source.
fn handed_over() -> Lab {
    let lab = full_lab();
    let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--strategy", "deferred", "--detach"];
    result(&lab.a.dray(&[&["--json"], &args[..]].concat()));
    let owned = || lab.b.image(IMAGE).is_some_and(|image| image["state"] == "owner");
    wait_for("the handover", WAIT, owned).unwrap();
    wait_for("the replica", WAIT, || lab.a.pool().join(REPLICA).exists()).unwrap();
    lab
}

#[test]
fn of_adds_at_once_one_is_accepted() {
    let mut lab = Lab::new();
    lab.a.start();
    for _ in 0..TRIES {
        let path = lab.a.pool().join("one");
        std::fs::write(&path, [1; 65536]).unwrap();
        let add = |nth: usize| {
            let mut command = Command::new(DRAY);
            command.arg("--socket").arg(lab.a.api()).args(["images", "add"]);
            command.arg(format!("i{nth}")).arg(&path).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().unwrap()
        };
        let children: Vec<_> = (0..3).map(add).collect();
        let ended = children.into_iter().map(|mut child| child.wait().unwrap().success());
        let ended: Vec<_> = ended.collect();
        assert_eq!(ended.iter().filter(|accepted| **accepted).count(), 1, "{ended:?}");
        let nth = ended.iter().position(|accepted| *accepted).unwrap();
        result(&lab.a.dray(&["--json", "images", "remove", &format!("i{nth}")]));
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_file_is_added_once_under_all_its_names_unless_it_is_only_read() {
    let mut lab = Lab::new();
    lab.a.start();
    let path = lab.a.pool().join("one");
    std::fs::write(&path, [1; 65536]).unwrap();
    let link = linked(&path);
    let add = |name, path: &Path, more: &[&str]| {
        let args = ["--json", "images", "add", name, path.to_str().unwrap()];
        result(&lab.a.dray(&[&args[..], more].concat()))
    };
    add("one", &path, &[]);
    not_added(&lab.a, &link, "'one'");
    let read_only = ["images", "add", "second", link.to_str().unwrap(), "--read-only"];
    refused(&lab.a, &read_only, CONFLICT, &["'one'"]);
    result(&lab.a.dray(&["--json", "images", "remove", "one"]));
    add("base", &path, &["--read-only"]);
    add("again", &link, &["--read-only"]);
    not_added(&lab.a, &path, "'again'");
}

#[test]
fn an_incomplete_image_is_nobody_elses() {
    let mut lab = handed_over();
    let partial = lab.b.pool().join(PARTIAL);
    let link = linked(&partial);
    for _ in 0..2 {
        not_added(&lab.b, &partial, IMAGE);
        not_added(&lab.b, &link, IMAGE);
        cannot_write(&link);
        assert_eq!(block(&lab.b, 9), content(9, 1));
        lab.b.kill();
        lab.b.start();
        wait_for("the image", WAIT, || Client::connect(&lab.b.nbd(), IMAGE).is_ok()).unwrap();
    }
}

#[test]
fn a_copy_that_is_still_read_is_nobody_elses() {
    let mut lab = handed_over();
    let replica = lab.a.pool().join(REPLICA);
    let link = linked(&replica);
    for _ in 0..2 {
        not_added(&lab.a, &replica, IMAGE);
        not_added(&lab.a, &link, IMAGE);
        cannot_write(&link);
        can_read(&link);
        lab.a.kill();
        lab.a.start();
    }
    result(&lab.b.dray(&["--json", "backfill", "start"]));
    let named = || lab.b.pool().join(IMAGE).exists();
    wait_for("the end", WAIT, named).unwrap();
    assert_eq!(block(&lab.b, 9), content(9, 1));
    cannot_write(&lab.b.pool().join(IMAGE));
    not_added(&lab.a, &link, IMAGE);
}

#[test]
fn a_resized_image_is_still_locked() {
    let mut lab = Lab::new();
    lab.a.start();
    let path = lab.a.pool().join(IMAGE);
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    lab.a.add(IMAGE);
    cannot_write(&path);
    result(&lab.a.dray(&["--json", "resize", IMAGE, "4MiB"]));
    let mut client = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    client.request(WRITE, 10 * BLOCK, BLOCK as u32, &content(10, 2), &|| true).unwrap();
    client.request(FLUSH, 0, 0, &[], &|| true).unwrap();
    cannot_write(&path);
    not_added(&lab.a, &path, IMAGE);
    assert_eq!(block(&lab.a, 10), content(10, 2));
}

/// What clients have written is in the file that is served, whatever has its name by now.
#[test]
fn an_image_is_not_resized_into_another_file() {
    let mut lab = Lab::new();
    lab.a.start();
    let (path, aside) = (lab.a.pool().join(IMAGE), lab.a.pool().join("aside"));
    let mut first = vec![0; 1 << 20];
    first[(9 * BLOCK) as usize..(10 * BLOCK) as usize].copy_from_slice(&content(9, 1));
    std::fs::write(&path, first).unwrap();
    lab.a.add(IMAGE);
    for other in [1 << 20, 4096] {
        std::fs::rename(&path, &aside).unwrap();
        std::fs::write(&path, vec![5; other]).unwrap();
        let words = ["another file is at", "give the file that is served its name again"];
        refused(&lab.a, &["resize", IMAGE, "4MiB"], CONFLICT, &words);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), other as u64, "it is another file's");
        assert_eq!(std::fs::metadata(&aside).unwrap().len(), 1 << 20);
        std::fs::rename(&aside, &path).unwrap();
    }
    result(&lab.a.dray(&["--json", "resize", IMAGE, "4MiB"]));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 << 20);
    assert_eq!(block(&lab.a, 9), content(9, 1));
}

/// An image that another program has when its agent starts, and that program.
fn somebody_elses(lab: &mut Lab) -> Child {
    lab.a.start();
    let path = lab.a.pool().join(IMAGE);
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    lab.a.add(IMAGE);
    lab.a.kill();
    let mut other = Command::new("qemu-io");
    other.args(["-f", "raw"]).arg(&path).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut other = other.spawn().unwrap();
    // An answer shows that the image is open.
    other.stdin.as_mut().unwrap().write_all(b"length\n").unwrap();
    let mut answer = String::new();
    BufReader::new(other.stdout.take().unwrap()).read_line(&mut answer).unwrap();
    lab.a.start();
    other
}

/// A VM was started on its file while no agent ran, and goes on there.
#[test]
fn an_image_that_somebody_else_has_at_a_start_can_be_forgotten() {
    let mut lab = Lab::new();
    let mut other = somebody_elses(&mut lab);
    refused(&lab.a, &["images", "remove", IMAGE, "--delete"], CONFLICT, &["in qemu-io (pid"]);
    result(&lab.a.dray(&["--json", "images", "remove", IMAGE]));
    assert!(lab.a.image(IMAGE).is_none() && lab.a.pool().join(IMAGE).exists());
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success());
    lab.a.add(IMAGE);
}

#[test]
fn an_image_that_somebody_else_has_at_a_start_is_closed_until_they_let_go() {
    let mut lab = Lab::new();
    let mut other = somebody_elses(&mut lab);
    let path = lab.a.pool().join(IMAGE);
    let closed = lab.a.image(IMAGE).unwrap()["closed"].clone();
    assert!(closed["why"].as_str().unwrap().contains("in qemu-io (pid"), "{closed}");
    assert!(closed["hint"].as_str().unwrap().contains("stop what uses its file"), "{closed}");
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success());
    let open = || lab.a.image(IMAGE).is_some_and(|image| image["closed"].is_null());
    wait_for("the image", WAIT, open).unwrap();
    cannot_write(&path);
}

/// What is at an image's path is not the file that dray has open: neither is moved for the other.
#[test]
fn an_image_whose_file_was_put_elsewhere_is_used_by_nobody_new() {
    let mut lab = Lab::new();
    lab.start();
    let (path, away) = (lab.a.pool().join(IMAGE), lab.a.pool().join("away.img"));
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    lab.a.add(IMAGE);
    let mut known = Client::connect(&lab.a.nbd(), IMAGE).unwrap();
    std::fs::rename(&path, &away).unwrap();
    let new = || Command::new("qemu-img").args(["info", "-f", "raw"]).arg(uri(&lab.a)).output();
    for other in [false, true] {
        if other {
            std::fs::write(&path, vec![8; 1 << 20]).unwrap();
        }
        refused(&lab.a, &MIGRATE, CONFLICT, &["is not the file that is at", "put its file back"]);
        let new = new().unwrap();
        let why = String::from_utf8_lossy(&new.stderr).into_owned();
        assert!(!new.status.success() && why.contains("is not the file"), "{why}");
    }
    // Who was attached before has not lost its disk.
    known.request(WRITE, 0, BLOCK as u32, &content(10, 2), &|| true).unwrap();
    std::fs::rename(&away, &path).unwrap();
    assert_eq!(block(&lab.a, 0), content(10, 2));
    result(&lab.a.dray(&[&["--json"], &MIGRATE[..]].concat()));
    assert_eq!(lab.b.image(IMAGE).unwrap()["state"], "owner");
}

fn uri(host: &Host) -> String {
    format!("nbd+unix:///{IMAGE}?socket={}", host.nbd().display())
}
