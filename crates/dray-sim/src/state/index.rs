//! Content that the target has anywhere: an index, as fallible as the agent's, and what it leads to.

use crate::disk::ZERO;
use crate::faults::Setup;
use crate::rng::Rng;
use crate::state::source::SourceHost;
use dray_types::{BlockRange, ImageIndex};
use dray_wire::frame::{PIECE_BLOCKS, PieceHash, run_hash};
use std::collections::BTreeMap;

/// Blocks of a piece.
pub(crate) const PIECE: usize = PIECE_BLOCKS as usize;

/// Where content may be.
#[derive(Clone, Copy)]
pub(crate) enum Location {
    /// A file that nobody writes to.
    Library(usize),
    /// A piece of an image that arrives, or of an old disk.
    Image(usize, u64),
}

/// The index, and content outside the migration.
#[derive(Default)]
pub(crate) struct Index {
    pub(crate) places: BTreeMap<PieceHash, Location>,
    pub(crate) library: Vec<Vec<u64>>,
    /// What the images held at the start: what a basis has, more or less.
    pub(crate) first: Vec<Vec<u64>>,
}

/// A hash of blocks that are version numbers.
pub(crate) fn hash_of(versions: &[u64]) -> PieceHash {
    let bytes: Vec<u8> = versions.iter().flat_map(|version| version.to_le_bytes()).collect();
    let mut hash = [0; 32];
    for (seed, word) in hash.chunks_exact_mut(8).enumerate() {
        let seed = BlockRange::new(seed as u64, 1);
        word.copy_from_slice(&run_hash(ImageIndex(0), seed, &[0; 4], &bytes).to_le_bytes());
    }
    hash
}

impl Index {
    /// Some of what the source has is at the target, some of it not any more.
    pub(crate) fn new(setup: &Setup, source: &SourceHost, rng: &mut Rng) -> Self {
        let mut index = Self::default();
        let Some(reuse) = &setup.reuse else { return index };
        for (ix, image) in setup.images.iter().enumerate() {
            index.first.push((0..image.blocks).map(|b| source.disks[ix].read(b)).collect());
            for piece in 0..image.blocks / PIECE_BLOCKS {
                if !rng.chance(reuse.share) {
                    continue;
                }
                let blocks = piece * PIECE_BLOCKS..(piece + 1) * PIECE_BLOCKS;
                let mut content: Vec<_> = blocks.map(|b| source.disks[ix].read(b)).collect();
                let place = Location::Library(index.library.len());
                index.places.insert(hash_of(&content), place);
                if rng.chance(reuse.stale) {
                    content[rng.below(PIECE_BLOCKS) as usize] ^= 1 << 40;
                }
                index.library.push(content);
            }
        }
        index
    }

    /// The agent died: what only its memory knew is gone; durable entries stay, right or wrong.
    pub(crate) fn forget_some(&mut self, rng: &mut Rng) {
        self.places.retain(|_, place| matches!(place, Location::Library(_)) || rng.chance(0.5));
    }
}

/// The mask of a run's zero blocks.
pub(crate) fn mask_of(versions: &[u64]) -> [u64; 4] {
    let mut mask = [0; 4];
    for (nth, _) in versions.iter().enumerate().filter(|(_, version)| **version == ZERO) {
        mask[nth / 64] |= 1 << (nth % 64);
    }
    mask
}
