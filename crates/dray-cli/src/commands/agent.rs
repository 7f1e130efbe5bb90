//! `dray agent`.

use crate::output::Output;
use dray_api::ApiResult;
use dray_config::DEFAULT_PATH;
use std::path::PathBuf;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

const EXAMPLES: &str = "\
Examples:
  dray agent --config /etc/dray/dray.toml
  dray agent -v                        log more

The agent runs in the foreground until SIGTERM or Ctrl-C, and logs to standard error. You may
kill it at any time: the next agent reads its journals, and guests reconnect by themselves.
DRAY_LOG is a filter for the log (as `debug` or `dray_agent=trace`).";

/// Arguments of `dray agent`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = DEFAULT_PATH)]
    config: PathBuf,
}

/// Names what is logged; overrides `-v`.
const LOG_VARIABLE: &str = "DRAY_LOG";

/// Runs until a signal ends it.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    log(output);
    dray_agent::start::run(&args.config)?;
    Ok(ExitCode::SUCCESS)
}

fn log(output: &Output) {
    let level = match (output.quiet, output.verbose) {
        (true, _) => "warn",
        (false, 0) => "info",
        (false, 1) => "debug",
        (false, _) => "trace",
    };
    let filter = EnvFilter::try_from_env(LOG_VARIABLE).unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(output.style_err().colour)
        .init();
}
