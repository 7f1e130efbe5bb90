//! The hosts of `[[peer]]`, and what each may do on this one.

use std::fmt;

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

    /// The line of its `[[peer]]` with which it would have this right as well.
    pub fn line_with(&self, right: Right) -> String {
        let all = Right::ALL.into_iter();
        Right::line(all.filter(|&one| one == right || self.may(one)))
    }
}

/// The peers of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peers(Vec<Peer>);

impl Peers {
    /// These peers.
    pub fn new(peers: Vec<Peer>) -> Self {
        Self(peers)
    }

    /// All of them.
    pub fn all(&self) -> &[Peer] {
        &self.0
    }

    /// The peer of this name.
    pub fn get(&self, name: &str) -> Option<&Peer> {
        self.0.iter().find(|peer| peer.name.eq_ignore_ascii_case(name))
    }
}
