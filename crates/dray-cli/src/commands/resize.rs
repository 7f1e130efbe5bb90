//! `dray resize`.

use super::absolute;
use crate::client::Client;
use crate::output::Output;
use crate::show::units::bytes;
use dray_api::{ApiResult, Resize};
use dray_types::ByteSize;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray resize vm1-data 40GiB --qmp /run/vm1.qmp

The command makes raw images larger, never shorter. Make a qcow2 disk larger with QEMU's
`block_resize`. The agent refuses it during a migration. It disconnects the VM for a moment, so
the VM's block node needs a reconnect-delay; nodes that dray makes have one.";

/// Arguments of `dray resize`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of the image
    image: String,
    /// New size, as 40GiB
    size: ByteSize,
    /// QMP socket of the VM that uses the image: dray tells its guest the new size
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
}

/// Has the agent grow an image, and tell the guest if a VM is named.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let qmp = args.qmp.as_deref().map(absolute).transpose()?;
    let command = Resize { image: args.image, size: args.size, qmp };
    let image = client.call(command).await?;
    output.result(&image, |image, _| format!("image {} has {}\n", image.name, bytes(image.size)));
    Ok(ExitCode::SUCCESS)
}
