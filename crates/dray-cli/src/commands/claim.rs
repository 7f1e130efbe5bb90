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

Use this only when the host that owns the image will never come back as it was. Make sure that
it cannot write the image any more (powered off, cut off from its clients): if it does, there
are two owners and the data is lost. Without --accept-loss the agent says what would be lost
and changes nothing; with it, parts that only the other host had become zeros.

The migration of the image ends for good. Other images of it that this host owns and has all of go
on here; the rest stay closed, with what they have, until they are claimed as well.";

/// Ranges shown before the rest is only counted.
const SHOWN: usize = 8;

/// Arguments of `dray claim`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of the image on this host
    image: String,
    /// Your word that the other host can write it no more
    #[arg(long)]
    source_is_fenced: bool,
    /// Accept the loss of what the agent says is gone
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
        text += &style.warn("writes that the guest was told are durable may be lost\n");
    }
    if claimed.bytes_lost > 0 {
        let lost = bytes(claimed.bytes_lost);
        text += &style.warn(&format!("{lost} are gone and zeros now; check the file system:"));
        text.push('\n');
        for range in claimed.lost.iter().take(SHOWN) {
            text += &format!("  {} at byte {}\n", bytes(range.len), range.start);
        }
        let more = claimed.lost.len().saturating_sub(SHOWN) as u64;
        if more > 0 {
            text += &format!("  and {}; --json lists them\n", counted(more, "further range"));
        }
    }
    for other in &claimed.others {
        text += &format!("{other} was in the same migration: closed until it is claimed as well\n");
    }
    text
}
