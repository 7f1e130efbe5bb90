//! [`ChunkSet`]: which chunks were touched, paid for by what was touched.

use std::collections::BTreeMap;

const WORDS: usize = 8;
const PAGE_CHUNKS: u64 = WORDS as u64 * 64;

/// A set of chunk numbers. A page of 512 chunks exists once one of them is in the set, so the cost
/// follows the accesses and not the size of the image.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub(crate) struct ChunkSet {
    pages: BTreeMap<u64, [u64; WORDS]>,
    len: u64,
}

fn bit(chunk: u64) -> (usize, u64) {
    let within = chunk % PAGE_CHUNKS;
    ((within / 64) as usize, 1 << (within % 64))
}

impl ChunkSet {
    /// Adds a chunk; true when it was not there.
    pub(crate) fn insert(&mut self, chunk: u64) -> bool {
        let page = self.pages.entry(chunk / PAGE_CHUNKS).or_default();
        let (word, bit) = bit(chunk);
        let new = page[word] & bit == 0;
        page[word] |= bit;
        self.len += u64::from(new);
        new
    }

    pub(crate) fn contains(&self, chunk: u64) -> bool {
        let (word, bit) = bit(chunk);
        self.pages.get(&(chunk / PAGE_CHUNKS)).is_some_and(|page| page[word] & bit != 0)
    }

    /// Number of chunks in the set.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Heap bytes: a page and its share of a map node that is half full.
    pub(crate) fn memory(&self) -> usize {
        self.pages.len() * 2 * (size_of::<[u64; WORDS]>() + size_of::<u64>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_in_the_set_once() {
        let mut set = ChunkSet::default();
        let new: Vec<bool> = [3, 4, 511, 512, 9000, 3].map(|chunk| set.insert(chunk)).into();
        assert_eq!(new, [true, true, true, true, true, false]);
        assert_eq!(set.len(), 5);
        assert!(set.contains(511) && !set.contains(510) && !set.contains(1 << 40));
    }
}
