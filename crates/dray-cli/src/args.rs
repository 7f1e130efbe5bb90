//! What can be typed: the global options and the list of commands. The arguments of a command
//! stand with the command.

use crate::{commands, exit};
use clap::{ArgAction, Parser, Subcommand};
use dray_api::DEFAULT_SOCKET;
use std::path::PathBuf;

const START: &str = "\
Start here:
  dray pki init                             make an authority; `dray pki issue` the certificates
  dray agent --config /etc/dray/dray.toml   run the agent, on every host
  dray prepare --qmp /run/vm1.qmp --to hostb
  dray migrate --qmp /run/vm1.qmp --to hostb --target-qmp /run/vm1-incoming.qmp";

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
    /// No progress and no notes, only results and errors
    #[arg(long, short, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Say more; for the agent: log more (twice: everything)
    #[arg(long, short, global = true, action = ArgAction::Count)]
    pub verbose: u8,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run the agent
    Agent(commands::agent::Args),
    /// Check a configuration file and say what is wrong with it
    CheckConfig(commands::check_config::Args),
    /// Make exports at the target and print how to start its QEMU
    Prepare(commands::prepare::Args),
    /// Predict what a migration would take
    Plan(commands::plan::Args),
    /// Have a target read images from its backups, before a migration
    Seed(commands::seed::Args),
    /// Move a running VM, several, or images, to another host
    Migrate(commands::migrate::Args),
    /// Show migrations
    Status(commands::status::Args),
    /// Follow a migration to its end
    Watch(commands::watch::Args),
    /// Stop a migration before its handover; the guest goes on at the source
    Cancel(commands::cancel::Args),
    /// Take up an interrupted migration
    Resume(commands::resume::Args),
    /// Change the bandwidth limit of a running migration
    Limit(commands::limit::Args),
    /// Show, follow, pace and cancel migrations that were begun together
    Batch(commands::batch::Args),
    /// Start, pause or pace the fetching of what a target still misses
    Backfill(commands::backfill::Args),
    /// List, add and remove images
    Images(commands::images::Args),
    /// Show the generations of an image and who kept them
    Lineage(commands::lineage::Args),
    /// Back images up while their guests go on
    Backup(commands::backup::Args),
    /// List backups, make repositories, end a backup
    Backups(commands::backups::Args),
    /// Check the backups in a repository
    Verify(commands::verify::Args),
    /// Make an image of a backup
    Restore(commands::restore::Args),
    /// Splice the disks of a running VM under dray
    Adopt(commands::adopt::Args),
    /// Hand the disks of a running VM back to its QEMU
    Release(commands::release::Args),
    /// Grow an image
    Resize(commands::resize::Args),
    /// Take ownership of an image whose owner is gone for good
    Claim(commands::claim::Args),
    /// End the stall of guest I/O that waits for a lost source
    Unstall(commands::unstall::Args),
    /// Make the certificates with which agents trust each other
    Pki(commands::pki::Args),
    /// Replay a trace through the engine: what a migration would cost
    Sim(Box<commands::sim::Args>),
    /// Record, analyse and generate traces of block accesses
    Trace(commands::trace::Args),
    /// Print a completion script for a shell
    Completions(commands::completions::Args),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        super::Args::command().debug_assert();
    }
}
