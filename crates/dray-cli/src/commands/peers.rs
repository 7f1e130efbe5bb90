//! `dray peers`.

use crate::client::Client;
use crate::output::Output;
use crate::show::style::Style;
use crate::show::table::{Align, table};
use crate::show::units::millis;
use dray_api::{ApiResult, PeerState, PeerStatus, Peers};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  dray peers                   every [[peer]] of the configuration, and whether it answers
  dray --json peers            for programs: a list of objects

The agent asks all peers at the same time. A peer that has not answered after 5 s is silent.";

/// Arguments of `dray peers`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {}

/// Prints the peers as a table, and why those do not answer that do not.
pub async fn run(_: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    let found = client.call(Peers {}).await?;
    output.result(&found, |found, style| text(found, style));
    Ok(ExitCode::SUCCESS)
}

fn text(peers: &[PeerStatus], style: Style) -> String {
    if peers.is_empty() {
        return "no peer is configured\n".to_owned();
    }
    let head = [
        ("PEER", Align::Left),
        ("ADDRESS", Align::Left),
        ("STATE", Align::Left),
        ("ROUND TRIP", Align::Right),
        ("AGENT", Align::Left),
    ];
    let rows: Vec<_> = peers.iter().map(row).collect();
    let mut text = table(head, &rows, style);
    for peer in peers {
        let Some(error) = &peer.error else { continue };
        let hint = error.hint.as_ref().map(|hint| format!("  {hint}\n")).unwrap_or_default();
        text += &format!("\n{}: {}\n{hint}", style.warn(&peer.peer), error.why);
    }
    text
}

fn row(peer: &PeerStatus) -> [String; 5] {
    let state = match peer.state {
        PeerState::Ready => "ready",
        PeerState::Untrusted => "untrusted",
        PeerState::Refuses => "refuses",
        PeerState::Silent => "silent",
    };
    [
        peer.peer.clone(),
        peer.address.clone(),
        state.to_owned(),
        peer.rtt_ms.map_or("-".to_owned(), millis),
        peer.agent.clone().unwrap_or_else(|| "-".to_owned()),
    ]
}
