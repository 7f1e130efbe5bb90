//! `dray verify`.

use super::backups::{RepositoryArgs, repository};
use crate::client::Client;
use crate::output::Output;
use crate::progress::backup::follow;
use crate::show::backup::verified;
use crate::show::units::counted;
use dray_api::{ApiResult, BackupVerify, ErrorKind, Refusal};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray verify nas                    are all parts of the backups there?
  dray verify nas vm1-root --read-data
                                     has all content its hash?";

/// Arguments of `dray verify`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    repository: RepositoryArgs,
    /// Only backups of this image, by its name or its id
    image: Option<String>,
    /// Read all content and compare it with its hashes
    #[arg(long)]
    read_data: bool,
}

/// Has the agent check the backups in a repository and prints the damaged ones.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let at = args.repository.at.clone();
    let command = BackupVerify {
        repository: repository(args.repository.at, args.repository.key_file.as_deref())?,
        image: args.image,
        read_data: args.read_data,
    };
    let found = follow(client, command, output).await?;
    let which = at.map_or("the repository".to_owned(), |at| format!("repository '{at}'"));
    let what = format!("{} in {which}", counted(found.damaged.len() as u64, "fault"));
    let fault = |why: &str| Refusal::new(ErrorKind::Verification, what, why);
    match found.damaged.as_slice() {
        [] => {
            output.result(&found, verified);
            Ok(ExitCode::SUCCESS)
        }
        [one] => Err(fault(one).hint("restore from another backup")),
        several => {
            if output.json {
                output.json_line(&found);
            } else {
                several.iter().for_each(|fault| output.text(fault));
            }
            Err(fault("they are listed above")
                .hint("restore from the backups that are not listed above"))
        }
    }
}
