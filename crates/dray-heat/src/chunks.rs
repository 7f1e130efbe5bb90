//! [`ChunkSet`]: which chunks were touched, in address order, paid for by what was touched.

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

    /// The chunks in address order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.iter().flat_map(|(page, words)| {
            words.iter().enumerate().flat_map(move |(word, &bits)| {
                let first = page * PAGE_CHUNKS + word as u64 * 64;
                ones(bits).map(move |bit| first + bit)
            })
        })
    }

    /// The chunks below `chunks` that are not in the set, as `(first, past the last)`, in address
    /// order.
    pub(crate) fn gaps(&self, chunks: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut from = 0;
        self.iter().chain(std::iter::once(chunks)).filter_map(move |chunk| {
            let gap = (from, chunk);
            from = chunk + 1;
            (gap.0 < gap.1).then_some(gap)
        })
    }

    /// Heap bytes: a page and its share of a map node that is half full.
    pub(crate) fn memory(&self) -> usize {
        self.pages.len() * 2 * (size_of::<[u64; WORDS]>() + size_of::<u64>())
    }
}

fn ones(mut bits: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let bit = (bits != 0).then(|| u64::from(bits.trailing_zeros()))?;
        bits &= bits - 1;
        Some(bit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_what_the_chunks_leave() {
        let mut set = ChunkSet::default();
        for chunk in [3, 4, 511, 512, 9000, 3] {
            set.insert(chunk);
        }
        assert_eq!(set.len(), 5);
        assert!(set.contains(511) && !set.contains(510) && !set.contains(1 << 40));
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 4, 511, 512, 9000]);
        let gaps: Vec<_> = set.gaps(9001).collect();
        assert_eq!(gaps, [(0, 3), (5, 511), (513, 9000)]);
        assert_eq!(ChunkSet::default().gaps(7).collect::<Vec<_>>(), [(0, 7)]);
        assert_eq!(ChunkSet::default().gaps(0).count(), 0);
    }
}
