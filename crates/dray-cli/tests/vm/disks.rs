//! A qcow2 disk arrives with its backing file, bitmap and snapshot.

use crate::stage::{Kind, Stage};

#[test]
fn a_qcow2_chain_arrives_whole() {
    let Some(mut stage) = Stage::new("qcow2", &[Kind::Qcow2], 3_000_000) else { return };
    stage.prepare();
    let summary = stage.migrate(&[]).expect("moves");
    assert_eq!(summary["result"], "completed", "{summary:#}");
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.finish_guest();
    stage.assert_images("b");
}
