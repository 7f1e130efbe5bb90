//! Migrations that nothing disturbs: every strategy, several images, limits, cancelling.

use crate::case::{BLOCKS, Case, DATA, FAR, IMAGE};
use crate::guest::{self, BLOCK, Guest};
use crate::lab::{Lab, opens, wait_for};
use crate::refusals::{CONFLICT, refused};
use serde_json::{Value, json};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Output;
use std::time::Duration;

/// Bytes a second at which a copy takes some seconds.
pub const SLOW: u64 = 6 << 20;
/// What file systems need beside the data of a sparse file.
const SLACK: u64 = 1 << 20;

/// The last line of a command's output, which is its result.
pub fn result(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().next_back().unwrap_or_default();
    serde_json::from_str(last).unwrap_or_else(|why| panic!("{why}: {output:?}"))
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

fn moves_with(strategy: &str) {
    let mut case = Case::begin(Lab::new(), 7, &[], &[]);
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hostb", "--verify", "--strategy"];
    let summary = result(&case.lab.a.dray(&[&args[..], &[strategy]].concat()));
    assert_eq!(summary["result"], "completed", "{summary}");
    assert_eq!(summary["verified"], true, "{summary}");
    assert_eq!(summary["strategy"], strategy);
    case.await_end().unwrap();
    let (here, there) = (case.lab.a.pool(), case.lab.b.pool());
    assert_eq!(mode(&here.join(format!(".{IMAGE}.dray-replica-2"))), 0);
    assert_eq!(mode(&there.join(IMAGE)), 0o644, "as at the source");
    let dir = there.join(IMAGE);
    let Case { mut lab, guest, .. } = case;
    let versions = guest.shut_down().unwrap();
    lab.a.kill();
    lab.b.kill();
    guest::compare(&dir, &versions).unwrap();
    assert!(!opens(&here.join(IMAGE)) && opens(&dir));
    let data = versions.values().filter(|&&version| version != 0).count() as u64 * BLOCK;
    let allocated = dir.metadata().unwrap().blocks() * 512;
    assert!(allocated <= data + SLACK, "{allocated} bytes for {data} bytes of data");
}

#[test]
fn pre_copy_moves_an_image_under_a_guest() {
    moves_with("pre-copy");
}

#[test]
fn post_copy_moves_an_image_under_a_guest() {
    moves_with("post-copy");
}

#[test]
fn hybrid_moves_an_image_under_a_guest() {
    moves_with("hybrid");
}

/// What `dray migrate` shows of the time when every block is at the target.
fn release_of(more: &[&str]) -> Vec<Value> {
    let mut case = Case::begin_small(Lab::new());
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hostb"];
    let output = case.lab.a.dray(&[&args[..], more].concat());
    assert!(output.status.success(), "{output:?}");
    case.await_end().unwrap();
    case.end().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["phase"] == "release").collect()
}

/// Verification is shown when it was asked for, with a share of its own, and only then.
#[test]
fn the_end_shows_what_is_verified() {
    let image = FAR * BLOCK;
    let verified = release_of(&["--verify"]);
    assert!(!verified.is_empty());
    for event in &verified {
        assert_eq!(event["total"]["bytes_total"], image, "{event}");
        let done = event["total"]["bytes_done"].as_u64().unwrap();
        assert!(event["step"] == "verify" || done == image, "{event}");
    }
    for event in release_of(&[]) {
        assert_eq!(event["step"], Value::Null, "{event}");
        assert_eq!(event["total"]["bytes_done"], event["total"]["bytes_total"], "{event}");
    }
}

#[test]
fn several_images_move_as_one() {
    const NAMES: [&str; 3] = ["one.img", "two.img", "three.img"];
    let mut lab = Lab::new();
    NAMES.iter().for_each(|name| guest::make_image(&lab.a.pool().join(name), BLOCKS / 4));
    lab.start();
    NAMES.iter().for_each(|name| lab.a.add(name));
    let guests: Vec<_> = (0..)
        .zip(NAMES)
        .map(|(seed, name)| Guest::start(&lab, name, BLOCKS / 4, BLOCKS / 4, seed))
        .collect();
    // The images are alike, and what they have in common would not be sent for each of them.
    let mut args = vec!["--json", "migrate", "--to", "hostb", "--no-reuse"];
    NAMES.iter().for_each(|name| args.extend(["--image", name]));
    let summary = result(&lab.a.dray(&args));
    assert_eq!(summary["result"], "completed", "{summary}");
    let images = summary["images"].as_array().unwrap();
    assert_eq!(images.len(), NAMES.len());
    let sent = |image: &Value| image["blocks_sent"].as_u64().unwrap();
    assert!(images.iter().all(|image| sent(image) >= BLOCKS / 4 / 4 * 3), "{summary}");
    let all: u64 = images.iter().map(sent).sum();
    // The engine also counts blocks that turn out to hold zeros when they are read.
    assert!(all >= summary["blocks_sent"].as_u64().unwrap(), "{summary}");
    let versions: Vec<_> = guests.into_iter().map(|guest| guest.shut_down().unwrap()).collect();
    lab.a.kill();
    lab.b.kill();
    for (name, versions) in NAMES.iter().zip(&versions) {
        guest::compare(&lab.b.pool().join(name), versions).unwrap();
        assert!(!opens(&lab.a.pool().join(name)) && opens(&lab.b.pool().join(name)));
    }
}

