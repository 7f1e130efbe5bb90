//! `dray backup`.

use super::absolute;
use crate::client::Client;
use crate::output::Output;
use crate::progress::backup::follow;
use crate::show::backup::made;
use dray_api::{ApiResult, Backup};
use dray_types::BitRate;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray backups init file:///mnt/nas/dray                make the repository, once
  dray backup vm1-root --to file:///mnt/nas/dray
  dray backup vm1-root vm1-data --to nas                a [[backup]] of the configuration
  dray backup vm1-root --to nas --fsfreeze /run/vm1.qga

The guest keeps running: its writes are held back for some milliseconds, and the backup has the
content of that moment, the same for all named images. The agent reads only the blocks that
were written since the last backup in this repository. Ctrl-C cancels the backup and leaves
nothing of it.";

/// Arguments of `dray backup`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Names of the images; give all images of one VM together
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// The repository: the name of a `[[backup]]` in the configuration, or a URL [default: the only `[[backup]]`]
    #[arg(long, value_name = "URL|NAME")]
    to: Option<String>,
    /// The file with the repository's key
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Freeze the guest's file systems for the moment of the backup, through this socket of the guest agent
    #[arg(long, value_name = "SOCKET")]
    fsfreeze: Option<PathBuf>,
    /// Limit for reading, as 200Mbit or 25MiB/s; storing is not faster
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<BitRate>,
    /// Read all blocks, also those that the repository has already
    #[arg(long)]
    full: bool,
    /// At the end, keep only the N newest backups of each image
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep_last: Option<u32>,
}

/// Has the agent back images up and follows the backup to its end.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Backup {
        images: args.images,
        to: args.to,
        key_file: args.key_file.as_deref().map(absolute).transpose()?,
        fsfreeze: args.fsfreeze.as_deref().map(absolute).transpose()?,
        bandwidth: args.bandwidth,
        full: args.full,
        keep_last: args.keep_last,
    };
    let done = follow(client, command, output).await?;
    output.result(&done, made);
    Ok(ExitCode::SUCCESS)
}
