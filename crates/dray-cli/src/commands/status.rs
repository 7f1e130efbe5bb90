//! `dray status`.

use crate::client::Client;
use crate::output::Output;
use crate::show::status;
use dray_api::text::MigrationRef;
use dray_api::{ApiResult, Status};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray status                  all migrations of this host
  dray status 4f1c             one in detail; the start of its id is enough
  dray --json status           for programs: a list of objects

On standard error, the command first names the parts of this host that do not work.";

/// Arguments of `dray status`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Migration to show at length: its id, or the start of it
    migration: Option<String>,
}

/// Prints migrations as a table, or one at length.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let one = args.migration.is_some();
    let command = Status { migration: args.migration.map(MigrationRef) };
    super::tell_troubles(client, output).await?;
    let found = client.call(command).await?;
    output.result(&found, |found, style| match found.as_slice() {
        [migration] if one => status::detail(migration, style),
        all => status::list(all, style),
    });
    Ok(ExitCode::SUCCESS)
}
