//! What cannot be done: one clear error with a hint and an exit code, a guest that notices nothing,
//! and nothing left behind on either host.

use crate::case::{Case, FAR, IMAGE, SMALL};
use crate::guest::{self, Guest};
use crate::lab::{DRAY, Host, Lab, run, wait_for};
use crate::moves::SLOW;
use dray_agent::pki::{self, Validity};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, SystemTime};

const NOT_FOUND: i32 = 5;
const CONFLICT: i32 = 6;
const DENIED: i32 = 7;
const NO_SPACE: i32 = 10;
const IO: i32 = 11;

/// Runs a command that must fail like this.
fn refused(host: &Host, args: &[&str], code: i32, words: &[&str]) {
    failed(args, &host.dray(args), code, words);
}

fn failed(args: &[&str], output: &Output, code: i32, words: &[&str]) {
    let all = String::from_utf8_lossy(&output.stderr).into_owned();
    // What comes before is progress.
    let text = &all[all.find("dray: ").unwrap_or_default()..];
    assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
    let told = text.starts_with("dray: ") && text.contains(": ") && text.contains("\nhint: ");
    assert!(told, "{args:?} must say what, why and what to do: {text}");
    assert_eq!(text.matches("dray: ").count(), 1, "{args:?} must say it once: {text}");
    for word in words {
        assert!(text.contains(word), "{args:?} must name '{word}': {text}");
    }
}

const MIGRATE: [&str; 5] = ["migrate", "--image", IMAGE, "--to", "hostb"];

/// The guest is at the source and well, and the target has nothing.
fn nothing_happened(case: &Case) {
    assert_eq!(case.guest.complaint(), None);
    let image = case.lab.a.image(IMAGE).unwrap();
    assert_eq!((&image["state"], image["migration"].is_null()), (&"owner".into(), true));
    assert_eq!(case.lab.a.open_migrations() + case.lab.b.open_migrations(), 0);
    assert!(case.lab.b.image(IMAGE).is_none());
    let before = case.guest.requests();
    wait_for("the guest", Duration::from_secs(10), || case.guest.requests() > before + 5).unwrap();
}

/// A file system of its own, so that it can be full or read-only.
struct Mount(PathBuf);

