//! `dray quit`.

use super::absolute;
use crate::client::Client;
use crate::output::Output;
use dray_api::{ApiResult, Quit};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples, on the host that the VM has left:
  dray quit --qmp /run/vm1.qmp

The guest never runs again in this QEMU. dray refuses to end any other one.";

/// Arguments of `dray quit`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// QMP socket of the QEMU
    #[arg(long, value_name = "SOCKET")]
    qmp: PathBuf,
}

/// Ends the QEMU that a VM has left.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let done = client.call(Quit { qmp: absolute(&args.qmp)? }).await?;
    output.result(&done, |done, _| {
        let pid = done.pid;
        match done.ended {
            true => format!("QEMU {pid} has ended\n"),
            false => format!(
                "QEMU {pid} was told to end and still runs; `kill -9 {pid}` ends it at once: it has \
                 nothing left to write\n"
            ),
        }
    });
    Ok(ExitCode::SUCCESS)
}
