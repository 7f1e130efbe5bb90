//! Help texts and completions.

use crate::fake::{dray, finish};
use crate::golden;

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

/// The commands that a help text lists.
fn listed(help: &str) -> Vec<&str> {
    let list = help.split("\nCommands:\n").nth(1).unwrap_or_default();
    let list = list.lines().take_while(|line| !line.is_empty());
    // What is further to the right belongs to the line above.
    let rows = list.filter_map(|line| line.strip_prefix("  ").filter(|row| !row.starts_with(' ')));
    let names = rows.filter_map(|row| row.split(' ').next());
    names.filter(|name| *name != "help").collect()
}

/// Adds the help of `path` to `texts`, and that of every command below it.
fn gather(path: &[&str], texts: &mut Vec<(String, String)>) {
    let text = help(&[path, &["--help"]].concat());
    texts.push((path.join("-"), text.clone()));
    for below in listed(&text) {
        gather(&[path, &[below]].concat(), texts);
    }
}

/// Every command, `backups-list` for example, with its help.
pub fn of_all() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    listed(&help(&["-h"])).iter().for_each(|command| gather(&[command], &mut texts));
    texts
}

#[test]
fn help_of_every_command() {
    let texts = of_all();
    assert!(texts.iter().any(|(name, _)| name == "migrate"));
    for (name, text) in texts {
        golden::check(&format!("help-{name}"), &text);
    }
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
