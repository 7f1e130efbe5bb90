//! `dray backups`: what there is in repositories, and what is under way.

use super::absolute;
use crate::client::Client;
use crate::output::Output;
use crate::show::backup::{cancelled, collected, listing, overview, pruned, repository_made};
use clap::Subcommand;
use dray_api::{ApiResult, BackupCancel, BackupGc, BackupInit, BackupPrune, Backups, Repository};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray backups                                configured and running backups
  dray backups list nas                       all backups in a repository
  dray backups list file:///mnt/nas/dray vm1-root
  dray backups init nas --key-file /etc/dray/nas.key
  dray backups prune nas --keep-daily 7 --keep-weekly 4 --dry-run
  dray backups gc nas                         free the space of removed backups
  dray backups cancel vm1-root                cancel a running backup

A key file holds 64 hexadecimal digits (`openssl rand -hex 32`). Without it the backups are
lost.";

/// Arguments of `dray backups`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    what: Option<Action>,
}

/// A repository.
#[derive(clap::Args, Debug)]
pub struct RepositoryArgs {
    /// The repository: the name of a `[[backup]]` in the configuration, or a URL [default: the only `[[backup]]`]
    #[arg(value_name = "URL|NAME")]
    pub at: Option<String>,
    /// The file with the repository's key
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
}

/// Which backups stay.
#[derive(clap::Args, Debug)]
#[group(required = true, multiple = true)]
struct Keep {
    /// Keep the newest N backups of each image
    #[arg(long, value_name = "N", default_value_t)]
    keep_last: u32,
    /// Keep the backups of the last N days
    #[arg(long, value_name = "N", default_value_t)]
    keep_within_days: u32,
    /// Keep the newest backup of each of the last N days that have one (UTC)
    #[arg(long, value_name = "N", default_value_t)]
    keep_daily: u32,
    /// Keep the newest backup of each of the last N weeks that have one
    #[arg(long, value_name = "N", default_value_t)]
    keep_weekly: u32,
    /// Keep the newest backup of each of the last N months that have one
    #[arg(long, value_name = "N", default_value_t)]
    keep_monthly: u32,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// List the backups in a repository
    List {
        #[command(flatten)]
        repository: RepositoryArgs,
        /// Only backups of this image, by its name or its id
        image: Option<String>,
    },
    /// Make a repository
    Init {
        #[command(flatten)]
        repository: RepositoryArgs,
    },
    /// Remove backups; a backup stays when any of the options keeps it
    Prune {
        #[command(flatten)]
        repository: RepositoryArgs,
        /// Only backups of this image, by its name or its id
        image: Option<String>,
        #[command(flatten)]
        keep: Keep,
        /// Only show what would be removed
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove content that no backup needs
    Gc {
        #[command(flatten)]
        repository: RepositoryArgs,
    },
    /// Cancel the running backup of an image
    Cancel {
        /// Name of the image
        image: String,
    },
}

/// A repository as the agent wants it.
pub fn repository(at: Option<String>, key_file: Option<&Path>) -> ApiResult<Repository> {
    Ok(Repository { at, key_file: key_file.map(absolute).transpose()? })
}

/// Lists backups, makes a repository, prunes it, or ends a backup.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let named = |args: RepositoryArgs| repository(args.at, args.key_file.as_deref());
    match args.what {
        None => {
            let command = Backups { repository: None, image: None };
            let found = client.call(command).await?;
            output.result(&found, overview);
        }
        Some(Action::List { repository, image }) => {
            let repository = Some(named(repository)?);
            let command = Backups { repository, image };
            let found = client.call(command).await?;
            output.result(&found, listing);
        }
        Some(Action::Init { repository }) => {
            let command = BackupInit(named(repository)?);
            let done = client.call(command).await?;
            output.result(&done, repository_made);
        }
        Some(Action::Prune { repository, image, keep, dry_run }) => {
            let command = BackupPrune {
                repository: named(repository)?,
                image,
                keep_last: keep.keep_last,
                keep_within_days: keep.keep_within_days,
                keep_daily: keep.keep_daily,
                keep_weekly: keep.keep_weekly,
                keep_monthly: keep.keep_monthly,
                dry_run,
            };
            let done = client.call(command).await?;
            output.result(&done, pruned);
        }
        Some(Action::Gc { repository }) => {
            let command = BackupGc(named(repository)?);
            let done = client.call(command).await?;
            output.result(&done, collected);
        }
        Some(Action::Cancel { image }) => {
            let command = BackupCancel { image };
            let done = client.call(command).await?;
            output.result(&done, cancelled);
        }
    }
    Ok(ExitCode::SUCCESS)
}
