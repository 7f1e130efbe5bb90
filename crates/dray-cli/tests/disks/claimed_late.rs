//! `dray claim` of what a migration that is over has left behind, and what becomes of a migration whose copy at the
//! source is lost when its target was claimed.

use crate::again::with_a_guest;
use crate::claims::{CLAIM, IMAGE, WAIT, claim, fresh, make, restart_twice, write};
use crate::guest::{self, Versions, content};
use crate::lab::{Host, Lab, wait_for};
use crate::moves::result;
use crate::refusals::{CONFLICT, refused};
use crate::restarts::{client, read, replica};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The exit code of what the file system does not give.
const IO: i32 = 11;

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

/// What becomes of the copy at the source while its agent is off.
type Damage = fn(&Path);

fn remove(copy: &Path) {
    std::fs::remove_file(copy).unwrap();
}

fn put_another_there(copy: &Path) {
    let other = copy.with_extension("other");
    std::fs::copy(copy, &other).unwrap();
    std::fs::rename(other, copy).unwrap();
}

fn edit(copy: &Path) {
    let file = File::options().write(true).open(copy).unwrap();
    file.write_all_at(&[9; 4096], 0).unwrap();
}

/// A source whose copy, from which its target still reads, is not what it was any more, and that target, which has been
/// claimed; and the migration.
fn claimed_while_the_copy_is_lost(damage: Damage) -> (Lab, String) {
    let mut lab = with_a_guest();
    let migration = lab.b.migrations()[0]["migration"].as_str().unwrap().to_owned();
    lab.a.kill();
    damage(&replica(&lab.a).unwrap());
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "LetGo-Images")]);
    claim(&lab.b, &CLAIM);
    (lab, migration)
}

/// The hint names what is to be done, and in which order.
fn names_the_way_out(a: &Host, migration: &str) {
    let hint = a.image(IMAGE).unwrap()["closed"]["hint"].as_str().unwrap().to_owned();
    let said =
        [format!("`dray claim {IMAGE}` at hostb"), format!("`dray cancel {migration}` here")];
    assert!(said.iter().all(|said| hint.contains(said.as_str())), "{hint}");
    let cancel = format!("dray cancel {migration}");
    refused(a, &["images", "remove", IMAGE, "--delete"], CONFLICT, &[&cancel]);
}

/// The agent dies in the middle of the first cancel.
fn is_let_go_for_good(a: &mut Host, migration: &str) {
    assert!(!a.dray(&["cancel", migration]).status.success(), "it dies");
    wait_for("the death", WAIT, || a.has_died()).unwrap();
    a.start();
    assert!(a.image(IMAGE).unwrap()["closed"]["hint"].as_str().unwrap().contains("dray cancel"));
    let cancelled = a.dray(&["cancel", migration]);
    let said = String::from_utf8_lossy(&cancelled.stdout).into_owned();
    assert!(cancelled.status.success() && said.contains("as replicas"), "{cancelled:?}");
    for _ in 0..2 {
        assert_eq!(a.open_migrations(), 0);
        let left = a.image(IMAGE).unwrap();
        assert!(left["state"] == "replica" && left["migration"].is_null(), "{left}");
        a.kill();
        a.start();
    }
    assert!(!a.dray(&["cancel", migration]).status.success(), "it is over");
}

/// It would wait for its copy for ever, and the image could not come home.
#[test]
fn a_source_that_has_lost_its_copy_lets_go_of_a_claimed_target_when_it_is_told_to() {
    let damages: [(Damage, bool); 3] = [(remove, false), (put_another_there, true), (edit, false)];
    for (damage, stays) in damages {
        let (mut lab, migration) = claimed_while_the_copy_is_lost(damage);
        let copy = lab.a.image(IMAGE).unwrap()["path"].as_str().unwrap().to_owned();
        names_the_way_out(&lab.a, &migration);
        is_let_go_for_good(&mut lab.a, &migration);
        let removed = lab.a.dray(&["images", "remove", IMAGE, "--delete"]);
        let said = String::from_utf8_lossy(&removed.stdout).into_owned();
        assert!(removed.status.success() && said.contains("stays") == stays, "{removed:?}");
        assert!(lab.a.image(IMAGE).is_none());
        assert_eq!(Path::new(&copy).exists(), stays, "what is not dray's is not deleted");
        let home = ["--json", "migrate", "--image", IMAGE, "--to", "hosta"];
        assert_eq!(result(&lab.b.dray(&home))["result"], "completed");
        for (block, expected) in [(5, content(5, 2)), (700, content(700, 2)), (7, vec![0; 4096])] {
            assert_eq!(read(&mut client(&lab.a), block), expected, "{block}");
        }
    }
}

/// Its images are this host's, and only a claim says that nobody else has them.
#[test]
fn a_source_that_has_not_handed_over_is_not_let_go_of() {
    let mut lab = Lab::new();
    make(&lab, IMAGE);
    lab.start();
    lab.a.add(IMAGE);
    let more = ["--to", "hostb", "--strategy", "pre-copy", "--bandwidth", "1MiB/s", "--detach"];
    assert!(lab.a.dray(&[&["migrate", "--image", IMAGE], &more[..]].concat()).status.success());
    let begun = || lab.a.image(IMAGE).is_some_and(|image| !image["migration"].is_null());
    wait_for("its begin", WAIT, begun).unwrap();
    let migration = lab.a.migrations()[0]["migration"].as_str().unwrap().to_owned();
    lab.a.kill();
    let (file, away) = (lab.a.pool().join(IMAGE), lab.a.pool().join("away"));
    std::fs::rename(&file, &away).unwrap();
    lab.a.start();
    refused(&lab.a, &["cancel", &migration], CONFLICT, &["has not handed over", "dray claim"]);
    std::fs::rename(&away, &file).unwrap();
    let served = || lab.a.image(IMAGE).is_some_and(|image| image["closed"].is_null());
    wait_for("its file", WAIT, served).unwrap();
    assert_eq!(read(&mut client(&lab.a), 5), content(5, 1));
}

