//! Where output goes: results to standard output, progress, notes and errors to standard error.

use crate::global::Global;
use crate::show::style::Style;
use dray_api::{ErrorKind, Refusal};
use serde::Serialize;
use serde_json::json;
use std::io::{IsTerminal, Write};

/// How this run shows things.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// JSON instead of text.
    pub json: bool,
    /// No progress and no notes.
    pub quiet: bool,
    /// More detail.
    pub verbose: u8,
    /// Standard error is a terminal that can redraw.
    pub live: bool,
    style_out: Style,
    style_err: Style,
}

impl Output {
    /// What the options and the terminal ask for.
    pub fn new(global: &Global) -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let colour = |terminal: bool| Style { colour: terminal && !plain && !dumb };
        Self {
            json: global.json,
            quiet: global.quiet,
            verbose: global.verbose,
            live: std::io::stderr().is_terminal() && !dumb && !global.json && !global.quiet,
            style_out: colour(std::io::stdout().is_terminal()),
            style_err: colour(std::io::stderr().is_terminal()),
        }
    }

    /// Colours for standard error.
    pub fn style_err(&self) -> Style {
        self.style_err
    }

    /// Prints a result: as JSON, or as the text that `human` makes of it.
    pub fn result<T: Serialize>(&self, result: &T, human: impl FnOnce(&T, Style) -> String) {
        if self.json {
            self.json_line(result);
        } else {
            self.text(&human(result, self.style_out));
        }
    }

    /// Prints text to standard output, with a line end if it has none.
    pub fn text(&self, text: &str) {
        if text.is_empty() {
            return;
        }
        let end = if text.ends_with('\n') { "" } else { "\n" };
        // A reader that has gone has no use for the rest.
        let _ = std::io::stdout().lock().write_all(format!("{text}{end}").as_bytes());
    }

    /// Prints one line of JSON to standard output.
    pub fn json_line<T: Serialize>(&self, value: &T) {
        match serde_json::to_string(value) {
            Ok(line) => self.text(&line),
            Err(why) => self.note(&format!("cannot write JSON: {why}")),
        }
    }

    /// Prints one line about what is going on to standard error, unless quiet.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            let _ = writeln!(std::io::stderr().lock(), "{text}");
        }
    }

    /// Prints an error and its hint; with `--json` also as the last line of the output.
    pub fn error(&self, error: &Refusal) {
        if self.json {
            let cancelled = error.kind == ErrorKind::Cancelled;
            let result = if cancelled { "cancelled" } else { "failed" };
            self.json_line(&json!({ "result": result, "error": error }));
        }
        let style = self.style_err;
        let mut text = format!("{} {error}\n", style.bad("dray:"));
        if let Some(hint) = &error.hint {
            text += &format!("{} {hint}\n", style.good("hint:"));
        }
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }
}
