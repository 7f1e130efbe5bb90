//! `dray batch`.

use super::limit::{NewLimit, rate_or_none};
use crate::client::Client;
use crate::output::Output;
use crate::progress::batch::follow;
use crate::show::batch::{ended, list};
use clap::Subcommand;
use dray_api::{ApiResult, BatchCancel, BatchLimit, BatchRef, BatchWatch, Batches};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray batch                   all batches and their progress
  dray batch 7b                the migrations of one, also when it is over
  dray batch watch             the only batch that runs
  dray batch limit 1Gbit       limit all its migrations together, from now on
  dray batch cancel 7b         start no more; cancel those before their handover

`dray migrate` with --vm, --all or --each starts a batch. Each of its migrations has an id of
its own, as any other migration, for `dray status`, `dray cancel` and `dray limit`.";

/// Arguments of `dray batch`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct Args {
    /// Show the migrations of this batch: its id, or the start of it
    batch: Option<String>,
    #[command(subcommand)]
    what: Option<Action>,
}

/// What to do with a batch.
#[derive(Subcommand, Debug)]
enum Action {
    /// List batches
    List,
    /// Follow a batch to its end
    Watch {
        /// Batch: its id, or the start of it [default: the only one that runs]
        batch: Option<String>,
    },
    /// Start no further migration of a batch, and cancel those that are before their handover
    Cancel {
        /// Batch: its id, or the start of it [default: the only one that runs]
        batch: Option<String>,
    },
    /// Change the bandwidth limit of all migrations of a batch together
    Limit {
        /// The new limit, as 500Mbit or 100MiB/s, or none
        #[arg(value_parser = rate_or_none)]
        rate: NewLimit,
        /// Batch: its id, or the start of it [default: the only one that runs]
        batch: Option<String>,
    },
}

/// Shows, follows, paces or cancels the migrations of a batch.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let batch = args.batch.map(BatchRef);
    match args.what.unwrap_or(Action::List) {
        Action::List if batch.is_some() => {
            let found = client.call(Batches { batch }).await?;
            output
                .result(&found, |found, style| found.iter().map(|one| ended(one, style)).collect());
        }
        Action::List => {
            let found = client.call(Batches { batch }).await?;
            output.result(&found, |found, style| list(found, style));
        }
        Action::Watch { batch } => {
            let command = BatchWatch { batch: batch.map(BatchRef) };
            return follow(client, command, output).await;
        }
        Action::Cancel { batch } => {
            let command = BatchCancel { batch: batch.map(BatchRef) };
            let status = client.call(command).await?;
            output.result(&status, ended);
        }
        Action::Limit { rate, batch } => {
            let command = BatchLimit { batch: batch.map(BatchRef), budget: rate.0 };
            let status = client.call(command).await?;
            output.result(&status, |status, style| list(std::slice::from_ref(status), style));
        }
    }
    Ok(ExitCode::SUCCESS)
}