/// What `dray status` shows of the only migration of a host, as a program and as a person sees it.
fn status(host: &Host) -> (Value, String) {
    let shown = result(&host.dray(&["--json", "status"]))[0].clone();
    let id = shown["migration"].as_str().unwrap_or_else(|| panic!("{shown}")).to_owned();
    let detail = host.dray(&["status", &id]);
    assert!(detail.status.success(), "{detail:?}");
    (shown, String::from_utf8_lossy(&detail.stdout).into_owned())
}

/// It is no secret of `dray images`.
#[test]
fn a_migration_that_cannot_be_brought_back_is_listed_at_its_source() {
    let mut lab = with_a_guest();
    let migration = lab.b.migrations()[0]["migration"].as_str().unwrap().to_owned();
    lab.a.kill();
    remove(&replica(&lab.a).unwrap());
    lab.a.start();
    let (shown, detail) = status(&lab.a);
    let seen = [&shown["state"], &shown["role"], &shown["peer"], &shown["migration"]];
    assert_eq!(seen, ["waiting", "source", "hostb", &migration], "{shown}");
    let named = format!("`dray cancel {migration}` here");
    for said in ["waiting", "dray-replica", &named, &format!("`dray claim {IMAGE}` at hostb")] {
        assert!(detail.contains(said), "{said}: {detail}");
    }
    let list = lab.a.dray(&["status"]);
    let said = String::from_utf8_lossy(&list.stdout).into_owned();
    assert!(said.contains("waiting") && said.contains(&named), "{said}");
    for command in [["watch", &migration], ["limit", "none"], ["resume", &migration]] {
        let answer = lab.a.dray(&command);
        assert!(!answer.status.success(), "{command:?}: {answer:?}");
    }
    refused(&lab.a, &["watch", &migration], IO, &["cannot be brought back", &named]);
}

/// Nothing was promised: it ends here on the operator's word, when its source is gone.
#[test]
fn a_migration_that_cannot_be_brought_back_is_listed_at_its_target() {
    let mut lab = Lab::new();
    make(&lab, IMAGE);
    lab.start();
    lab.a.add(IMAGE);
    let more = ["--to", "hostb", "--strategy", "pre-copy", "--bandwidth", "1MiB/s", "--detach"];
    assert!(lab.a.dray(&[&["migrate", "--image", IMAGE], &more[..]].concat()).status.success());
    let begun = || lab.b.image(IMAGE).is_some() && lab.b.open_migrations() > 0;
    wait_for("its begin", WAIT, begun).unwrap();
    std::thread::sleep(std::time::Duration::from_secs(1));
    lab.a.kill();
    lab.b.kill();
    let partial = lab.b.pool().join(format!(".{IMAGE}.dray-partial"));
    std::fs::rename(&partial, lab.b.pool().join("away")).unwrap();
    lab.b.start();
    let (shown, detail) = status(&lab.b);
    let seen = [&shown["state"], &shown["role"], &shown["peer"]];
    assert_eq!(seen, ["waiting", "target", "hosta"], "{shown}");
    let migration = shown["migration"].as_str().unwrap().to_owned();
    let named = format!("`dray cancel {migration}` on this host if the source is lost");
    assert!(detail.contains("waiting") && detail.contains(&named), "{detail}");
    let cancelled = lab.b.dray(&["cancel", &migration]);
    assert!(cancelled.status.success(), "{cancelled:?}");
    let gone = || lab.b.open_migrations() == 0;
    wait_for("its end", WAIT, gone).unwrap();
    let left = result(&lab.b.dray(&["--json", "status"]));
    assert!(left.as_array().unwrap().iter().all(|one| one["state"] == "cancelled"), "{left}");
}

/// The operator cancels at the source before anybody has claimed the image at the target. What both hosts say leads to
/// the end.
#[test]
fn a_target_whose_source_was_told_to_let_go_names_the_way_out() {
    let mut lab = with_a_guest();
    let migration = lab.b.migrations()[0]["migration"].as_str().unwrap().to_owned();
    lab.a.kill();
    remove(&replica(&lab.a).unwrap());
    lab.a.start();
    let cancelled = lab.a.dray(&["cancel", &migration]);
    let said = String::from_utf8_lossy(&cancelled.stdout).into_owned();
    assert!(cancelled.status.success(), "{cancelled:?}");
    assert!(said.contains(&format!("`dray status {migration}` there")), "{said}");
    let hint = || status(&lab.b).0["error"]["hint"].as_str().unwrap_or_default().to_owned();
    let claims = format!("dray claim {IMAGE} --source-is-fenced");
    wait_for("the way out", WAIT * 2, || hint().contains(&claims)).unwrap();
    // Without the word that something may be lost the claim says what, and how to give it.
    let without = lab.b.dray(&["claim", IMAGE, "--source-is-fenced"]);
    let why = String::from_utf8_lossy(&without.stderr).into_owned();
    assert!(!without.status.success() && why.contains("--accept-loss"), "{without:?}");
    claim(&lab.b, &CLAIM);
    assert_eq!(lab.b.open_migrations(), 0);
    let image = lab.b.image(IMAGE).unwrap();
    assert!(image["state"] == "owner" && image["closed"].is_null(), "{image}");
    assert!(lab.a.dray(&["images", "remove", IMAGE, "--delete"]).status.success());
    let home = ["--json", "migrate", "--image", IMAGE, "--to", "hosta"];
    assert_eq!(result(&lab.b.dray(&home))["result"], "completed");
}
