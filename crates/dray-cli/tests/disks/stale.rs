//! What is left of a migration that is over says nothing about the image any more: it takes part in
//! another one by now, or has come back, or only the name is the same.

use crate::case::{BLOCKS, IMAGE};
use crate::guest;
use crate::lab::{Host, Lab, wait_for};
use crate::moves::SLOW;
use crate::refusals::{CONFLICT, refused};
use serde_json::json;
use std::time::Duration;

/// Longest wait for anything.
const END: Duration = Duration::from_secs(45);

fn migrate(from: &Host, to: &str, strategy: &str) {
    let subject = json!({"images": {"names": [IMAGE]}});
    let bandwidth = json!({"bytes_per_second": SLOW});
    let command = json!({"migrate": {"subject": subject, "to": to, "strategy": strategy,
        "bandwidth": bandwidth, "detach": true}});
    from.ask(command).unwrap();
}

fn owns(host: &Host) -> bool {
    host.image(IMAGE).is_some_and(|image| image["state"] == "owner")
}

#[test]
fn a_move_that_was_given_up_does_not_touch_the_next_one() {
    let mut lab = Lab::new();
    let mut c = lab.third();
    guest::make_image(&lab.a.pool().join(IMAGE), BLOCKS);
    lab.start();
    c.start();
    lab.a.add(IMAGE);
    migrate(&lab.a, "hostb", "pre-copy");
    let copied = || lab.a.progress().is_some_and(|(_, p)| p["total"]["bytes_done"] != 0);
    wait_for("the copy", END, copied).unwrap();
    lab.b.kill();
    assert!(lab.a.dray(&["cancel"]).status.success());
    assert_eq!(lab.a.open_migrations(), 1, "it can be taken up again");
    migrate(&lab.a, "hostc", "post-copy");
    wait_for("the handover", END, || owns(&c)).unwrap();
    for _ in 0..2 {
        lab.a.kill();
        lab.a.start();
        let image = lab.a.image(IMAGE).unwrap();
        assert_eq!(image["state"], "replica", "{image}");
        assert!(!image["migration"].is_null(), "hostc reads from it: {image}");
        refused(&lab.a, &["images", "remove", IMAGE, "--delete"], CONFLICT, &["migration"]);
    }
    let whole = || c.image(IMAGE).is_some_and(|image| image["missing_blocks"] == 0);
    wait_for("the rest", END, || owns(&c) && whole()).unwrap();
    wait_for("its name", END, || c.files() == [IMAGE]).unwrap();
    c.kill();
    guest::compare(&c.pool().join(IMAGE), &guest::first_versions(BLOCKS)).unwrap();
}

/// Neither its file nor its record is there: its name is free.
#[test]
fn an_image_that_was_removed_after_a_cancelled_move_is_gone_after_a_restart() {
    let mut lab = Lab::new();
    let path = lab.a.pool().join(IMAGE);
    guest::make_image(&path, BLOCKS / 16);
    lab.start();
    lab.a.add(IMAGE);
    migrate(&lab.a, "hostb", "pre-copy");
    let copied = || lab.a.progress().is_some_and(|(_, p)| p["total"]["bytes_done"] != 0);
    wait_for("the copy", END, copied).unwrap();
    assert!(lab.a.dray(&["cancel"]).status.success());
    let free = || lab.a.image(IMAGE).is_some_and(|image| image["migration"].is_null());
    wait_for("the end", END, free).unwrap();
    assert!(lab.a.dray(&["images", "remove", IMAGE]).status.success());
    std::fs::remove_file(&path).unwrap();
    for _ in 0..2 {
        lab.a.kill();
        lab.a.start();
        assert!(lab.a.image(IMAGE).is_none(), "{:?}", lab.a.image(IMAGE));
    }
    guest::make_image(&path, BLOCKS / 16);
    lab.a.add(IMAGE);
    assert!(owns(&lab.a));
    for _ in 0..2 {
        lab.a.kill();
        lab.a.start();
        assert!(owns(&lab.a), "{:?}", lab.a.image(IMAGE));
    }
}

/// The target of a move that is complete still answers its source, which has not heard it, while the
/// image moves on.
#[test]
fn a_source_that_comes_late_does_not_touch_the_next_move() {
    let mut lab = Lab::new();
    let mut c = lab.third();
    guest::make_image(&lab.a.pool().join(IMAGE), BLOCKS);
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "Journal-Done")]);
    lab.b.start();
    c.start();
    lab.a.add(IMAGE);
    let command = json!({"migrate": {"subject": {"images": {"names": [IMAGE]}}, "to": "hostb",
        "strategy": "pre-copy", "detach": true}});
    lab.a.ask(command).unwrap();
    wait_for("the death", END, || lab.a.has_died()).unwrap();
    let free = |host: &Host| host.image(IMAGE).is_some_and(|image| image["migration"].is_null());
    wait_for("the target's end", END, || owns(&lab.b) && free(&lab.b)).unwrap();
    migrate(&lab.b, "hostc", "post-copy");
    wait_for("the handover", END, || owns(&c)).unwrap();
    // The first source is back, and then the host in the middle restarts.
    lab.a.start();
    wait_for("the first move's end", END, || lab.a.open_migrations() == 0).unwrap();
    for _ in 0..2 {
        let image = lab.b.image(IMAGE).unwrap();
        assert_eq!(image["state"], "replica", "{image}");
        assert!(!image["migration"].is_null(), "hostc reads from it: {image}");
        lab.b.kill();
        lab.b.start();
    }
    let whole = || c.image(IMAGE).is_some_and(|image| image["missing_blocks"] == 0);
    wait_for("the rest", END, whole).unwrap();
    wait_for("its name", END, || c.files() == [IMAGE]).unwrap();
    c.kill();
    guest::compare(&c.pool().join(IMAGE), &guest::first_versions(BLOCKS)).unwrap();
}
