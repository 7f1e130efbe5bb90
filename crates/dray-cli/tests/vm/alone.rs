//! Images move without a VM, and somebody starts one on them meanwhile.

use crate::failures::copying;
use crate::stage::{Kind, PATIENCE, Stage};
use serde_json::Value;

/// The images of a VM that was shut down are on their way, and it is started again.
fn started_on_the_way(name: &str) -> Option<Stage> {
    let mut stage = Stage::new(name, &[Kind::Resident], 2_000_000)?;
    stage.finish_guest();
    let alone = ["migrate", "--image", "disk0.raw", "--to", "hostb", "--bandwidth", "30Mbit"];
    let begun = stage.lab.host("a").dray(&[&alone[..], &["--detach"]].concat()).expect("migrate");
    assert_eq!(begun.code, 0, "{begun:?}");
    stage.lab.host("a").wait_status(PATIENCE, copying).expect("it copies");
    stage.start_source_again();
    stage.assert_guest_is_well();
    let waits = |status: &Value| {
        let said = status["error"].to_string();
        said.contains("the handover waits") && said.contains("a vm uses it")
    };
    let waits = stage.lab.host("a").wait_status(PATIENCE, waits);
    let waits = waits.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    assert_eq!(waits["state"], "running", "{waits:#}");
    stage.assert_guest_is_well();
    Some(stage)
}

#[test]
fn an_image_that_a_vm_was_started_on_stays_until_that_is_shut_down() {
    let Some(mut stage) = started_on_the_way("alone-ends") else { return };
    stage.finish_guest();
    let a = stage.lab.host("a");
    let ended = a.wait_status(PATIENCE, |status| status["state"] == "completed");
    let ended = ended.unwrap_or_else(|why| panic!("{why}\n{}", stage.logs()));
    assert!(ended["error"].is_null(), "{ended:#}");
    stage.assert_images("b");
}

#[test]
#[ignore = "long: make long"]
fn an_image_that_a_vm_was_started_on_stays_when_the_move_is_cancelled() {
    let Some(mut stage) = started_on_the_way("alone-cancelled") else { return };
    stage.lab.host("a").json(&["cancel"]).expect("cancel");
    stage.assert_guest_is_well();
    stage.finish_guest();
    stage.assert_images("a");
}
