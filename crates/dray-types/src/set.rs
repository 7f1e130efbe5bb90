//! [`BlockSet`]: which blocks, kept small by storing only what is neither empty nor full.
//!
//! A set is a sorted map of leaves; a leaf covers 32768 blocks (128 MiB of image). An empty leaf is
//! absent and a full leaf costs a map entry, so a mostly clean or mostly full image of any size is
//! a handful of entries and is scanned in no time. The encoding is canonical: equal sets encode to
//! equal bytes, so a hash of the encoding identifies the set (the handover relies on it).

use crate::range::BlockRange;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

/// Blocks covered by one leaf.
const LEAF_BLOCKS: u64 = 32768;
const WORDS: usize = (LEAF_BLOCKS / 64) as usize;
/// Leaves a decoded set may name at most: 2^31 blocks, an image of 8 TiB with every leaf mixed.
const MAX_LEAVES: u64 = 1 << 16;
/// Highest leaf number a decoded set may name: an image of 2^60 bytes.
const MAX_LEAF: u64 = (1 << 48) / LEAF_BLOCKS;

#[derive(Clone, PartialEq, Eq)]
enum Leaf {
    Full,
    /// Neither empty nor full; the count of set bits is kept beside them.
    Mixed(Box<[u64; WORDS]>, u32),
}

/// A set of block numbers with cheap range operations.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct BlockSet {
    leaves: BTreeMap<u64, Leaf>,
}

/// Mask of bits `from .. to` inside a word (`from < to <= 64`).
fn mask(from: u64, to: u64) -> u64 {
    let width = to - from;
    let ones = if width == 64 { u64::MAX } else { (1 << width) - 1 };
    ones << from
}

/// The words that bits `from .. to` of a leaf touch, with the mask of touched bits in each.
fn words(from: u64, to: u64) -> impl Iterator<Item = (usize, u64)> {
    let first = from / 64;
    let last = (to - 1) / 64;
    (first..=last).map(move |word| {
        let low = if word == first { from % 64 } else { 0 };
        let high = if word == last { (to - 1) % 64 + 1 } else { 64 };
        (word as usize, mask(low, high))
    })
}

/// The leaves a range touches, with the bits inside each.
fn parts(range: BlockRange) -> impl Iterator<Item = (u64, u64, u64)> {
    let mut at = range.start;
    let end = range.end();
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let leaf = at / LEAF_BLOCKS;
        let from = at % LEAF_BLOCKS;
        let to = (end - leaf * LEAF_BLOCKS).min(LEAF_BLOCKS);
        at = leaf * LEAF_BLOCKS + to;
        Some((leaf, from, to))
    })
}

impl Leaf {
    fn len(&self) -> u64 {
        match self {
            Leaf::Full => LEAF_BLOCKS,
            Leaf::Mixed(_, count) => u64::from(*count),
        }
    }

    /// Bits `from .. to` that are set.
    fn count(&self, from: u64, to: u64) -> u64 {
        match self {
            Leaf::Full => to - from,
            Leaf::Mixed(..) if to - from == LEAF_BLOCKS => self.len(),
            Leaf::Mixed(bits, _) => words(from, to)
                .map(|(word, mask)| u64::from((bits[word] & mask).count_ones()))
                .sum(),
        }
    }

    /// First position at or after `from` whose bit equals `wanted`.
    fn find(&self, from: u64, wanted: bool) -> Option<u64> {
        match self {
            Leaf::Full => wanted.then_some(from).filter(|&at| at < LEAF_BLOCKS),
            Leaf::Mixed(bits, _) => find_bit(bits, from, wanted),
        }
    }
}

fn find_bit(bits: &[u64; WORDS], from: u64, wanted: bool) -> Option<u64> {
    if from >= LEAF_BLOCKS {
        return None;
    }
    let mut word = (from / 64) as usize;
    let flip = if wanted { 0 } else { u64::MAX };
    let mut current = (bits[word] ^ flip) & (u64::MAX << (from % 64));
    loop {
        if current != 0 {
            return Some(word as u64 * 64 + u64::from(current.trailing_zeros()));
        }
        word += 1;
        if word == WORDS {
            return None;
        }
        current = bits[word] ^ flip;
    }
}

impl BlockSet {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of blocks in the set.
    pub fn len(&self) -> u64 {
        self.leaves.values().map(Leaf::len).sum()
    }

