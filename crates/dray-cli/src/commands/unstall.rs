//! `dray unstall`.

use crate::client::Client;
use crate::output::Output;
use crate::show::units::counted;
use dray_api::{ApiResult, Unstall};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray unstall vm1-root          ask the source again now
  dray unstall vm1-root --fail   give the guest I/O errors

While the source of a migration cannot be reached, reads of blocks that are still there wait. A
waiting read also delays QEMU's `stop` and `quit`; --fail ends the wait. With rerror=stop and
werror=stop on its devices, QEMU pauses the guest, and the guest does not see the errors.";

/// Arguments of `dray unstall`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Name of the image
    image: String,
    /// Fail the waiting requests with an I/O error
    #[arg(long)]
    fail: bool,
}

/// Asks a lost source again for what a guest waits for, or fails it.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let command = Unstall { image: args.image, fail: args.fail };
    let done = client.call(command).await?;
    output.result(&done, |done, _| {
        let waiting = counted(done.waiting, "waiting request");
        let missing = done.bytes_missing;
        let what = if done.failed { "failed" } else { "asked the source again for" };
        format!("{what} {waiting} of {}; {missing} still missing\n", done.image)
    });
    Ok(ExitCode::SUCCESS)
}
