//! `dray claim` of what a migration that is over has left behind.

use crate::claims::{CLAIM, IMAGE, WAIT, claim, fresh, make, restart_twice, write};
use crate::guest;
use crate::lab::{Lab, wait_for};
use crate::moves::result;

#[test]
fn a_replica_whose_migration_is_over_can_be_claimed() {
    let mut lab = Lab::new();
    make(&lab, IMAGE);
    lab.start();
    lab.a.add(IMAGE);
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hostb"];
    assert_eq!(result(&lab.a.dray(&args))["result"], "completed");
    let left =
        || lab.a.image(IMAGE).is_some_and(|i| i["state"] == "replica" && i["migration"].is_null());
    wait_for("the end", WAIT, left).unwrap();
    lab.b.kill();
    claim(&lab.a, &CLAIM);
    let mut versions = fresh();
    write(&lab.a, IMAGE, &mut versions, 1, 2, 5);
    restart_twice(&mut lab.a, IMAGE, &versions);
    lab.a.kill();
    guest::compare(&lab.a.pool().join(IMAGE), &versions).unwrap();
}

/// The claim gives the image another id. What is done needs none of its images to tell its target so, and has
/// nothing left with which the target's could be compared.
#[test]
fn a_migration_that_is_done_tells_its_target_so_although_its_image_was_claimed() {
    let mut lab = Lab::new();
    make(&lab, IMAGE);
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "Notice-Done")]);
    lab.b.start();
    lab.a.add(IMAGE);
    let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--verify", "--detach"];
    assert!(lab.a.dray(&args).status.success());
    wait_for("the source's death", WAIT, || lab.a.has_died()).unwrap();
    assert!(lab.b.open_migrations() > 0, "it was to hear nothing");
    lab.b.kill();
    lab.a.start();
    claim(&lab.a, &CLAIM);
    let mut versions = fresh();
    write(&lab.a, IMAGE, &mut versions, 1, 2, 5);
    restart_twice(&mut lab.a, IMAGE, &versions);
    assert!(!lab.a.log().contains("cannot bring back"), "{}", lab.a.log());
    assert!(lab.a.open_migrations() > 0, "its target has not heard of the end");
    let shown = || result(&lab.a.dray(&["--json", "status"]))[0]["progress"]["phase"].clone();
    wait_for("what is left to do", WAIT, || shown() == "release").unwrap();
    lab.b.start();
    let over = || lab.a.open_migrations() + lab.b.open_migrations() == 0;
    wait_for("the end at both", WAIT, over).unwrap();
    let ended = result(&lab.a.dray(&["--json", "status"]))[0].clone();
    assert_eq!(ended["state"], "completed", "{ended}");
    assert_eq!(ended["summary"]["verified"], "not comparable", "{ended}");
    lab.a.kill();
    guest::compare(&lab.a.pool().join(IMAGE), &versions).unwrap();
    lab.b.kill();
    guest::compare(&lab.b.pool().join(IMAGE), &fresh()).unwrap();
}
