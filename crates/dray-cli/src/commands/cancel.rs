//! `dray cancel`.

use crate::client::Client;
use crate::output::Output;
use crate::show::units::bytes;
use dray_api::text::MigrationRef;
use dray_api::{ApiResult, Cancel};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray cancel                  the only migration running
  dray cancel 4f1c --discard   this one, and delete what the target has received

What the target has received is kept, so that the next try starts from it, unless --discard is
given. After the handover there is nothing to cancel: only the target can serve the guest then.
Where the target says that it knows nothing of the migration any more (an image of it was
claimed there), or has everything and is away, it lets go of what the images left here.
At the target of a migration it takes back what its source cannot be asked about, unless this host
has promised to serve it.";

/// Arguments of `dray cancel`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Migration to stop: its id, or the start of it; the only one running if not given
    migration: Option<String>,
    /// Also delete what the target has received
    #[arg(long)]
    discard: bool,
}

/// Ends a migration before its handover and says what became of the copy at the target.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Cancel { migration: args.migration.map(MigrationRef), discard: args.discard };
    let cancelled = client.call(command).await?;
    output.result(&cancelled, |cancelled, _| {
        let kept = match cancelled.bytes_kept {
            _ if cancelled.target_was_away => "the target is away: it throws away what it has \
                 received, and gives the names free, when it is back and hears of it"
                .to_owned(),
            0 => "nothing is kept at the target".to_owned(),
            kept => format!("{} are kept at the target for the next try", bytes(kept)),
        };
        if cancelled.at_target {
            return format!("cancelled {}: nothing of it is left here\n", cancelled.migration);
        }
        if cancelled.replicas_stay {
            let id = &cancelled.migration;
            return format!(
                "cancelled {id}: what the images left here stays, as replicas\n\
                 `dray images remove NAME --delete` removes one, `dray claim NAME` takes one back into use\n\
                 if the other host still waits for blocks of them, `dray status {id}` there names what ends that\n"
            );
        }
        format!("cancelled {}: the guest goes on here; {kept}\n", cancelled.migration)
    });
    Ok(ExitCode::SUCCESS)
}