    /// True when it holds no block.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// Adds every block of `range`.
    pub fn insert(&mut self, range: BlockRange) {
        for (leaf, from, to) in parts(range) {
            if from == 0 && to == LEAF_BLOCKS {
                self.leaves.insert(leaf, Leaf::Full);
                continue;
            }
            let entry =
                self.leaves.entry(leaf).or_insert_with(|| Leaf::Mixed(Box::new([0; WORDS]), 0));
            if let Leaf::Mixed(bits, count) = entry {
                for (word, mask) in words(from, to) {
                    *count += (mask & !bits[word]).count_ones();
                    bits[word] |= mask;
                }
                if u64::from(*count) == LEAF_BLOCKS {
                    *entry = Leaf::Full;
                }
            }
        }
    }

    /// Takes every block of `range` out.
    pub fn remove(&mut self, range: BlockRange) {
        for (leaf, from, to) in parts(range) {
            let Entry::Occupied(mut entry) = self.leaves.entry(leaf) else { continue };
            if from == 0 && to == LEAF_BLOCKS {
                entry.remove();
                continue;
            }
            if *entry.get() == Leaf::Full {
                entry.insert(Leaf::Mixed(Box::new([u64::MAX; WORDS]), LEAF_BLOCKS as u32));
            }
            let Leaf::Mixed(bits, count) = entry.get_mut() else { continue };
            for (word, mask) in words(from, to) {
                *count -= (mask & bits[word]).count_ones();
                bits[word] &= !mask;
            }
            if *count == 0 {
                entry.remove();
            }
        }
    }

    /// True when block `block` is in the set.
    pub fn contains(&self, block: u64) -> bool {
        match self.leaves.get(&(block / LEAF_BLOCKS)) {
            None => false,
            Some(leaf) => leaf.find(block % LEAF_BLOCKS, true) == Some(block % LEAF_BLOCKS),
        }
    }

    /// True when any block of `range` is in the set.
    pub fn intersects(&self, range: BlockRange) -> bool {
        !range.is_empty() && self.next(range.start).is_some_and(|block| block < range.end())
    }

    /// Number of blocks of `range` that are in the set.
    pub fn count(&self, range: BlockRange) -> u64 {
        let end = range.start.saturating_add(range.len);
        let Some(last) = end.checked_sub(1).filter(|_| !range.is_empty()) else { return 0 };
        let (first, last) = (range.start / LEAF_BLOCKS, last / LEAF_BLOCKS);
        let leaves = self.leaves.range(first..=last);
        let counts = leaves.map(|(&leaf, content)| {
            let from = if leaf == first { range.start % LEAF_BLOCKS } else { 0 };
            let to = if leaf == last { (end - 1) % LEAF_BLOCKS + 1 } else { LEAF_BLOCKS };
            content.count(from, to)
        });
        counts.sum()
    }

    /// True when every block of `range` is in the set.
    pub fn contains_range(&self, range: BlockRange) -> bool {
        range.is_empty() || self.run_end(range.start, range.end()) >= range.end()
    }

    /// First block of the set at or after `from`.
    pub fn next(&self, from: u64) -> Option<u64> {
        let first = from / LEAF_BLOCKS;
        for (&leaf, content) in self.leaves.range(first..) {
            let start = if leaf == first { from % LEAF_BLOCKS } else { 0 };
            if let Some(at) = content.find(start, true) {
                return Some(leaf * LEAF_BLOCKS + at);
            }
        }
        None
    }

    /// End of the run of set blocks that holds `start`, looking no further than `limit`. Equals
    /// `start` when `start` is not in the set.
    fn run_end(&self, start: u64, limit: u64) -> u64 {
        let mut at = start;
        while at < limit {
            let Some(leaf) = self.leaves.get(&(at / LEAF_BLOCKS)) else { return at };
            let base = at / LEAF_BLOCKS * LEAF_BLOCKS;
            match leaf.find(at - base, false) {
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

    /// The canonical encoding: number of leaves, then per leaf its distance from the one before, a
    /// kind (1 full, 2 bitmap of 4096 bytes, 3 runs as gap and length), all numbers as LEB128.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_varint(&mut out, self.leaves.len() as u64);
        let mut previous = 0;
        for (&leaf, content) in &self.leaves {
            put_varint(&mut out, leaf - previous);
            previous = leaf;
            match content {
                Leaf::Full => out.push(1),
                Leaf::Mixed(bits, _) => encode_mixed(&mut out, bits),
            }
        }
        out
    }

    /// Reads an encoding, which must be canonical and fill `bytes` exactly.
    ///
    /// # Errors
    /// [`DecodeSetError`] for anything that [`encode`](Self::encode) would not have written.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeSetError> {
        let mut input = bytes;
        let count = take_varint(&mut input)?;
        if count > MAX_LEAVES {
            return Err(DecodeSetError);
        }
        let mut set = Self::new();
        let mut leaf = 0u64;
        for nth in 0..count {
            let delta = take_varint(&mut input)?;
            if nth > 0 && delta == 0 {
                return Err(DecodeSetError);
            }
            leaf = leaf.checked_add(delta).filter(|&l| l <= MAX_LEAF).ok_or(DecodeSetError)?;
            set.leaves.insert(leaf, decode_leaf(&mut input)?);
        }
        if !input.is_empty() || set.encode() != bytes {
            return Err(DecodeSetError);
        }
        Ok(set)
    }
}

/// Why bytes are not a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeSetError;

impl fmt::Display for DecodeSetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a canonical block set")
    }
}

