//! Frames on a data stream: a fixed header and the content of one run.
//!
//! All-zero blocks of a run are named in the header's mask and not carried; the payload holds the
//! other blocks in order, raw or as one zstd frame. The hash covers the identity of the run (image,
//! place, mask) and the decoded payload, so neither a wrong byte nor a right byte in a wrong place
//! goes unnoticed (I3).
//!
//! A run may be *described* instead: the payload then holds a hash of each aligned piece of 64 KiB,
//! and the target looks whether it has such a piece somewhere. The mask says which blocks are zeros
//! as for a run; a piece of nothing but zeros has no hash. Of a piece that the target lacks and knows
//! something like, the blocks may be described one by one; what lacks of these comes as a *part*: a
//! run whose mask names the blocks that it does not carry because the target has them in their place.

use crate::error::WireError;
use dray_types::{BLOCK_SIZE, BlockRange, Epoch, ImageIndex, MAX_RUN_BLOCKS};
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of a header.
pub const HEADER_LEN: usize = size_of::<RawHeader>();
/// Longest payload: a run of incompressible blocks.
pub const MAX_PAYLOAD: u32 = (MAX_RUN_BLOCKS * BLOCK_SIZE) as u32;
/// Longest range of zeros one frame may name: 64 GiB. Such a frame costs its reader work without
/// costing its writer bytes, so it is bounded like everything else.
pub const MAX_ZERO_BLOCKS: u64 = 1 << 24;

/// Blocks of a piece, the unit in which content is described: 64 KiB, and aligned to that. A hash of
/// 32 bytes is 0.05 % of it.
pub const PIECE_BLOCKS: u64 = 16;
/// Pieces of the longest described run: one bit each in [`crate::ToSource::Lack`].
pub const MAX_PIECES: u64 = MAX_RUN_BLOCKS / PIECE_BLOCKS;
const _: () = assert!(MAX_PIECES <= u16::BITS as u64);
/// Length of a piece's hash: all of BLAKE3. The target takes content for equal on the word of this
/// hash alone, and who writes into one guest's disk may want to harm another's: half of it could be
/// collided with 2⁶⁴ tries.
pub const PIECE_HASH_LEN: usize = 32;

/// The BLAKE3 hash of a piece, its zero blocks included; or that of a block.
pub type PieceHash = [u8; PIECE_HASH_LEN];

const MAGIC: u16 = 0xd7a1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHeader {
    magic: U16,
    kind: u8,
    encoding: u8,
    image: U16,
    reserved: U16,
    epoch: U64,
    tag: U64,
    start: U64,
    blocks: U32,
    payload: U32,
    zero_mask: [U64; 4],
    hash: U64,
}

/// What a frame means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameKind {
    /// At most [`MAX_RUN_BLOCKS`] blocks with their content.
    Run,
    /// A range that reads as zeros, without payload.
    Zero,
    /// Whole pieces, at most [`MAX_PIECES`], with the hash of each that is not all zeros. Sent only
    /// over sessions that agreed on [`crate::control::FEATURE_REUSE`].
    Described,
    /// At most [`MAX_RUN_BLOCKS`] blocks with the hash of each that is not all zeros. Sent only in
    /// answer to [`crate::ToSource::Near`].
    DescribedBlocks,
    /// Those blocks of a run whose bits in the mask are *not* set; the others are in their place at
    /// the target already. Sent only in answer to [`crate::ToSource::LackBlocks`].
    Part,
}

impl FrameKind {
    fn code(self) -> u8 {
        match self {
            Self::Run => 1,
            Self::Zero => 2,
            Self::Described => 3,
            Self::DescribedBlocks => 4,
            Self::Part => 5,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Run,
            2 => Self::Zero,
            3 => Self::Described,
            4 => Self::DescribedBlocks,
            5 => Self::Part,
            _ => return None,
        })
    }

    /// Whether the payload is hashes and no content.
    pub fn is_described(self) -> bool {
        matches!(self, Self::Described | Self::DescribedBlocks)
    }
}

/// How the payload is encoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Encoding {
    /// As it is.
    Raw,
    /// One zstd frame.
    Zstd,
}

/// The header of a frame, checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    /// What the frame means.
    pub kind: FrameKind,
    /// How the payload is encoded.
    pub encoding: Encoding,
    /// The image, by its place in `Open`.
    pub image: ImageIndex,
    /// Epoch of the sender (I1).
    pub epoch: Epoch,
    /// Chosen by whoever asked for the run; its acknowledgement names it.
    pub tag: u64,
    /// Which blocks.
    pub range: BlockRange,
    /// Bit `i` set: block `start + i` is all zeros and not in the payload; of a part: it is at the
    /// target already and not in the payload.
    pub zero_mask: [u64; 4],
    /// Length of the payload as it follows.
    pub payload_len: u32,
    /// Hash of identity and decoded payload, from [`frame_hash`].
    pub hash: u64,
}

