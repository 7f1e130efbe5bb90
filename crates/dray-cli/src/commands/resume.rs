//! `dray resume`.

use crate::client::Client;
use crate::output::Output;
use crate::progress;
use crate::show::status::short;
use dray_api::text::MigrationRef;
use dray_api::{ApiResult, Resume, Watch};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray resume                  the only interrupted migration
  dray resume 4f1c --detach    this one, without waiting for its end";

/// Arguments of `dray resume`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Migration to continue: its id, or the start of it [default: the only interrupted one]
    migration: Option<String>,
    /// Return when the migration continues
    #[arg(long)]
    detach: bool,
}

/// Takes up an interrupted migration and follows it to its end.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Resume { migration: args.migration.map(MigrationRef) };
    let started = client.call(command).await?;
    if !args.detach {
        let watch = Watch { migration: Some(started.migration.into()) };
        return progress::follow(client, watch, Ok, output).await.map(Into::into);
    }
    output.result(&started, |started, _| {
        let id = short(started.migration);
        format!("migration {} continues\n`dray watch {id}` shows it\n", started.migration)
    });
    Ok(ExitCode::SUCCESS)
}
