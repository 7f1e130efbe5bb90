//! The hosts of `[[peer]]`, and what each may do on this one.

use crate::live::Live;
use std::fmt;
use std::sync::Arc;

/// One thing that a peer may do on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Right {
    /// Move images to this host, into the pools of its `[[peer]]`.
    Receive,
    /// Ask which agent this is and which pools are open to the peer.
    Observe,
    /// List and read the replicas that lie in the pools of its `[[peer]]`.
    ReadReplicas,
    /// Ask whether this host has content with a certain hash.
    Reuse,
    /// Keep backups in the store of this host.
    Store,
}

impl Right {
    /// Every right, in the order of the documentation.
    pub const ALL: [Self; 5] =
        [Self::Receive, Self::Observe, Self::ReadReplicas, Self::Reuse, Self::Store];

    /// What a peer may do whose `[[peer]]` does not say.
    pub const DEFAULT: [Self; 1] = [Self::Receive];

    /// How the configuration calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Receive => "receive",
            Self::Observe => "observe",
            Self::ReadReplicas => "read-replicas",
            Self::Reuse => "reuse",
            Self::Store => "store",
        }
    }

    /// The right of this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|right| right.name() == name)
    }

    /// These rights as a line of the configuration.
    pub fn line(rights: impl IntoIterator<Item = Self>) -> String {
        let names: Vec<_> =
            rights.into_iter().map(|right| format!("\"{}\"", right.name())).collect();
        format!("rights = [{}]", names.join(", "))
    }
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Another agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The DNS name in its certificate.
    pub name: String,
    /// Where it listens: `host`, `host:port` or `[v6]:port`.
    pub address: String,
    /// Names of the pools here that it may use.
    pub pools: Vec<String>,
    /// What it may do here.
    pub rights: Vec<Right>,
    /// Hosts whose backups it may read in the store of this host, besides its own.
    pub reads_store_of: Vec<String>,
}

impl Peer {
    /// Whether it may use the pool of this name.
    pub fn may_use(&self, pool: &str) -> bool {
        self.pools.iter().any(|name| name == pool)
    }

    /// Whether it has this right.
    pub fn may(&self, right: Right) -> bool {
        self.rights.contains(&right)
    }

    /// Whether it may do everything here that `other`, an earlier state of it, may.
    pub(crate) fn may_all_of(&self, other: &Self) -> bool {
        let reads = |host| self.reads_store_of.contains(host);
        other.rights.iter().all(|&right| self.may(right))
            && other.pools.iter().all(|pool| self.may_use(pool))
            && other.reads_store_of.iter().all(reads)
    }

    /// The line of its `[[peer]]` with which it would have this right as well.
    pub fn line_with(&self, right: Right) -> String {
        let all = Right::ALL.into_iter();
        Right::line(all.filter(|&one| one == right || self.may(one)))
    }
}

/// The peers of the configuration, as they are now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peers(Live<Vec<Arc<Peer>>>);

impl Peers {
    /// These peers.
    pub fn new(peers: Vec<Peer>) -> Self {
        Self(Live::new(peers.into_iter().map(Arc::new).collect()))
    }

    /// All of them.
    pub fn all(&self) -> Arc<Vec<Arc<Peer>>> {
        self.0.now()
    }

    /// The peer of this name.
    pub fn get(&self, name: &str) -> Option<Arc<Peer>> {
        self.all().iter().find(|peer| peer.name.eq_ignore_ascii_case(name)).cloned()
    }

    /// From now on they are these.
    pub(crate) fn take(&self, other: &Self) {
        self.0.take(&other.0);
    }
}
