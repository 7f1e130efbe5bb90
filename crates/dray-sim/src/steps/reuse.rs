//! Content that the target has anywhere: an index with faults, and the runs that are described.
//!
//! Like the agent's, the index is only a hint: what it leads to is read, hashed and compared before
//! it is used. Here entries go stale by themselves (frames, guests and power cuts change what they
//! point to) and from the beginning (a library whose content is not what its hash says).
//!
//! Before the handover the source describes what it sends, after it what Backfill asks about. What is
//! found then fills missing blocks as any frame does, however late: a look may hang for longer than
//! anybody waits, and its guest goes on writing meanwhile.

use crate::disk::ZERO;
use crate::state::index::{Location, PIECE, hash_of, mask_of};
use crate::state::target::{Left, PendingWrite};
use crate::world::World;
use dray_engine::SECOND;
use dray_types::{BlockRange, ImageIndex};
use dray_wire::frame::{PIECE_BLOCKS, PieceHash, mask_bit};
use dray_wire::{FrameHeader, FrameKind};

/// How long a look hangs, in nanoseconds: longer than the target waits for it.
const HANGS: u64 = 40 * SECOND;

impl World {
    /// A run was read: it travels as hashes, and its content is kept unless nobody can change it.
    pub(crate) fn send_described(&mut self, tag: u64, image: ImageIndex, range: BlockRange) {
        let disk = &self.source.disks[image.ix()];
        let versions: Vec<_> = (range.start..range.end()).map(|b| disk.read(b)).collect();
        let mask = mask_of(&versions);
        let pieces = versions.chunks_exact(PIECE);
        let some = pieces.filter(|piece| piece.iter().any(|&version| version != ZERO));
        let payload = some.flat_map(hash_of).collect();
        if self.source.machine.owns() {
            self.source.kept.insert(tag, (range.start, versions));
        }
        self.send_frame(FrameKind::Described, tag, image, range, mask, payload);
    }

    /// What the target lacks goes as it was when it was described.
    pub(crate) fn send_kept(&mut self, tag: u64, of: u64, image: ImageIndex, range: BlockRange) {
        let Some((start, versions)) = self.source.kept.get(&of) else {
            return self.send_run(tag, image, range);
        };
        let from = (range.start - start) as usize;
        let versions = versions[from..from + range.len as usize].to_vec();
        self.send_versions(tag, image, range, &versions);
    }

    /// A described run arrived: what is found will be written. Returns how long looking takes.
    pub(crate) fn look_up(
        &mut self,
        session: u64,
        header: &FrameHeader,
        payload: &[u8],
    ) -> (PendingWrite, u64) {
        let FrameHeader { tag, image, range, zero_mask, .. } = *header;
        let mut hashes = payload.chunks_exact(size_of::<PieceHash>());
        let mut versions = vec![ZERO; range.len as usize];
        let mut lacking = 0u16;
        let reuse = self.setup.reuse.clone();
        let fails = reuse.as_ref().map_or(0.0, |reuse| reuse.fails);
        for piece in 0..range.len as usize / PIECE {
            if header.zero_pieces() >> piece & 1 == 1 {
                continue;
            }
            let hash = hashes.next().and_then(|hash| PieceHash::try_from(hash).ok());
            let start = range.start + (piece * PIECE) as u64;
            let own = self.in_place(image, start, hash);
            let found = if self.rng.chance(fails) { None } else { own.or_else(|| self.find(hash)) };
            self.check.looked_up(self.target.exposed, found.is_some());
            match found {
                Some(found) => versions[piece * PIECE..(piece + 1) * PIECE].copy_from_slice(&found),
                None => lacking |= 1 << piece,
            }
        }
        let agrees = |nth: usize| mask_bit(&zero_mask, nth as u64) == (versions[nth] == ZERO);
        let lacks = |nth: usize| lacking >> (nth / PIECE) & 1 == 1;
        if !(0..versions.len()).all(|nth| lacks(nth) || agrees(nth)) {
            self.fail("content with the right hash has other zero blocks".into());
        }
        let slow = reuse.as_ref().is_some_and(|reuse| self.rng.chance(reuse.slow));
        let hangs = reuse.is_some_and(|reuse| self.target.exposed && self.rng.chance(reuse.hangs));
        let delay = if slow { 50 } else { 2 } * self.disk_time() + if hangs { HANGS } else { 0 };
        let versions = Some(versions);
        let left = Left::Pieces { lacking, near: self.near(lacking) };
        (PendingWrite { session, tag, image, range, versions, left }, delay)
    }

    /// What the target has in the piece's own place, if that is it.
    fn in_place(&self, image: ImageIndex, start: u64, hash: Option<PieceHash>) -> Option<Vec<u64>> {
        let disk = &self.target.disks[image.ix()];
        let own: Vec<_> = (start..start + PIECE_BLOCKS).map(|block| disk.read(block)).collect();
        (Some(hash_of(&own)) == hash).then_some(own)
    }

    /// Content with this hash, read and hashed again; an entry that proves wrong is dropped.
    fn find(&mut self, hash: Option<PieceHash>) -> Option<Vec<u64>> {
        let hash = hash?;
        let content = match *self.index.places.get(&hash)? {
            Location::Library(at) => self.index.library[at].clone(),
            Location::Image(image, start) => {
                let disk = &self.target.disks[image];
                (start..start + PIECE_BLOCKS).map(|block| disk.read(block)).collect()
            }
        };
        if hash_of(&content) == hash {
            return Some(content);
        }
        self.index.places.remove(&hash);
        None
    }

    /// What arrived is content as well, for as long as nobody writes there.
    pub(crate) fn remember(&mut self, image: ImageIndex, range: BlockRange, versions: &[u64]) {
        if self.setup.reuse.is_none() {
            return;
        }
        let first = range.start.next_multiple_of(PIECE_BLOCKS);
        for start in (first..range.end()).step_by(PIECE) {
            let from = (start - range.start) as usize;
            if let Some(piece) = versions.get(from..from + PIECE) {
                self.index.places.insert(hash_of(piece), Location::Image(image.ix(), start));
            }
        }
    }
}
