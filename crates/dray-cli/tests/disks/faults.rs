//! Disks that are read-only, full or broken, on either side: one clear error, a guest that goes on
//! where it is, and nothing left behind.

use crate::case::{Case, DATA, FAR, IMAGE, SMALL};
use crate::guest::{self, Guest};
use crate::lab::{DRAY, Lab, wait_for};
use crate::mounts::{Loop, Mount, break_behind};
use crate::moves::SLOW;
use crate::nbd::{Client, Fault, WRITE};
use crate::refusals::{CONFLICT, DENIED, MIGRATE, failed, nothing_happened, refused};
use dray_testkit::guest::tools;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const NO_SPACE: i32 = 10;
const IO: i32 = 11;
/// What NBD calls a full disk.
const ENOSPC: u32 = 28;

#[test]
fn a_file_that_cannot_be_written_is_refused() {
    let mut lab = Lab::new();
    let Some(mount) = Mount::tmpfs(&lab.a.pool().join("ro"), "size=1m") else { return };
    std::fs::write(mount.path.join("x.img"), [7; 4096]).unwrap();
    let Some(()) = mount.make_read_only() else { return };
    lab.a.start();
    let path = mount.path.join("x.img");
    refused(&lab.a, &["images", "add", "x", path.to_str().unwrap()], DENIED, &["x.img"]);
    assert!(lab.a.image("x").is_none());
    lab.a.kill();
}

/// dray would take a qcow2's tables for the image. As a raw disk a guest may have that in it.
#[test]
fn an_image_whose_data_is_in_another_file_is_refused() {
    if !tools::available(&["qemu-img"]) {
        return;
    }
    let mut lab = Lab::new();
    lab.a.start();
    let (path, data) = (lab.a.pool().join("x.qcow2"), lab.a.pool().join("x.data"));
    let (path, beside) = (path.to_str().unwrap(), format!("data_file={}", data.display()));
    tools::run("qemu-img", &["create", "-f", "qcow2", "-o", &beside, path, "1M"]).unwrap();
    let add = ["images", "add", "x", path];
    refused(&lab.a, &add, CONFLICT, &["data is in another file", "qemu-img convert"]);
    let qcow2 = [&add[..], &["--format", "qcow2"]].concat();
    refused(&lab.a, &qcow2, CONFLICT, &["data is in another file"]);
    assert!(lab.a.image("x").is_none());
    let raw = lab.a.dray(&[&add[..], &["--format", "raw"]].concat());
    assert!(raw.status.success(), "{raw:?}");
    lab.a.kill();
}

#[test]
fn a_pool_without_room_is_refused() {
    let lab = Lab::new();
    let Some(_small) = Mount::tmpfs(&lab.b.pool(), "size=8m") else { return };
    let case = Case::begin_small(lab);
    refused(&case.lab.a, &MIGRATE, NO_SPACE, &["free"]);
    nothing_happened(&case);
}

#[test]
fn a_target_that_fills_up_ends_the_migration_and_not_the_guest() {
    let lab = Lab::new();
    let Some(small) = Mount::tmpfs(&lab.b.pool(), "size=40m") else { return };
    let mut case = Case::begin_small(lab);
    let args = [&MIGRATE[..], &["--bandwidth", "6MiB/s"]].concat();
    let mut dray = Command::new(DRAY);
    dray.arg("--socket").arg(case.lab.a.api()).args(&args);
    let asked = dray.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    case.await_bytes(SLOW).unwrap();
    let ballast = small.path.join("ballast");
    // Fills what is left; the error is wanted.
    let _ = std::fs::write(&ballast, vec![1; 40 << 20]);
    failed(&args, &asked.wait_with_output().unwrap(), NO_SPACE, &["No space left"]);
    assert_eq!(case.guest.complaint(), None);
    assert_eq!(case.lab.a.image(IMAGE).unwrap()["state"], "owner");
    std::fs::remove_file(&ballast).unwrap();
    assert!(case.lab.a.dray(&["resume"]).status.success());
    case.await_end().unwrap();
    case.end().unwrap();
}

/// Fills a file system to the last byte.
pub fn fill(path: &Path) {
    let ballast = vec![1; 1 << 20];
    let mut file = std::fs::File::options().create(true).append(true).open(path).unwrap();
    // The error at the end is wanted.
    while std::io::Write::write_all(&mut file, &ballast).is_ok() {}
}

