//! Described blocks at the target: the blocks of a piece that the target does not have as a whole,
//! but of which it has similar content, the *basis* of the piece.
//!
//! A basis is only a guess where to look: the piece's own place, as the file was before (a replica, an
//! earlier try), and places that neighbours were found at ([`dray_provider::reuse::Reuse::similar`]). It is read anew
//! here, and a block of it is used only if it has the hash that was described, all 32 bytes: a basis
//! that has changed, or never was one, costs a look and never a wrong block (I3). So nothing has to
//! be remembered between the hint and this look, nor between this look and the part that follows.

use super::sink::Sink;
use dray_types::{BLOCK_SIZE, BlockRange};
use dray_wire::FrameHeader;
use dray_wire::frame::{PIECE_BLOCKS, PIECE_HASH_LEN, mask_bit, set_mask_bit};

/// Similar pieces that are looked at. Of two copies of one disk, each with 5 % of its blocks changed,
/// one lacks a block of the original in every twentieth case; of three it is one in eight thousand.
const LOOKED_AT: usize = 3;

const BLOCK: usize = BLOCK_SIZE as usize;

/// A run whose blocks are described.
pub(super) struct BlockJob {
    pub(super) session: u64,
    pub(super) header: FrameHeader,
    /// The hash of each block that is not all zeros.
    hashes: Vec<Option<blake3::Hash>>,
    /// Blocks that were not found, a bit each.
    pub(super) lacking: [u64; 4],
    /// Blocks that are in their place already.
    in_place: [u64; 4],
    content: Vec<u8>,
    /// After the handover: what is found is written even if it is in its place.
    fills: bool,
}

impl BlockJob {
    pub(super) fn new(session: u64, header: &FrameHeader, hashes: &[u8], fills: bool) -> Self {
        let mut rest = hashes.chunks_exact(PIECE_HASH_LEN);
        let (mut all, mut lacking) = (Vec::new(), [0; 4]);
        for nth in 0..header.range.len {
            let bytes = if mask_bit(&header.zero_mask, nth) { None } else { rest.next() };
            let hash = bytes.and_then(|bytes| blake3::Hash::from_slice(bytes).ok());
            if hash.is_some() {
                set_mask_bit(&mut lacking, nth);
            }
            all.push(hash);
        }
        let content = vec![0; header.range.byte_len() as usize];
        let header = *header;
        Self { session, header, hashes: all, lacking, in_place: [0; 4], content, fills }
    }

    /// Looks for the blocks in their own place and where similar pieces are.
    pub(super) fn look(&mut self, sink: &Sink, memory: &mut [u8]) {
        let FrameHeader { image, range, .. } = self.header;
        let Some((reuse, asker)) = sink.reuse(image) else { return };
        for piece in range.start / PIECE_BLOCKS..range.end().div_ceil(PIECE_BLOCKS) {
            let own = sink.own_place(image, piece);
            let similar = sink.spot(image, piece).map(|spot| reuse.similar(asker, spot));
            let similar = similar.into_iter().flatten();
            let similar = similar.filter(|spot| reuse.has_data(asker, *spot)).take(LOOKED_AT);
            for spot in own.into_iter().chain(similar) {
                let blocks = BlockRange::new(piece * PIECE_BLOCKS, PIECE_BLOCKS).intersect(range);
                if !self.lacks(blocks) {
                    break;
                }
                if reuse.read(asker, spot, memory) {
                    self.compare(blocks, memory, own == Some(spot));
                }
            }
        }
    }

    fn lacks(&self, blocks: BlockRange) -> bool {
        let start = self.header.range.start;
        (blocks.start..blocks.end()).any(|block| mask_bit(&self.lacking, block - start))
    }

    /// Takes the blocks of a piece that have the right hash.
    fn compare(&mut self, blocks: BlockRange, piece: &[u8], in_place: bool) {
        for block in blocks.start..blocks.end() {
            let nth = block - self.header.range.start;
            if !mask_bit(&self.lacking, nth) {
                continue;
            }
            let at = (block % PIECE_BLOCKS) as usize * BLOCK;
            let bytes = &piece[at..at + BLOCK];
            if self.hashes[nth as usize] != Some(blake3::hash(bytes)) {
                continue;
            }
            self.lacking[(nth / 64) as usize] &= !(1 << (nth % 64));
            if in_place && !self.fills {
                set_mask_bit(&mut self.in_place, nth);
            }
            self.content[nth as usize * BLOCK..][..BLOCK].copy_from_slice(bytes);
        }
    }

    /// What has to be written, cut where that ends and where data and zeros meet: none for zeros.
    pub(super) fn parts(&self) -> Vec<(BlockRange, Option<&[u8]>)> {
        let kind = |nth: u64| {
            let stays = mask_bit(&self.lacking, nth) || mask_bit(&self.in_place, nth);
            (!stays).then(|| self.hashes[nth as usize].is_none())
        };
        let (range, mut parts, mut at) = (self.header.range, Vec::new(), 0);
        while at < range.len {
            let (start, is) = (at, kind(at));
            while at < range.len && kind(at) == is {
                at += 1;
            }
            let part = BlockRange::new(range.start + start, at - start);
            let bytes = &self.content[start as usize * BLOCK..at as usize * BLOCK];
            match is {
                Some(true) => parts.push((part, None)),
                Some(false) => parts.push((part, Some(bytes))),
                None => {}
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::{Epoch, ImageIndex};
    use dray_wire::{Encoding, FrameKind};

    #[test]
    fn only_blocks_with_the_right_hash_are_taken_and_those_in_place_are_not_written() {
        let block = |byte: u8| [byte; BLOCK];
        let wanted: Vec<_> = (1..=15).map(block).collect();
        let hashes: Vec<u8> = wanted.iter().flat_map(|b| *blake3::hash(b).as_bytes()).collect();
        let header = FrameHeader {
            kind: FrameKind::DescribedBlocks,
            encoding: Encoding::Raw,
            image: ImageIndex(0),
            epoch: Epoch(1),
            tag: 1,
            range: BlockRange::new(64, 16),
            // The first block is zeros.
            zero_mask: [1, 0, 0, 0],
            payload_len: hashes.len() as u32,
            hash: 0,
        };
        let mut job = BlockJob::new(1, &header, &hashes, false);
        assert_eq!(job.lacking, [0xfffe, 0, 0, 0]);
        let mut basis: Vec<u8> = (0..16).flat_map(block).collect();
        // One byte of block 3, and all of block 9, are others; blocks 1 and 2 have changed places.
        basis[3 * BLOCK + 4000] ^= 1;
        basis[9 * BLOCK..10 * BLOCK].fill(77);
        basis[BLOCK..2 * BLOCK].fill(2);
        basis[2 * BLOCK..3 * BLOCK].fill(1);
        job.compare(header.range, &basis, false);
        assert_eq!(job.lacking, [0b10_0000_1110, 0, 0, 0]);
        basis[9 * BLOCK..10 * BLOCK].fill(9);
        job.compare(header.range, &basis, true);
        assert_eq!((job.lacking, job.in_place), ([0b1110, 0, 0, 0], [1 << 9, 0, 0, 0]));
        let cut: Vec<_> = job.parts().iter().map(|(r, d)| (r.start, r.len, d.is_some())).collect();
        assert_eq!(cut, [(64, 1, false), (68, 5, true), (74, 6, true)]);
        assert_eq!(job.parts()[1].1.map(|bytes| (bytes[0], bytes[5 * BLOCK - 1])), Some((4, 8)));
    }
}
