//! For whom content is looked for, and what may be given to it.
//!
//! Whoever asks for a hash learns whether this host has such content. So an image gets content of its own file (what a
//! copy that returns holds, and what has arrived), and with the right `reuse` also that of read-only base images and of
//! the pools of its own reuse domain (I7). That another file is called a copy of the same image says nothing: whoever
//! brings it says which image it is.

use super::files::{FileRef, Found};
use super::scope::{self, Scope};
use dray_config::{Config, Peer, Right};
use std::path::Path;

/// An image that arrives, and where it comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Asker {
    peer: String,
    file: FileRef,
    domain: Option<String>,
    /// Who has the same one waits for content that another of them was told to send.
    pub(super) scope: Scope,
    /// Where content is looked for, this one first.
    pub(super) scopes: Vec<Scope>,
}

impl Asker {
    /// The image of `file`, which lies at `path`, comes from `peer`.
    pub(super) fn new(config: &Config, peer: &str, file: FileRef, path: Option<&Path>) -> Self {
        let known = config.peer(peer).filter(|known| known.may(Right::Reuse));
        let domain =
            known.as_ref().and(path).and_then(|path| config.pool_of(path)?.reuse_domain.clone());
        let own = scope::of_file(&file);
        let shared = domain.as_deref().map(scope::of_domain);
        let mut scopes: Vec<_> = shared.into_iter().chain([own]).collect();
        scopes.extend(known.iter().flat_map(|peer| bases(config, peer)));
        Self { peer: peer.to_owned(), file, domain, scope: shared.unwrap_or(own), scopes }
    }

    /// Whether what was found may be given to it.
    pub(super) fn may_see(&self, config: &Config, found: &Found) -> bool {
        if found.is == self.file {
            return true;
        }
        let Some(peer) = config.peer(&self.peer) else { return false };
        peer.may(Right::Reuse) && self.shares(config, &peer, found)
    }

    fn shares(&self, config: &Config, peer: &Peer, found: &Found) -> bool {
        let around = config.pools_around(&found.path);
        let domain = around.first().and_then(|pool| pool.reuse_domain.as_ref());
        let same = domain.is_some() && domain == self.domain.as_ref();
        (found.read_only || same) && around.iter().any(|pool| peer.may_use(&pool.name))
    }
}

/// The scopes of base images that `peer` may see.
fn bases<'a>(config: &'a Config, peer: &'a Peer) -> impl Iterator<Item = Scope> + 'a {
    let seen = config.pools.iter().filter(|pool| peer.may_use(&pool.name));
    seen.map(|pool| scope::of_bases(&pool.name))
}
