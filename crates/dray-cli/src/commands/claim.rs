//! `dray claim`.

use crate::client::Client;
use crate::output::Output;
use crate::show::style::Style;
use crate::show::units::{bytes, counted};
use dray_api::{ApiResult, Claim, Claimed};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray claim vm1-root --source-is-fenced
  dray claim vm1-root --source-is-fenced --accept-loss

Use this command only if the host that owns the image will never come back as it was. Make sure
that it cannot write to the image any more (it is powered off, or cut off from its clients):
otherwise the image has two owners, and data is lost. Without --accept-loss the agent says
which data would be lost and changes nothing. With it, parts that only the other host had
become zeros.

The claim ends the migration of the image. This host continues to serve other images of the
migration that it owns and of which it has all blocks. The others stay closed, and keep their
content, until you claim them as well.";

/// Ranges shown before the rest is only counted.
const SHOWN: usize = 8;

/// Arguments of `dray claim`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of the image on this host
    image: String,
    /// You confirm that the other host cannot write to the image any more
    #[arg(long)]
    source_is_fenced: bool,
    /// Accept the loss of the data that the agent reports as lost
    #[arg(long)]
    accept_loss: bool,
}

/// Makes this host the owner of an image whose owner is gone for good.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let Args { image, source_is_fenced, accept_loss } = args;
    let command = Claim { image, source_is_fenced, accept_loss };
    let claimed = client.call(command).await?;
    output.result(&claimed, text);
    Ok(ExitCode::SUCCESS)
}

fn text(claimed: &Claimed, style: Style) -> String {
    let mut text = format!("this host owns {} now, at epoch {}\n", claimed.image, claimed.epoch.0);
    if claimed.writes_may_be_lost {
        text += &style.warn("flushed writes of the guest may be lost\n");
    }
    if claimed.bytes_lost > 0 {
        let lost = bytes(claimed.bytes_lost);
        text += &style.warn(&format!("{lost} are lost, and are zeros now; check the file system:"));
        text.push('\n');
        for range in claimed.lost.iter().take(SHOWN) {
            text += &format!("  {} at byte {}\n", bytes(range.len), range.start);
        }
        let more = claimed.lost.len().saturating_sub(SHOWN) as u64;
        if more > 0 {
            text += &format!("  and {}; --json lists them\n", counted(more, "further range"));
        }
    }
    for process in &claimed.attached {
        text += &style.warn(&format!(
            "process {process} still has the image open: if it is the vm's old qemu, either let its \
             guest continue there, or end it and start the vm anew; dray refuses the writes of the \
             one that comes second\n"
        ));
    }
    for other in &claimed.others {
        text += &format!(
            "{other} was in the same migration: it stays closed until you claim it as well\n"
        );
    }
    text
}
