//! The locks against the real QEMU: each side sees the other's, and a lock keeps writers out.

use dray_image::{ErrorKind, Hold, QemuLocks, locks};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn image() -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new().prefix("image-qemu-").suffix(".raw").tempfile().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    file
}

fn qemu_io(path: &Path, command: &str) -> Output {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.args(["-f", "raw", "-c", command]).arg(path).output().expect("qemu-io is installed")
}

fn take(path: &Path) -> dray_image::Result<QemuLocks> {
    QemuLocks::take(&std::fs::File::open(path).unwrap(), path, Hold::Owner)
}

fn text(output: &Output) -> String {
    let all = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&all).into_owned()
}

/// A child between fork and exec holds every lock that this process holds: one test at a time.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[test]
fn qemu_cannot_open_what_dray_has_locked() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let image = image();
    let locks = take(image.path()).unwrap();
    let refused = qemu_io(image.path(), "write 0 4k");
    assert!(!refused.status.success());
    assert!(text(&refused).contains("Failed to get"), "{}", text(&refused));
    // A reader that must not see a moving image is kept out as well.
    let copy = image.path().with_extension("copy");
    let mut qemu_img = Command::new("qemu-img");
    qemu_img.args(["convert", "-f", "raw", "-O", "raw"]).arg(image.path()).arg(&copy);
    let convert = qemu_img.output().expect("qemu-img is installed");
    assert!(!convert.status.success(), "{}", text(&convert));
    assert!(!copy.exists());
    assert!(std::fs::read(image.path()).unwrap().iter().all(|&byte| byte == 0));
    drop(locks);
    let written = qemu_io(image.path(), "write -P 9 0 4k");
    assert!(written.status.success(), "{}", text(&written));
    assert_eq!(std::fs::read(image.path()).unwrap()[0], 9);
}

#[test]
fn dray_sees_what_qemu_has_open_and_who_it_is() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let image = image();
    let mut qemu_io = Command::new("qemu-io")
        .args(["-f", "raw"])
        .arg(image.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu-io is installed");
    // An answer shows that the image is open.
    let mut input = qemu_io.stdin.take().unwrap();
    input.write_all(b"length\n").unwrap();
    let mut answer = String::new();
    BufReader::new(qemu_io.stdout.take().unwrap()).read_line(&mut answer).unwrap();
    assert!(answer.contains("1 MiB"), "{answer}");

    let seen = locks::probe(image.path()).unwrap().expect("qemu-io has it open");
    assert!(seen.used.contains(&locks::Permission::Write), "{seen:?}");
    assert!(seen.excludes_owner());
    assert!(seen.by.iter().any(|process| process.pid == qemu_io.id()), "{seen:?}");
    let error = take(image.path()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InUse);
    let wanted = format!("it is open for writing in qemu-io (pid {})", qemu_io.id());
    assert!(error.to_string().ends_with(&wanted), "{error}");

    input.write_all(b"quit\n").unwrap();
    assert!(qemu_io.wait().unwrap().success());
    assert_eq!(locks::probe(image.path()).unwrap(), None);
}

#[test]
fn qemu_reads_what_dray_only_reads_and_cannot_write_it() {
    let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let image = image();
    let locks = QemuLocks::take(image.as_file(), image.path(), Hold::Reader).unwrap();
    assert!(!qemu_io(image.path(), "write 0 4k").status.success());
    let mut reader = Command::new("qemu-io");
    let read = reader.args(["-r", "-f", "raw", "-c", "read 0 4k"]).arg(image.path()).output();
    let read = read.expect("qemu-io is installed");
    assert!(read.status.success(), "{}", text(&read));
    drop(locks);
    assert!(qemu_io(image.path(), "write 0 4k").status.success());
}
