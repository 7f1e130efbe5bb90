//! `dray limit`.

use crate::client::Client;
use crate::output::Output;
use dray_api::text::MigrationRef;
use dray_api::{ApiResult, Limit};
use dray_types::{BitRate, Why};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray limit 500Mbit           the only migration that runs
  dray limit 100MiB/s 4f1c     this one
  dray limit none              no limit";

/// Arguments of `dray limit`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The new limit, as 500Mbit or 100MiB/s, or none
    #[arg(value_parser = rate_or_none)]
    rate: NewLimit,
    /// Migration: its id, or the start of it [default: the only one that runs]
    migration: Option<String>,
}

/// The limit as it was typed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NewLimit(pub Option<BitRate>);

/// A rate or `none`, for clap.
pub fn rate_or_none(text: &str) -> Result<NewLimit, Why> {
    if text == "none" {
        return Ok(NewLimit(None));
    }
    let rate: BitRate = text.parse().map_err(|why| format!("{why}, or none"))?;
    Ok(NewLimit(Some(rate)))
}

/// Changes the bandwidth limit of a migration and prints the new one.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Limit { migration: args.migration.map(MigrationRef), bandwidth: args.rate.0 };
    let limited = client.call(command).await?;
    output.result(&limited, |limited, style| {
        let mut text = match limited.bandwidth {
            Some(rate) => format!("migration {} sends at most {rate}\n", limited.migration),
            None => format!("migration {} has no limit\n", limited.migration),
        };
        if let Some(why) = &limited.not_kept {
            let until = "after a restart of the agent, the earlier limit applies again";
            text += &style.warn(&format!("{until}: {why}"));
            text.push('\n');
        }
        text
    });
    Ok(ExitCode::SUCCESS)
}
