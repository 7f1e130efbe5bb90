//! Replicas at other hosts: which there are, and one of them as a provider.
//!
//! It has no recipe of its own: it is trusted as one that lies here would be, and each piece carries a
//! hash over the way. Where a backup knows what a piece of that generation must be, it decides.

use super::choose::joined;
use crate::provider::{Failure, Parts, Provider};
use crate::snapshots::{Catalogue, HeldCopy, Snapshot, Snapshots, Unheard, Wanted};
use dray_api::HeldAs;
use dray_backup::{Hash, PIECE_BYTES, Piece as Recipe, Reader};
use dray_config::Config;
use dray_image::ImageFile;
use dray_net::NetErrorKind;
use dray_net::questions::Questions;
use dray_net::tls::Identity;
use dray_net::{requests, turns};
use dray_types::ErrorKind;
use dray_types::{GenerationId, ImageId};
use dray_wire::StreamKind;
use dray_wire::replica::{Answer, Ask, HASH_BYTES, Piece, piece_count};
use dray_wire::request::{Holding, Reply, Request};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// The longest wait for a peer: it looks at nothing but its own records.
const PEER_PATIENCE: Duration = Duration::from_secs(5);

/// The replicas at a peer.
pub struct PeerCatalogue {
    /// Says where the peer is.
    pub config: Arc<Config>,
    /// The peer's name.
    pub name: String,
}

impl Catalogue for PeerCatalogue {
    fn name(&self) -> &str {
        &self.name
    }

    fn patience(&self) -> Duration {
        PEER_PATIENCE
    }

    fn is_host(&self) -> bool {
        true
    }

    fn snapshots(&self, image: ImageId) -> Result<Snapshots, Unheard> {
        at_peer(&self.config, &self.name, image)
    }
}

fn at_peer(config: &Arc<Config>, name: &str, image: ImageId) -> Result<Snapshots, Unheard> {
    let peer = config.peer(name).ok_or(Unheard::Unknown)?;
    let turn = turns::turn(&peer.address)?;
    let identity = Identity::load(&config.tls_dir)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let request = Request::Holdings { image };
    let asked = requests::ask(&identity, &peer.name, &peer.address, &request, PEER_PATIENCE);
    let asked = runtime.block_on(asked);
    turn.heard(&asked);
    let asked = match asked {
        // It gives replicas to other hosts, if to any: nothing is wrong with it.
        Err(why) if why.kind == NetErrorKind::Refused(ErrorKind::Denied) => {
            tracing::debug!(peer = name, %why, "a peer gives this host no replicas");
            return Ok(Snapshots::default());
        }
        asked => asked?,
    };
    match asked {
        Reply::Holdings { held } => {
            let held = held.into_iter().map(|holding| replica(config, name, holding)).collect();
            Ok(Snapshots { held, ..Snapshots::default() })
        }
        _ => Err(Unheard::Misfit),
    }
}

fn replica(config: &Arc<Config>, peer: &str, holding: Holding) -> Snapshot {
    let Holding { generation, len, allocated, distrusted } = holding;
    Snapshot {
        place: peer.to_owned(),
        generation,
        len,
        held: Box::new(ReplicaCopy {
            config: Arc::clone(config),
            peer: peer.to_owned(),
            allocated,
            distrusted,
        }),
    }
}

/// The replica at a peer, as the index knows it.
struct ReplicaCopy {
    config: Arc<Config>,
    peer: String,
    allocated: u64,
    distrusted: Vec<u64>,
}

impl HeldCopy for ReplicaCopy {
    fn held_as(&self) -> HeldAs {
        HeldAs::Replica
    }

    fn distrusted(&self) -> &[u64] {
        &self.distrusted
    }

    fn allocated(&self) -> u64 {
        self.allocated
    }

    fn provider(&self, wanted: Wanted) -> Option<Arc<dyn Provider>> {
        let identity = Identity::load(&self.config.tls_dir).ok()?;
        let peer = self.config.peer(&self.peer)?;
        let Wanted { image, generation, old, recipe } = wanted;
        Some(Arc::new(PeerReplica {
            questions: Questions::new(identity, &peer.name, &peer.address, StreamKind::Replica),
            image,
            generation,
            old,
            recipe,
            from_old: AtomicU64::new(0),
        }))
    }
}

