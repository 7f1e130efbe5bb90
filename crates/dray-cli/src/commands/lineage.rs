//! `dray lineage`.

use crate::client::Client;
use crate::output::Output;
use crate::show::lineage::{now_unix_ms, tree};
use dray_api::{ApiResult, Lineage};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray lineage vm1-root             the newest generation first, and who holds it
  dray lineage vm1-root --here      what this host knows, without asking anybody

A handover closes a generation, and the source keeps a replica of it. A migration back to a host
whose replica is of one of these generations sends only what was written since. A backup closes one
too. The repositories and peers in this host's configuration are asked which they hold; who does
not answer is named.";

/// Arguments of `dray lineage`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of the image
    image: String,
    /// Ask nobody else who holds what
    #[arg(long)]
    here: bool,
}

/// Asks for the generations of an image and prints who kept them.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Lineage { image: args.image, here_only: args.here };
    let line = client.call(command).await?;
    output.result(&line, |line, style| tree(line, now_unix_ms(), style));
    Ok(ExitCode::SUCCESS)
}
