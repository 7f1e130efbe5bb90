//! Segments: what a backup says about 512 neighbouring pieces, 32 MiB of image.
//!
//! A manifest is a list of segments; a segment is stored in packs just like a piece. A backup that
//! changed nothing in a segment names the old one again, so what an incremental backup writes
//! depends on what changed and not on the length of the image.

use crate::error::{Error, Result};
use crate::pack::MAX_PACK;
use crate::piece::{Hash, PIECE_BYTES, Piece, piece_count, piece_len};
use crate::place::{PackId, PackSlice};
use crate::seal::TAG_BYTES;
use serde::{Deserialize, Serialize};

/// Pieces of a segment; the last of an image may have fewer.
pub const SEGMENT_PIECES: u64 = 512;

/// Number of segments of an image of `bytes` bytes.
pub(crate) const fn segment_count(bytes: u64) -> u64 {
    piece_count(bytes).div_ceil(SEGMENT_PIECES)
}

/// Number of pieces in segment `ix` of an image of `bytes` bytes.
pub(crate) fn pieces_in(bytes: u64, ix: u64) -> usize {
    piece_count(bytes).saturating_sub(ix * SEGMENT_PIECES).min(SEGMENT_PIECES) as usize
}

/// The stored form: runs of zeros, and runs of pieces that lie one after the other in a pack.
#[derive(Serialize, Deserialize)]
struct Stored {
    packs: Vec<PackId>,
    runs: Vec<Run>,
}

#[derive(Serialize, Deserialize)]
enum Run {
    Zero(u32),
    Data { pack: u32, offset: u32, pieces: Vec<(Hash, u32)> },
}

/// Encodes what is known of a segment's pieces.
pub(crate) fn encode(pieces: &[Piece]) -> Result<Vec<u8>> {
    let mut stored = Stored { packs: Vec::new(), runs: Vec::new() };
    let mut end = None;
    for piece in pieces {
        end = stored.add(piece, end);
    }
    postcard::to_allocvec(&stored).map_err(|e| Error::invalid(format!("cannot encode: {e}")))
}

impl Stored {
    /// Appends a piece. `end` is where the piece before ends in its pack.
    fn add(&mut self, piece: &Piece, end: Option<(PackId, u64)>) -> Option<(PackId, u64)> {
        let Piece::Data { hash, place } = *piece else {
            match self.runs.last_mut() {
                Some(Run::Zero(count)) => *count += 1,
                _ => self.runs.push(Run::Zero(1)),
            }
            return None;
        };
        match self.runs.last_mut() {
            Some(Run::Data { pieces, .. }) if end == Some((place.pack, place.offset.into())) => {
                pieces.push((hash, place.stored));
            }
            _ => {
                let known = self.packs.iter().position(|pack| *pack == place.pack);
                let pack = known.unwrap_or_else(|| {
                    self.packs.push(place.pack);
                    self.packs.len() - 1
                }) as u32;
                let pieces = vec![(hash, place.stored)];
                self.runs.push(Run::Data { pack, offset: place.offset, pieces });
            }
        }
        Some((place.pack, place.end()))
    }
}

/// Decodes segment `ix` of an image of `bytes` bytes; everything in it is checked (I7).
pub(crate) fn decode(encoded: &[u8], bytes: u64, ix: u64) -> Result<Vec<Piece>> {
    let damaged = || Error::damaged("its list of pieces cannot be decoded");
    let Ok((stored, [])) = postcard::take_from_bytes::<Stored>(encoded) else {
        return Err(damaged());
    };
    let wanted = pieces_in(bytes, ix);
    let mut pieces = Vec::with_capacity(wanted);
    for run in stored.runs {
        match run {
            Run::Zero(count) if count as usize <= wanted - pieces.len() => {
                pieces.resize(pieces.len() + count as usize, Piece::Zero);
            }
            Run::Data { pack, mut offset, pieces: run } if run.len() <= wanted - pieces.len() => {
                let pack = *stored.packs.get(pack as usize).ok_or_else(damaged)?;
                for (hash, stored) in run {
                    let nth = ix * SEGMENT_PIECES + pieces.len() as u64;
                    let place = PackSlice { pack, offset, stored };
                    check_place(&place, piece_len(bytes, nth)).ok_or_else(damaged)?;
                    offset += stored;
                    pieces.push(Piece::Data { hash, place });
                }
            }
            _ => return Err(damaged()),
        }
    }
    if pieces.len() == wanted { Ok(pieces) } else { Err(damaged()) }
}

/// Something of `plain` bytes can be stored there.
pub(crate) fn check_place(place: &PackSlice, plain: usize) -> Option<()> {
    let fits = place.end() <= MAX_PACK as u64;
    (fits && place.stored > 0 && place.stored as usize <= plain + TAG_BYTES).then_some(())
}

/// Longest encoded segment: a piece in a pack and a run of its own takes 40 bytes for the pack (a
/// session of 19, a number of 5, a hash of 16), 10 for the run, 32 for the hash and 3 for the length.
pub(crate) const MAX_ENCODED: usize = PIECE_BYTES;
const _: () = assert!(SEGMENT_PIECES as usize * (40 + 10 + 32 + 3) + 8 < MAX_ENCODED);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece() -> impl Strategy<Value = Piece> {
        let data = (0u32..4, 0u32..MAX_PACK as u32 - 70_000, 1u32..65_000, any::<[u8; 32]>());
        prop_oneof![
            2 => Just(Piece::Zero),
            3 => data.prop_map(|(number, offset, stored, hash)| {
                let pack = PackId { session: u128::MAX - 5, number, hash: [number as u8; 16] };
                Piece::Data { hash: Hash(hash), place: PackSlice { pack, offset, stored } }
            }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_encoded_comes_back(pieces in prop::collection::vec(piece(), 1..600)) {
            let pieces = &pieces[..pieces.len().min(512)];
            let bytes = pieces.len() as u64 * PIECE_BYTES as u64;
            let encoded = encode(pieces).unwrap();
            prop_assert!(encoded.len() <= MAX_ENCODED);
            prop_assert_eq!(decode(&encoded, bytes, 0).unwrap(), pieces);
            prop_assert!(decode(&encoded, bytes + PIECE_BYTES as u64, 0).is_err() || pieces.len() == 512);
            prop_assert!(decode(&encoded[..encoded.len() - 1], bytes, 0).is_err());
        }

        #[test]
        fn any_bytes_are_an_error_or_a_segment(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            if let Ok(pieces) = decode(&bytes, 20 * PIECE_BYTES as u64, 0) {
                prop_assert_eq!(pieces.len(), 20);
            }
        }
    }

    #[test]
    fn neighbours_cost_little_and_the_worst_case_is_bounded() {
        let at = |number: u32, offset: u32| {
            let pack = PackId { session: u128::MAX, number: u32::MAX - number, hash: [255; 16] };
            let place = PackSlice { pack, offset, stored: PIECE_BYTES as u32 };
            Piece::Data { hash: Hash([255; 32]), place }
        };
        let neighbours: Vec<_> = (0..256).map(|n| at(0, n * PIECE_BYTES as u32)).collect();
        assert!(encode(&neighbours).unwrap().len() < 256 * 35 + 64);
        let scattered: Vec<_> = (0..512).map(|n| at(n, (MAX_PACK - PIECE_BYTES) as u32)).collect();
        assert!(encode(&scattered).unwrap().len() <= MAX_ENCODED);
    }
}
