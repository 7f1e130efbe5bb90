//! Peers list and read the replicas of this host: only those in pools that the peer may use, and
//! only as long as the replicas are unchanged since the handover (I7).
//!
//! An image that this host owns is never read from here in this way: that is its migration's business.

use super::room::Question;
use crate::agent::Agent;
use dray_config::Right;
use dray_host::abort;
use dray_host::lineage::{REGION_BLOCKS, ReplicaNote, stamp_of};
use dray_host::record::{CopyState, NameKind};
use dray_host::registry::Entry;
use dray_image::{Image, runs};
use dray_net::questions::{Answering, Asked, IDLE};
use dray_net::{NetError, NetErrorKind, Stream};
use dray_types::{BLOCK_SIZE, BlockRange, GenerationId, ImageId};
use dray_wire::replica::{self, Answer, Ask, HASH_BYTES, MAX_READ, PIECE_BYTES, Piece};
use dray_wire::request::Holding;
use std::io;
use std::sync::Arc;
use tokio::runtime::Handle;
use xxhash_rust::xxh3::xxh3_64;

/// Blocks of a piece.
const PIECE_BLOCKS: u64 = PIECE_BYTES / BLOCK_SIZE;

/// Longest head of a question: numbers only.
const MAX_ASK: usize = 256;
/// Longest body of one: the hashes of all pieces that it may ask for.
const MAX_HASHES: usize = (MAX_READ as u64 / PIECE_BYTES) as usize * HASH_BYTES;

/// A replica that a peer may read.
struct Offered {
    entry: Arc<Entry>,
    note: ReplicaNote,
}

impl Agent {
    /// The replicas of an image that `peer` may read here; none while this host owns the image.
    pub(crate) fn holdings(&self, peer: &str, image: ImageId) -> Vec<Holding> {
        let all = self.registry.all();
        let owned = |entry: &Arc<Entry>| {
            let record = entry.record();
            record.id == image && record.state == CopyState::Owner
        };
        if all.iter().any(owned) {
            return Vec::new();
        }
        let offered = all.into_iter().filter_map(|entry| self.offered(peer, image, entry));
        let holding = |offered: Offered| Holding {
            generation: offered.note.generation,
            len: offered.entry.record().len,
            allocated: offered.entry.file.allocated_bytes().unwrap_or(0),
            distrusted: offered.note.distrusted,
        };
        offered.map(holding).collect()
    }

    /// The entry as a replica of the image that the peer may read.
    fn offered(&self, peer: &str, image: ImageId, entry: Arc<Entry>) -> Option<Offered> {
        let record = entry.record();
        let idle = record.state == CopyState::Replica && record.migration.is_none();
        let file = matches!(record.place, NameKind::Replica(_));
        if record.id != image || !idle || !file {
            return None;
        }
        let path = record.current_path().ok()?;
        // What nobody vouches for is not passed on.
        let note = record.replica.filter(|note| note.check_kept().is_ok() && !note.unproved)?;
        let peer = self.config.peer(peer)?;
        let mut pools = self.config.pools.iter().filter(|pool| peer.may_use(&pool.name));
        let allowed = peer.may(Right::ReadReplicas) && pools.any(|pool| pool.contains(&path));
        // One that was touched is for its own host, which compares it with what its owner has.
        (allowed && stamp_of(&self.registry.at(&path)).ok()? == note.stamp)
            .then_some(Offered { entry, note })
    }

    fn find(&self, peer: &str, image: ImageId, generation: GenerationId) -> Option<Offered> {
        let all = self.registry.all().into_iter();
        let mut offered = all.filter_map(|entry| self.offered(peer, image, entry));
        offered.find(|offered| offered.note.generation.id == generation)
    }

    /// Lets a peer read until it has had enough. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When no thread can be made.
    pub(super) fn offer_replicas(
        self: &Arc<Self>,
        stream: Stream,
        question: Question,
    ) -> Result<(), NetError> {
        let mut stream = stream.into_blocking()?;
        stream.limit_waits(IDLE)?;
        let (agent, runtime) = (Arc::clone(self), Handle::current());
        let work = move || {
            let _question = question;
            let peer = stream.peer().to_owned();
            let answering = Answering::new(&mut stream, runtime, MAX_ASK, MAX_HASHES);
            if let Err(why) = agent.answer_all(answering, &peer) {
                tracing::debug!(peer, %why, "a peer's stream to the replicas of this host ended");
            }
        };
        let made = std::thread::Builder::new().name("dray-replica".to_owned()).spawn(work);
        let local = |why| NetError::new(NetErrorKind::Local, format!("offer replicas: {why}"));
        made.map(drop).map_err(local)
    }

    fn answer_all(&self, mut answering: Answering<'_>, peer: &str) -> io::Result<()> {
        while let Some(Asked { ask, body, held }) = answering.question::<Ask>()? {
            abort::before(|| vec!["replica-answer".to_owned()]);
            drop(held);
            let held = answering.place(ask.len.min(MAX_READ) as usize)?;
            let (answer, bytes) = self.answer(peer, &ask, &body);
            answering.answer(&answer, &bytes, held)?;
        }
        Ok(())
    }

