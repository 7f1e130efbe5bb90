//! `dray watch`.

use crate::client::Client;
use crate::output::Output;
use crate::progress;
use dray_api::text::MigrationRef;
use dray_api::{ApiResult, Watch};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray watch                   the only migration that runs
  dray watch 4f1c              this one; the start of its id is enough

Ctrl-C ends the display, not the migration.";

/// Arguments of `dray watch`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Migration to follow: its id, or the start of it [default: the only one that runs]
    migration: Option<String>,
}

/// Follows a migration to its end.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Watch { migration: args.migration.map(MigrationRef) };
    progress::follow(client, command, Ok, output).await.map(Into::into)
}
