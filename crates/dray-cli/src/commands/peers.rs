//! `dray peers`.

use crate::client::Client;
use crate::output::Output;
use crate::show::style::Style;
use crate::show::table::{Align, table};
use crate::show::units::{bytes, counted, millis, rate, seconds};
use dray_api::{
    ApiResult, ErrorKind, PeerPool, PeerProbe, PeerState, PeerStatus, Peers, Probe, Refusal,
};
use std::process::ExitCode;

/// Days before its end at which a certificate is warned of.
const SOON: u64 = 30;
/// Clocks that are further apart are told of.
const APART_MS: u64 = 1000;
const NONE: &str = "no peer is configured\n";

const EXAMPLES: &str = "\
Examples:
  dray peers                   every [[peer]] of the configuration, and whether it answers
  dray peers --probe           measures the links, too
  dray peers hostb --probe     measures one
  dray --json peers            for programs: a list of objects

The agent asks all peers at the same time. A peer that has not answered after 5 s is silent.

--probe measures one link after the other, half a second each: what one connection carries
from this host to the peer, and how fast the peer writes to the pool that images from here come
to. `dray plan` and `dray migrate` use the rate of the link for their predictions.";

/// Arguments of `dray peers`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Only these peers
    #[arg(value_name = "HOST")]
    peers: Vec<String>,
    /// Measure the links to them and how fast they write
    #[arg(long)]
    probe: bool,
}

/// Prints the peers as a table, and why those do not answer that do not.
pub async fn run(args: Args, client: &Client, output: &Output) -> ApiResult<ExitCode> {
    if args.probe {
        let probed = client.call(Probe { peers: args.peers }).await?;
        output.result(&probed, |probed, style| probes(probed, style));
        return Ok(ExitCode::SUCCESS);
    }
    let mut found = client.call(Peers {}).await?;
    let is_wanted = |name: &str| args.peers.iter().any(|wanted| wanted.eq_ignore_ascii_case(name));
    found.retain(|peer| args.peers.is_empty() || is_wanted(&peer.peer));
    if let Some(unknown) =
        args.peers.iter().find(|name| !found.iter().any(|it| it.peer.eq_ignore_ascii_case(name)))
    {
        let what = format!("cannot show the peer {unknown}");
        let why = "no [[peer]] of the configuration is called so";
        return Err(Refusal::new(ErrorKind::NotFound, what, why).hint("`dray peers` shows all"));
    }
    output.result(&found, |found, style| text(found, style));
    Ok(ExitCode::SUCCESS)
}

fn probes(probed: &[PeerProbe], style: Style) -> String {
    if probed.is_empty() {
        return NONE.to_owned();
    }
    let head =
        [("PEER", Align::Left), ("LINK TO IT", Align::Right), ("WRITES TO ITS POOL", Align::Right)];
    let shown = |found: Option<u64>| found.map_or("-".to_owned(), rate);
    let row = |probe: &PeerProbe| [probe.peer.clone(), shown(probe.link), shown(probe.disk)];
    let rows: Vec<_> = probed.iter().map(row).collect();
    let errors = probed.iter().filter_map(|probe| Some((&probe.peer, probe.error.as_ref()?)));
    table(head, &rows, style)
        + &errors.map(|(peer, why)| complaint(peer, why, style)).collect::<String>()
}

/// Why a peer does not answer.
fn complaint(peer: &str, error: &Refusal, style: Style) -> String {
    let hint = error.hint.as_ref().map(|hint| format!("  {hint}\n")).unwrap_or_default();
    format!("\n{}: {}\n{hint}", style.warn(peer), error.why)
}

fn text(peers: &[PeerStatus], style: Style) -> String {
    if peers.is_empty() {
        return NONE.to_owned();
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
        text += &peer.error.as_ref().map_or(String::new(), |why| complaint(&peer.peer, why, style));
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
