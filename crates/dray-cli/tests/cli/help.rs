//! Help texts and completions.

use crate::fake::{dray, finish};
use crate::golden;

const COMMANDS: [&str; 28] = [
    "agent",
    "check-config",
    "prepare",
    "plan",
    "migrate",
    "status",
    "watch",
    "cancel",
    "resume",
    "seed",
    "limit",
    "batch",
    "backfill",
    "images",
    "lineage",
    "backup",
    "backups",
    "verify",
    "restore",
    "adopt",
    "release",
    "resize",
    "claim",
    "unstall",
    "pki",
    "sim",
    "trace",
    "completions",
];

fn help(args: &[&str]) -> String {
    let ran = finish(dray(args).output().unwrap());
    assert_eq!(ran.code, 0, "{}", ran.err);
    ran.out
}

#[test]
fn help_of_dray_itself() {
    golden::check("help", &help(&["-h"]));
    golden::check("help-long", &help(&["--help"]));
}

#[test]
fn help_of_every_command() {
    for command in COMMANDS {
        golden::check(&format!("help-{command}"), &help(&[command, "--help"]));
    }
    for (command, sub) in [
        ("images", "add"),
        ("images", "remove"),
        ("pki", "init"),
        ("pki", "issue"),
        ("sim", "compare"),
        ("sim", "chunks"),
        ("trace", "analyse"),
        ("trace", "generate"),
        ("trace", "record"),
        ("batch", "list"),
        ("batch", "watch"),
        ("batch", "cancel"),
        ("batch", "limit"),
        ("backfill", "start"),
        ("backfill", "pause"),
        ("backfill", "rate"),
        ("backups", "list"),
        ("backups", "init"),
        ("backups", "cancel"),
        ("backups", "prune"),
        ("backups", "gc"),
    ] {
        golden::check(&format!("help-{command}-{sub}"), &help(&[command, sub, "--help"]));
    }
}

#[test]
fn help_knows_every_command() {
    let listed = help(&["-h"]);
    for command in COMMANDS {
        assert!(listed.contains(&format!("\n  {command} ")), "{command} is not listed");
    }
    let commands = listed.split("Commands:").nth(1).unwrap().split("\n\n").next().unwrap();
    assert_eq!(commands.lines().filter(|line| !line.is_empty()).count(), COMMANDS.len() + 1);
}

#[test]
fn completions_name_the_commands_in_every_shell() {
    for shell in ["bash", "zsh", "fish"] {
        let script = help(&["completions", shell]);
        for word in ["migrate", "target-qmp", "check-config", "bandwidth"] {
            assert!(script.contains(word), "{shell} does not complete {word}");
        }
    }
}
