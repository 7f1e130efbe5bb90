//! The content that a repository has already, by hash, so that a writer does not store it twice.

use crate::piece::{Hash, Piece};
use crate::place::{PackId, PackSlice};
use std::collections::HashMap;

/// A place with its pack as a number, to keep entries short.
#[derive(Clone, Copy)]
struct Short {
    pack: u32,
    offset: u32,
    stored: u32,
}

/// Hash → place. Bounded: what does not fit is stored again, which costs space and nothing else.
pub(crate) struct Index {
    packs: Vec<PackId>,
    numbers: HashMap<PackId, u32>,
    entries: HashMap<Hash, Short>,
    most: usize,
}

impl Index {
    /// An index of at most `most` pieces.
    pub(crate) fn new(most: usize) -> Self {
        Self { packs: Vec::new(), numbers: HashMap::new(), entries: HashMap::new(), most }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.entries.len() >= self.most
    }

    /// Where that content is stored.
    pub(crate) fn get(&self, hash: &Hash) -> Option<PackSlice> {
        let Short { pack, offset, stored } = *self.entries.get(hash)?;
        Some(PackSlice { pack: self.packs[pack as usize], offset, stored })
    }

    pub(crate) fn insert(&mut self, piece: &Piece) {
        let Piece::Data { hash, place } = *piece else { return };
        if self.is_full() {
            return;
        }
        let pack = *self.numbers.entry(place.pack).or_insert_with(|| {
            self.packs.push(place.pack);
            self.packs.len() as u32 - 1
        });
        let PackSlice { offset, stored, .. } = place;
        self.entries.entry(hash).or_insert(Short { pack, offset, stored });
    }
}
