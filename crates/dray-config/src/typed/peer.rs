//! What was typed of peers.

use super::{Reader, Text, TypedPool};
use crate::{Peer, Right};
use serde::Deserialize;
use std::collections::HashSet;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TypedPeer {
    name: Text,
    address: Text,
    #[serde(default)]
    pools: Vec<Text>,
    rights: Option<Vec<Text>>,
    #[serde(default)]
    reads_store_of: Vec<Text>,
}

impl Reader<'_> {
    /// The peers of the agent called `own`.
    pub(super) fn peers(
        &mut self,
        own: &str,
        typed: &[TypedPeer],
        pools: &[TypedPool],
    ) -> Vec<Peer> {
        let mut seen = HashSet::new();
        let mut peers = Vec::new();
        for typed in typed {
            let peer = self.part(|reader| reader.peer(own, &mut seen, typed));
            // Of a wrong pool or right only that is left out: the peer may be needed for what is under way.
            peers.extend(peer.map(|peer| Peer {
                pools: self.pools_of(typed, pools),
                rights: self.rights_of(typed),
                ..peer
            }));
        }
        peers
    }

    fn peer(&mut self, own: &str, seen: &mut HashSet<String>, peer: &TypedPeer) -> Peer {
        self.unique(seen, "peer.name", &peer.name);
        let name = self.name("peer.name", &peer.name);
        if name.eq_ignore_ascii_case(own) {
            let what = "it is this agent's own name";
            self.problem(&peer.name, "peer.name", what, "name another host");
        }
        if peer.address.get_ref().is_empty() {
            let hint = "write it as hostb, hostb:7421 or 10.0.0.2:7421";
            self.problem(&peer.address, &format!("peer.{name}.address"), "it is empty", hint);
        }
        let address = peer.address.get_ref().clone();
        let reads_store_of = peer.reads_store_of.iter();
        let reads_store_of = reads_store_of.map(|other| other.get_ref().clone()).collect();
        Peer { name, address, pools: Vec::new(), rights: Vec::new(), reads_store_of }
    }

    fn pools_of(&mut self, peer: &TypedPeer, pools: &[TypedPool]) -> Vec<String> {
        let mut known = Vec::new();
        for pool in &peer.pools {
            match pools.iter().any(|known| known.name.get_ref() == pool.get_ref()) {
                true => known.push(pool.get_ref().clone()),
                false => {
                    let what = format!("there is no pool '{}'", pool.get_ref());
                    let hint = "add a [[pool]] with this name, or remove it from the list";
                    let field = format!("peer.{}.pools", peer.name.get_ref());
                    self.problem(pool, &field, what, hint);
                }
            }
        }
        known
    }

    fn rights_of(&mut self, peer: &TypedPeer) -> Vec<Right> {
        let Some(typed) = &peer.rights else { return Right::DEFAULT.to_vec() };
        let mut rights = Vec::new();
        for name in typed {
            match Right::of_name(name.get_ref()) {
                Some(right) => rights.push(right),
                None => {
                    let what = format!("'{}' is not a right", name.get_ref());
                    let field = format!("peer.{}.rights", peer.name.get_ref());
                    let hint = format!("choose from {}", Right::line(Right::ALL));
                    self.problem(name, &field, what, &hint);
                }
            }
        }
        rights
    }
}
