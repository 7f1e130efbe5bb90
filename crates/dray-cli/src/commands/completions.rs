//! `dray completions`.

use crate::output::Output;
use clap::CommandFactory;
use clap_complete::Shell;
use dray_api::ApiResult;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray completions bash > /etc/bash_completion.d/dray
  dray completions zsh > /usr/local/share/zsh/site-functions/_dray
  dray completions fish > /etc/fish/completions/dray.fish";

/// Arguments of `dray completions`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The shell
    shell: Shell,
}

/// Prints the completion script of a shell.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::Args::command(), "dray", &mut script);
    output.text(&String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}
