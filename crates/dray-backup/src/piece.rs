//! Pieces: the 64 KiB units of content, their hashes, and where they lie.

use crate::place::PackSlice;

/// Bytes of a piece; only the last one of an image may be shorter.
pub const PIECE_BYTES: usize = 64 << 10;
/// Longest image: 64 TiB. Bounds every table that a decoder allocates.
pub const MAX_IMAGE_BYTES: u64 = 1 << 46;

/// BLAKE3 of a piece's bytes.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    /// The hash of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl std::fmt::Display for Hash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for Hash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// What a backup knows of one piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Piece {
    /// All of it is zero; nothing is stored.
    Zero,
    /// It has content.
    Data {
        /// The hash of that content.
        hash: Hash,
        /// Where it is stored.
        place: PackSlice,
    },
}

impl Piece {
    /// The hash of its content, none when it is zero.
    pub fn hash(&self) -> Option<Hash> {
        match self {
            Self::Zero => None,
            Self::Data { hash, .. } => Some(*hash),
        }
    }

    pub(crate) fn place(&self) -> Option<PackSlice> {
        match self {
            Self::Zero => None,
            Self::Data { place, .. } => Some(*place),
        }
    }
}

/// Number of pieces of an image of `bytes` bytes.
pub const fn piece_count(bytes: u64) -> u64 {
    bytes.div_ceil(PIECE_BYTES as u64)
}

/// Length of piece `ix` of an image of `bytes` bytes; zero when it is past the end.
pub fn piece_len(bytes: u64, ix: u64) -> usize {
    let start = ix.saturating_mul(PIECE_BYTES as u64);
    bytes.saturating_sub(start).min(PIECE_BYTES as u64) as usize
}

/// True when every byte is zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<64>();
    words.iter().all(|word| word == &[0; 64]) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_piece_may_be_short() {
        assert_eq!(piece_count(0), 0);
        assert_eq!(piece_count(PIECE_BYTES as u64 + 1), 2);
        assert_eq!(piece_len(PIECE_BYTES as u64 + 1, 0), PIECE_BYTES);
        assert_eq!(piece_len(PIECE_BYTES as u64 + 1, 1), 1);
        assert_eq!(piece_len(PIECE_BYTES as u64 + 1, 2), 0);
        assert_eq!(piece_len(1, u64::MAX), 0);
    }

    #[test]
    fn one_bit_is_not_zero() {
        for len in [0, 1, 63, 64, 65, 1000] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes));
                bytes[at] = 0;
            }
        }
    }
}
