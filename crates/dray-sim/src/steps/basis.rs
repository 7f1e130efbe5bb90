//! Blocks of pieces that the target lacks: what it may have of them, and what comes of asking.
//!
//! A *basis* here is as bad as one can be: another version of the piece, in which any block may
//! differ, or content that changes between the hint and the look.
//! Whatever it is, only a block whose own hash is the one that was described may be used (I3).

use crate::disk::ZERO;
use crate::state::index::hash_of;
use crate::state::target::{Left, PendingWrite};
use crate::world::World;
use dray_types::{BLOCK_SIZE, BlockRange, ImageIndex};
use dray_wire::frame::{PieceHash, mask_bit, mask_len, set_mask_bit};
use dray_wire::{FrameHeader, FrameKind};

/// What a version is in a basis that has another one.
const OTHER: u64 = 1 << 41;

impl World {
    /// Those of the lacking pieces that are said to have a basis.
    pub(crate) fn near(&mut self, lacking: u16) -> u16 {
        let Some(basis) = self.setup.reuse.as_ref().map(|reuse| reuse.basis.clone()) else {
            return 0;
        };
        let known = if self.target.exposed { self.asks_known } else { self.basis_known };
        if !known {
            return 0;
        }
        let near = |all: u16, bit| all | u16::from(self.rng.chance(basis.near)) << bit;
        (0..16).fold(0, near) & lacking
    }

    /// Content that was kept when it was described, or as it is now.
    fn kept(&mut self, of: u64, image: ImageIndex, range: BlockRange) -> Vec<u64> {
        let kept = self.source.kept.get(&of).filter(|_| self.source.machine.owns());
        if let Some((start, versions)) = kept {
            let from = (range.start - start) as usize;
            return versions[from..from + range.len as usize].to_vec();
        }
        let disk = &self.source.disks[image.ix()];
        (range.start..range.end()).map(|block| disk.read(block)).collect()
    }

    /// The blocks of a part of what was described travel as hashes.
    pub(crate) fn send_described_blocks(
        &mut self,
        tag: u64,
        of: u64,
        image: ImageIndex,
        range: BlockRange,
    ) {
        let versions = self.kept(of, image, range);
        let mask = crate::state::index::mask_of(&versions);
        let some = versions.iter().filter(|&&version| version != ZERO);
        let payload = some.flat_map(|&version| hash_of(&[version])).collect();
        if self.source.machine.owns() {
            self.source.kept.insert(tag, (range.start, versions));
        }
        self.send_frame(FrameKind::DescribedBlocks, tag, image, range, mask, payload);
    }

    /// What lacks of them goes as it was when it was described.
    pub(crate) fn send_part(
        &mut self,
        tag: u64,
        of: u64,
        image: ImageIndex,
        range: BlockRange,
        blocks: [u64; 4],
    ) {
        let versions = self.kept(of, image, range);
        let (mut mask, mut payload) = ([0; 4], Vec::new());
        for (nth, version) in (0..range.len).zip(versions) {
            if !mask_bit(&blocks, nth) {
                set_mask_bit(&mut mask, nth);
                continue;
            }
            payload.extend(version.to_le_bytes());
            payload.resize(payload.len() + BLOCK_SIZE as usize - 8, 0);
            self.check_crossing(image, BlockRange::new(range.start + nth, 1));
        }
        self.send_frame(FrameKind::Part, tag, image, range, mask, payload);
    }

    /// Described blocks arrived: what is found will be written. Returns how long looking takes.
    pub(crate) fn look_up_blocks(
        &mut self,
        session: u64,
        header: &FrameHeader,
        payload: &[u8],
    ) -> (PendingWrite, u64) {
        let FrameHeader { tag, image, range, zero_mask, .. } = *header;
        let mut hashes = payload.chunks_exact(size_of::<PieceHash>());
        let mut versions = vec![ZERO; range.len as usize];
        let mut lacking = [0; 4];
        for nth in (0..range.len).filter(|&nth| !mask_bit(&zero_mask, nth)) {
            let wanted = hashes.next();
            let version = self.basis_block(image, range.start + nth);
            if wanted == Some(&hash_of(&[version])[..]) {
                versions[nth as usize] = version;
            } else {
                set_mask_bit(&mut lacking, nth);
            }
        }
        self.check.blocks_found += range.len - mask_len(&lacking);
        let left = Left::Blocks(lacking);
        let delay = 2 * self.disk_time();
        (PendingWrite { session, tag, image, range, versions: Some(versions), left }, delay)
    }

    /// What a basis has in the place of a block: what the source had at the start, what is at the
    /// target in that place, or something else.
    fn basis_block(&mut self, image: ImageIndex, block: u64) -> u64 {
        let version = match self.rng.below(4) {
            0 => self.target.disks[image.ix()].read(block),
            _ => self.index.first[image.ix()][block as usize],
        };
        let other = self.setup.reuse.as_ref().map_or(1.0, |reuse| reuse.basis.other);
        if self.rng.chance(other) { version ^ OTHER } else { version }
    }
}
