//! The `dray` command for operators. It parses the arguments, asks the agent on this host over its
//! socket and shows the answer; `dray agent` is the agent itself.
//!
//! [`commands`] says what can be typed, one file in it does each command, [`progress`] shows
//! a migration under way, [`client`] asks the agent, [`show`] lays out results, [`exit`] lists the exit codes.

mod client;
mod commands;
mod exit;
mod global;
mod output;
mod progress;
#[cfg(test)]
mod reference;
mod show;

use clap::Parser;
use commands::Args;
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
