//! `dray cancel`.

use crate::client::Client;
use crate::output::Output;
use crate::show::units::bytes;
use dray_api::text::MigrationRef;
use dray_api::{ApiResult, Cancel};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray cancel                  the only migration that runs
  dray cancel 4f1c --discard   this one, and delete the blocks at the target

The target keeps the received blocks, so that the next attempt continues with them, unless you
give --discard. After the handover you cannot cancel a migration: only the target can serve the
guest then. There are three exceptions, in which the migration ends and the copies on this host
stay as replicas: the target does not know the migration any more (an image of it was claimed
there), the target has all blocks and cannot be reached, or this agent cannot bring the
migration back. At the target, this command ends a migration whose source cannot be asked,
unless this host has promised to serve the images.";

/// Arguments of `dray cancel`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Migration to cancel: its id, or the start of it [default: the only one that runs]
    migration: Option<String>,
    /// Also delete the blocks that the target has received
    #[arg(long)]
    discard: bool,
}

/// Ends a migration before its handover and says what became of the copy at the target.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Cancel { migration: args.migration.map(MigrationRef), discard: args.discard };
    let cancelled = client.call(command).await?;
    output.result(&cancelled, |cancelled, _| {
        let kept = match cancelled.bytes_kept {
            _ if cancelled.target_was_away => "the target cannot be reached: it discards the \
                                               received blocks, and frees the names, when it \
                                               learns of the cancel"
                .to_owned(),
            0 => "the target keeps no blocks".to_owned(),
            kept => format!("the target keeps {} for the next attempt", bytes(kept)),
        };
        if cancelled.at_target {
            return format!("cancelled {}: this host keeps nothing of it\n", cancelled.migration);
        }
        if cancelled.replicas_stay {
            let id = &cancelled.migration;
            return format!(
                "cancelled {id}: the copies on this host stay, as replicas\n`dray images remove \
                 NAME --delete` removes one, `dray claim NAME` takes one back into use\nif the \
                 other host still waits for blocks of them, `dray status {id}` there says how to \
                 end that\n"
            );
        }
        format!("cancelled {}: the guest continues on this host; {kept}\n", cancelled.migration)
    });
    Ok(ExitCode::SUCCESS)
}
