//! `docs/reference/commands.md` is made of what `clap` knows. `UPDATE_GOLDEN=1` writes the document.

use crate::commands::Args;
use clap::{Arg, ArgAction, Command, CommandFactory};
use std::fmt::Write;
use std::path::Path;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/commands.md");

/// A text of help as Markdown: without ends of lines, and with what looks like a table or a tag as it is.
fn plain(text: &impl ToString) -> String {
    let text = text.to_string().replace('|', "\\|").replace('<', "&lt;");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// How an argument is typed.
fn typed(arg: &Arg) -> String {
    let values = arg.get_value_names().unwrap_or_default();
    let values: Vec<_> = values.iter().map(ToString::to_string).collect();
    let flags = [
        arg.get_short().map(|short| format!("-{short}")),
        arg.get_long().map(|long| format!("--{long}")),
    ];
    let flags: Vec<_> = flags.into_iter().flatten().collect();
    let takes = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    match (flags.is_empty(), takes) {
        (true, _) => values.join(" "),
        (false, true) => format!("{} {}", flags.join(", "), values.join(" ")),
        (false, false) => flags.join(", "),
    }
}

/// What it means, its values and its default.
fn meaning(arg: &Arg) -> String {
    let help = arg.get_long_help().or(arg.get_help());
    let mut text = help.map(plain).unwrap_or_default();
    let is_word = |text: &str| text.ends_with(['.', ':', ';']) || text.is_empty();
    let mut add = |more: String| {
        let gap = if is_word(&text) { " " } else { ". " };
        let _ = write!(text, "{gap}{more}");
    };
    let takes = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let values: Vec<_> = arg
        .get_possible_values()
        .iter()
        .filter(|value| takes && !value.is_hide_set())
        .map(|value| match value.get_help() {
            Some(help) => format!("`{}` ({})", value.get_name(), plain(help)),
            None => format!("`{}`", value.get_name()),
        })
        .collect();
    if !values.is_empty() {
        add(format!("One of {}.", values.join(", ")));
    }
    let default = arg.get_default_values();
    if takes && !default.is_empty() && !arg.is_hide_default_value_set() {
        let shown: Vec<_> = default.iter().map(|value| value.to_string_lossy()).collect();
        add(format!("Default: `{}`.", shown.join(" ")));
    }
    text.trim().to_owned()
}

fn describe(text: &mut String, command: &mut Command, path: &str, level: usize) {
    let _ = write!(text, "\n{} {path}\n", "#".repeat(level));
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string);
    if let Some(about) = about {
        let _ = write!(text, "\n{}\n", about.replace('<', "&lt;"));
    }
    let usage = command.render_usage().to_string();
    let _ = write!(text, "\n```text\n{}\n```\n", usage.trim_start_matches("Usage: ").trim());
    let is_shown =
        |arg: &&Arg| !arg.is_hide_set() && !arg.is_global_set() && arg.get_id() != "help";
    let args: Vec<_> = command.get_arguments().filter(is_shown).collect();
    if !args.is_empty() {
        text.push_str("\n| Argument | Meaning |\n|---|---|\n");
        for arg in args {
            let _ = writeln!(text, "| `{}` | {} |", typed(arg), meaning(arg));
        }
    }
    for sub in command.get_subcommands_mut().filter(|sub| sub.get_name() != "help") {
        let path = format!("{path} {}", sub.get_name());
        describe(text, sub, &path, level + 1);
    }
}

fn document() -> String {
    let mut dray = Args::command();
    dray.build();
    let mut text = String::from(
        "# Commands\n\n\
         This page is generated from the help of the command line: `dray COMMAND --help` prints the same.\n\
         [Exit codes](exit-codes.md) are listed on a page of their own.\n\n\
         These options go with every command:\n\n\
         | Argument | Meaning |\n|---|---|\n",
    );
    for arg in dray.get_arguments().filter(|arg| arg.is_global_set()) {
        let _ = writeln!(text, "| `{}` | {} |", typed(arg), meaning(arg));
    }
    for command in dray.get_subcommands_mut().filter(|command| command.get_name() != "help") {
        let path = format!("dray {}", command.get_name());
        describe(&mut text, command, &path, 2);
    }
    text
}

#[test]
fn the_reference_says_what_the_help_says() {
    let (found, path) = (document(), Path::new(DOCUMENT));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        return std::fs::write(path, found).unwrap();
    }
    let wanted = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == wanted, "{DOCUMENT} is not what the help says; UPDATE_GOLDEN=1 writes it");
}