impl Mount {
    fn tmpfs(path: &Path, options: &str) -> Self {
        std::fs::create_dir_all(path).unwrap();
        run(Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(path));
        Self(path.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Agents may still have files open; the directory goes with the test.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Somebody else who uses an image.
fn used(path: &Path) -> Running {
    let socket = path.with_extension("sock");
    let child = Command::new("qemu-nbd")
        .args(["--persistent", "-f", "raw", "-k"])
        .args([&socket, path])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("qemu-nbd", Duration::from_secs(10), || socket.exists()).unwrap();
    Running(child)
}

#[test]
fn what_makes_no_sense_is_refused_at_once() {
    let mut case = Case::begin_small(Lab::new());
    let a = &case.lab.a;
    refused(a, &["migrate", "--image", "no.img", "--to", "hostb"], NOT_FOUND, &["no.img"]);
    refused(a, &["migrate", "--image", IMAGE, "--to", "hostc"], NOT_FOUND, &["hostc", "peer"]);
    refused(a, &["migrate", "--image", IMAGE, "--to", "hosta"], NOT_FOUND, &["hosta"]);
    refused(a, &["images", "add", "x", "/etc/hostname"], DENIED, &["/etc/hostname", "pool"]);
    let gone = a.pool().join("gone.img");
    refused(a, &["images", "add", "x", gone.to_str().unwrap()], NOT_FOUND, &["gone.img"]);
    let other = a.pool().join("other.img");
    std::fs::write(&other, [7; 4096]).unwrap();
    let user = used(&other);
    refused(a, &["images", "add", "x", other.to_str().unwrap()], CONFLICT, &["in qemu-nbd (pid"]);
    drop(user);
    let taken = case.lab.b.pool().join(IMAGE);
    std::fs::write(&taken, b"precious").unwrap();
    refused(a, &MIGRATE, CONFLICT, &["exists already"]);
    assert_eq!(std::fs::read(&taken).unwrap(), b"precious");
    std::fs::remove_file(&taken).unwrap();
    nothing_happened(&case);
    for path in [other.clone(), other.with_extension("sock")] {
        // The socket goes with its server.
        let _ = std::fs::remove_file(path);
    }
    case.migrate("hybrid", None).unwrap();
    case.await_end().unwrap();
    case.end().unwrap();
}

#[test]
fn a_file_that_cannot_be_written_is_refused() {
    let mut lab = Lab::new();
    let mount = Mount::tmpfs(&lab.a.pool().join("ro"), "size=1m");
    std::fs::write(mount.0.join("x.img"), [7; 4096]).unwrap();
    run(Command::new("mount").args(["-o", "remount,ro"]).arg(&mount.0));
    lab.a.start();
    let path = mount.0.join("x.img");
    refused(&lab.a, &["images", "add", "x", path.to_str().unwrap()], DENIED, &["x.img"]);
    assert!(lab.a.image("x").is_none());
    lab.a.kill();
}

#[test]
fn certificates_of_another_authority_are_refused() {
    let lab = Lab::with(|name, config| match name {
        "hostb" => config.replace("/pki/hostb", "/other/hostb"),
        _ => config,
    });
    let other = lab.dir.path().join("other");
    run(Command::new(DRAY).args(["pki", "init", "--dir"]).arg(&other));
    run(Command::new(DRAY).args(["pki", "issue", "hostb", "--dir"]).arg(&other));
    let case = Case::begin_small(lab);
    refused(&case.lab.a, &MIGRATE, DENIED, &["hostb", "certificate", "authority"]);
    nothing_happened(&case);
}

#[test]
fn a_certificate_that_has_expired_is_refused() {
    let lab = Lab::new();
    let pki = lab.dir.path().join("pki");
    std::fs::remove_dir_all(pki.join("hostb")).unwrap();
    let now = SystemTime::now();
    let brief = Validity { from: now - BRIEF, until: now + BRIEF };
    pki::issue_for(&pki, "hostb", &[], brief).unwrap();
    let case = Case::begin_small(lab);
    // A certificate is good to the end of its last second.
    std::thread::sleep(BRIEF + Duration::from_secs(1));
    refused(&case.lab.a, &MIGRATE, DENIED, &["the certificate of hostb expired", "dray pki"]);
    nothing_happened(&case);
}

/// Longer than two agents take to start.
const BRIEF: Duration = Duration::from_secs(5);

#[test]
fn a_host_that_the_target_does_not_know_is_refused() {
    let lab = Lab::with(|name, config| match name {
        "hostb" => config.replace("\"hosta\"\naddress", "\"hostz\"\naddress"),
        _ => config,
    });
    let case = Case::begin_small(lab);
    refused(&case.lab.a, &MIGRATE, DENIED, &["hosta", "[[peer]]"]);
    nothing_happened(&case);
}

#[test]
fn a_pool_without_room_is_refused() {
    let lab = Lab::new();
    let _small = Mount::tmpfs(&lab.b.pool(), "size=8m");
    let case = Case::begin_small(lab);
    refused(&case.lab.a, &MIGRATE, NO_SPACE, &["free"]);
    nothing_happened(&case);
    assert!(case.lab.b.files().is_empty());
}

#[test]
fn a_target_that_fills_up_ends_the_migration_and_not_the_guest() {
    let lab = Lab::new();
    let small = Mount::tmpfs(&lab.b.pool(), "size=40m");
    let mut case = Case::begin_small(lab);
    let args = [&MIGRATE[..], &["--bandwidth", "6MiB/s"]].concat();
    let mut dray = Command::new(DRAY);
    dray.arg("--socket").arg(case.lab.a.api()).args(&args);
    let asked = dray.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    case.await_bytes(SLOW).unwrap();
    let ballast = small.0.join("ballast");
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

#[test]
fn there_is_nothing_to_cancel_after_the_handover() {
    let mut case = Case::begin_small(Lab::new());
    case.migrate("post-copy", Some(SLOW)).unwrap();
    case.await_shown("backfill").unwrap();
    refused(&case.lab.a, &["cancel"], CONFLICT, &["handed over"]);
    case.await_end().unwrap();
    case.end().unwrap();
}

/// A block device over a file.
struct Loop(PathBuf);

impl Drop for Loop {
    fn drop(&mut self) {
        // It stays until the agent has closed it.
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

#[test]
fn a_source_that_cannot_be_read_ends_the_migration_and_not_the_guest() {
    let mut lab = Lab::with(|_, config| config + "[[pool]]\nname = \"dev\"\npath = \"/dev\"\n");
    let file = lab.dir.path().join("device.img");
    guest::make_image(&file, FAR);
    let name = run(Command::new("losetup").args(["-f", "--show"]).arg(&file));
    let device = Loop(name.trim().into());
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
