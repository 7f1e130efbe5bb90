//! Each strategy moves a writing guest with a resident and an adopted disk.

use crate::stage::{Kind, Stage};

fn moves(strategy: &str) {
    let kinds = [Kind::Resident, Kind::Plain];
    let Some(mut stage) = Stage::new(strategy, &kinds, 4_000_000) else { return };
    stage.prepare();
    let summary = stage.migrate(&["--strategy", strategy, "--verify"]).expect("moves");
    println!("{strategy}: {summary:#}");
    assert_eq!(summary["result"], "completed");
    assert_eq!(summary["strategy"], strategy);
    stage.assert_guest_is_well();
    stage.quit_source();
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("b");
}

#[test]
fn hybrid() {
    moves("hybrid");
}

#[test]
fn pre_copy() {
    moves("pre-copy");
}

#[test]
fn post_copy() {
    moves("post-copy");
}
