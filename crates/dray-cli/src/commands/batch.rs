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
  dray batch                   what was begun with others, and how it goes
  dray batch watch             the only batch running
  dray batch limit 1Gbit       what all of it may send together, from now on
  dray batch cancel 7b         begin nothing more; cancel what is before its handover

`dray migrate` with --vm, --all or --each begins a batch. One migration of it is seen to by its
own id, as any other: `dray status`, `dray cancel`, `dray limit`.";

/// Arguments of `dray batch`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: Option<What>,
}

/// What to do with a batch.
#[derive(Subcommand, Debug)]
enum What {
    /// List batches
    List,
    /// Follow a batch to its end
    Watch {
        /// Its id, or the start of it; the only one running if not given
        batch: Option<String>,
    },
    /// Begin nothing more of a batch, and cancel what of it is before its handover
    Cancel {
        /// Its id, or the start of it; the only one running if not given
        batch: Option<String>,
    },
    /// Change what all migrations of a batch may send together
    Limit {
        /// The new limit, like 500Mbit or 100MiB/s, or none
        #[arg(value_parser = rate_or_none)]
        rate: NewLimit,
        /// Its id, or the start of it; the only one running if not given
        batch: Option<String>,
    },
}

/// Shows, follows, paces or cancels the migrations of a batch.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    match args.what.unwrap_or(What::List) {
        What::List => {
            let found = client.call(Batches {}).await?;
            output.result(&found, |found, style| list(found, style));
        }
        What::Watch { batch } => {
            let command = BatchWatch { batch: batch.map(BatchRef) };
            return follow(client, command, output).await;
        }
        What::Cancel { batch } => {
            let command = BatchCancel { batch: batch.map(BatchRef) };
            let status = client.call(command).await?;
            output.result(&status, ended);
        }
        What::Limit { rate, batch } => {
            let command = BatchLimit { batch: batch.map(BatchRef), budget: rate.0 };
            let status = client.call(command).await?;
            output.result(&status, |status, style| list(std::slice::from_ref(status), style));
        }
    }
    Ok(ExitCode::SUCCESS)
}
