//! One file per command: its arguments, and what it does with them.

pub mod adopt;
pub mod agent;
pub mod backfill;
pub mod backup;
pub mod backups;
pub mod batch;
pub mod cancel;
pub mod check_config;
pub mod claim;
pub mod completions;
mod hot_set;
pub mod images;
pub mod limit;
pub mod lineage;
pub mod migrate;
pub mod pki;
pub mod plan;
pub mod prepare;
mod record;
pub mod release;
pub mod resize;
pub mod restore;
pub mod resume;
pub mod seed;
mod several;
pub mod sim;
pub mod status;
pub mod subject;
pub mod trace;
mod tuning;
pub mod unstall;
pub mod verify;
pub mod watch;

use crate::args::{Args, Command};
use crate::client::Client;
use crate::output::Output;
use crate::show::troubles;
use dray_api::{AgentInfo, ApiResult, ErrorKind, Refusal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Does what was typed.
pub fn run(args: Args, output: &Output) -> ApiResult<ExitCode> {
    let client = Client::new(args.global.socket);
    match args.command {
        Command::Agent(args) => agent::run(&args, output),
        Command::CheckConfig(args) => check_config::run(&args, output),
        Command::Pki(args) => pki::run(&args, output),
        Command::Completions(args) => completions::run(&args, output),
        Command::Sim(args) => sim::run(&args, output),
        Command::Trace(args) => trace::run(&args, &client, output),
        command => wait(ask(command, &client, output)),
    }
}

/// Runs what asks the agent to its end.
fn wait(work: impl Future<Output = ApiResult<ExitCode>>) -> ApiResult<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|why| Refusal::new(ErrorKind::Internal, "cannot start", why))?;
    runtime.block_on(work)
}

/// The commands that the agent answers.
async fn ask(command: Command, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    match command {
        Command::Prepare(args) => prepare::run(args, client, output).await,
        Command::Plan(args) => plan::run(args, client, output).await,
        Command::Seed(args) => seed::run(args, client, output).await,
        Command::Migrate(args) => migrate::run(args, client, output).await,
        Command::Status(args) => status::run(args, client, output).await,
        Command::Watch(args) => watch::run(args, client, output).await,
        Command::Cancel(args) => cancel::run(args, client, output).await,
        Command::Resume(args) => resume::run(args, client, output).await,
        Command::Limit(args) => limit::run(args, client, output).await,
        Command::Batch(args) => batch::run(args, client, output).await,
        Command::Backfill(args) => backfill::run(args, client, output).await,
        Command::Images(args) => images::run(args, client, output).await,
        Command::Lineage(args) => lineage::run(args, client, output).await,
        Command::Backup(args) => backup::run(args, client, output).await,
        Command::Backups(args) => backups::run(args, client, output).await,
        Command::Verify(args) => verify::run(args, client, output).await,
        Command::Restore(args) => restore::run(args, client, output).await,
        Command::Adopt(args) => adopt::run(args, client, output).await,
        Command::Release(args) => release::run(args, client, output).await,
        Command::Resize(args) => resize::run(args, client, output).await,
        Command::Claim(args) => claim::run(args, client, output).await,
        Command::Unstall(args) => unstall::run(args, client, output).await,
        Command::Agent(_)
        | Command::CheckConfig(_)
        | Command::Pki(_)
        | Command::Completions(_)
        | Command::Sim(_)
        | Command::Trace(_) => Ok(ExitCode::SUCCESS),
    }
}

/// Tells what does not work on the agent's host, on standard error: there it is in nobody's way.
async fn tell_troubles(client: &Client, output: &Output) -> ApiResult<()> {
    let info: AgentInfo = client.call(dray_api::Command::Info).await?;
    let text = troubles::lines(&info.troubles, output.style_err());
    if !text.is_empty() {
        output.note(text.trim_end());
    }
    Ok(())
}

/// A path of this host as the agent can use it: the agent runs in another directory.
fn absolute(path: &Path) -> ApiResult<PathBuf> {
    std::path::absolute(path).map_err(|why| {
        Refusal::new(ErrorKind::Invalid, format!("cannot use the path '{}'", path.display()), why)
    })
}

/// A pair `HERE=THERE`, for clap.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((here, there)) if !here.is_empty() && !there.is_empty() => {
            Ok((here.to_owned(), there.to_owned()))
        }
        _ => Err("write it as HERE=THERE".to_owned()),
    }
}

/// A path that must be absolute because it is one of the other host, for clap.
fn path_at_target(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("a path at the target must be absolute".into()) }
}
