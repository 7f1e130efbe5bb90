//! `dray peers`: asks every peer of the configuration who it is, all at once.

use super::ask_peer::net_error;
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, PeerPool, PeerState, PeerStatus, Peers};
use dray_config::Peer;
use dray_files::unix_ms;
use dray_host::refusals::io_error;
use dray_migrate::{forecast, links};
use dray_net::{NetError, NetErrorKind};
use dray_wire::request::{Reply, Request};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// An operator waits for the slowest of all.
const LIMIT: Duration = Duration::from_secs(5);

impl Answers<Peers> for Arc<Agent> {
    async fn answer(&self, _: Peers, _: Events) -> ApiResult<Vec<PeerStatus>> {
        let ask = |peer: &Arc<Peer>| {
            let (agent, peer) = (Arc::clone(self), Arc::clone(peer));
            tokio::spawn(async move { agent.look_for(&peer).await })
        };
        let asked: Vec<_> = self.config.peers.all().iter().map(ask).collect();
        let mut found = Vec::new();
        for answer in asked {
            found.push(answer.await.map_err(|why| io_error("cannot ask the peers", why))?);
        }
        Ok(found)
    }
}

impl Agent {
    async fn look_for(&self, peer: &Peer) -> PeerStatus {
        let identify = async {
            let asked = self.ask_within(LIMIT, &peer.name, &Request::Identify);
            (timeout(LIMIT, asked).await, unix_ms())
        };
        let (rtt, (reply, then)) = tokio::join!(forecast::round_trip(&peer.address), identify);
        let late = |_| {
            let what = format!("it has not answered within {} s", LIMIT.as_secs());
            Err(NetError::new(NetErrorKind::Timeout, what))
        };
        let known = PeerStatus {
            peer: peer.name.clone(),
            address: peer.address.clone(),
            state: PeerState::Ready,
            rtt_ms: rtt.ok().map(|seconds| seconds * 1e3),
            agent: None,
            pools: Vec::new(),
            certificate_days: None,
            clock_ahead_ms: None,
            rate: links::rate(&self.store.links(), &peer.name),
            error: None,
        };
        let odd = || NetError::new(NetErrorKind::Protocol, "its answer does not fit the question");
        match reply.unwrap_or_else(late) {
            Ok(Reply::Identity { agent, pools, unix_ms: its, certificate_days }) => {
                let pools = pools.into_iter().map(|(name, free)| PeerPool { name, free });
                PeerStatus {
                    agent: Some(agent),
                    pools: pools.collect(),
                    certificate_days,
                    clock_ahead_ms: Some(ahead(its, then, known.rtt_ms)),
                    ..known
                }
            }
            Ok(_) => unanswered(known, &odd()),
            Err(why) => unanswered(known, &why),
        }
    }
}

fn unanswered(known: PeerStatus, why: &NetError) -> PeerStatus {
    PeerStatus { state: state(why.kind), error: Some(net_error("no answer", why)), ..known }
}

/// By how much a clock is ahead of which it is known what it showed half a round trip before `here`.
fn ahead(its_unix_ms: u64, here_unix_ms: u64, rtt_ms: Option<f64>) -> i64 {
    let on_its_way = (rtt_ms.unwrap_or(0.0) / 2.0) as i64;
    let signed = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
    signed(its_unix_ms).saturating_add(on_its_way).saturating_sub(signed(here_unix_ms))
}

/// What the failure to ask a peer says of it.
fn state(why: NetErrorKind) -> PeerState {
    match why {
        NetErrorKind::Certificate => PeerState::Untrusted,
        NetErrorKind::Refused(_)
        | NetErrorKind::Overtaken(_)
        | NetErrorKind::Version
        | NetErrorKind::Protocol => PeerState::Refuses,
        NetErrorKind::Unreachable
        | NetErrorKind::Timeout
        | NetErrorKind::Broken
        | NetErrorKind::Closed
        | NetErrorKind::Local => PeerState::Silent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_compared_with_the_moment_at_which_it_was_read() {
        assert_eq!(ahead(10_000, 10_020, Some(40.0)), 0);
        assert_eq!(ahead(13_000, 10_000, None), 3000);
        assert_eq!(ahead(7_000, 10_000, Some(2.0)), -2999);
        assert_eq!(ahead(u64::MAX, 0, None), i64::MAX);
    }
}