/// The hash that a run, zeros and a described run carry: see [`frame_hash`].
pub fn run_hash(image: ImageIndex, range: BlockRange, zero_mask: &[u64; 4], payload: &[u8]) -> u64 {
    frame_hash(FrameKind::Run, image, range, zero_mask, payload)
}

/// The hash a frame carries: xxh3 of the decoded payload (the non-zero blocks in order), seeded
/// with the run's identity. The kinds that came later have seeds of their own: a part that was taken
/// for a run would name blocks as zeros that it only does not carry.
pub fn frame_hash(
    kind: FrameKind,
    image: ImageIndex,
    range: BlockRange,
    zero_mask: &[u64; 4],
    payload: &[u8],
) -> u64 {
    let seed = match kind {
        FrameKind::Run | FrameKind::Zero | FrameKind::Described => 0,
        FrameKind::DescribedBlocks | FrameKind::Part => kind.code().into(),
    };
    let mut identity = [0u8; 50];
    identity[..2].copy_from_slice(&image.0.to_le_bytes());
    identity[2..10].copy_from_slice(&range.start.to_le_bytes());
    identity[10..18].copy_from_slice(&range.len.to_le_bytes());
    for (word, slot) in zero_mask.iter().zip(identity[18..].chunks_exact_mut(8)) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    xxh3_64_with_seed(payload, xxh3_64_with_seed(&identity, seed))
}

impl FrameHeader {
    /// Number of blocks whose content the payload holds.
    pub fn data_blocks(&self) -> u64 {
        match self.kind {
            FrameKind::Zero | FrameKind::Described | FrameKind::DescribedBlocks => 0,
            FrameKind::Run | FrameKind::Part => self.unmasked(),
        }
    }

    fn unmasked(&self) -> u64 {
        self.range.len - mask_len(&self.zero_mask)
    }

    /// The pieces of the run that are all zeros, a bit each; those have no hash.
    pub fn zero_pieces(&self) -> u16 {
        let zero = |piece| {
            let mut blocks = piece * PIECE_BLOCKS..(piece + 1) * PIECE_BLOCKS;
            blocks.all(|block| mask_bit(&self.zero_mask, block))
        };
        (0..self.range.len / PIECE_BLOCKS)
            .filter(|&piece| zero(piece))
            .fold(0, |all, piece| all | 1 << piece)
    }

    /// Length of the payload once decoded.
    pub fn decoded_len(&self) -> usize {
        match self.kind {
            FrameKind::Described => {
                let pieces = (self.range.len / PIECE_BLOCKS) as usize;
                (pieces - self.zero_pieces().count_ones() as usize) * PIECE_HASH_LEN
            }
            FrameKind::DescribedBlocks => self.unmasked() as usize * PIECE_HASH_LEN,
            FrameKind::Run | FrameKind::Zero | FrameKind::Part => {
                (self.data_blocks() * BLOCK_SIZE) as usize
            }
        }
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let raw = RawHeader {
            magic: MAGIC.into(),
            kind: self.kind.code(),
            encoding: match self.encoding {
                Encoding::Raw => 0,
                Encoding::Zstd => 1,
            },
            image: self.image.0.into(),
            reserved: 0.into(),
            epoch: self.epoch.0.into(),
            tag: self.tag.into(),
            start: self.range.start.into(),
            blocks: (self.range.len as u32).into(),
            payload: self.payload_len.into(),
            zero_mask: self.zero_mask.map(U64::new),
            hash: self.hash.into(),
        };
        let mut out = [0; HEADER_LEN];
        out.copy_from_slice(raw.as_bytes());
        out
    }

