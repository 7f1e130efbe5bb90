//! `dray backfill`.

use super::absolute;
use super::limit::{NewLimit, rate_or_none};
use crate::client::Client;
use crate::output::Output;
use crate::show::status::short;
use crate::show::units::bytes;
use clap::Subcommand;
use dray_api::{ApiResult, Backfill, BackfillAction, Backfilling};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples, on the host that the guest has moved to:
  dray backfill start                    fetch all blocks that are still at the source
  dray backfill pause vm1-root           fetch only the blocks that the guest reads
  dray backfill rate 200Mbit --qmp /run/vm1.qmp
  dray backfill rate none

A migration with --strategy deferred waits for `start`. Until the target has fetched all
blocks, keep the source and its copy; `dray images` there says which host needs it.";

/// Arguments of `dray backfill`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Fetch all missing blocks, in the background
    Start {
        #[command(flatten)]
        which: Which,
    },
    /// Fetch only the blocks that the guest reads
    Pause {
        #[command(flatten)]
        which: Which,
    },
    /// Change the limit for fetching blocks in the background
    Rate {
        /// The new limit, as 200Mbit or 25MiB/s, or none
        #[arg(value_parser = rate_or_none)]
        rate: NewLimit,
        #[command(flatten)]
        which: Which,
    },
}

#[derive(clap::Args, Debug)]
struct Which {
    /// Image, or migration by the start of its id [default: the only one in Backfill]
    #[arg(value_name = "IMAGE|MIGRATION")]
    which: Option<String>,
    /// QMP socket of the VM that was moved
    #[arg(long, value_name = "SOCKET", conflicts_with = "which")]
    qmp: Option<PathBuf>,
}

impl Args {
    fn resolve(self) -> ApiResult<Backfill> {
        let (action, Which { which, qmp }) = match self.what {
            Action::Start { which } => (BackfillAction::Start, which),
            Action::Pause { which } => (BackfillAction::Pause, which),
            Action::Rate { rate, which } => (BackfillAction::Rate(rate.0), which),
        };
        let qmp = qmp.map(|qmp| absolute(&qmp)).transpose()?;
        Ok(Backfill { action, which, qmp })
    }
}

/// Starts, pauses or paces the fetching of missing blocks, and says which it was.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = args.resolve()?;
    let action = command.action;
    let now = client.call(command).await?;
    output.result(&now, |now, _| text(now, action));
    Ok(ExitCode::SUCCESS)
}

fn text(now: &Backfilling, action: BackfillAction) -> String {
    let (id, left) = (short(now.migration), bytes(now.bytes_missing));
    match action {
        BackfillAction::Start => format!("fetching {left} of migration {id}\n"),
        BackfillAction::Pause => {
            format!(
                "paused: {left} of migration {id} stay at the source until the guest reads them\n"
            )
        }
        BackfillAction::Rate(Some(rate)) => format!("fetching at most {rate}; {left} left\n"),
        BackfillAction::Rate(None) => format!("fetching without a limit; {left} left\n"),
    }
}
