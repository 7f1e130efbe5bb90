//! While a disk changes place neither QEMU nor dray has the lock on its file. Another program takes it in that time,
//! writes and lets it go: nobody's record has that write, and the next backup has it all the same.

use crate::unlocked::{AFTER, ON_RAW, Scene};
use dray_image::locks::{Hold, QemuLocks};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
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
