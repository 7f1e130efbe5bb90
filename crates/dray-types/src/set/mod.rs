//! [`BlockSet`]: which blocks, kept small by storing only what is neither empty nor full.
//!
//! A leaf covers 32768 blocks (128 MiB of image). An empty leaf is absent, full leaves are kept as runs of
//! leaves, and one with a few runs of blocks as these runs: what a set costs follows from how scattered its
//! blocks are, not from how long the image is. The encoding is canonical: equal sets encode to equal bytes, so
//! a hash of the encoding identifies the set (the handover relies on it).

mod encoding;
mod full;
mod leaf;

use crate::range::BlockRange;
pub use encoding::DecodeSetError;
use full::FullLeaves;
use leaf::Leaf;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

/// Blocks covered by one leaf.
const LEAF_BLOCKS: u64 = 32768;

/// A set of block numbers with cheap range operations.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct BlockSet {
    full: FullLeaves,
    /// The leaves that are neither full nor empty.
    mixed: BTreeMap<u64, Leaf>,
}

/// What a range covers: parts of leaves, with the bits inside each, and whole leaves between them.
struct Cover {
    parts: [Option<(u64, u64, u64)>; 2],
    whole: Option<(u64, u64)>,
}

impl Cover {
    fn of(range: BlockRange) -> Self {
        let (start, end) = (range.start, range.end());
        let mut cover = Self { parts: [None; 2], whole: None };
        if start >= end {
            return cover;
        }
        let (mut first, last) = (start / LEAF_BLOCKS, end / LEAF_BLOCKS);
        let (from, to) = (start % LEAF_BLOCKS, end % LEAF_BLOCKS);
        if first == last {
            cover.parts[0] = Some((first, from, to));
            return cover;
        }
        if from > 0 {
            cover.parts[0] = Some((first, from, LEAF_BLOCKS));
            first += 1;
        }
        if to > 0 {
            cover.parts[1] = Some((last, 0, to));
        }
        cover.whole = (first < last).then_some((first, last));
        cover
    }

    fn parts(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        self.parts.into_iter().flatten()
    }
}

impl BlockSet {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of blocks in the set.
    pub fn len(&self) -> u64 {
        self.full.len() * LEAF_BLOCKS + self.mixed.values().map(Leaf::len).sum::<u64>()
    }

    /// Parts that the set is kept in, and encoded as: what it costs follows from them.
    pub fn parts(&self) -> u64 {
        (self.full.runs().count() + self.mixed.len()) as u64
    }

    /// True when it holds no block.
    pub fn is_empty(&self) -> bool {
        self.full.is_empty() && self.mixed.is_empty()
    }

    /// Adds every block of `range`.
    pub fn insert(&mut self, range: BlockRange) {
        let cover = Cover::of(range);
        if let Some((first, end)) = cover.whole {
            self.drop_mixed(first, end);
            self.full.insert(first, end);
        }
        cover.parts().for_each(|(leaf, from, to)| self.insert_part(leaf, from, to));
    }

    fn insert_part(&mut self, leaf: u64, from: u64, to: u64) {
        if self.full.run_at(leaf).is_some() {
            return;
        }
        match self.mixed.entry(leaf) {
            Entry::Vacant(entry) => drop(entry.insert(Leaf::of(from, to))),
            Entry::Occupied(mut entry) => {
                entry.get_mut().insert(from, to);
                if entry.get().len() == LEAF_BLOCKS {
                    entry.remove();
                    self.full.insert(leaf, leaf + 1);
                }
            }
        }
    }

    /// Takes every block of `range` out.
    pub fn remove(&mut self, range: BlockRange) {
        let cover = Cover::of(range);
        if let Some((first, end)) = cover.whole {
            self.drop_mixed(first, end);
            self.full.remove(first, end);
        }
        cover.parts().for_each(|(leaf, from, to)| self.remove_part(leaf, from, to));
    }

