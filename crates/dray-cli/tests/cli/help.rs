//! Help texts and completions.

use crate::fake::{Fake, dray, finish};
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

/// What is proposed when somebody presses Tab at the end of this line.
fn proposed(fake: &Fake, line: &[&str]) -> Vec<String> {
    let mut shell = dray(&[&["--", "dray"], line].concat());
    shell.env("COMPLETE", "bash").env("_CLAP_IFS", "\n");
    shell.env("_CLAP_COMPLETE_INDEX", line.len().to_string()).env("DRAY_SOCKET", fake.socket());
    let ran = finish(shell.output().unwrap());
    assert_eq!(ran.code, 0, "{}", ran.err);
    ran.out.lines().map(str::to_owned).collect()
}

#[test]
fn tab_completes_commands_options_and_the_names_that_the_agent_knows() {
    let fake = Fake::start();
    for (line, expected) in [
        (&["mig"][..], "migrate"),
        (&["migrate", "--target-q"], "--target-qmp"),
        (&["migrate", "--to", "host"], "hostb"),
        (&["migrate", "--image", "vm1-"], "vm1-root"),
        (&["backup", "vm1-"], "vm1-root"),
        (&["backup", "vm1-root", "--to", ""], "nas"),
        (&["cancel", "4f1c"], "4f1c0000"),
    ] {
        let proposed = proposed(&fake, line);
        assert!(proposed.iter().any(|one| one.trim_end() == expected), "{line:?}: {proposed:?}");
    }
    // An agent that is not there costs nothing but its names.
    let away = tempfile::tempdir().unwrap();
    let mut shell = dray(&["--", "dray", "migrate", "--to", ""]);
    shell.env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", "3");
    let ran = finish(shell.env("DRAY_SOCKET", away.path().join("none")).output().unwrap());
    assert_eq!((ran.code, &*ran.out, &*ran.err), (0, "", ""));
}

#[test]
fn every_shell_has_a_completion_script() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(help(&["completions", shell]).contains("COMPLETE"), "{shell}");
    }
}
