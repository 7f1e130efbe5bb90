//! `dray claim` of what a migration that is over has left behind.

use crate::claims::{CLAIM, IMAGE, WAIT, claim, fresh, make, restart_twice, write};
use crate::guest::{self, Versions};
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

/// The target has all of an image, and has not heard that the source knows; the source has claimed its replica, and a
/// guest has written to that. The target is away.
fn claimed_while_its_target_is_away(lab: &mut Lab) -> Versions {
    make(lab, IMAGE);
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
    versions
}

/// What is done waits for its target, and says so.
fn waits_for_its_target(lab: &Lab) {
    assert!(!lab.a.log().contains("cannot bring back"), "{}", lab.a.log());
    assert!(lab.a.open_migrations() > 0, "its target has not heard of the end");
    let shown = || result(&lab.a.dray(&["--json", "status"]))[0]["progress"]["phase"].clone();
    wait_for("what is left to do", WAIT, || shown() == "release").unwrap();
}

/// The target comes back and hears it; there is nothing with which its image could be compared.
fn its_target_hears_of_the_end(lab: &mut Lab) {
    lab.b.start();
    let over = || lab.a.open_migrations() + lab.b.open_migrations() == 0;
    wait_for("the end at both", WAIT, over).unwrap();
    let ended = result(&lab.a.dray(&["--json", "status"]))[0].clone();
    assert_eq!(ended["state"], "completed", "{ended}");
    assert_eq!(ended["summary"]["verified"], "not comparable", "{ended}");
    lab.a.kill();
    lab.b.kill();
    guest::compare(&lab.b.pool().join(IMAGE), &fresh()).unwrap();
}

/// The claim gives the image another id. What is done needs none of its images to tell its target so, and has
/// nothing left with which the target's could be compared.
#[test]
fn a_migration_that_is_done_tells_its_target_so_although_its_image_was_claimed() {
    let mut lab = Lab::new();
    let versions = claimed_while_its_target_is_away(&mut lab);
    restart_twice(&mut lab.a, IMAGE, &versions);
    waits_for_its_target(&lab);
    its_target_hears_of_the_end(&mut lab);
    guest::compare(&lab.a.pool().join(IMAGE), &versions).unwrap();
}

/// The image is removed after that, its file too or not.
#[test]
fn a_migration_that_is_done_tells_its_target_so_although_its_image_is_gone() {
    for deleted in [true, false] {
        let mut lab = Lab::new();
        let versions = claimed_while_its_target_is_away(&mut lab);
        let removed = lab.a.dray(&["images", "remove", IMAGE]);
        assert!(removed.status.success(), "{removed:?}");
        let file = lab.a.pool().join(IMAGE);
        if deleted {
            std::fs::remove_file(&file).unwrap();
        }
        for _ in 0..2 {
            lab.a.kill();
            lab.a.start();
        }
        waits_for_its_target(&lab);
        its_target_hears_of_the_end(&mut lab);
        assert!(deleted || guest::compare(&file, &versions).is_ok(), "nobody touches the file");
    }
}
