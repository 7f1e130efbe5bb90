//! `dray peers`.

use crate::client::Client;
use crate::output::Output;
use crate::show::style::Style;
use crate::show::table::{Align, table};
use crate::show::units::{bytes, counted, millis, rate, seconds};
use dray_api::{ApiResult, PeerPool, PeerState, PeerStatus, Peers};
use std::process::ExitCode;

/// Days before its end at which a certificate is warned of.
const SOON: u64 = 30;
/// Clocks that are further apart are told of.
const APART_MS: u64 = 1000;

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
        ("RATE", Align::Right),
        ("AGENT", Align::Left),
        ("CERTIFICATE", Align::Right),
        ("POOLS", Align::Left),
    ];
    let rows: Vec<_> = peers.iter().map(row).collect();
    let mut text = table(head, &rows, style);
    for peer in peers {
        for warning in warnings(peer) {
            text += &format!("\n{}: {warning}\n", style.warn(&peer.peer));
        }
        let Some(error) = &peer.error else { continue };
        let hint = error.hint.as_ref().map(|hint| format!("  {hint}\n")).unwrap_or_default();
        text += &format!("\n{}: {}\n{hint}", style.warn(&peer.peer), error.why);
    }
    text
}

fn row(peer: &PeerStatus) -> [String; 8] {
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
        peer.rate.map_or("-".to_owned(), rate),
        peer.agent.clone().unwrap_or_else(|| "-".to_owned()),
        peer.certificate_days.map_or("-".to_owned(), |days| counted(days, "day")),
        pools(peer),
    ]
}

fn pools(peer: &PeerStatus) -> String {
    let one = |pool: &PeerPool| match pool.free {
        Some(free) => format!("{} ({} free)", pool.name, bytes(free)),
        None => pool.name.clone(),
    };
    match peer.pools.is_empty() {
        true => "-".to_owned(),
        false => peer.pools.iter().map(one).collect::<Vec<_>>().join(", "),
    }
}

/// What an operator may want to put right of a peer that answers.
fn warnings(peer: &PeerStatus) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(days) = peer.certificate_days.filter(|days| *days <= SOON) {
        let left = counted(days, "more day");
        found.push(format!("its certificates are valid for {left}: see `dray pki issue`"));
    }
    if let Some(ahead) = peer.clock_ahead_ms.filter(|ahead| ahead.unsigned_abs() > APART_MS) {
        let apart = seconds(ahead.unsigned_abs() as f64 / 1e3);
        let how = if ahead > 0 { "ahead of" } else { "behind" };
        found.push(format!("its clock is {apart} {how} this host's"));
    }
    found
}
