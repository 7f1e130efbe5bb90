//! `dray restore`.

use super::backups::repository;
use crate::client::Client;
use crate::output::Output;
use crate::progress::backup::follow;
use crate::show::backup::restored;
use dray_api::{ApiResult, Restore};
use dray_types::BitRate;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray restore vm1-root --from nas --as vm1-root-old          the newest backup
  dray restore vm1-root@12 --from nas --as vm1-root-12        generation 12
  dray restore vm1-root@5f3a --from file:///mnt/nas/dray --as vm1-old --pool ssd

The new image is independent of the old one: a sparse file in a pool, which gets its name when
it is complete. If the restore fails, it leaves no file.";

/// Arguments of `dray restore`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The image by its name when it was backed up, or its id; with a generation's number or the
    /// first digits of its id behind an @
    #[arg(value_name = "IMAGE[@GENERATION]")]
    image: String,
    /// The repository: the name of a `[[backup]]` in the configuration, or a URL [default: the only `[[backup]]`]
    #[arg(long, value_name = "URL|NAME")]
    from: Option<String>,
    /// Name of the new image
    #[arg(long = "as", value_name = "NAME")]
    name: String,
    /// Pool for the new image [default: the first one]
    #[arg(long)]
    pool: Option<String>,
    /// The file with the repository's key
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Limit for writing, as 200Mbit or 25MiB/s
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<BitRate>,
}

/// Has the agent make an image of a backup and follows that to its end.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let (image, generation) = match args.image.rsplit_once('@') {
        Some((image, generation)) => (image.to_owned(), Some(generation.to_owned())),
        None => (args.image, None),
    };
    let command = Restore {
        repository: repository(args.from, args.key_file.as_deref())?,
        image,
        generation,
        name: args.name,
        pool: args.pool,
        bandwidth: args.bandwidth,
    };
    let done = follow(client, command, output).await?;
    output.result(&done, restored);
    Ok(ExitCode::SUCCESS)
}
