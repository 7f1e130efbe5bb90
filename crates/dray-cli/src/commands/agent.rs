//! `dray agent`.

use crate::output::Output;
use crate::show::status::SHORT_ID;
use dray_api::ApiResult;
use dray_config::DEFAULT_PATH;
use std::fmt::Debug;
use std::path::PathBuf;
use std::process::ExitCode;
use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

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

    /// Log lines for people, or a JSON object a line for programs
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    log_format: LogFormat,
}

/// How log lines look.
#[derive(clap::ValueEnum, Clone, Copy, Default, Debug)]
enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Names what is logged; overrides `-v`.
const LOG_VARIABLE: &str = "DRAY_LOG";

/// Runs until a signal ends it.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    log(args.log_format, output);
    dray_agent::start::run(&args.config)?;
    Ok(ExitCode::SUCCESS)
}

fn log(format: LogFormat, output: &Output) {
    let level = match (output.quiet, output.verbose) {
        (true, _) => "warn",
        (false, 0) => "info",
        (false, 1) => "debug",
        (false, _) => "trace",
    };
    let filter = EnvFilter::try_from_env(LOG_VARIABLE).unwrap_or_else(|_| EnvFilter::new(level));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log
            .with_ansi(output.style_err().colour)
            .with_target(output.verbose > 0)
            .fmt_fields(debug_fn(write_field).delimited(" "))
            .init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}

/// Writes what a line says: its message first, the start of a migration's id in brackets, the rest by name.
fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> std::fmt::Result {
    match field.name() {
        "message" => write!(writer, "{value:?}"),
        "migration" => write!(writer, "({})", format!("{value:?}").get(..SHORT_ID).unwrap_or("?")),
        name => write!(writer, "{name}={value:?}"),
    }
}
