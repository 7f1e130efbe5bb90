//! The `dray` command for operators. It parses the arguments, asks the agent on this host over its
//! socket and shows the answer; `dray agent` is the agent itself.
//!
//! `dray confine` is the agent's launcher of QEMU's tools (`dray_confine`). [`commands`] says what can be typed, one file in it does each command, [`progress`] shows
//! a migration under way, [`client`] asks the agent, [`show`] lays out results, [`exit`] lists the exit codes.

mod client;
mod commands;
mod complete;
mod exit;
mod global;
mod output;
mod progress;
#[cfg(test)]
mod reference;
mod show;

use clap::{CommandFactory, Parser};
use clap_complete::CompleteEnv;
use commands::Args;
use output::Output;
use std::process::ExitCode;

fn main() -> ExitCode {
    // Not a command for people: the agent starts it, and nothing else is to be done in it.
    if std::env::args_os().nth(1).is_some_and(|word| word == dray_confine::COMMAND) {
        return dray_confine::launch();
    }
    // When the shell asks what could be typed next, this answers and ends.
    CompleteEnv::with_factory(|| complete::with_names(Args::command())).complete();
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