#[test]
fn the_limit_can_be_changed_while_a_migration_runs() {
    let mut case = Case::begin_small(Lab::new());
    case.migrate("pre-copy", Some(100_000)).unwrap();
    case.await_bytes(1).unwrap();
    let (_, progress) = case.lab.a.progress().unwrap();
    assert_eq!(progress["phase"], "copy");
    assert!(case.lab.a.dray(&["limit", "none"]).status.success());
    // At the old limit the copy would take four minutes.
    case.await_end().unwrap();
    case.end().unwrap();
}

#[test]
fn a_limit_outlives_a_restart_of_the_agent() {
    let mut case = Case::begin_small(Lab::new());
    case.migrate("pre-copy", Some(100_000)).unwrap();
    case.await_bytes(1).unwrap();
    let limit = |case: &Case| case.lab.a.progress().unwrap().1["bandwidth"].clone();
    for (asked, shown) in [("200KB/s", json!({"bytes_per_second": 200_000})), ("none", json!(null))]
    {
        let answer = result(&case.lab.a.dray(&["--json", "limit", asked]));
        assert_eq!((&answer["bandwidth"], &answer["not_kept"]), (&shown, &Value::Null));
        assert_eq!(limit(&case), shown);
        case.lab.a.kill();
        case.lab.a.start();
        assert_eq!(limit(&case), shown, "after a restart");
    }
    // At the limits before it the copy would take minutes.
    case.await_end().unwrap();
    case.end().unwrap();
}

/// The only migration at the source, in this state.
fn await_state(case: &Case, state: &str) -> String {
    let is = || case.lab.a.migrations().first().is_some_and(|first| first["state"] == state);
    wait_for(state, Duration::from_secs(30), is).unwrap();
    case.lab.a.migrations()[0]["migration"].as_str().unwrap().to_owned()
}

#[test]
fn what_has_ended_is_not_cancelled_and_the_guest_is_where_it_says() {
    let limits = "[limits]\nlink_timeout_seconds = 2\n";
    let mut case = Case::begin_small(Lab::with(|_, config| config + limits));
    case.migrate("hybrid", Some(SLOW)).unwrap();
    case.await_bytes(1).unwrap();
    case.lab.b.kill();
    let id = await_state(&case, "failed");
    let words = ["has ended already", "could not be reached", "continues on this host", "24 hours"];
    refused(&case.lab.a, &["cancel", &id], CONFLICT, &words);
    case.lab.b.start();
    assert!(case.lab.a.dray(&["resume", &id, "--detach"]).status.success());
    assert!(case.lab.a.dray(&["cancel"]).status.success());
    refused(
        &case.lab.a,
        &["cancel", &id],
        CONFLICT,
        &["cancelled already", "continues on this host"],
    );
    case.migrate("hybrid", None).unwrap();
    case.await_end().unwrap();
    let ids = case.lab.a.migrations();
    let over = ids.iter().find(|shown| shown["state"] == "completed").unwrap();
    let over = over["migration"].as_str().unwrap();
    refused(&case.lab.a, &["cancel", over], CONFLICT, &["at the target", "migrate back"]);
    case.end().unwrap();
}