impl std::error::Error for DecodeSetError {}

fn encode_mixed(out: &mut Vec<u8>, bits: &[u64; WORDS]) {
    let mut runs = Vec::new();
    let mut at = 0;
    let mut count = 0u64;
    while let Some(start) = find_bit(bits, at, true) {
        let end = find_bit(bits, start, false).unwrap_or(LEAF_BLOCKS);
        put_varint(&mut runs, start - at);
        put_varint(&mut runs, end - start);
        at = end;
        count += 1;
        if runs.len() >= WORDS * 8 {
            out.push(2);
            out.extend(bits.iter().flat_map(|word| word.to_le_bytes()));
            return;
        }
    }
    out.push(3);
    put_varint(out, count);
    out.extend(runs);
}

fn decode_leaf(input: &mut &[u8]) -> Result<Leaf, DecodeSetError> {
    match take(input, 1)?[0] {
        1 => Ok(Leaf::Full),
        2 => {
            let mut bits = Box::new([0u64; WORDS]);
            for word in bits.iter_mut() {
                let bytes = take(input, 8)?;
                *word = u64::from_le_bytes(bytes.try_into().map_err(|_| DecodeSetError)?);
            }
            finish_mixed(bits)
        }
        3 => {
            let mut bits = Box::new([0u64; WORDS]);
            let mut at = 0u64;
            for _ in 0..take_varint(input)? {
                let start = at.checked_add(take_varint(input)?).ok_or(DecodeSetError)?;
                let len = take_varint(input)?;
                at = start.checked_add(len).ok_or(DecodeSetError)?;
                if len == 0 || at > LEAF_BLOCKS {
                    return Err(DecodeSetError);
                }
                for (word, mask) in words(start, at) {
                    bits[word] |= mask;
                }
            }
            finish_mixed(bits)
        }
        _ => Err(DecodeSetError),
    }
}

fn finish_mixed(bits: Box<[u64; WORDS]>) -> Result<Leaf, DecodeSetError> {
    let count: u32 = bits.iter().map(|word| word.count_ones()).sum();
    if count == 0 || u64::from(count) == LEAF_BLOCKS {
        return Err(DecodeSetError);
    }
    Ok(Leaf::Mixed(bits, count))
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn take<'a>(input: &mut &'a [u8], count: usize) -> Result<&'a [u8], DecodeSetError> {
    let (head, tail) = input.split_at_checked(count).ok_or(DecodeSetError)?;
    *input = tail;
    Ok(head)
}

fn take_varint(input: &mut &[u8]) -> Result<u64, DecodeSetError> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = take(input, 1)?[0];
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return Err(DecodeSetError);
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(DecodeSetError)
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
        let len = prop_oneof![1..200u64, Just(LEAF_BLOCKS), 1..LEAF_BLOCKS * 2];
        let start = prop_oneof![0..SPAN, Just(0), Just(LEAF_BLOCKS), Just(LEAF_BLOCKS - 1)];
        let range = (start, len).prop_map(|(start, len)| BlockRange::new(start, len));
        prop::collection::vec((any::<bool>(), range), 0..12)
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
        fn behaves_like_a_sorted_set(ops in ranges(), probe in 0..SPAN, width in 0..400u64) {
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
        fn encoding_is_canonical(ops in ranges()) {
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
    fn a_full_terabyte_is_small() {
        let set: BlockSet = [BlockRange::whole(1 << 40)].into_iter().collect();
        assert_eq!(set.len(), (1 << 40) / 4096);
        assert!(set.encode().len() < 17_000);
        assert_eq!(set.runs().count(), 1);
    }
}
