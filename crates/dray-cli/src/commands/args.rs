//! What can be typed: the global options and a command. The arguments of a command stand with the command.

use super::Command;
use crate::exit;
use crate::global::Global;
use clap::Parser;

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

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        super::Args::command().debug_assert();
    }
}
