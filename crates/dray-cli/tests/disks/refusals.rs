//! What cannot be done: one clear error with a hint and an exit code, a guest that notices nothing,
//! and nothing left behind on either host.

use crate::case::{Case, IMAGE};
use crate::lab::{DRAY, Host, Lab, run, wait_for};
use crate::moves::SLOW;
use dray_net::pki::{self, Validity};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, SystemTime};

const INVALID: i32 = 4;
const NOT_FOUND: i32 = 5;
/// It does not fit what is there.
pub const CONFLICT: i32 = 6;
/// Not allowed.
pub const DENIED: i32 = 7;

/// Runs a command that must fail like this.
pub fn refused(host: &Host, args: &[&str], code: i32, words: &[&str]) {
    failed(args, &host.dray(args), code, words);
}

/// A command must have failed like this: it says once what, why and what to do.
pub fn failed(args: &[&str], output: &Output, code: i32, words: &[&str]) {
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

/// Moves the image.
pub const MIGRATE: [&str; 5] = ["migrate", "--image", IMAGE, "--to", "hostb"];

/// The guest is at the source and well, and the target has nothing.
pub fn nothing_happened(case: &Case) {
    assert_eq!(case.guest.complaint(), None);
    let image = case.lab.a.image(IMAGE).unwrap();
    assert_eq!((&image["state"], image["migration"].is_null()), (&"owner".into(), true));
    let lab = &case.lab;
    let nothing = || {
        let forgotten = lab.a.open_migrations() + lab.b.open_migrations() == 0;
        forgotten && lab.b.image(IMAGE).is_none() && lab.b.files().is_empty()
    };
    // A target that was asked to forget does so in its own time.
    let gone = wait_for("nothing left", Duration::from_secs(10), nothing);
    gone.unwrap_or_else(|why| panic!("{why}: {:?}", lab.b.files()));
    let before = case.guest.requests();
    wait_for("the guest", Duration::from_secs(10), || case.guest.requests() > before + 5).unwrap();
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
    let link = a.pool().join("link.img");
    std::os::unix::fs::symlink("/etc/hostname", &link).unwrap();
    refused(a, &["images", "add", "x", link.to_str().unwrap()], DENIED, &["link.img", "pool"]);
    std::fs::remove_file(link).unwrap();
    let outside = [&MIGRATE[..], &["--name", "disk.img=../disk.img"]].concat();
    refused(a, &outside, INVALID, &["../disk.img", "not a name"]);
    let pool = [&MIGRATE[..], &["--pool", "other"]].concat();
    refused(a, &pool, DENIED, &["other", "pool"]);
    let gone = a.pool().join("gone.img");
    refused(a, &["images", "add", "x", gone.to_str().unwrap()], NOT_FOUND, &["gone.img"]);
    let other = a.pool().join("other.img");
    std::fs::write(&other, [7; 4096]).unwrap();
    let user = used(&other);
    refused(a, &["images", "add", "x", other.to_str().unwrap()], CONFLICT, &["in qemu-nbd (pid"]);
    drop(user);
    // The agent's state directory may be lost, and the file what another host still needs.
    for (name, is) in [("replica-2", "another host owns"), ("partial", "not arrived whole")] {
        let aside = a.pool().join(format!(".x.img.dray-{name}"));
        std::fs::write(&aside, [7; 4096]).unwrap();
        refused(a, &["images", "add", "x", aside.to_str().unwrap()], CONFLICT, &[is, "rename"]);
        std::fs::remove_file(&aside).unwrap();
    }
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

/// The target sees it, and says so in words that reach the operator at the source.
#[test]
fn a_certificate_of_the_source_that_has_expired_is_refused() {
    let lab = Lab::new();
    let pki = lab.dir.path().join("pki");
    std::fs::remove_dir_all(pki.join("hosta")).unwrap();
    let now = SystemTime::now();
    let brief = Validity { from: now - BRIEF, until: now + BRIEF };
    pki::issue_for(&pki, "hosta", &[], brief).unwrap();
    let case = Case::begin_small(lab);
    std::thread::sleep(BRIEF + Duration::from_secs(1));
    refused(&case.lab.a, &MIGRATE, DENIED, &["certificate", "expired", "dray pki"]);
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
fn there_is_nothing_to_cancel_after_the_handover() {
    let mut case = Case::begin_small(Lab::new());
    case.migrate("post-copy", Some(SLOW)).unwrap();
    case.await_shown("backfill").unwrap();
    refused(&case.lab.a, &["cancel"], CONFLICT, &["handed over"]);
    case.await_end().unwrap();
    case.end().unwrap();
}
