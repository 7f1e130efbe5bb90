//! A released disk that was made shorter and longer again: QEMU's bitmap tells nothing of what it cut off, and the
//! next backup has it all the same.

use crate::unlocked::{BEFORE, CHUNK, ON_RAW, SCSI, SIZE, Scene};
use serde_json::json;

/// Where a disk is cut: within a block of what the guest has written.
const CUT: u64 = BEFORE + CHUNK / 2 + 1536;

fn resize(scene: &Scene, size: u64) {
    for disk in ["node0", "node1"] {
        scene.ask("block_resize", &json!({ "node-name": disk, "size": size }));
    }
}

#[test]
fn a_released_disk_that_was_shorter_for_a_while_counts_as_changed() {
    let scene = Scene::new("shrunk", &[SCSI, ON_RAW]);
    scene.release();
    resize(&scene, CUT);
    resize(&scene, SIZE);
    assert_eq!(scene.changed(), [SIZE, SIZE]);
    // And the bitmap is believed again.
    scene.release();
    let changed = scene.changed();
    assert!(changed.iter().all(|changed| *changed < SIZE), "{changed:?}");
}

/// A cut within the last piece, which no bit of QEMU's tells: it counts as changed at any time.
#[test]
fn what_was_cut_off_the_very_end_is_in_the_next_backup() {
    let scene = Scene::new("shrunk_end", &[SCSI, ON_RAW]);
    for cut in [512, 1536, 4096, 40 << 10] {
        [0, 1].into_iter().for_each(|disk| scene.write(disk, SIZE - CHUNK));
        scene.release();
        resize(&scene, SIZE - cut);
        resize(&scene, SIZE);
        // It compares the backup with the file.
        scene.changed();
    }
}