    /// Reads and checks a header. After it, the payload's length is known to be harmless.
    ///
    /// # Errors
    /// `Malformed` or `TooLong` for any header that [`encode`](Self::encode) would not write.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, WireError> {
        let raw = RawHeader::ref_from_bytes(bytes)
            .map_err(|_| WireError::malformed("frame header", "length"))?;
        if raw.magic.get() != MAGIC || raw.reserved.get() != 0 {
            return Err(WireError::malformed("frame header", "not the start of a frame"));
        }
        let kind = FrameKind::from_code(raw.kind)
            .ok_or_else(|| WireError::malformed("frame header", format!("kind {}", raw.kind)))?;
        let encoding = match raw.encoding {
            0 => Encoding::Raw,
            1 => Encoding::Zstd,
            other => {
                return Err(WireError::malformed("frame header", format!("encoding {other}")));
            }
        };
        let header = Self {
            kind,
            encoding,
            image: ImageIndex(raw.image.get()),
            epoch: Epoch(raw.epoch.get()),
            tag: raw.tag.get(),
            range: BlockRange::new(raw.start.get(), raw.blocks.get().into()),
            zero_mask: raw.zero_mask.map(|word| word.get()),
            payload_len: raw.payload.get(),
            hash: raw.hash.get(),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), WireError> {
        let limit = match self.kind {
            FrameKind::Zero => MAX_ZERO_BLOCKS,
            _ => MAX_RUN_BLOCKS,
        };
        let len = self.range.len;
        if len == 0 || len > limit {
            return Err(WireError::TooLong { what: "run", len, limit });
        }
        if self.range.start > (u64::MAX / BLOCK_SIZE) - len {
            return Err(WireError::malformed("frame header", "block number"));
        }
        let whole = |blocks: u64| blocks.is_multiple_of(PIECE_BLOCKS);
        if self.kind == FrameKind::Described && !(whole(self.range.start) && whole(len)) {
            return Err(WireError::malformed("frame header", "described blocks are no pieces"));
        }
        let mask_fits = match self.kind {
            FrameKind::Zero => self.zero_mask == [0; 4],
            _ => (len..256).all(|bit| !mask_bit(&self.zero_mask, bit)),
        };
        if !mask_fits {
            return Err(WireError::malformed("frame header", "zero mask past the end of the run"));
        }
        if self.kind == FrameKind::Part && self.unmasked() == 0 {
            return Err(WireError::malformed("frame header", "a part of nothing"));
        }
        let decoded = self.decoded_len() as u64;
        let payload = u64::from(self.payload_len);
        let fits = match self.encoding {
            Encoding::Raw => payload == decoded,
            Encoding::Zstd => !self.kind.is_described() && payload > 0 && payload < decoded,
        };
        if !fits {
            return Err(WireError::TooLong { what: "payload", len: payload, limit: decoded });
        }
        Ok(())
    }

    /// Checks a decoded payload against the header's hash (I3).
    ///
    /// # Errors
    /// `Hash` when they differ.
    pub fn verify(&self, payload: &[u8]) -> Result<(), WireError> {
        let matches = payload.len() == self.decoded_len()
            && frame_hash(self.kind, self.image, self.range, &self.zero_mask, payload) == self.hash;
        if matches { Ok(()) } else { Err(WireError::Hash) }
    }
}

/// Whether bit `bit` (below 256) of a zero mask is set.
pub fn mask_bit(mask: &[u64; 4], bit: u64) -> bool {
    mask[(bit / 64) as usize] >> (bit % 64) & 1 == 1
}

/// Bits of a mask that are set.
pub fn mask_len(mask: &[u64; 4]) -> u64 {
    mask.iter().map(|word| u64::from(word.count_ones())).sum()
}