/// What the target writes comes to nothing when it is to be made durable.
#[test]
fn a_target_that_cannot_write_ends_the_migration_and_not_the_guest() {
    let lab = Lab::new();
    let Some((device, file)) = Loop::in_memory(64 << 20) else { return };
    let Some(_pool) = Mount::ext2(&lab.b.pool(), device) else { return };
    break_behind(&file, 12 << 20);
    let mut case = Case::begin_small(lab);
    refused(&case.lab.a, &MIGRATE, IO, &["at the target", "Input/output error"]);
    assert_eq!(case.guest.complaint(), None);
    assert_eq!(case.lab.a.image(IMAGE).unwrap()["state"], "owner");
    assert!(case.lab.a.dray(&["cancel", "--discard"]).status.code() != Some(0), "it has ended");
    let before = case.guest.requests();
    wait_for("the guest", Duration::from_secs(10), || case.guest.requests() > before + 5).unwrap();
    case.lab.b.kill();
}

#[test]
fn a_source_that_cannot_be_read_ends_the_migration_and_not_the_guest() {
    let mut lab = Lab::with(|_, config| config + "[[pool]]\nname = \"dev\"\npath = \"/dev\"\n");
    let file = lab.dir.path().join("device.img");
    guest::make_image(&file, FAR);
    let Some(device) = Loop::over(&file) else { return };
    // What lies behind the end of its file the device cannot read.
    let readable = 80 << 20;
    std::fs::File::options().write(true).open(&file).unwrap().set_len(readable).unwrap();
    lab.start();
    let path = device.0.to_str().unwrap();
    assert!(lab.a.dray(&["images", "add", IMAGE, path]).status.success(), "{}", lab.a.log());
    let guest = Guest::start(&lab, IMAGE, FAR, SMALL, 5);
    refused(&lab.a, &MIGRATE, IO, &["reading", "Input/output error"]);
    let before = guest.requests();
    wait_for("the guest", Duration::from_secs(10), || guest.requests() > before + 5).unwrap();
    assert_eq!(guest.complaint(), None);
    assert_eq!(lab.a.image(IMAGE).unwrap()["state"], "owner");
    guest.stop();
    lab.a.kill();
    lab.b.kill();
}

/// The guest's own error, and nobody else's: the migration goes on, and at the target is room.
#[test]
fn a_source_that_fills_up_tells_its_guest_and_still_moves() {
    let mut lab = Lab::new();
    let Some(small) = Mount::tmpfs(&lab.a.pool(), "size=30m") else { return };
    guest::make_image(&small.path.join(IMAGE), FAR);
    fill(&small.path.join("ballast"));
    lab.start();
    lab.a.add(IMAGE);
    let hole = guest::first_hole(FAR) * guest::BLOCK;
    let write = |socket: &Path| {
        let mut client = Client::connect(socket, IMAGE).unwrap();
        client.request(WRITE, hole, guest::BLOCK as u32, &guest::content(0, 7), &|| true)
    };
    let refused = write(&lab.a.nbd());
    assert!(matches!(refused, Err(Fault::Error(ENOSPC))), "{refused:?}");
    let moved = lab.a.dray(&[&MIGRATE[..], &["--verify"]].concat());
    assert!(moved.status.success(), "{moved:?}");
    assert!(write(&lab.b.nbd()).is_ok());
    assert!(lab.b.pool().join(IMAGE).metadata().unwrap().len() >= DATA);
    lab.a.kill();
    lab.b.kill();
}

/// Nothing begins that could not be remembered.
#[test]
fn a_state_directory_without_room_is_refused() {
    for name in ["hosta", "hostb"] {
        let mut lab = Lab::new();
        let state = lab.host(name).dir.join("state");
        let Some(small) = Mount::tmpfs(&state, "size=1m") else { return };
        let case = Case::begin_small(lab);
        fill(&small.path.join("ballast"));
        refused(&case.lab.a, &MIGRATE, NO_SPACE, &["No space left"]);
        nothing_happened(&case);
        std::fs::remove_file(small.path.join("ballast")).unwrap();
        let mut case = case;
        case.migrate("hybrid", None).unwrap();
        case.await_end().unwrap();
        case.end().unwrap();
    }
}
