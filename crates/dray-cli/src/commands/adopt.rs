//! `dray adopt`.

use super::absolute;
use crate::client::Client;
use crate::output::Output;
use crate::show::images::spliced;
use dray_api::{Adopt, ApiResult};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray adopt --qmp /run/vm1.qmp                 every disk of the VM
  dray adopt --qmp /run/vm1.qmp --disk disk0    only this device

`dray migrate` adopts the disks that it moves by itself. Use this command if you want a disk to
be on dray all the time.";

/// Arguments of `dray adopt`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// QMP socket of the running VM
    #[arg(long, value_name = "SOCKET")]
    qmp: PathBuf,
    /// Device id (qdev) of a disk (repeatable) [default: all disks]
    #[arg(long = "disk", value_name = "DEVICE")]
    disks: Vec<String>,
    /// Adopt disks with dirty bitmaps, which removes these bitmaps
    #[arg(long)]
    drop_bitmaps: bool,
}

/// Has the agent put the disks of a running VM under itself and prints the images.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let qmp = absolute(&args.qmp)?;
    let command = Adopt { qmp, disks: args.disks, drop_bitmaps: args.drop_bitmaps };
    let done = client.call(command).await?;
    output.result(&done, |done, style| spliced(done, "adopted", style));
    Ok(ExitCode::SUCCESS)
}
