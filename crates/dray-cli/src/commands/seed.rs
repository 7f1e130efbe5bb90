//! `dray seed`.

use super::pair;
use super::subject::MoveArgs;
use crate::client::Client;
use crate::output::Output;
use crate::progress::seeding;
use dray_api::{ApiResult, Seed};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray seed --image db --to hostb
  dray seed --qmp /run/vm1.qmp --to hostb --pool fast

For each image, the target reads the newest backup that it can use from the repositories in its
own configuration ([[backup]]), or the replica that one of its peers has kept, and keeps it as
a replica. It reads nothing from the source. A later migration sends only the blocks that were
written since. `dray migrate` and `dray prepare` do this by themselves, unless you give
--no-backups.

Ctrl-C stops the reading; the same command within a day continues it.";

/// Arguments of `dray seed`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    what: MoveArgs,
    /// Pool at the target [default: the target's default for this host]
    #[arg(long)]
    pool: Option<String>,
    /// Name at the target of an image or device (repeatable)
    #[arg(long = "name", value_name = "HERE=THERE", value_parser = pair)]
    names: Vec<(String, String)>,
}

/// Has the target read images from its backups and follows that to its end.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Seed {
        subject: args.what.subject.resolve()?,
        to: args.what.to,
        pool: args.pool,
        prefix: None,
        names: args.names.into_iter().collect(),
    };
    let seeded = seeding::call(client, command, output).await?;
    output.result(&seeded, |seeded, _| {
        if seeded.images.iter().all(|image| image.generation.is_none() && image.notes.is_empty()) {
            return format!(
                "{} has no backup or replica with which the migration could begin\n",
                seeded.to
            );
        }
        seeding::words(seeded).into_iter().map(|line| line + "\n").collect()
    });
    Ok(ExitCode::SUCCESS)
}