    fn remove_part(&mut self, leaf: u64, from: u64, to: u64) {
        if self.full.run_at(leaf).is_some() {
            self.full.remove(leaf, leaf + 1);
            self.mixed.insert(leaf, Leaf::full());
        }
        let Entry::Occupied(mut entry) = self.mixed.entry(leaf) else { return };
        entry.get_mut().remove(from, to);
        if entry.get().len() == 0 {
            entry.remove();
        }
    }

    /// The leaves `first .. end` are not mixed any more.
    fn drop_mixed(&mut self, first: u64, end: u64) {
        while let Some((&leaf, _)) = self.mixed.range(first..end).next() {
            self.mixed.remove(&leaf);
        }
    }

    /// True when block `block` is in the set.
    pub fn contains(&self, block: u64) -> bool {
        let (leaf, at) = (block / LEAF_BLOCKS, block % LEAF_BLOCKS);
        let mixed = || self.mixed.get(&leaf).is_some_and(|leaf| leaf.find(at, true) == Some(at));
        self.full.run_at(leaf).is_some() || mixed()
    }

    /// True when any block of `range` is in the set.
    pub fn intersects(&self, range: BlockRange) -> bool {
        !range.is_empty() && self.next(range.start).is_some_and(|block| block < range.end())
    }

    /// Number of blocks of `range` that are in the set.
    pub fn count(&self, range: BlockRange) -> u64 {
        let len = range.len.min(u64::MAX - range.start);
        let cover = Cover::of(BlockRange::new(range.start, len));
        let whole = cover.whole.map_or(0, |(first, end)| {
            let mixed = self.mixed.range(first..end).map(|(_, leaf)| leaf.len());
            self.full.count(first, end) * LEAF_BLOCKS + mixed.sum::<u64>()
        });
        let part = |(leaf, from, to)| match self.full.run_at(leaf) {
            Some(_) => to - from,
            None => self.mixed.get(&leaf).map_or(0, |leaf| leaf.count(from, to)),
        };
        whole + cover.parts().map(part).sum::<u64>()
    }

    /// True when every block of `range` is in the set.
    pub fn contains_range(&self, range: BlockRange) -> bool {
        range.is_empty() || self.run_end(range.start, range.end()) >= range.end()
    }

    /// First block of the set at or after `from`.
    pub fn next(&self, from: u64) -> Option<u64> {
        let first = from / LEAF_BLOCKS;
        let full = self.full.next_run(first).map(|(start, _)| start.max(first));
        let in_full = full.map(|leaf| from.max(leaf * LEAF_BLOCKS));
        let before = full.unwrap_or(u64::MAX);
        let in_mixed = self.mixed.range(first..before).find_map(|(&leaf, content)| {
            let start = if leaf == first { from % LEAF_BLOCKS } else { 0 };
            content.find(start, true).map(|at| leaf * LEAF_BLOCKS + at)
        });
        in_mixed.or(in_full)
    }

    /// End of the run of set blocks that holds `start`, looking no further than `limit`. Equals
    /// `start` when `start` is not in the set.
    fn run_end(&self, start: u64, limit: u64) -> u64 {
        let mut at = start;
        while at < limit {
            let leaf = at / LEAF_BLOCKS;
            if let Some((_, end)) = self.full.run_at(leaf) {
                at = end * LEAF_BLOCKS;
                continue;
            }
            let Some(content) = self.mixed.get(&leaf) else { return at };
            let base = leaf * LEAF_BLOCKS;
            match content.find(at - base, false) {
                Some(stop) => return (base + stop).min(limit),
                None => at = base + LEAF_BLOCKS,
            }
        }
        limit
    }

    /// The first run of at most `max` blocks at or after block `from`.
    pub fn next_run(&self, from: u64, max: u64) -> Option<BlockRange> {
        let start = self.next(from)?;
        let end = self.run_end(start, start.saturating_add(max));
        Some(BlockRange::new(start, end - start))
    }

