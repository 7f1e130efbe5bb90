//! The `dray` command for operators. It parses the arguments, asks the agent on this host over its
//! socket and shows the answer; `dray agent` is the agent itself.
//!
//! [`args`] says what can be typed, one file in [`commands`] does each command, [`progress`] shows
//! a migration under way, [`client`] asks the agent, [`show`] lays out results, [`exit`] lists the exit codes.

mod args;
mod client;
mod commands;
mod exit;
mod output;
mod progress;
#[cfg(test)]
mod reference;
mod show;

use args::Args;
use clap::Parser;
use output::Output;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = Args::parse();
    let output = Output::new(&args.global);
    match commands::run(args, &output) {
        Ok(code) => code,
        Err(error) => {
            output.error(&error);
            exit::code(error.kind)
        }
    }
}