/// The provider.
pub struct PeerReplica {
    /// The way to the host.
    pub questions: Questions,
    /// The image.
    pub image: ImageId,
    /// The generation that is wanted, which the replica holds.
    pub generation: GenerationId,
    /// An old copy of the image on this host, of whatever state: what is the same there does not cross.
    pub old: Option<Arc<dyn ImageFile>>,
    /// A backup of the same generation.
    pub recipe: Option<Arc<Reader>>,
    /// Bytes that came from the old copy.
    pub from_old: AtomicU64,
}

impl PeerReplica {
    /// The hashes of the old copy's pieces with its bytes; nothing without one.
    fn known(&self, offset: u64, len: u64) -> (Vec<u8>, Vec<u8>) {
        let Some(old) = &self.old else { return Default::default() };
        let mut bytes = vec![0; len as usize];
        if old.read_at(&mut bytes, offset).is_err() {
            return Default::default();
        }
        let hashes = bytes.chunks(PIECE_BYTES).flat_map(|piece| *blake3::hash(piece).as_bytes());
        (hashes.collect(), bytes)
    }

    /// Whether a piece is what a backup says it must be, if one says anything.
    fn is_right(&self, ix: u64, piece: Option<&[u8]>) -> bool {
        let recipe = self.recipe.as_ref().and_then(|recipe| recipe.piece(ix).ok());
        match recipe {
            None => true,
            Some(Recipe::Zero) => piece.is_none_or(|piece| piece.iter().all(|byte| *byte == 0)),
            Some(Recipe::Data { hash, .. }) => piece.is_some_and(|piece| Hash::of(piece) == hash),
        }
    }

    /// The parts of an answer, each piece checked.
    fn parts(
        &self,
        ask: &Ask,
        pieces: &[Piece],
        body: &[u8],
        old: &[u8],
    ) -> Result<Parts, Failure> {
        let wrong = |why: &str| Failure::Damaged(format!("the answer is wrong: {why}"));
        let (mut parts, mut rest) = (Parts::new(), body);
        for (nth, piece) in pieces.iter().enumerate() {
            let start = nth * PIECE_BYTES;
            let len = PIECE_BYTES.min(ask.len as usize - start);
            let offset = ask.offset + start as u64;
            let bytes = match piece {
                Piece::Zero => None,
                Piece::Known => {
                    let known = old.get(start..start + len);
                    let known = known
                        .ok_or_else(|| wrong("it refers to bytes that this host does not have"))?;
                    self.from_old.fetch_add(len as u64, Ordering::Relaxed);
                    Some(known)
                }
                Piece::Data { hash } => {
                    let (data, after) =
                        rest.split_at_checked(len).ok_or_else(|| wrong("bytes are missing"))?;
                    rest = after;
                    if xxh3_64(data) != *hash {
                        return Err(wrong("its hash differs"));
                    }
                    Some(data)
                }
            };
            if !self.is_right(offset / PIECE_BYTES as u64, bytes) {
                return Err(wrong("a backup of this generation has other bytes at this place"));
            }
            parts.extend(bytes.map(|bytes| (offset, bytes.to_vec())));
        }
        if rest.is_empty() {
            Ok(joined(parts))
        } else {
            Err(wrong("there are bytes after its end"))
        }
    }
}

impl Provider for PeerReplica {
    fn name(&self) -> String {
        format!("replica at {}", self.questions.peer())
    }

    fn bytes_of_old(&self) -> u64 {
        self.from_old.load(Ordering::Relaxed)
    }

    fn read(&self, offset: u64, len: u64) -> Result<Parts, Failure> {
        let ask = Ask { image: self.image, generation: self.generation, offset, len: len as u32 };
        let (hashes, old) = self.known(offset, len);
        debug_assert!(hashes.is_empty() || hashes.len() == piece_count(ask.len) * HASH_BYTES);
        match self.questions.ask(&ask, &hashes) {
            Err(why) => Err(Failure::Unavailable(why.to_string())),
            Ok((Answer::Failed { why }, _)) => Err(Failure::Unavailable(why)),
            Ok((Answer::Distrusted, _)) => {
                Err(Failure::Damaged("a migration has written to it since".to_owned()))
            }
            Ok((Answer::Pieces(pieces), body)) if pieces.len() == piece_count(ask.len) => {
                self.parts(&ask, &pieces, &body, &old)
            }
            Ok(_) => Err(Failure::Damaged("the answer does not fit the question".to_owned())),
        }
    }
}