    /// All runs in ascending order, each as long as it can be.
    pub fn runs(&self) -> impl Iterator<Item = BlockRange> + '_ {
        self.runs_up_to(u64::MAX)
    }

    /// All runs in ascending order, cut at `max` blocks.
    pub fn runs_up_to(&self, max: u64) -> impl Iterator<Item = BlockRange> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let run = self.next_run(from, max)?;
            from = run.end();
            Some(run)
        })
    }

    /// Adds every block of `other`.
    pub fn union_with(&mut self, other: &Self) {
        for run in other.runs() {
            self.insert(run);
        }
    }

    /// Takes every block of `other` out.
    pub fn subtract(&mut self, other: &Self) {
        for run in other.runs() {
            self.remove(run);
        }
    }

    /// The blocks of `range` that are in the set.
    pub fn intersection(&self, range: BlockRange) -> Self {
        let mut result = Self::new();
        let mut from = range.start;
        while from < range.end() {
            // No further than the range: a run may go on for the whole image.
            let Some(run) = self.next_run(from, range.end() - from) else { break };
            result.insert(run.intersect(range));
            from = run.end();
        }
        result
    }

    /// The blocks of `range` that are not in the set.
    pub fn complement_in(&self, range: BlockRange) -> Self {
        let mut result = Self::new();
        result.insert(range);
        result.subtract(&self.intersection(range));
        result
    }

    /// The canonical encoding.
    pub fn encode(&self) -> Vec<u8> {
        encoding::encode(self)
    }

    /// Reads an encoding, which must be canonical and fill `bytes` exactly.
    ///
    /// # Errors
    /// [`DecodeSetError`] for anything that [`encode`](Self::encode) would not have written.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeSetError> {
        encoding::decode(bytes)
    }
}

impl FromIterator<BlockRange> for BlockSet {
    fn from_iter<T: IntoIterator<Item = BlockRange>>(runs: T) -> Self {
        let mut set = Self::new();
        for run in runs {
            set.insert(run);
        }
        set
    }
}

impl fmt::Debug for BlockSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        let mut list = f.debug_list();
        for run in self.runs().take(SHOWN) {
            list.entry(&(run.start..run.end()));
        }
        if self.runs().nth(SHOWN).is_some() {
            list.entry(&format_args!("… {} blocks", self.len()));
        }
        list.finish()
    }
}

impl serde::Serialize for BlockSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.encode())
    }
}

