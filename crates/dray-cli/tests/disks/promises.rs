//! What waits at a target for a source that has not begun, has ended, or is gone: what is said of it, and
//! when it goes.

use crate::case::{BLOCKS, Case, DATA, IMAGE};
use crate::guest;
use crate::lab::{Host, Lab, wait_for};
use crate::mounts::Mount;
use crate::moves::SLOW;
use crate::refusals::{CONFLICT, refused};
use serde_json::Value;
use std::io::Write;
use std::time::Duration;

/// Another image that wants the same name at the target.
const OTHER: &str = "other.img";
/// A target has asked its source by then.
const HEARD: Duration = Duration::from_secs(25);

/// Two hosts, and images at the first.
fn lab() -> Lab {
    let mut lab = Lab::new();
    for name in [IMAGE, OTHER] {
        guest::make_image(&lab.a.pool().join(name), BLOCKS / 16);
    }
    lab.start();
    [IMAGE, OTHER].iter().for_each(|name| lab.a.add(name));
    lab
}

/// Prepares the image; the migration's id.
fn prepare(lab: &Lab) -> String {
    succeed(&lab.a, &["prepare", "--image", IMAGE, "--to", "hostb"]);
    lab.a.migrations()[0]["migration"].as_str().unwrap().to_owned()
}

