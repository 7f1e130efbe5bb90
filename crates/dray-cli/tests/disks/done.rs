//! A migration of which everything is done but its end: the target has all of the image, and has not heard that the
//! source knows.

use crate::claims::{IMAGE, WAIT, fresh, make, restart_twice};
use crate::guest;
use crate::lab::{Host, Lab, wait_for};
use crate::moves::result;
use crate::refusals::{CONFLICT, refused};

/// It is so, the target is dead, and the source was restarted.
fn done_and_unheard(lab: &mut Lab, verify: bool) {
    make(lab, IMAGE);
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "Notice-Done")]);
    lab.b.start();
    lab.a.add(IMAGE);
    let mut args = vec!["migrate", "--image", IMAGE, "--to", "hostb", "--detach"];
    args.extend(verify.then_some("--verify"));
    assert!(lab.a.dray(&args).status.success());
    wait_for("the source's death", WAIT, || lab.a.has_died()).unwrap();
    assert!(lab.b.open_migrations() > 0, "it was to hear nothing");
    lab.b.kill();
}

fn shows_that_it_waits(a: &Host) {
    let shown = || result(&a.dray(&["--json", "status"]))[0]["progress"].clone();
    let waits = || shown()["phase"] == "release" && shown()["link_up"] == false;
    wait_for("what is left to do", WAIT, waits).unwrap();
}

fn is_replica(a: &Host) {
    let left = a.image(IMAGE).unwrap();
    assert!(left["state"] == "replica" && left["migration"].is_null(), "{left}");
    guest::compare(left["path"].as_str().unwrap().as_ref(), &fresh()).unwrap();
}

/// The source lets it go, whenever it dies. A target that comes back later needs nothing of it, and its image is as
/// free as any.
#[test]
fn what_is_done_can_be_let_go_without_its_target() {
    for verify in [true, false] {
        let mut lab = Lab::with(|_, config| config + "[replicas]\nkeep = 0\n");
        done_and_unheard(&mut lab, verify);
        lab.a.start_with(&[("DRAY_ABORT_BEFORE", "LetGo-Forget")]);
        shows_that_it_waits(&lab.a);
        refused(&lab.a, &["images", "remove", IMAGE, "--delete"], CONFLICT, &["does not know yet"]);
        assert!(!lab.a.dray(&["cancel"]).status.success(), "it dies");
        wait_for("the death", WAIT, || lab.a.has_died()).unwrap();
        lab.a.start();
        shows_that_it_waits(&lab.a);
        let cancelled = lab.a.dray(&["cancel"]);
        let said = String::from_utf8_lossy(&cancelled.stdout).into_owned();
        assert!(cancelled.status.success() && said.contains("as replicas"), "{cancelled:?}");
        for _ in 0..2 {
            assert_eq!(lab.a.open_migrations(), 0);
            is_replica(&lab.a);
            lab.a.kill();
            lab.a.start();
        }
        lab.b.start();
        let over = || lab.b.open_migrations() == 0;
        wait_for("the end at the target", WAIT, over)
            .unwrap_or_else(|why| panic!("{why}\n{}", lab.b.log()));
        assert_eq!(lab.b.log().contains("not compared"), verify, "{}", lab.b.log());
        restart_twice(&mut lab.b, IMAGE, &fresh());
        is_replica(&lab.a);
        let home = ["--json", "migrate", "--image", IMAGE, "--to", "hosta"];
        assert_eq!(result(&lab.b.dray(&home))["result"], "completed");
        let owned = || lab.a.image(IMAGE).is_some_and(|image| image["migration"].is_null());
        wait_for("the end", WAIT, owned).unwrap();
        restart_twice(&mut lab.a, IMAGE, &fresh());
    }
}

/// A source that only is away is waited for, whatever is asked of the target meanwhile.
#[test]
fn a_target_that_has_everything_waits_for_a_source_that_is_away() {
    let mut lab = Lab::new();
    done_and_unheard(&mut lab, true);
    lab.b.start();
    let id = lab.b.migrations()[0]["migration"].as_str().unwrap().to_owned();
    std::thread::sleep(std::time::Duration::from_secs(4));
    refused(&lab.b, &["cancel", &id], CONFLICT, &["belongs to its source"]);
    assert!(lab.b.open_migrations() > 0, "{}", lab.b.log());
    assert!(!lab.b.image(IMAGE).unwrap()["migration"].is_null());
    lab.a.start();
    let over = || lab.a.open_migrations() + lab.b.open_migrations() == 0;
    wait_for("the end at both", WAIT, over).unwrap();
    let ended = result(&lab.a.dray(&["--json", "status"]))[0].clone();
    assert_eq!(ended["summary"]["verified"], true, "{ended}");
    restart_twice(&mut lab.b, IMAGE, &fresh());
}