impl<'de> serde::Deserialize<'de> for BlockSet {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl serde::de::Visitor<'_> for Bytes {
            type Value = BlockSet;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an encoded block set")
            }

            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<BlockSet, E> {
                BlockSet::decode(bytes).map_err(E::custom)
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Blocks the model looks at: three leaves and a bit, so that leaf borders are crossed often.
    const SPAN: u64 = LEAF_BLOCKS * 3 + 100;

    fn ranges() -> impl Strategy<Value = Vec<(bool, BlockRange)>> {
        let len = prop_oneof![1..200u64, 1..5u64, Just(LEAF_BLOCKS), 1..LEAF_BLOCKS * 2];
        let start = prop_oneof![0..SPAN, Just(0), Just(LEAF_BLOCKS), Just(LEAF_BLOCKS - 1)];
        let range = (start, len).prop_map(|(start, len)| BlockRange::new(start, len));
        prop::collection::vec((any::<bool>(), range), 0..12)
    }

    /// Many short ranges in one leaf, so that it becomes a bitmap and is one no more.
    fn scattered() -> impl Strategy<Value = Vec<(bool, BlockRange)>> {
        let range = (0..2000u64, 1..4u64).prop_map(|(start, len)| BlockRange::new(start, len));
        let some = (prop::bool::weighted(0.8), range);
        prop::collection::vec(some, 0..800)
    }

    fn both(ops: &[(bool, BlockRange)]) -> (BlockSet, BTreeSet<u64>) {
        let (mut set, mut model) = (BlockSet::new(), BTreeSet::new());
        for &(add, range) in ops {
            let blocks = range.start..range.end();
            if add {
                set.insert(range);
                model.extend(blocks);
            } else {
                set.remove(range);
                blocks.for_each(|block| {
                    model.remove(&block);
                });
            }
        }
        (set, model)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn behaves_like_a_sorted_set(
            ops in prop_oneof![ranges(), scattered()],
            probe in prop_oneof![0..SPAN, 0..2000u64],
            width in prop_oneof![0..400u64, 0..SPAN],
        ) {
            let (set, model) = both(&ops);
            prop_assert_eq!(set.len(), model.len() as u64);
            prop_assert_eq!(set.is_empty(), model.is_empty());
            prop_assert_eq!(set.next(probe), model.range(probe..).next().copied());
            prop_assert_eq!(set.contains(probe), model.contains(&probe));
            let window = BlockRange::new(probe, width);
            let inside = model.range(probe..probe + width).count() as u64;
            prop_assert_eq!(set.intersects(window), inside > 0);
            prop_assert_eq!(set.count(window), inside);
            prop_assert_eq!(set.count(BlockRange::new(0, u64::MAX)), set.len());
            prop_assert_eq!(set.contains_range(window), inside == width);
            prop_assert_eq!(set.intersection(window).len(), inside);
            prop_assert_eq!(set.complement_in(window).len(), width - inside);
            let listed: Vec<u64> = set.runs_up_to(7).flat_map(|r| r.start..r.end()).collect();
            prop_assert!(listed.iter().eq(model.iter()));
        }

        #[test]
        fn encoding_is_canonical(ops in prop_oneof![ranges(), scattered()]) {
            let (set, model) = both(&ops);
            let rebuilt: BlockSet = model.iter().map(|&b| BlockRange::new(b, 1)).collect();
            prop_assert_eq!(set.encode(), rebuilt.encode());
            prop_assert_eq!(BlockSet::decode(&set.encode()), Ok(set));
        }

        #[test]
        fn decoding_noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(set) = BlockSet::decode(&bytes) {
                prop_assert_eq!(set.encode(), bytes);
            }
        }
    }

    #[test]
    fn a_full_image_is_small_however_long_it_is() {
        let whole = BlockRange::whole(1 << 50);
        let set: BlockSet = [whole].into_iter().collect();
        assert_eq!(set.len(), (1 << 50) / 4096);
        assert!(set.encode().len() < 16, "{} bytes", set.encode().len());
        assert_eq!(set.runs().count(), 1);
        assert_eq!(BlockSet::decode(&set.encode()), Ok(set.clone()));
        assert!(set.complement_in(whole).is_empty());
    }

    /// What a guest has that writes here and there, in a leaf of its own each time.
    #[test]
    fn scattered_blocks_cost_what_they_are() {
        let blocks = (0..10_000).map(|nth| BlockRange::new(nth * LEAF_BLOCKS + nth, 1));
        let set: BlockSet = blocks.collect();
        assert!(set.mixed.values().all(|leaf| !leaf.is_large()));
        assert!(set.encode().len() < 100_000, "{} bytes", set.encode().len());
        assert_eq!(BlockSet::decode(&set.encode()), Ok(set));
    }

    /// A leaf that was scattered and is not any more is the same as one that never was.
    #[test]
    fn a_set_is_what_is_in_it_and_not_what_was() {
        let every_other = (0..1000).map(|nth| BlockRange::new(nth * 2, 1));
        let mut set: BlockSet = every_other.collect();
        assert!(set.mixed[&0].is_large());
        set.remove(BlockRange::new(1, 5000));
        let one: BlockSet = [BlockRange::new(0, 1)].into_iter().collect();
        assert_eq!((set.encode(), &set), (one.encode(), &one));
    }
}