#[test]
fn a_discard_that_the_target_has_not_heard_of_says_so() {
    let mut case = Case::begin_small(Lab::new());
    case.migrate("hybrid", Some(SLOW)).unwrap();
    case.await_bytes(DATA / 8).unwrap();
    case.lab.b.kill();
    let alone = || case.lab.a.progress().is_some_and(|(_, shown)| shown["link_up"] == false);
    wait_for("the link to be lost", Duration::from_secs(10), alone).unwrap();
    let cancelled = case.lab.a.dray(&["cancel", "--discard"]);
    let text = String::from_utf8_lossy(&cancelled.stdout).into_owned();
    assert!(cancelled.status.success() && text.contains("learns of the cancel"), "{cancelled:?}");
    case.lab.b.start();
    let gone = || case.lab.b.files().is_empty() && case.lab.b.open_migrations() == 0;
    wait_for("the target to hear of it", Duration::from_secs(20), gone).unwrap();
    case.migrate("hybrid", None).unwrap();
    case.await_end().unwrap();
    case.end().unwrap();
}

#[test]
fn what_a_cancelled_migration_sent_is_used_by_the_next() {
    let mut case = Case::begin_small(Lab::new());
    case.migrate("hybrid", Some(SLOW)).unwrap();
    case.await_bytes(DATA / 2).unwrap();
    let cancelled = result(&case.lab.a.dray(&["--json", "cancel"]));
    assert!(cancelled["bytes_kept"].as_u64() >= Some(DATA / 2), "{cancelled}");
    assert_eq!(case.lab.a.image(IMAGE).unwrap()["state"], "owner");
    assert_eq!(case.lab.a.image(IMAGE).unwrap()["migration"], Value::Null);
    let partial = format!(".{IMAGE}.dray-partial");
    assert_eq!(case.lab.b.files(), [partial.as_str()]);
    assert_eq!(mode(&case.lab.b.pool().join(partial)), 0);
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hostb"];
    let summary = result(&case.lab.a.dray(&args));
    assert_eq!(summary["result"], "completed", "{summary}");
    let sent = summary["wire_bytes"]["total"].as_u64().unwrap();
    assert!(sent < DATA / 2 + 3 * SLACK, "{sent} bytes for the second half of {DATA}");
    case.await_end().unwrap();
    case.end().unwrap();
}

#[test]
fn a_discarded_migration_leaves_nothing_behind() {
    let mut case = Case::begin_small(Lab::new());
    case.migrate("hybrid", Some(SLOW)).unwrap();
    case.await_bytes(DATA / 4).unwrap();
    assert!(case.lab.a.dray(&["cancel", "--discard"]).status.success());
    let lab = &case.lab;
    wait_for("the target to forget", Duration::from_secs(10), || {
        lab.b.files().is_empty() && lab.b.image(IMAGE).is_none() && lab.b.open_migrations() == 0
    })
    .unwrap();
    assert_eq!(lab.a.files(), [IMAGE]);
    case.migrate("post-copy", None).unwrap();
    case.await_end().unwrap();
    case.end().unwrap();
}

/// A migration that was abandoned and goes on is no longer in anybody's way.
#[test]
fn what_goes_on_again_does_not_give_way() {
    const OTHER: &str = "other.img";
    let mut case = Case::begin_small(Lab::new());
    guest::make_image(&case.lab.a.pool().join(OTHER), BLOCKS / 8);
    case.lab.a.add(OTHER);
    case.migrate("hybrid", Some(SLOW)).unwrap();
    case.await_bytes(DATA / 8).unwrap();
    case.lab.a.dray(&["limit", "4MiB"]);
    assert!(case.lab.a.dray(&["cancel"]).status.success());
    assert!(case.lab.a.dray(&["resume", "--detach"]).status.success());
    case.await_bytes(DATA / 4).unwrap();
    let name = format!("{OTHER}={IMAGE}");
    let other = ["migrate", "--image", OTHER, "--to", "hostb", "--name", &name];
    refused(&case.lab.a, &other, CONFLICT, &["exists"]);
    case.await_end().unwrap();
    std::fs::remove_file(case.lab.a.pool().join(OTHER)).unwrap();
    case.end().unwrap();
}

/// The target has forgotten it by then, and nobody else can say that it is over.
#[test]
fn a_source_that_ends_as_its_command_returns_knows_that_the_migration_is_over() {
    let mut lab = Lab::new();
    std::fs::write(lab.a.pool().join("vm.img"), vec![7; 1 << 20]).unwrap();
    lab.start();
    lab.a.add("vm.img");
    let moved = lab.a.dray(&["migrate", "--image", "vm.img", "--to", "hostb"]);
    lab.a.kill();
    assert!(moved.status.success(), "{moved:?}");
    lab.a.start();
    wait_for("the end at the source", Duration::from_secs(30), || lab.a.open_migrations() == 0)
        .unwrap();
    let watched = lab.a.dray(&["--json", "status"]);
    assert!(!String::from_utf8_lossy(&watched.stdout).contains("running"), "{watched:?}");
}
