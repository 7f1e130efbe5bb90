//! A deferred migration: the disk is handed over at once, its blocks come when somebody reads them
//! or when the target's operator says so, each of them once.

use crate::case::IMAGE;
use crate::guest::{BLOCK, content};
use crate::lab::{Lab, wait_for};
use crate::moves::result;
use crate::nbd::{Client, READ};
use crate::orders::{BLOCKS, full_lab};
use serde_json::{Value, json};
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(20);

fn handed_over() -> Lab {
    let lab = full_lab();
    let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--verify", "--detach"];
    let output = lab.a.dray(&[&args[..], &["--strategy", "deferred"]].concat());
    assert!(output.status.success(), "{output:?}");
    let waits = |(_, progress): (String, Value)| progress["phase"] == "backfill";
    wait_for("the handover", WAIT, || lab.b.progress().is_some_and(waits))
        .unwrap_or_else(|why| panic!("{why}\n{}\n{}", lab.a.log(), lab.b.log()));
    lab
}

fn missing(lab: &Lab) -> u64 {
    lab.b.image(IMAGE).unwrap()["missing_blocks"].as_u64().unwrap()
}

fn read(lab: &Lab, block: u64) {
    let mut client = Client::connect(&lab.b.nbd(), IMAGE).unwrap();
    let data = client.request(READ, block * BLOCK, BLOCK as u32, &[], &|| true).unwrap();
    assert_eq!(data, content(block, 1), "block {block}");
}

fn paused(host: &crate::lab::Host) -> bool {
    host.progress().is_some_and(|(_, progress)| progress["paused"] == true)
}

#[test]
fn nothing_is_fetched_until_the_operator_says_so_and_then_everything_once() {
    let mut lab = handed_over();
    let told = |lab: &Lab, bytes: u64| {
        lab.a
            .image(IMAGE)
            .is_some_and(|i| i["kept_for"] == json!({"host": "hostb", "bytes": bytes}))
    };
    assert_eq!(missing(&lab), BLOCKS);
    // What a guest reads comes, and its neighbours; a restart of the target changes nothing.
    read(&lab, 4000);
    let left = missing(&lab);
    assert!((BLOCKS - 16..BLOCKS).contains(&left), "{left}");
    lab.b.stop();
    lab.b.start();
    wait_for("the pause to be shown", WAIT, || paused(&lab.a) && paused(&lab.b)).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(missing(&lab), left);
    wait_for("what the source must keep", WAIT, || told(&lab, left * BLOCK)).unwrap();
    let list = lab.a.dray(&["images"]);
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    assert!(list.contains("hostb needs"), "{list}");
    let removed = lab.a.dray(&["images", "remove", IMAGE]);
    assert!(!removed.status.success(), "the source's copy is still needed");
    // At a megabyte a second it would take half a minute: it can be paused, and be let go.
    let backfill = |args: &[&str]| result(&lab.b.dray(&[&["--json", "backfill"], args].concat()));
    assert_eq!(backfill(&["rate", "1MiB/s"])["bandwidth"]["bytes_per_second"], 1 << 20);
    assert_eq!(backfill(&["start", IMAGE])["paused"], false);
    wait_for("the first blocks", WAIT, || missing(&lab) < left).unwrap();
    assert!(missing(&lab) > 0);
    assert_eq!(backfill(&["pause"])["paused"], true);
    std::thread::sleep(Duration::from_millis(1500));
    let rest = missing(&lab);
    assert!(rest > BLOCKS / 4, "{rest}");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(missing(&lab), rest, "paused");
    read(&lab, BLOCKS - 1);
    backfill(&["rate", "none"]);
    backfill(&["start"]);
    let summary = result(&lab.a.dray(&["--json", "watch"]));
    ends_well(&summary);
}

fn ends_well(summary: &Value) {
    assert_eq!(summary["result"], "completed", "{summary}");
    assert_eq!(summary["verified"], true, "{summary}");
    assert_eq!(summary["strategy"], "deferred");
    let sent = |name| summary["images"][0][name].as_u64().unwrap();
    assert_eq!((sent("blocks_sent"), sent("blocks_sent_twice")), (BLOCKS, 0), "{summary}");
}

#[test]
fn a_backfill_is_steered_at_its_target() {
    let lab = handed_over();
    let at_source = lab.a.ask(json!({"backfill": {"action": "start", "which": IMAGE}}));
    let error = at_source.unwrap_err();
    assert_eq!(error["kind"], "conflict", "{error}");
    assert_eq!(error["hint"], "give the command on hostb");
    let nobody = lab.b.ask(json!({"backfill": {"action": "start", "which": "other"}}));
    assert_eq!(nobody.unwrap_err()["kind"], "not-found");
    let vm = lab.b.ask(json!({"backfill": {"action": "start", "qmp": "/none"}}));
    assert_eq!(vm.unwrap_err()["kind"], "not-found");
    assert_eq!(missing(&lab), BLOCKS);
    lab.b.ask(json!({"backfill": {"action": "start"}})).unwrap();
    wait_for("the end", WAIT, || missing(&lab) == 0).unwrap();
    wait_for("both to forget", WAIT, || lab.a.open_migrations() + lab.b.open_migrations() == 0)
        .unwrap();
    let again = lab.b.ask(json!({"backfill": {"action": "start"}}));
    assert!(again.is_err(), "there is nothing to start");
}
