//! One file per command: its arguments, and what it does with them. The [table](Command) below makes
//! each known: to the help, and to what is run. `mod` stands apart from it, as `cargo fmt` does not
//! look for files in macros.

mod adopt;
mod agent;
mod args;
mod backfill;
mod backup;
mod backups;
mod batch;
mod cancel;
mod check_config;
mod claim;
mod completions;
mod hot_set;
mod images;
mod info;
mod limit;
mod lineage;
mod migrate;
mod peers;
mod pki;
mod plan;
mod prepare;
mod quit;
mod record;
mod release;
mod reload;
mod resize;
mod restore;
mod resume;
mod seed;
mod several;
mod sim;
mod status;
mod subject;
mod trace;
mod tuning;
mod unstall;
mod verify;
mod watch;

pub use args::Args;

use crate::client::Client;
use crate::output::Output;
use crate::show::troubles;
use clap::Subcommand;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_types::Why;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Makes [`Command`] and [`run`] of the table of commands. A row is `Variant = module, how;` under the
/// command's line of help:
///
/// * `module` is the command's file in this folder. It has `Args` and `run`.
/// * `how` is `asks` when it talks to the agent (`async fn run(Args, &Client, &Output)`), and `alone`
///   when it needs none (`fn run(&Args, &Output)`).
macro_rules! commands {
    ($( #[$help:meta] $command:ident = $module:ident, $how:ident; )+) => {
        /// The commands, in the order in which the help lists them.
        #[derive(Subcommand, Debug)]
        pub enum Command {
            $(#[$help] $command(Box<$module::Args>),)+
        }

        /// Does what was typed.
        pub fn run(args: Args, output: &Output) -> ApiResult<ExitCode> {
            let client = Client::new(args.global.socket);
            match args.command {
                $(Command::$command(args) => start!($how, $module, *args, &client, output),)+
            }
        }
    };
}

/// How a command of the table is started.
macro_rules! start {
    (alone, $module:ident, $args:expr, $client:expr, $output:expr) => {
        $module::run(&$args, $output)
    };
    (asks, $module:ident, $args:expr, $client:expr, $output:expr) => {
        wait($module::run($args, $client, $output))
    };
}

commands! {
    /// Run the agent
    Agent = agent, alone;
    /// Check a configuration file and print its problems
    CheckConfig = check_config, alone;
    /// Make room at the target, and print the arguments for the QEMU that waits there
    Prepare = prepare, asks;
    /// Predict the time, downtime and traffic of a migration
    Plan = plan, asks;
    /// Let a target read images from backups and replicas, before a migration
    Seed = seed, asks;
    /// Move a running VM, several VMs, or images, to another host
    Migrate = migrate, asks;
    /// End the QEMU of a VM that has moved away
    Quit = quit, asks;
    /// Show migrations
    Status = status, asks;
    /// Follow a migration to its end
    Watch = watch, asks;
    /// Cancel a migration before its handover; the guest continues at the source
    Cancel = cancel, asks;
    /// Continue an interrupted migration
    Resume = resume, asks;
    /// Change the bandwidth limit of a running migration
    Limit = limit, asks;
    /// Show, follow, limit and cancel the migrations of one command
    Batch = batch, asks;
    /// Start, pause or limit the fetching of missing blocks at a target
    Backfill = backfill, asks;
    /// List, add and remove images
    Images = images, asks;
    /// Show the generations of an image, and where copies of them are
    Lineage = lineage, asks;
    /// Back images up while their guests run
    Backup = backup, asks;
    /// List and prune backups, make repositories, cancel a backup
    Backups = backups, asks;
    /// Check the backups in a repository
    Verify = verify, asks;
    /// Make an image of a backup
    Restore = restore, asks;
    /// Put the disks of a running VM under dray
    Adopt = adopt, asks;
    /// Give the disks of a running VM back to its QEMU
    Release = release, asks;
    /// Make an image larger
    Resize = resize, asks;
    /// Take ownership of an image whose owner is lost
    Claim = claim, asks;
    /// End the wait of guest I/O for a lost source
    Unstall = unstall, asks;
    /// Show who the agent is, and what does not work on its host
    Info = info, asks;
    /// Have the agent read its configuration and its certificates again
    Reload = reload, asks;
    /// Show whether the peers of the configuration answer
    Peers = peers, asks;
    /// Make the certificates by which agents identify each other
    Pki = pki, alone;
    /// Replay a trace through the engine to predict the cost of a migration
    Sim = sim, alone;
    /// Record, analyse and generate traces of block accesses
    Trace = trace, asks;
    /// Print a completion script for a shell
    Completions = completions, alone;
}

/// Runs what asks the agent to its end.
fn wait(work: impl Future<Output = ApiResult<ExitCode>>) -> ApiResult<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|why| Refusal::new(ErrorKind::Internal, "cannot start", why))?;
    runtime.block_on(work)
}

/// Tells what does not work on the agent's host, on standard error: there it is in nobody's way.
async fn tell_troubles(client: &Client, output: &Output) -> ApiResult<()> {
    let info = client.call(dray_api::Info {}).await?;
    let text = troubles::lines(&info.troubles, output.style_err());
    if !text.is_empty() {
        output.note(text.trim_end());
    }
    Ok(())
}

/// A path of this host as the agent can use it: the agent runs in another directory.
fn absolute(path: &Path) -> ApiResult<PathBuf> {
    std::path::absolute(path).map_err(|why| {
        Refusal::new(ErrorKind::Invalid, format!("cannot use the path '{}'", path.display()), why)
    })
}

/// A pair `HERE=THERE`, for clap.
fn pair(text: &str) -> Result<(String, String), Why> {
    match text.split_once('=') {
        Some((here, there)) if !here.is_empty() && !there.is_empty() => {
            Ok((here.to_owned(), there.to_owned()))
        }
        _ => Err("write it as HERE=THERE".into()),
    }
}

/// A path that must be absolute because it is one of the other host, for clap.
fn path_at_target(text: &str) -> Result<PathBuf, Why> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("a path at the target must be absolute".into()) }
}
