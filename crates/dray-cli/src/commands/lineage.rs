//! `dray lineage`.

use crate::client::Client;
use crate::output::Output;
use crate::show::lineage::{now_unix_ms, tree};
use dray_api::{ApiResult, Lineage};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray lineage vm1-root             the newest generation first, and where it is
  dray lineage vm1-root --here      only what this host knows

A handover closes a generation, and the source keeps a replica of it. A migration back to a
host with a replica of one of these generations sends only the blocks that were written since.
A backup closes a generation as well. The agent asks the repositories and peers in its
configuration which generations they hold; the output names those that do not answer.";

/// Arguments of `dray lineage`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of the image
    image: String,
    /// Do not ask repositories and other hosts
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
