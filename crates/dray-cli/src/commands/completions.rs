//! `dray completions`.

use crate::output::Output;
use clap_complete::Shell;
use clap_complete::env::Shells;
use dray_api::{ApiResult, ErrorKind, Refusal};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray completions bash > /etc/bash_completion.d/dray
  dray completions zsh > /usr/local/share/zsh/site-functions/_dray
  dray completions fish > /etc/fish/completions/dray.fish

Tab then completes commands and options, and the names of peers, images, migrations and
repositories that the agent on this host knows.";

/// Arguments of `dray completions`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The shell
    shell: Shell,
}

/// Prints the completion script of a shell.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    let what = "cannot write the completion script";
    let shells = Shells::builtins();
    let shell = shells.completer(&args.shell.to_string()).ok_or_else(|| {
        Refusal::new(ErrorKind::Unsupported, what, format!("{} is not supported", args.shell))
    })?;
    let mut script = Vec::new();
    // The script asks the program that is found as `dray`, with this variable set.
    shell
        .write_registration("COMPLETE", "dray", "dray", "dray", &mut script)
        .map_err(|why| Refusal::new(ErrorKind::Internal, what, why))?;
    output.text(&String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}