fn succeed(host: &Host, args: &[&str]) -> String {
    let output = host.dray(args);
    assert!(output.status.success(), "{args:?} on {}: {output:?}\n{}", host.name, host.log());
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The only migration of a host.
fn only(host: &Host) -> Value {
    let all = host.migrations();
    assert_eq!(all.len(), 1, "{all:?}");
    all[0].clone()
}

fn restart(host: &mut Host) {
    host.kill();
    host.start();
}

/// Nothing is left of any migration at the target, nor kept of it at the source.
fn nothing_left(lab: &Lab) {
    let nothing = || {
        let open = lab.a.open_migrations() + lab.b.open_migrations();
        open == 0 && lab.b.files().is_empty() && lab.b.image(IMAGE).is_none()
    };
    let gone = wait_for("nothing left", HEARD, nothing);
    gone.unwrap_or_else(|why| {
        panic!("{why}: {:?} {:?}\n{}", lab.b.files(), lab.b.migrations(), lab.b.log())
    });
}

/// Whatever wants the name of [`IMAGE`] at the target gets it.
fn another_moves(lab: &Lab) {
    let name = format!("{OTHER}={IMAGE}");
    succeed(&lab.a, &["migrate", "--image", OTHER, "--to", "hostb", "--name", &name]);
    assert_eq!(lab.b.image(IMAGE).unwrap()["state"], "owner");
}

#[test]
fn a_target_says_that_a_prepared_migration_waits_for_its_source() {
    let mut lab = lab();
    let id = prepare(&lab);
    for _ in 0..3 {
        let shown = only(&lab.b);
        assert_eq!((&shown["state"], &shown["role"]), (&"prepared".into(), &"target".into()));
        assert!(shown["waiting_seconds"].as_u64() < Some(60), "{shown}");
        let list = succeed(&lab.b, &["status"]);
        assert!(list.contains("prepared") && !list.contains("100 %"), "{list}");
        let text = succeed(&lab.b, &["status", &id]);
        let says = text.contains("prepared; waits for hosta to begin, for ");
        assert!(says && !text.contains("100 %") && !text.contains("copy"), "{text}");
        restart(&mut lab.b);
    }
    assert!(only(&lab.a)["waiting_seconds"].is_null(), "a source waits for nobody");
    let began = || succeed(&lab.a, &["migrate", "--image", IMAGE, "--to", "hostb"]);
    began();
    // The target hears of it last.
    wait_for("its end", HEARD, || only(&lab.b)["state"] == "completed").unwrap();
    assert_eq!(only(&lab.b)["waiting_seconds"], Value::Null);
}

/// The same again is the same preparation, also after a restart; another image of the name is refused.
#[test]
fn a_second_prepare_names_the_first_and_what_takes_it_back() {
    let mut lab = lab();
    let id = prepare(&lab);
    let back = format!("`dray cancel {id}`");
    let name = format!("{OTHER}={IMAGE}");
    let other = ["prepare", "--image", OTHER, "--to", "hostb", "--name", &name];
    for round in 0..3 {
        assert_eq!(prepare(&lab), id);
        refused(&lab.a, &other, CONFLICT, &["prepared", &id, &back]);
        match round {
            0 => restart(&mut lab.a),
            _ => restart(&mut lab.b),
        }
    }
    succeed(&lab.a, &["cancel", &id]);
    nothing_left(&lab);
    succeed(&lab.a, &other);
}

/// The name is held by what another host has prepared: which that is, is for that host and this one.
#[test]
fn a_name_that_another_host_has_prepared_is_told_to_be_taken_and_no_more() {
    let mut lab = Lab::new();
    let mut third = lab.third();
    for host in [&lab.a, &third] {
        guest::make_image(&host.pool().join(IMAGE), BLOCKS / 16);
    }
    lab.start();
    third.start();
    [&lab.a, &third].iter().for_each(|host| host.add(IMAGE));
    let id = prepare(&lab);
    let wants = ["prepare", "--image", IMAGE, "--to", "hostb"];
    refused(&third, &wants, CONFLICT, &["another host has it", "`dray status` on hostb"]);
    let told = String::from_utf8(third.dray(&wants).stderr).unwrap();
    assert!(!told.contains(&id) && !told.contains("hosta"), "{told}");
    assert!(succeed(&lab.b, &["status", &id]).contains("hosta"), "the operator there sees it");
    // It was cancelled while the target was away, and whoever wants the name next does not wait.
    lab.b.kill();
    succeed(&lab.a, &["cancel", &id]);
    lab.b.start();
    succeed(&third, &["prepare", "--image", IMAGE, "--to", "hostb"]);
}

#[test]
fn what_was_prepared_is_cancelled_while_its_target_is_away() {
    let mut lab = lab();
    let id = prepare(&lab);
    lab.b.kill();
    let said = succeed(&lab.a, &["cancel", &id]);
    assert!(said.contains("cannot be reached"), "{said}");
    for _ in 0..2 {
        restart(&mut lab.a);
        assert_eq!(lab.a.migrations(), Vec::<Value>::new(), "a restart brings nothing back");
    }
    lab.b.start();
    nothing_left(&lab);
    prepare(&lab);
}

#[test]
fn a_cancel_is_remembered_by_a_source_without_room() {
    let mut lab = Lab::new();
    guest::make_image(&lab.a.pool().join(IMAGE), BLOCKS / 16);
    let state = lab.a.dir.join("state");
    let Some(mount) = Mount::tmpfs(&state, "size=2m") else { return };
    lab.start();
    lab.a.add(IMAGE);
    let id = prepare(&lab);
    lab.b.kill();
    let mut ballast = std::fs::File::create(state.join("ballast")).unwrap();
    for size in [1 << 16, 1 << 12, 1] {
        while ballast.write_all(&vec![1; size]).is_ok() {}
    }
    succeed(&lab.a, &["cancel", &id]);
    restart(&mut lab.a);
    assert_eq!(lab.a.migrations(), Vec::<Value>::new());
    lab.b.start();
    nothing_left(&lab);
    drop(ballast);
    std::fs::remove_file(state.join("ballast")).unwrap();
    prepare(&lab);
    lab.a.kill();
    drop(mount);
}

/// An agent dies before a cancel is noted: it was not cancelled, and is when it is asked for again.
#[test]
fn a_source_that_dies_before_it_notes_a_cancel_has_not_cancelled() {
    let mut lab = lab();
    let id = prepare(&lab);
    lab.b.kill();
    lab.a.kill();
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "SetCancelled")]);
    assert!(!lab.a.dray(&["cancel", &id]).status.success());
    lab.a.await_death().unwrap();
    lab.a.start();
    lab.b.start();
    let up = || [&lab.a, &lab.b].iter().all(|host| only(host)["progress"]["link_up"] == true);
    wait_for("a session", HEARD, up).unwrap();
    assert_eq!(
        (&only(&lab.a)["state"], &only(&lab.b)["state"]),
        (&"prepared".into(), &"prepared".into())
    );
    succeed(&lab.a, &["cancel", &id]);
    nothing_left(&lab);
}

/// The target dies between its promise and saying so, and its source gives the migration up.
pub fn promised(lab: Lab) -> Case {
    let case = Case::begin(lab, 5, &[], &[("DRAY_ABORT_BEFORE", "Send-Prepared")]);
    case.migrate("hybrid", None).unwrap();
    let mut case = case;
    let died = wait_for("the target's death", HEARD, || case.lab.b.has_died());
    died.unwrap_or_else(|why| panic!("{why}: {}", case.picture()));
    case
}

#[test]
fn a_promise_that_its_source_has_given_up_is_void_and_its_copy_is_used() {
    let mut case = promised(Lab::new());
    succeed(&case.lab.a, &["cancel"]);
    restart(&mut case.lab.a);
    case.lab.b.start();
    let shown = || only(&case.lab.b);
    let void = || shown()["state"] == "interrupted" && shown()["progress"]["phase"] == "copy";
    wait_for("the promise to be void", HEARD, void).unwrap_or_else(|why| {
        panic!("{why}: {} {}", shown(), case.lab.b.log());
    });
    // What the target has is used by the next try.
    case.migrate("hybrid", None).unwrap();
    case.await_end().unwrap();
    case.end().unwrap();
}

