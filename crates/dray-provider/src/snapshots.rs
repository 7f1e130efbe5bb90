//! The snapshot index: which backup or replica holds which generation of an image, asked of the
//! repositories and the peers in the configuration.
//!
//! All places are asked at once, and none is waited for for long: one that says nothing must not keep a
//! migration from its work. A fleet's catalogue would answer here instead.

use crate::destination::Destination;
use dray_backup::{Backup, Repository};
use dray_config::Config;
use dray_net::tls::{Identity, TlsError};
use dray_net::{NetError, requests};
use dray_types::{Ancestor, ImageId, Refusal};
use dray_wire::request::{Holding, Reply, Request};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// The longest wait for a repository's list of what it has, or for one more part of a recipe. Some hundred
/// manifests are read one after the other, each a round trip to an object store.
pub const PATIENCE: Duration = Duration::from_secs(25);
/// The longest wait for a peer: it looks at nothing but its own records.
const PEER_PATIENCE: Duration = Duration::from_secs(5);

/// One generation of an image, at one place.
pub struct Snapshot {
    /// The place's name: a repository's or a peer's.
    pub place: String,
    /// The generation.
    pub generation: Ancestor,
    /// The image's length then, in bytes.
    pub len: u64,
    /// What holds its content.
    pub held: Held,
}

/// What holds a generation's content.
pub enum Held {
    /// A backup.
    Backup(Repository, Box<Backup>),
    /// The replica at a peer.
    Replica {
        /// Bytes allocated for it.
        allocated: u64,
        /// Regions that do not hold the generation any more.
        distrusted: Vec<u64>,
    },
}

/// Why a place has told nothing.
#[derive(Debug, thiserror::Error)]
pub enum Unheard {
    /// A peer that the configuration does not name.
    #[error("no such peer is configured")]
    Unknown,
    /// A repository that cannot be opened.
    #[error(transparent)]
    Closed(#[from] Refusal),
    /// A repository that cannot be read.
    #[error(transparent)]
    Unread(#[from] dray_backup::Error),
    /// This host cannot show who it is.
    #[error(transparent)]
    Certificate(#[from] TlsError),
    /// A peer that cannot be asked, or has refused.
    #[error(transparent)]
    Peer(#[from] NetError),
    /// Something on this host.
    #[error(transparent)]
    Local(#[from] io::Error),
    /// A peer that has answered something else.
    #[error("its answer does not fit the question")]
    Misfit,
    /// It has been waited for long enough.
    #[error("it did not answer within {} s", .0.as_secs())]
    Late(Duration),
}

/// What all places have of an image.
#[derive(Default)]
pub struct Snapshots {
    /// By place: the repositories, then the peers, in the order of the configuration.
    pub held: Vec<Snapshot>,
    /// What is damaged, and which repository cannot be asked and why, for people.
    pub notes: Vec<String>,
    /// Which peer cannot be asked and why.
    pub silent: Vec<String>,
}

/// How one place is asked.
type Question = fn(&Config, &str, ImageId) -> Result<Snapshots, Unheard>;

impl Snapshots {
    /// Asks every place for what it has of `image`.
    pub fn of(config: &Arc<Config>, image: ImageId) -> Self {
        let begun = Instant::now();
        let repositories: Vec<_> = config.backups.iter().map(|place| place.name.as_str()).collect();
        let peers: Vec<_> = config.peers.iter().map(|peer| peer.name.as_str()).collect();
        let ask = |names: &[&str], question: Question| {
            let ask = |name: &&str| {
                let (config, name) = (Arc::clone(config), (*name).to_owned());
                apart(move || question(&config, &name, image))
            };
            names.iter().map(ask).collect::<Vec<_>>()
        };
        let (stored, replicas) = (ask(&repositories, at_repository), ask(&peers, at_peer));
        let mut all = Self::default();
        for (name, answer) in peers.iter().zip(replicas) {
            let why = all.take(&answer, begun + PEER_PATIENCE, PEER_PATIENCE).err();
            all.silent.extend(why.map(|why| format!("{name}: {why}")));
        }
        let replicas = std::mem::take(&mut all.held);
        for (name, answer) in repositories.iter().zip(stored) {
            let why = all.take(&answer, begun + PATIENCE, PATIENCE).err();
            all.notes.extend(why.map(|why| format!("{name}: {why}")));
        }
        all.held.extend(replicas);
        all
    }

    /// Takes in an answer that comes before `until`.
    fn take(
        &mut self,
        answer: &Receiver<Result<Self, Unheard>>,
        until: Instant,
        patience: Duration,
    ) -> Result<(), Unheard> {
        let answer = answer.recv_timeout(until.saturating_duration_since(Instant::now()));
        let found = answer.map_err(|_| Unheard::Late(patience))??;
        self.held.extend(found.held);
        self.notes.extend(found.notes);
        Ok(())
    }
}

/// Does it on a thread of its own, which whoever waits may leave alone: it ends with its work. Where no
/// thread can be made nothing ever comes.
pub fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (send, told) = mpsc::sync_channel(1);
    // Nobody may be waiting any more.
    let work = move || drop(send.send(work()));
    drop(std::thread::Builder::new().name("dray-snapshots".to_owned()).spawn(work));
    told
}

fn at_repository(config: &Config, name: &str, image: ImageId) -> Result<Snapshots, Unheard> {
    let repository = Destination::resolve(config, name, None)?.open()?;
    let listing = repository.backups(image)?;
    let notes = listing.damaged.iter().map(|(_, why)| format!("{name}: {why}")).collect();
    let held = listing.backups.into_iter().map(|backup| Snapshot {
        place: name.to_owned(),
        generation: backup.info.generation,
        len: backup.info.bytes,
        held: Held::Backup(repository.clone(), Box::new(backup)),
    });
    Ok(Snapshots { held: held.collect(), notes, silent: Vec::new() })
}

fn at_peer(config: &Config, name: &str, image: ImageId) -> Result<Snapshots, Unheard> {
    let peer = config.peer(name).ok_or(Unheard::Unknown)?;
    let identity = Identity::load(&config.tls_dir)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let request = Request::Holdings { image };
    let asked = requests::ask(&identity, &peer.name, &peer.address, &request, PEER_PATIENCE);
    match runtime.block_on(asked)? {
        Reply::Holdings { held } => {
            let held = held.into_iter().map(|holding| replica(name, holding)).collect();
            Ok(Snapshots { held, ..Snapshots::default() })
        }
        _ => Err(Unheard::Misfit),
    }
}

fn replica(peer: &str, holding: Holding) -> Snapshot {
    let Holding { generation, len, allocated, distrusted } = holding;
    Snapshot {
        place: peer.to_owned(),
        generation,
        len,
        held: Held::Replica { allocated, distrusted },
    }
}