/// Sets bit `bit` (below 256) of a mask.
pub fn set_mask_bit(mask: &mut [u64; 4], bit: u64) {
    mask[(bit / 64) as usize] |= 1 << (bit % 64);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(payload: &[u8], zero_mask: [u64; 4], range: BlockRange) -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Run,
            encoding: Encoding::Raw,
            image: ImageIndex(3),
            epoch: Epoch(9),
            tag: 77,
            range,
            zero_mask,
            payload_len: payload.len() as u32,
            hash: run_hash(ImageIndex(3), range, &zero_mask, payload),
        }
    }

    #[test]
    fn a_frame_round_trips_and_its_layout_stays() {
        let payload = vec![7u8; 8192];
        let header = sample(&payload, [0b010, 0, 0, 0], BlockRange::new(5, 3));
        let bytes = header.encode();
        assert_eq!(FrameHeader::decode(&bytes), Ok(header));
        assert_eq!(header.verify(&payload), Ok(()));
        assert_eq!(HEADER_LEN, 80);
        let golden = [0xa1, 0xd7, 1, 0, 3, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 77, 0];
        assert_eq!(bytes[..18], golden);
        assert_eq!(bytes[24..40], [5, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0x20, 0, 0]);
    }

    #[test]
    fn wrong_content_or_place_is_noticed() {
        let payload = vec![7u8; 4096];
        let header = sample(&payload, [0; 4], BlockRange::new(5, 1));
        let mut flipped = payload.clone();
        flipped[4000] ^= 1;
        assert_eq!(header.verify(&flipped), Err(WireError::Hash));
        let moved = FrameHeader { range: BlockRange::new(6, 1), ..header };
        assert_eq!(moved.verify(&payload), Err(WireError::Hash));
    }

    #[test]
    fn lengths_are_bounded() {
        let header = sample(&[0; 4096], [0; 4], BlockRange::new(5, 1));
        let decode = |header: FrameHeader| FrameHeader::decode(&header.encode());
        assert!(decode(FrameHeader { payload_len: MAX_PAYLOAD + 1, ..header }).is_err());
        assert!(decode(FrameHeader { range: BlockRange::new(0, 257), ..header }).is_err());
        assert!(decode(FrameHeader { range: BlockRange::new(0, 0), ..header }).is_err());
        assert!(decode(FrameHeader { range: BlockRange::new(u64::MAX, 1), ..header }).is_err());
        assert!(decode(FrameHeader { zero_mask: [2, 0, 0, 0], ..header }).is_err());
        assert!(
            decode(FrameHeader { encoding: Encoding::Zstd, payload_len: 4096, ..header }).is_err()
        );
    }

    #[test]
    fn a_described_run_names_whole_pieces() {
        let hashes = [5u8; 2 * PIECE_HASH_LEN];
        // Of three pieces the second is all zeros; the first has one zero block.
        let mask = [0xffff_0001, 0, 0, 0];
        let range = BlockRange::new(32, 48);
        let header = FrameHeader {
            kind: FrameKind::Described,
            payload_len: hashes.len() as u32,
            ..sample(&hashes, mask, range)
        };
        let bytes = header.encode();
        assert_eq!(FrameHeader::decode(&bytes), Ok(header));
        assert_eq!(bytes[2], 3);
        assert_eq!((header.zero_pieces(), header.decoded_len()), (0b010, 64));
        assert_eq!(header.verify(&hashes), Ok(()));
        assert_eq!(header.data_blocks(), 0, "no content is carried");
        let decode = |header: FrameHeader| FrameHeader::decode(&header.encode());
        assert!(decode(FrameHeader { payload_len: 96, ..header }).is_err());
        assert!(decode(FrameHeader { range: BlockRange::new(33, 48), ..header }).is_err());
        assert!(decode(FrameHeader { range: BlockRange::new(32, 47), ..header }).is_err());
        assert!(
            decode(FrameHeader { encoding: Encoding::Zstd, payload_len: 5, ..header }).is_err()
        );
        let long = FrameHeader { range: BlockRange::new(0, 272), payload_len: 17 * 32, ..header };
        assert!(decode(FrameHeader { zero_mask: [0; 4], ..long }).is_err());
    }

    #[test]
    fn described_blocks_and_a_part_say_what_their_payload_is() {
        let range = BlockRange::new(33, 5);
        let mask = [0b00110, 0, 0, 0];
        let frame = |kind, payload: &[u8]| FrameHeader {
            kind,
            hash: frame_hash(kind, ImageIndex(3), range, &mask, payload),
            ..sample(payload, mask, range)
        };
        let decode = |header: FrameHeader| FrameHeader::decode(&header.encode());
        let hashes = [5u8; 3 * PIECE_HASH_LEN];
        let described = frame(FrameKind::DescribedBlocks, &hashes);
        assert_eq!((decode(described), described.encode()[2]), (Ok(described), 4));
        assert_eq!((described.verify(&hashes), described.data_blocks()), (Ok(()), 0));
        let packed = FrameHeader { encoding: Encoding::Zstd, payload_len: 5, ..described };
        assert!(decode(packed).is_err(), "hashes are not compressed");
        let bytes = [7u8; 3 * 4096];
        let part = frame(FrameKind::Part, &bytes);
        assert_eq!((decode(part), part.encode()[2]), (Ok(part), 5));
        assert_eq!((part.verify(&bytes), part.data_blocks()), (Ok(()), 3));
        assert!(decode(FrameHeader { payload_len: 5 * 4096, ..part }).is_err());
        let none = FrameHeader { zero_mask: [0b11111, 0, 0, 0], payload_len: 0, ..part };
        assert!(decode(none).is_err(), "a part of nothing");
        let run = FrameHeader { kind: FrameKind::Run, ..part };
        assert_eq!(run.verify(&bytes), Err(WireError::Hash), "it is not taken for a run");
    }

    proptest! {
        #[test]
        fn noise_never_panics(bytes in prop::array::uniform32(any::<u8>()), tail in any::<[u8; 32]>()) {
            let mut header = sample(&[0; 4096], [0; 4], BlockRange::new(5, 1)).encode();
            header[2..34].copy_from_slice(&bytes);
            header[40..72].copy_from_slice(&tail);
            if let Ok(decoded) = FrameHeader::decode(&header) {
                prop_assert_eq!(decoded.encode(), header);
            }
        }
    }
}
