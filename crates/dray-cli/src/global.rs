//! The options of every command.

use clap::ArgAction;
use dray_api::DEFAULT_SOCKET;
use std::path::PathBuf;

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
