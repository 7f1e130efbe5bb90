//! The global options of the command line. [`commands`](crate::commands) lists the commands; the
//! arguments of a command stand with the command.

use crate::commands::Command;
use crate::exit;
use clap::{ArgAction, Parser};
use dray_api::DEFAULT_SOCKET;
use std::path::PathBuf;

const START: &str = "\
Start here:
  dray pki init                             make a certificate authority; then `dray pki issue`
  dray agent --config /etc/dray/dray.toml   run the agent, on every host
  dray prepare --qmp /run/vm1.qmp --to hostb
  dray migrate --qmp /run/vm1.qmp --to hostb --target-qmp /run/vm1.qmp";

/// Moves the disks of running virtual machines between hosts that share no storage.
#[derive(Parser, Debug)]
#[command(
    name = "dray",
    version,
    max_term_width = 100,
    after_help = START,
    after_long_help = format!("{START}\n\n{}", exit::TABLE)
)]
pub struct Args {
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Socket of the agent on this host
    #[arg(long, global = true, value_name = "PATH", default_value = DEFAULT_SOCKET, env = "DRAY_SOCKET",
        hide_env_values = true)]
    pub socket: PathBuf,
    /// Print JSON lines: events if there are any, the result last
    #[arg(long, global = true)]
    pub json: bool,
    /// Print results and errors, but no progress and no notes
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Print more; the agent logs more (given twice: everything)
    #[arg(long, short, global = true, action = ArgAction::Count)]
    pub verbose: u8,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        super::Args::command().debug_assert();
    }
}
