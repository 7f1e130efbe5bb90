//! `dray peers`: asks every peer of the configuration who it is, all at once.

use super::ask_peer::net_error;
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, PeerState, PeerStatus, Peers};
use dray_config::Peer;
use dray_host::refusals::io_error;
use dray_migrate::forecast;
use dray_net::{NetError, NetErrorKind};
use dray_wire::request::{Reply, Request};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// An operator waits for the slowest of all.
const LIMIT: Duration = Duration::from_secs(5);

impl Answers<Peers> for Arc<Agent> {
    async fn answer(&self, _: Peers, _: Events) -> ApiResult<Vec<PeerStatus>> {
        let ask = |peer: &Peer| {
            let (agent, peer) = (Arc::clone(self), peer.clone());
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
        let identify = self.ask_within(LIMIT, &peer.name, &Request::Identify);
        let (rtt, reply) =
            tokio::join!(forecast::round_trip(&peer.address), timeout(LIMIT, identify));
        let late = |_| {
            let what = format!("it has not answered within {} s", LIMIT.as_secs());
            Err(NetError::new(NetErrorKind::Timeout, what))
        };
        let agent = match reply.unwrap_or_else(late) {
            Ok(Reply::Identity { agent, .. }) => Ok(agent),
            Ok(_) => {
                Err(NetError::new(NetErrorKind::Protocol, "its answer does not fit the question"))
            }
            Err(why) => Err(why),
        };
        PeerStatus {
            peer: peer.name.clone(),
            address: peer.address.clone(),
            state: agent.as_ref().map_or_else(|why| state(why.kind), |_| PeerState::Ready),
            rtt_ms: rtt.ok().map(|seconds| seconds * 1e3),
            error: agent.as_ref().err().map(|why| net_error("no answer", why)),
            agent: agent.ok(),
        }
    }
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
