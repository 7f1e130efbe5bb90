//! `dray peers --probe`: measures links, one after the other, so that none is measured beside another.

use super::ask_peer::net_error;
use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{ApiResult, ErrorKind, PeerProbe, Probe, Refusal};
use dray_config::Peer;
use dray_migrate::links;
use dray_net::probe;
use std::sync::Arc;

impl Answers<Probe> for Arc<Agent> {
    async fn answer(&self, command: Probe, _: Events) -> ApiResult<Vec<PeerProbe>> {
        let mut found = Vec::new();
        for peer in self.peers_called(&command.peers)? {
            found.push(self.probe(&peer).await);
        }
        Ok(found)
    }
}

impl Agent {
    fn peers_called(&self, names: &[String]) -> ApiResult<Vec<Arc<Peer>>> {
        let known = |name: &String| {
            self.config.peer(name).ok_or_else(|| {
                let what = format!("cannot measure the link to {name}");
                let all = self.config.peers.all();
                let names: Vec<_> = all.iter().map(|peer| peer.name.clone()).collect();
                Refusal::new(
                    ErrorKind::NotFound,
                    what,
                    "no [[peer]] of the configuration is called so",
                )
                .hint(format!("its peers are {}", names.join(", ")))
            })
        };
        match names.is_empty() {
            true => Ok(self.config.peers.all().to_vec()),
            false => names.iter().map(known).collect(),
        }
    }

    async fn probe(&self, peer: &Peer) -> PeerProbe {
        match probe::measure(&self.identity, &peer.name, &peer.address).await {
            Ok(probed) => {
                let link = probed.link.rate();
                if let Some(rate) = link {
                    links::note(&self.store.links(), &peer.name, rate, false);
                }
                PeerProbe { peer: peer.name.clone(), link, disk: probed.disk.rate(), error: None }
            }
            Err(why) => PeerProbe {
                peer: peer.name.clone(),
                link: None,
                disk: None,
                error: Some(net_error(format!("cannot measure the link to {}", peer.name), &why)),
            },
        }
    }
}
