//! While a disk changes place neither QEMU nor dray has the lock on its file. Another program takes it in that time,
//! writes and lets it go: nobody's record has that write, and the next backup has it all the same.

use crate::unlocked::{AFTER, ON_RAW, Scene};
use dray_image::locks::{Hold, QemuLocks};
use dray_testkit::lab::Answer;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const BLOCK: u64 = 4096;
const OUTSIDE: u64 = 8 << 20;
/// So many exchanges are tried until the program got in between in each direction.
const TRIES: u64 = 60;

/// Does `during` while another program writes to the file at `path` whenever it gets QEMU's locks. How often it did.
fn beside(path: &Path, nth: u64, during: impl FnOnce()) -> u64 {
    let stop = AtomicBool::new(false);
    let program = || {
        let file = File::options().read(true).write(true).open(path).expect("open");
        let mut writes = 0;
        while !stop.load(Ordering::SeqCst) {
            if QemuLocks::take(&file, path, Hold::Owner).is_ok() {
                let at = OUTSIDE + (nth * 16 + writes % 16) * BLOCK;
                file.write_all_at(&[9; BLOCK as usize], at).expect("a write");
                writes += 1;
            }
            thread::sleep(Duration::from_micros(500));
        }
        writes
    };
    thread::scope(|scope| {
        let program = scope.spawn(program);
        during();
        stop.store(true, Ordering::SeqCst);
        program.join().expect("the program")
    })
}

/// Has the disk change place with `command`, beside the program. How often that has written.
fn exchange(scene: &Scene, path: &Path, nth: u64, command: &str) -> u64 {
    let mut done = false;
    let writes = beside(path, nth, || done = scene.try_on_vm(command));
    if !done {
        // The program had the lock at the wrong moment, and the command was refused.
        scene.on_vm(command);
    }
    writes
}

#[test]
fn a_write_while_the_lock_changes_hands_is_in_the_next_backup() {
    let scene = Scene::new("between", &[ON_RAW]);
    let path: PathBuf = scene.path(0);
    scene.on_vm("adopt");
    let mut writes = [0, 0];
    for nth in 0..TRIES {
        scene.back_up(0);
        writes[0] += exchange(&scene, &path, 2 * nth, "release");
        scene.write(0, AFTER);
        writes[1] += exchange(&scene, &path, 2 * nth + 1, "adopt");
        scene.back_up(0);
        scene.assert_restored(0);
        if writes.iter().all(|count| *count > 0) {
            return;
        }
    }
    panic!("in {TRIES} exchanges the program wrote {writes:?} times");
}

/// Another client of the export, which writes block after block until its export has gone.
fn other_client(scene: &Scene) -> Child {
    let socket = scene.agent().nbd_socket();
    let export = format!("nbd+unix:///disk0.raw?socket={}", socket.display());
    let mut client = Command::new("qemu-io");
    client.args(["-f", "raw", &export]).stdin(Stdio::piped()).stdout(Stdio::null());
    client.stderr(Stdio::null());
    let mut client = client.spawn().expect("qemu-io");
    let mut commands = client.stdin.take().expect("its input");
    // One that has ended takes no more of them.
    thread::spawn(move || {
        for nth in 0..3000 {
            let at = OUTSIDE + nth % 1000 * BLOCK;
            if writeln!(commands, "write -P {} {at} {BLOCK}", nth / 1000 + 1).is_err() {
                return;
            }
        }
    });
    client
}

#[test]
fn what_another_client_writes_while_the_disk_is_released_is_in_the_next_backup() {
    let scene = Scene::new("clients", &[ON_RAW]);
    scene.on_vm("adopt");
    for _ in 0..4 {
        scene.back_up(0);
        let mut client = other_client(&scene);
        thread::sleep(Duration::from_millis(60));
        scene.on_vm("release");
        client.wait().expect("it ends");
        scene.on_vm("adopt");
        scene.back_up(0);
        scene.assert_restored(0);
    }
}

/// The disk is a plain file as soon as its QEMU has ended, and may be written to by the next one: what is read of it
/// then is of no moment.
#[test]
fn a_backup_during_which_the_vm_ends_is_none() {
    let mut scene = Scene::new("ended", &[ON_RAW]);
    scene.on_vm("adopt");
    scene.monitor("qemu-io -d disk0 \"write -P 5 0 16M\"");
    let to = scene.repository();
    let backup = ["backup", "disk0.raw", "--to", &to, "--bandwidth", "32Mbit"];
    let backup = scene.agent().spawn(&backup).expect("dray");
    thread::sleep(Duration::from_millis(800));
    scene.kill();
    let answer = Answer::of(backup).expect("answer");
    assert_eq!(answer.code, 6, "{answer:?}");
    assert!(answer.stderr.contains("has left dray while it was read"), "{answer:?}");
    let left = scene.dray(&["backups", "list", &to]);
    assert!(!left.to_string().contains("disk0.raw"), "{left:#}");
}
