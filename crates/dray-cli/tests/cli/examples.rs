//! The examples in the help of every command are run, each line of them: what is typed is understood,
//! the agent is asked for what was meant, and its answer is shown. For a new command nothing is
//! written here: its examples are in its help, the fake agent's answer is the example in
//! `docs/reference/api.md`, and `UPDATE_GOLDEN=1` writes down what came of it, to be read.

use crate::fake::{Fake, finish};
use crate::{golden, help};
use dray_api::Command;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write;

/// These need no agent. `local.rs` and `sim.rs` run them.
const ALONE: [&str; 7] =
    ["agent", "check-config", "completions", "pki", "sim", "trace analyse", "trace generate"];

/// Some migrations of a batch have failed, as in the fake agent's.
const NOT_ALL: i32 = 16;

/// The lines that a help text shows as examples, without the `dray` at the front and the remark
/// behind.
fn examples(help: &str) -> Vec<String> {
    let Some((_, text)) = help.split_once("\nExamples") else { return Vec::new() };
    let mut lines = Vec::new();
    let mut text = text.lines();
    while let Some(line) = text.next() {
        let mut typed = line.trim_start().to_owned();
        while let Some(begin) = typed.strip_suffix('\\') {
            typed = format!("{begin}{}", text.next().expect("a line goes on").trim_start());
        }
        if let Some(typed) = typed.strip_prefix("dray ").filter(|_| line.starts_with(' ')) {
            lines.push(typed.split("  ").next().expect("there is a first").to_owned());
        }
    }
    lines.retain(|typed| !ALONE.iter().any(|alone| typed.starts_with(alone)));
    lines
}

/// Runs one, and adds what it asked and showed to `seen`. Returns what it asked.
fn run(typed: &str, seen: &mut String) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let args: Vec<_> = typed.split_whitespace().collect();
    let fake = Fake::start();
    let ran = finish(fake.command(&args).current_dir(&dir).output().unwrap());
    assert!([0, NOT_ALL].contains(&ran.code), "{typed}: {}", ran.err);
    let asked = fake.seen();
    assert!(!asked.is_empty(), "{typed}: asks nothing");
    writeln!(seen, "$ dray {typed}").unwrap();
    asked.iter().for_each(|one| writeln!(seen, "asks {one}").unwrap());
    writeln!(seen, "{}", ran.out).unwrap();
    asked
}

/// A program reads one line of JSON after the events.
fn check_json(typed: &str, asked: &[Value]) {
    let dir = tempfile::tempdir().unwrap();
    let typed = format!("--json {}", typed.trim_start_matches("--json "));
    let args: Vec<_> = typed.split_whitespace().collect();
    let ran = finish(Fake::start().command(&args).current_dir(&dir).output().unwrap());
    for line in ran.out.lines() {
        serde_json::from_str::<Value>(line).unwrap();
    }
    let was_asked = |name: &str| asked.iter().any(|one| one.get(name).is_some());
    let sends = |(name, events): &(&str, &[&str])| was_asked(name) && !events.is_empty();
    if !Command::ALL.iter().any(sends) {
        assert_eq!(ran.out.lines().count(), 1, "{typed}: {}", ran.out);
    }
}

#[test]
fn the_examples_ask_for_every_command_of_the_interface() {
    let mut left: BTreeSet<_> = Command::ALL.iter().map(|(name, _)| *name).collect();
    for (name, help) in help::of_all() {
        let mut seen = String::new();
        for typed in examples(&help) {
            let asked = run(&typed, &mut seen);
            check_json(&typed, &asked);
            left.retain(|name| asked.iter().all(|one| one.get(*name).is_none()));
        }
        if !seen.is_empty() {
            golden::check(&format!("examples-{name}"), &seen);
        }
    }
    assert!(left.is_empty(), "no example in the help asks for {left:?}");
}
