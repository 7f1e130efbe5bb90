//! `dray info`.

use crate::client::Client;
use crate::output::Output;
use crate::show::style::Style;
use crate::show::troubles;
use crate::show::units::bytes;
use dray_api::{AgentInfo, ApiResult, Info};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray info                    name, version and process of the agent, and what does not work
  dray --json info             for programs: an object";

/// Arguments of `dray info`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {}

/// Prints who the agent is.
pub async fn run(_: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let info = client.call(Info {}).await?;
    output.result(&info, text);
    Ok(ExitCode::SUCCESS)
}

fn text(info: &AgentInfo, style: Style) -> String {
    let AgentInfo { host, version, api_version, pid, peers, indexed_bytes, troubles } = info;
    let peers = if peers.is_empty() { "none".to_owned() } else { peers.join(", ") };
    let indexed = bytes(*indexed_bytes);
    format!(
        "{}\n  version    {version}, interface {api_version}\n  process    {pid}\n  peers      {peers}\n  indexed    {indexed} of \
         content, which this host can reuse\n{}",
        style.bold(host),
        troubles::lines(troubles, style)
    )
}
