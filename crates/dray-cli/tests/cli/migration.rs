//! A migration from the operator's chair: progress, summary, Ctrl-C.

use crate::fake::{Fake, ID, finish, summary};
use crate::golden;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

const MIGRATE: [&str; 7] =
    ["migrate", "--qmp", "/q", "--to", "hostb", "--target-qmp", "/run/vm1-incoming.qmp"];

#[test]
fn away_from_a_terminal_there_are_lines_and_a_summary() {
    let ran = Fake::start().run(&MIGRATE);
    assert_eq!(ran.code, 0);
    golden::check("migrate-lines", &ran.err);
    golden::check("migrate-summary", &ran.out);
}

#[test]
fn more_detail_shows_each_image() {
    let ran = Fake::start().run(&[&["-v"], &MIGRATE[..]].concat());
    golden::check("migrate-summary-detail", &ran.out);
}

#[test]
fn quiet_leaves_the_summary() {
    let ran = Fake::start().run(&[&["-q"], &MIGRATE[..]].concat());
    assert!(ran.err.is_empty());
    assert!(ran.out.contains("moved vm1"));
}

#[test]
fn json_is_events_and_then_one_summary() {
    let ran = Fake::start().run(&[&["--json"], &MIGRATE[..]].concat());
    assert!(ran.err.is_empty(), "{}", ran.err);
    let lines: Vec<Value> =
        ran.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (last, events) = lines.split_last().unwrap();
    let kinds: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["started", "progress", "notice", "progress"]);
    assert_eq!(events[0]["migration"], ID.to_string());
    assert_eq!(events[1]["images"][0]["bytes_done"], 1_u64 << 30);
    assert_eq!(last, &serde_json::to_value(summary()).unwrap());
    assert_eq!(last["result"], "completed");
    assert_eq!(last["strategy"], "hybrid");
    assert_eq!(last["total_seconds"], 28.4);
    assert_eq!(last["downtime_ms"]["total"], 38.2);
    assert_eq!(last["wire_bytes"]["memory"], 129_000_000);
    assert_eq!(last["rounds"], 1);
    assert_eq!(last["remote_reads"], 1204);
    assert_eq!(last["verified"], true);
}

#[test]
fn resume_follows_what_it_took_up() {
    let fake = Fake::start();
    let ran = fake.run(&["resume"]);
    assert_eq!(ran.code, 0);
    assert!(ran.out.contains("moved vm1"));
    assert_eq!(fake.seen()[1]["watch"]["migration"], ID.to_string());
}

#[test]
fn ctrl_c_stops_watching_and_says_so() {
    let fake = Fake::start();
    let mut child = fake
        .command(&["watch", "endless"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The first progress line shows that it is watching.
    let mut notes = BufReader::new(child.stderr.take().unwrap());
    let mut first = String::new();
    notes.read_line(&mut first).unwrap();
    assert!(first.contains("copy"), "{first}");
    let interrupt = format!("kill -INT {}", child.id());
    assert!(std::process::Command::new("sh").args(["-c", &interrupt]).status().unwrap().success());
    let rest: Vec<String> = notes.lines().map(Result::unwrap).collect();
    assert_eq!(rest[0], "dray: stopped watching; migration 4f1c0000 goes on");
    assert_eq!(
        rest[1],
        "hint: `dray watch 4f1c0000` shows it again, `dray cancel 4f1c0000` stops it"
    );
    let ran = finish(child.wait_with_output().unwrap());
    assert_eq!(ran.code, 130);
    assert!(ran.out.is_empty());
}
