//! `dray check-config`.

use crate::output::Output;
use crate::show::units::counted;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_config::explain::ways_in;
use dray_config::start::Start;
use dray_config::{Config, ConfigError, DEFAULT_PATH, Problem};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray check-config                                /etc/dray/dray.toml
  dray check-config --config ./dray.toml
  dray check-config --explain                      who may do what on this host
  dray check-config --systemd > /etc/systemd/system/dray.service.d/paths.conf

The command also checks that pools, certificates and the keys of backup repositories exist,
that the certificates are valid, and that only their owner can read the keys. It starts nothing
and changes nothing. For each problem it says how an agent that starts now would act: leave a
part out, or use the last good configuration.";

/// Certificates that are valid for fewer days are to be renewed.
const SOON: u64 = 30;

/// Arguments of `dray check-config`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = DEFAULT_PATH)]
    config: PathBuf,
    /// Print a drop-in for the systemd unit, with which the agent can write only to what the configuration names
    #[arg(long)]
    systemd: bool,
    /// Print who can reach what on this host: users, other hosts and network clients
    #[arg(long, conflicts_with = "systemd")]
    explain: bool,
}

/// Reads the configuration file and prints what is wrong with it, each problem with its line.
pub fn run(args: &Args, output: &Output) -> ApiResult<ExitCode> {
    let (start, problems) = match Start::load(&args.config) {
        Ok(start) => {
            let config = &start.config;
            let problems = match &start.instead {
                Some(instead) => instead.because.problems.clone(),
                None => [start.problems.clone(), config.check(), config.check_backups()].concat(),
            };
            (Some(start), problems)
        }
        Err(ConfigError { problems, .. }) => (None, problems),
    };
    let file = args.config.display();
    if !problems.is_empty() {
        return Err(refused(&file, &problems, &would_do(start.as_ref())));
    }
    let config = start.map(|start| start.config);
    let Some(config) = config else { return Ok(ExitCode::FAILURE) };
    if args.systemd {
        output.text(&dray_config::unit::drop_in(&config));
        return Ok(ExitCode::SUCCESS);
    }
    if args.explain {
        explain(&config, output);
        return Ok(ExitCode::SUCCESS);
    }
    let days = dray_net::tls::days_left(&config.tls_dir).unwrap_or_default();
    let Config { name, pools, peers, .. } = config;
    let pools: Vec<String> = pools.into_iter().map(|pool| pool.name).collect();
    let peers: Vec<String> = peers.all().iter().map(|peer| peer.name.clone()).collect();
    let result = json!({ "result": "good", "name": name, "pools": pools, "peers": peers,
        "certificate_days_left": days });
    output.result(&result, |_, style| {
        let list = |names: &[String]| match names {
            [] => "none".to_owned(),
            names => names.join(", "),
        };
        let (pools, peers) = (list(&pools), list(&peers));
        let left = format!("the certificates are valid for {}\n", counted(days, "more day"));
        let left = if days < SOON { style.warn(&left) } else { left };
        format!("{} {file} is good: {name}, pools {pools}, peers {peers}\n{left}", style.good("✓"))
    });
    Ok(ExitCode::SUCCESS)
}

/// Every way to this host, and who may use it.
fn explain(config: &Config, output: &Output) {
    let ways = ways_in(config);
    let who = |who: &[(String, String)]| -> Vec<_> {
        who.iter().map(|(who, may)| json!({ "who": who, "may": may })).collect()
    };
    let listed: Vec<_> = ways
        .iter()
        .map(|way| json!({ "way": way.what, "who": who(&way.who), "others": way.others }))
        .collect();
    output.result(&json!(listed), |_, _| {
        let shown: Vec<String> = ways.iter().map(ToString::to_string).collect();
        shown.join("\n")
    });
}

/// What an agent would do that starts now.
fn would_do(start: Option<&Start>) -> String {
    match start {
        None => "an agent cannot start with it".to_owned(),
        Some(Start { instead: Some(instead), .. }) => {
            format!("an agent that starts now uses {instead}")
        }
        Some(_) => "an agent that starts now runs without the parts that this concerns".to_owned(),
    }
}

/// All problems in one error: alone on the line of the error, several below it.
fn refused(file: &impl std::fmt::Display, problems: &[Problem], would_do: &str) -> Refusal {
    let what = format!("cannot use {file}");
    if let [problem] = problems {
        let mut alone = problem.clone();
        let hint = alone.hint.take().map_or_else(String::new, |hint| format!("{hint}; "));
        return Refusal::new(ErrorKind::Invalid, what, alone).hint(hint + would_do);
    }
    let list: String = problems.iter().map(|problem| format!("\n  {problem}")).collect();
    let why = format!("{} problems{list}", problems.len());
    Refusal::new(ErrorKind::Invalid, what, why).hint(would_do)
}
