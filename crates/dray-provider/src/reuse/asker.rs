//! For whom content is looked for, and what may be given to it.
//!
//! Whoever asks for a hash learns whether this host has such content. So an image gets content of its own file (what a
//! copy that returns holds, and what has arrived), and with the right `reuse` also that of read-only base images and of
//! the pools of its own reuse domain (I7). That another file is called a copy of the same image says nothing: whoever
//! brings it says which image it is.

use super::files::{FileRef, Found};
use dray_config::{Config, Peer, Right};
use std::path::Path;

/// An image that arrives, and where it comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Asker {
    peer: String,
    file: FileRef,
    domain: Option<String>,
    /// Who has the same number waits for content that another of them was told to send.
    pub(super) scope: u64,
}

/// Numbers from here on are those of domains.
const DOMAINS: u64 = 1 << 32;

impl Asker {
    /// The image of `file`, which has this number and lies at `path`, comes from `peer`.
    pub(super) fn new(
        config: &Config,
        peer: &str,
        file: FileRef,
        number: u32,
        path: Option<&Path>,
    ) -> Self {
        let known = config.peer(peer).filter(|known| known.may(Right::Reuse));
        let domain = known.and(path).and_then(|path| config.pool_of(path)?.reuse_domain.clone());
        let same =
            |name: &String| config.pools.iter().position(|p| p.reuse_domain.as_ref() == Some(name));
        let first = domain.as_ref().and_then(same);
        let scope = first.map_or(u64::from(number), |first| DOMAINS + first as u64);
        Self { peer: peer.to_owned(), file, domain, scope }
    }

    /// Whether what was found may be given to it.
    pub(super) fn may_see(&self, config: &Config, found: &Found) -> bool {
        if found.is == self.file {
            return true;
        }
        let Some(peer) = config.peer(&self.peer) else { return false };
        peer.may(Right::Reuse) && self.shares(config, peer, found)
    }

    fn shares(&self, config: &Config, peer: &Peer, found: &Found) -> bool {
        let around = config.pools_around(&found.path);
        let domain = around.first().and_then(|pool| pool.reuse_domain.as_ref());
        let same = domain.is_some() && domain == self.domain.as_ref();
        (found.read_only || same) && around.iter().any(|pool| peer.may_use(&pool.name))
    }
}
