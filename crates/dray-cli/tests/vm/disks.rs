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
