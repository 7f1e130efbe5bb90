//! `dray check-config`.

use crate::output::Output;
use dray_agent::api::{ApiError, ApiResult, ErrorKind};
use dray_agent::config::{Config, ConfigError, DEFAULT_PATH, Problem};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray check-config                                /etc/dray/dray.toml
  dray check-config --config ./dray.toml

Also checks that pools, certificates and the keys of backup repositories are there, that the
certificates are valid and the keys private.
Starts nothing and changes nothing.";

/// Arguments of `dray check-config`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = DEFAULT_PATH)]
    config: PathBuf,
}

/// Does it.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    let (config, problems) = match Config::load(&args.config) {
        Ok(config) => {
            let problems = [config.check(), config.check_backups()].concat();
            (Some(config), problems)
        }
        Err(ConfigError { problems, .. }) => (None, problems),
    };
    let file = args.config.display();
    if !problems.is_empty() {
        return Err(refused(&file, &problems));
    }
    let Some(Config { name, pools, peers, .. }) = config else { return Ok(ExitCode::FAILURE) };
    let pools: Vec<String> = pools.into_iter().map(|pool| pool.name).collect();
    let peers: Vec<String> = peers.into_iter().map(|peer| peer.name).collect();
    let result = json!({ "result": "good", "name": name, "pools": pools, "peers": peers });
    output.result(&result, |_, style| {
        let list = |names: &[String]| match names {
            [] => "none".to_owned(),
            names => names.join(", "),
        };
        let (pools, peers) = (list(&pools), list(&peers));
        format!("{} {file} is good: {name}, pools {pools}, peers {peers}\n", style.good("✓"))
    });
    Ok(ExitCode::SUCCESS)
}

/// All problems in one error: alone on the line of the error, several below it.
fn refused(file: &impl std::fmt::Display, problems: &[Problem]) -> ApiError {
    let what = format!("cannot use {file}");
    if let [problem] = problems {
        let mut alone = problem.clone();
        let hint = alone.hint.take();
        return ApiError { hint, ..ApiError::new(ErrorKind::Invalid, what, alone) };
    }
    let list: String = problems.iter().map(|problem| format!("\n  {problem}")).collect();
    ApiError::new(ErrorKind::Invalid, what, format!("{} problems{list}", problems.len()))
}
