//! `dray release`.

use super::absolute;
use crate::client::Client;
use crate::output::Output;
use crate::show::images::spliced;
use dray_api::{ApiResult, Release};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray release --qmp /run/vm1.qmp                 every disk that is on dray
  dray release --qmp /run/vm1.qmp --disk disk0    only this device

The agent refuses this while blocks of the image are still at the source.";

/// Arguments of `dray release`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// QMP socket of the running VM
    #[arg(long, value_name = "SOCKET")]
    qmp: PathBuf,
    /// Device id (qdev) of a disk (repeatable) [default: all disks on dray]
    #[arg(long = "disk", value_name = "DEVICE")]
    disks: Vec<String>,
}

/// Has the agent give disks back to their QEMU and prints where each is now.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Release { qmp: absolute(&args.qmp)?, disks: args.disks };
    let done = client.call(command).await?;
    output.result(&done, |done, style| spliced(done, "released", style));
    Ok(ExitCode::SUCCESS)
}
