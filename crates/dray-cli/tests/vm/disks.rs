//! A qcow2 disk arrives with its backing file, bitmap and snapshot.

use crate::stage::{Kind, SEEDED, SIZE, Stage};
use dray_testkit::guest::{Bystander, tools};

#[test]
fn a_qcow2_chain_arrives_whole() {
    let Some(mut stage) = Stage::new("qcow2", &[Kind::Qcow2], 3_000_000) else { return };
    stage.moves();
    // The user can still roll back: the snapshot holds what the disk was before the guest wrote.
    let path = stage.image("b", 0);
    let path = path.to_str().expect("text");
    let flat = stage.lab.dir().join("before.raw");
    // QEMU itself rolls nothing back that carries bitmaps.
    tools::run("qemu-img", &["bitmap", "--remove", path, "backup"]).expect("no bitmap");
    tools::run("qemu-img", &["snapshot", "-a", "before", path]).expect("rolls back");
    let raw = flat.to_str().expect("text");
    tools::run("qemu-img", &["convert", "-O", "raw", path, raw]).expect("convert");
    Bystander::new(1, SIZE, SEEDED).check_raw(&flat).expect("what it was before");
    tools::run("qemu-img", &["check", path]).expect("a sound qcow2");
}

/// It arrives on dray and stays there: its raw node needs the same options on the file.
#[test]
fn a_part_of_a_file_that_stayed_on_dray_is_released() {
    let Some(mut stage) = Stage::new("part", &[Kind::Part], 2_000_000) else { return };
    stage.prepare();
    stage.migrate(&["--release", "never"]).expect("moves");
    stage.assert_guest_is_well();
    let qmp = stage.target_qmp();
    let released = stage.lab.host("b").dray(&["release", "--qmp", &qmp]).expect("release");
    assert_eq!(released.code, 0, "{released:?}\n{}", stage.logs());
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}