    fn answer(&self, peer: &str, ask: &Ask, known: &[u8]) -> (Answer, Vec<u8>) {
        let failed = |why: &str| (Answer::Failed { why: why.to_owned() }, Vec::new());
        let Some(offered) = self.find(peer, ask.image, ask.generation) else {
            return failed("the replica is not there any more, or has changed");
        };
        if !is_sound(ask, offered.entry.record().len, known) {
            return failed("the question is not valid");
        }
        let blocks =
            BlockRange::new(ask.offset / BLOCK_SIZE, u64::from(ask.len).div_ceil(BLOCK_SIZE));
        if offered.note.distrusted.iter().any(|region| {
            !BlockRange::new(region.saturating_mul(REGION_BLOCKS), REGION_BLOCKS)
                .intersect(blocks)
                .is_empty()
        }) {
            return (Answer::Distrusted, Vec::new());
        }
        match pieces(&*offered.entry.file, ask, blocks, known) {
            Err(why) => failed(&why.to_string()),
            // A migration back may have begun to write into it meanwhile.
            Ok(_) if self.find(peer, ask.image, ask.generation).is_none() => {
                failed("another migration has just begun to use it")
            }
            Ok((pieces, bytes)) => (Answer::Pieces(pieces), bytes),
        }
    }
}

/// Whether the question is one that can be answered about an image of `len` bytes.
fn is_sound(ask: &Ask, len: u64, known: &[u8]) -> bool {
    let end = ask.offset.checked_add(ask.len.into());
    let whole = u64::from(ask.len).is_multiple_of(PIECE_BYTES) || end == Some(len);
    let hashes = known.is_empty() || known.len() == replica::piece_count(ask.len) * HASH_BYTES;
    let bounded = ask.len > 0 && ask.len <= MAX_READ && end.is_some_and(|end| end <= len);
    bounded && whole && hashes && ask.offset.is_multiple_of(PIECE_BYTES)
}

/// The pieces, and the bytes of those that the asking side lacks.
fn pieces(
    file: &dyn Image,
    ask: &Ask,
    blocks: BlockRange,
    known: &[u8],
) -> dray_image::Result<(Vec<Piece>, Vec<u8>)> {
    let data = runs::data_blocks(file, blocks)?;
    let (mut pieces, mut bytes) = (Vec::new(), Vec::new());
    for (nth, start) in (0..u64::from(ask.len)).step_by(PIECE_BYTES as usize).enumerate() {
        let range = BlockRange::new((ask.offset + start) / BLOCK_SIZE, PIECE_BLOCKS);
        if data.intersection(range).is_empty() {
            pieces.push(Piece::Zero);
            continue;
        }
        let mut piece = vec![0; PIECE_BYTES.min(u64::from(ask.len) - start) as usize];
        file.read_at(&mut piece, ask.offset + start)?;
        let theirs = known.chunks_exact(HASH_BYTES).nth(nth);
        pieces.push(if piece.iter().all(|byte| *byte == 0) {
            Piece::Zero
        } else if theirs.is_some_and(|theirs| blake3::hash(&piece).as_bytes() == theirs) {
            Piece::Known
        } else {
            let hash = xxh3_64(&piece);
            bytes.extend(piece);
            Piece::Data { hash }
        });
    }
    Ok((pieces, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(offset: u64, len: u32) -> Ask {
        Ask { image: ImageId(1), generation: GenerationId(1), offset, len }
    }

    #[test]
    fn only_questions_about_whole_pieces_of_the_image_are_answered() {
        let len = 10 * PIECE_BYTES + 4096;
        let sound =
            |offset, bytes, known: usize| is_sound(&ask(offset, bytes), len, &vec![0; known]);
        assert!(sound(0, PIECE_BYTES as u32, 0) && sound(PIECE_BYTES, 2 * PIECE_BYTES as u32, 64));
        assert!(sound(10 * PIECE_BYTES, 4096, 32), "the last one is short");
        assert!(!sound(0, 0, 0) && !sound(4096, PIECE_BYTES as u32, 0) && !sound(0, 4096, 0));
        assert!(!sound(0, PIECE_BYTES as u32, 31) && !sound(0, PIECE_BYTES as u32, 64));
        assert!(!sound(10 * PIECE_BYTES, PIECE_BYTES as u32, 0), "past the end");
        assert!(!sound(u64::MAX - PIECE_BYTES + 1, PIECE_BYTES as u32, 0));
        assert!(!is_sound(&ask(0, MAX_READ + PIECE_BYTES as u32), 1 << 40, &[]));
    }

    #[test]
    fn what_the_other_side_has_and_what_is_zero_does_not_cross() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let size = PIECE_BYTES as usize;
        let content = [vec![1; size], vec![0; size], vec![3; size], vec![4; 4096]].concat();
        std::fs::write(&path, &content).unwrap();
        let options = dray_image::FileOptions { write: false, direct: false, export_len: None };
        let file = dray_image::FileImage::open(&path, options).unwrap();
        let ask = ask(0, content.len() as u32);
        let blocks = BlockRange::new(0, (content.len() as u64).div_ceil(BLOCK_SIZE));
        let (first, bytes) = pieces(&file, &ask, blocks, &[]).unwrap();
        assert!(matches!(
            first[..],
            [Piece::Data { .. }, Piece::Zero, Piece::Data { .. }, Piece::Data { .. }]
        ));
        assert_eq!(bytes, [vec![1; size], vec![3; size], vec![4; 4096]].concat());
        let mut known = vec![0; 4 * HASH_BYTES];
        known[2 * HASH_BYTES..3 * HASH_BYTES]
            .copy_from_slice(blake3::hash(&vec![3; size]).as_bytes());
        let (second, bytes) = pieces(&file, &ask, blocks, &known).unwrap();
        assert_eq!((second[2], bytes.len()), (Piece::Known, size + 4096));
    }
}
