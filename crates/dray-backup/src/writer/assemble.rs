//! From pieces to segments: what was given, what is inherited, what must be stored again.

use super::Writer;
use super::packer::Packer;
use super::start::Standing;
use crate::error::{Error, Result};
use crate::manifest::{Manifest, SegmentRef};
use crate::piece::{Piece, is_zero, piece_len};
use crate::reader::{fetch, load_segment};
use crate::segment::{self, SEGMENT_PIECES, pieces_in, segment_count};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The segments of a backup in the making.
pub(super) struct Segments {
    bytes: u64,
    /// Pieces that were given, by segment: one bit each.
    claimed: HashMap<u64, Box<[u64; (SEGMENT_PIECES / 64) as usize]>>,
    /// Pieces whose place is known, of segments that are not complete.
    open: BTreeMap<u64, BTreeMap<u16, Piece>>,
    /// Segments that are on their way to a pack or there.
    stored: BTreeMap<u64, (u32, Option<Piece>)>,
    zero: BTreeSet<u64>,
}

impl Segments {
    pub(super) fn new(bytes: u64) -> Self {
        let (claimed, open) = (HashMap::new(), BTreeMap::new());
        Self { bytes, claimed, open, stored: BTreeMap::new(), zero: BTreeSet::new() }
    }

    /// Notes that piece `ix` is given now; it must not have been before.
    pub(super) fn claim(&mut self, ix: u64) -> Result<()> {
        if self.is_claimed(ix) {
            return Err(Error::invalid("it was written before").at_piece(ix));
        }
        let bits = self.claimed.entry(ix / SEGMENT_PIECES).or_default();
        let bit = ix % SEGMENT_PIECES;
        bits[(bit / 64) as usize] |= 1 << (bit % 64);
        Ok(())
    }

    fn is_claimed(&self, ix: u64) -> bool {
        let bit = ix % SEGMENT_PIECES;
        let bits = self.claimed.get(&(ix / SEGMENT_PIECES));
        bits.is_some_and(|bits| bits[(bit / 64) as usize] >> (bit % 64) & 1 == 1)
    }

    /// Notes what piece `ix` is; gives the segment when that completes it.
    pub(super) fn set(&mut self, ix: u64, piece: Piece) -> Option<(u64, Vec<Piece>)> {
        let segment = ix / SEGMENT_PIECES;
        let open = self.open.entry(segment).or_default();
        open.insert((ix % SEGMENT_PIECES) as u16, piece);
        if open.len() < pieces_in(self.bytes, segment) {
            return None;
        }
        let pieces = self.open.remove(&segment)?;
        Some((segment, pieces.into_values().collect()))
    }

    /// Sends a whole segment to a pack.
    pub(super) fn store(&mut self, ix: u64, pieces: &[Piece], meta: &mut Packer) -> Result<()> {
        if pieces.iter().all(|piece| *piece == Piece::Zero) {
            self.zero.insert(ix);
            return Ok(());
        }
        let encoded = segment::encode(pieces)?;
        self.stored.insert(ix, (encoded.len() as u32, None));
        meta.add(ix, &encoded)?;
        self.place(meta);
        Ok(())
    }

    fn place(&mut self, meta: &mut Packer) {
        for (ix, piece) in meta.take() {
            if let Some((_, place)) = self.stored.get_mut(&ix) {
                *place = Some(piece);
            }
        }
    }

    fn is_settled(&self, ix: u64) -> bool {
        self.zero.contains(&ix) || self.stored.contains_key(&ix)
    }

    fn get(&self, ix: u64) -> Result<Option<SegmentRef>> {
        match self.stored.get(&ix) {
            None => Ok(None),
            Some((plain, Some(Piece::Data { hash, place }))) => {
                Ok(Some(SegmentRef { hash: *hash, plain: *plain, place: *place }))
            }
            Some(_) => Err(Error::invalid("a segment is in no pack")),
        }
    }
}

impl Writer {
    /// Decides about every piece that was not given: as in the parent, or zero. What the parent has
    /// in a pack that will go, or with another length, is read and given like any other piece.
    pub(super) fn inherit(&mut self) -> Result<()> {
        let Some(parent) = self.parent.clone() else { return Ok(()) };
        let common = segment_count(self.bytes).min(parent.segment_count());
        for ix in 0..common {
            if self.is_untouched(&parent, ix) {
                continue;
            }
            self.session.renew()?;
            self.inherit_segment(&parent, ix)?;
        }
        Ok(())
    }

