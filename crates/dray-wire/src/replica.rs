//! Reading a replica that another host holds, on a stream of its own (kind 6), framed as those of a
//! backup store are: see [`crate::store`].
//!
//! The asking side may say what it has already, by hash, so that only the rest crosses.

use dray_types::{GenerationId, ImageId, text};
use serde::{Deserialize, Serialize};

/// Bytes of a piece; the last one of an image may be shorter.
pub const PIECE_BYTES: u64 = 64 << 10;
/// Most bytes that one question may ask for.
pub const MAX_READ: u32 = 4 << 20;
/// Bytes of a hash (BLAKE3) of what the asking side has.
pub const HASH_BYTES: usize = 32;

/// A question: the body is empty, or has the hash of each of the pieces as the asking side has them, one
/// after the other; zeros where it has nothing.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ask {
    /// The image.
    pub image: ImageId,
    /// The generation of it that is wanted.
    pub generation: GenerationId,
    /// First byte, at the beginning of a piece.
    pub offset: u64,
    /// Number of bytes: whole pieces, or up to the image's end; at most [`MAX_READ`].
    pub len: u32,
}

/// What is told of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Piece {
    /// It is zero.
    Zero,
    /// It is what the asking side has.
    Known,
    /// Its bytes are in the body.
    Data {
        /// Their XXH3-64.
        hash: u64,
    },
}

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The pieces in order; the body has the bytes of those with data, one after the other.
    Pieces(Vec<Piece>),
    /// The replica does not hold this stretch of the generation: another try is of no use.
    Distrusted,
    /// It cannot be read.
    Failed {
        /// Why, for people.
        #[serde(deserialize_with = "text::de_text")]
        why: String,
    },
}

/// Number of pieces in so many bytes.
pub fn piece_count(len: u32) -> usize {
    u64::from(len).div_ceil(PIECE_BYTES) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{LENGTHS, decode, decode_lengths, encode};

    #[test]
    fn messages_round_trip() {
        let ask =
            Ask { image: ImageId(1), generation: GenerationId(2), offset: 65536, len: MAX_READ };
        let bytes = encode(&ask, 7).unwrap();
        let lengths = decode_lengths(bytes[..LENGTHS].try_into().unwrap()).unwrap();
        assert_eq!(lengths, (bytes.len() - LENGTHS, 7));
        assert_eq!(decode::<Ask>(&bytes[LENGTHS..]), Ok(ask));
        let pieces = vec![Piece::Zero, Piece::Known, Piece::Data { hash: 9 }];
        let answer = encode(&Answer::Pieces(pieces.clone()), 0).unwrap();
        assert_eq!(decode::<Answer>(&answer[LENGTHS..]), Ok(Answer::Pieces(pieces)));
        assert!(decode::<Answer>(&[9]).is_err());
        assert_eq!((piece_count(0), piece_count(1), piece_count(65537)), (0, 1, 2));
    }
}
