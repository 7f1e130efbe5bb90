//! `dray reload`.

use crate::client::Client;
use crate::output::Output;
use crate::show::style::Style;
use dray_api::{ApiResult, Held, Reload, Reloaded};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray reload                  after a change of dray.toml or of the certificates

In force at once: [[peer]], [[nbd.client]], and the certificates and revocations in the [tls] directory. Everything
else needs a restart of the agent. A file with an error changes nothing.";

/// Arguments of `dray reload`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {}

/// Has the agent read its configuration, and prints what has changed.
pub async fn run(_: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let reloaded = client.call(Reload {}).await?;
    output.result(&reloaded, text);
    Ok(ExitCode::SUCCESS)
}

fn text(reloaded: &Reloaded, style: Style) -> String {
    let Reloaded { changes, needs_restart, ended, held, not_kept } = reloaded;
    let mut lines = changes.clone();
    if changes.is_empty() && needs_restart.is_empty() {
        lines.push("nothing has changed in the configuration".to_owned());
    }
    match ended {
        0 => {}
        1 => lines.push("1 connection of a peer that may do less now was ended".to_owned()),
        many => lines.push(format!("{many} connections of peers that may do less now were ended")),
    }
    if !needs_restart.is_empty() {
        let parts = needs_restart.join(", ");
        lines.push(style.warn(&format!("not in force before a restart of the agent: {parts}")));
    }
    for Held { migration, peer } in held {
        let what = format!(
            "migration {migration} does not go on: {peer} is no peer any more; add its [[peer]] again, or see `dray \
             status {migration}`"
        );
        lines.push(style.warn(&what));
    }
    if let Some(why) = not_kept {
        lines.push(
            style.warn(&format!("the file is not kept as the last good configuration: {why}")),
        );
    }
    lines.into_iter().map(|line| line + "\n").collect()
}