    /// Whether segment `ix` can be named again without looking into it.
    fn is_untouched(&self, parent: &Manifest, ix: u64) -> bool {
        let claimed = self.segments.claimed.contains_key(&ix);
        let resized = parent.info().bytes != self.bytes;
        let last = ix + 1 >= segment_count(parent.info().bytes).min(segment_count(self.bytes));
        let sound = match parent.segment(ix) {
            None => true,
            // That it is sound is not enough: what it names may be doomed.
            Some(old) => {
                self.known.avoids_nothing() && self.known.standing(&old.place) == Standing::Sound
            }
        };
        !claimed && sound && !(resized && last)
    }

    fn inherit_segment(&mut self, parent: &Manifest, ix: u64) -> Result<()> {
        let start = ix * SEGMENT_PIECES;
        let claimed = |nth: u64| self.segments.is_claimed(start + nth);
        if (0..pieces_in(self.bytes, ix) as u64).all(claimed) {
            return Ok(());
        }
        let resized = parent.info().bytes != self.bytes;
        let old = load_segment(&self.core, parent, ix).map_err(|e| e.at_piece(start))?;
        let mut kept = Vec::new();
        let mut changed = self.segments.claimed.contains_key(&ix) || resized;
        for (nth, piece) in old.into_iter().enumerate() {
            let nth = start + nth as u64;
            if self.segments.is_claimed(nth) || piece_len(self.bytes, nth) == 0 {
                continue;
            }
            if self.must_copy(parent, nth, &piece)? {
                self.copy(parent, nth, &piece)?;
                changed = true;
            } else {
                kept.push((nth, piece));
            }
        }
        let sound =
            parent.segment(ix).is_none_or(|old| self.known.standing(&old.place) == Standing::Sound);
        if changed || !sound {
            for (nth, piece) in kept {
                self.segments.claim(nth)?;
                self.settle(nth, piece)?;
            }
        }
        Ok(())
    }

    fn must_copy(&self, parent: &Manifest, ix: u64, piece: &Piece) -> Result<bool> {
        let Some(place) = piece.place() else { return Ok(false) };
        match self.known.standing(&place) {
            Standing::Sound => Ok(piece_len(self.bytes, ix) != piece_len(parent.info().bytes, ix)),
            Standing::Doomed => Ok(true),
            Standing::Lost => {
                let text = format!("{} is missing: make a full backup", place.pack);
                Err(Error::damaged(text).at_piece(ix))
            }
        }
    }

    fn copy(&mut self, parent: &Manifest, ix: u64, piece: &Piece) -> Result<()> {
        let Piece::Data { hash, place } = piece else { return Ok(()) };
        let len = piece_len(parent.info().bytes, ix);
        let mut bytes = fetch(&self.core, place, hash, len).map_err(|e| e.at_piece(ix))?;
        bytes.resize(piece_len(self.bytes, ix), 0);
        self.segments.claim(ix)?;
        if is_zero(&bytes) {
            return self.settle(ix, Piece::Zero);
        }
        self.workers.put(ix, &bytes)?;
        self.collect()
    }

    /// The list of all segments, every one of them stored or inherited.
    pub(super) fn finish_segments(&mut self) -> Result<Vec<Option<SegmentRef>>> {
        for (ix, known) in std::mem::take(&mut self.segments.open) {
            let mut pieces = vec![Piece::Zero; pieces_in(self.bytes, ix)];
            for (nth, piece) in known {
                pieces[usize::from(nth)] = piece;
            }
            self.segments.store(ix, &pieces, &mut self.meta)?;
        }
        self.meta.flush()?;
        self.segments.place(&mut self.meta);
        let inherited = |ix: u64| self.parent.as_ref()?.segment(ix).copied();
        (0..segment_count(self.bytes))
            .map(|ix| {
                if self.segments.is_settled(ix) { self.segments.get(ix) } else { Ok(inherited(ix)) }
            })
            .collect()
    }
}
