//! A migration from the operator's chair: progress, summary, Ctrl-C.

use crate::fake::{Fake, ID, batch_ended, finish, summary};
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
fn a_batch_ends_in_a_table_and_a_code_of_its_own() {
    let fake = Fake::start();
    let ran = fake.run(&["batch", "watch"]);
    assert_eq!(ran.code, 16);
    golden::check("batch-lines", &ran.err);
    golden::check("batch-ended", &ran.out);
    let ran = fake.run(&["--json", "batch", "watch"]);
    assert_eq!(ran.code, 16);
    let lines: Vec<Value> = ran.out.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!((&lines[0]["event"], &lines[0]["over"]), (&"batch".into(), &false.into()));
    let wanted = serde_json::to_value(batch_ended()).unwrap();
    assert_eq!(lines[1..], [wanted]);
}

#[test]
fn ctrl_c_leaves_a_batch_to_the_agent() {
    let fake = Fake::start();
    let words = interrupted(&fake, &["batch", "watch", "endless"], "over");
    assert_eq!(words[0], "dray: stopped watching; batch 7b000000 continues");
    let hint =
        "hint: `dray batch watch 7b000000` shows it again, `dray batch cancel 7b000000` cancels it";
    assert_eq!(words[1], hint);
}

#[test]
fn ctrl_c_stops_watching_and_says_so() {
    let fake = Fake::start();
    let words = interrupted(&fake, &["watch", "endless"], "copy");
    assert_eq!(words[0], "dray: stopped watching; migration 4f1c0000 continues");
    let hint = "hint: `dray watch 4f1c0000` shows it again, `dray cancel 4f1c0000` cancels it";
    assert_eq!(words[1], hint);
}

/// Presses Ctrl-C once a line with `word` was shown; what is said from then on.
fn interrupted(fake: &Fake, args: &[&str], word: &str) -> Vec<String> {
    let mut child =
        fake.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Progress shows that it is watching.
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.by_ref().any(|line| line.unwrap().contains(word)), "{args:?}");
    let interrupt = format!("kill -INT {}", child.id());
    assert!(std::process::Command::new("sh").args(["-c", &interrupt]).status().unwrap().success());
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    let ran = finish(child.wait_with_output().unwrap());
    assert_eq!(ran.code, 130);
    assert!(ran.out.is_empty());
    // A line of progress may have been on its way.
    let said = rest.iter().position(|line| line.starts_with("dray: ")).unwrap();
    rest[said..].to_vec()
}