#[test]
fn a_promise_that_its_source_has_discarded_goes() {
    let mut case = promised(Lab::new());
    succeed(&case.lab.a, &["cancel", "--discard"]);
    for _ in 0..2 {
        restart(&mut case.lab.a);
    }
    case.lab.b.start();
    nothing_left(&case.lab);
    case.migrate("hybrid", None).unwrap();
    case.await_end().unwrap();
    case.end().unwrap();
}

/// Nobody says that it is over: nothing goes, whatever is restarted.
#[test]
fn a_promise_stays_while_its_source_cannot_be_asked() {
    let mut case = promised(Lab::new());
    case.lab.a.kill();
    for _ in 0..2 {
        case.lab.b.start();
        let waits = || only(&case.lab.b)["error"]["hint"].as_str().map(str::to_owned);
        wait_for("the target to say so", HEARD, || waits().is_some()).unwrap();
        let text =
            succeed(&case.lab.b, &["status", only(&case.lab.b)["migration"].as_str().unwrap()]);
        for words in ["waits for hosta", "`dray claim disk.img"] {
            assert!(text.contains(words), "{text}");
        }
        let id = only(&case.lab.b)["migration"].as_str().unwrap().to_owned();
        refused(&case.lab.b, &["cancel", &id], CONFLICT, &["promised", "dray claim"]);
        case.lab.b.kill();
    }
    // Its source is back, and goes on with it.
    case.lab.b.start();
    case.lab.a.start();
    case.await_end().unwrap();
    case.end().unwrap();
}

#[test]
fn what_is_only_prepared_is_taken_back_at_the_target_once_its_source_is_gone() {
    let mut lab = lab();
    let id = prepare(&lab);
    refused(&lab.b, &["cancel", &id], CONFLICT, &["run it on hosta"]);
    lab.a.kill();
    restart(&mut lab.b);
    let back = format!("`dray cancel {id}`");
    let says = || only(&lab.b)["error"]["hint"].as_str().is_some_and(|hint| hint.contains(&back));
    wait_for("the target to say so", HEARD, says).unwrap();
    succeed(&lab.b, &["cancel", &id]);
    assert!(lab.b.files().is_empty() && lab.b.open_migrations() == 0, "{:?}", lab.b.files());
    restart(&mut lab.b);
    assert_eq!(lab.b.migrations(), Vec::<Value>::new());
}

/// A kept copy of a cancelled migration gives way, whether or not its target heard of the cancel.
#[test]
fn what_was_cancelled_gives_way_to_another_at_once_after_a_restart() {
    for away in [false, true] {
        let mut lab = lab();
        let slow = format!("{}B/s", SLOW / 8);
        let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--bandwidth", &slow, "--detach"];
        succeed(&lab.a, &args);
        let some = || lab.b.progress().is_some_and(|(_, p)| p["link_up"] == true);
        wait_for("the copy", HEARD, some).unwrap();
        if away {
            lab.b.kill();
        }
        succeed(&lab.a, &["cancel"]);
        lab.b.kill();
        lab.b.start();
        another_moves(&lab);
    }
}

/// The same for a promise.
#[test]
fn a_promise_that_was_given_up_gives_way_at_once() {
    let mut case = promised(Lab::new());
    guest::make_image(&case.lab.a.pool().join(OTHER), BLOCKS / 16);
    case.lab.a.add(OTHER);
    succeed(&case.lab.a, &["cancel"]);
    case.lab.b.start();
    let name = format!("{OTHER}={IMAGE}");
    succeed(&case.lab.a, &["prepare", "--image", OTHER, "--to", "hostb", "--name", &name]);
    let shown = case.lab.b.migrations();
    assert_eq!((shown.len(), &shown[0]["state"]), (1, &"prepared".into()), "{shown:?}");
    assert_eq!(case.guest.complaint(), None);
    assert_eq!(case.lab.a.image(IMAGE).unwrap()["state"], "owner");
}

/// A copy that is under way gives way to nobody, however often its target restarts.
#[test]
fn what_is_under_way_does_not_give_way_after_a_restart() {
    let mut case = Case::begin_small(Lab::new());
    guest::make_image(&case.lab.a.pool().join(OTHER), BLOCKS / 16);
    case.lab.a.add(OTHER);
    case.migrate("hybrid", Some(SLOW)).unwrap();
    case.await_bytes(DATA / 8).unwrap();
    let name = format!("{OTHER}={IMAGE}");
    let other = ["prepare", "--image", OTHER, "--to", "hostb", "--name", &name];
    for _ in 0..2 {
        restart(&mut case.lab.b);
        refused(&case.lab.a, &other, CONFLICT, &["on its way", "dray cancel"]);
    }
    case.lab.a.dray(&["limit", "none"]);
    case.await_end().unwrap();
    std::fs::remove_file(case.lab.a.pool().join(OTHER)).unwrap();
    case.end().unwrap();
}
