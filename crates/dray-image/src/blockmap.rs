//! [`AtomicBlockMap`]: a set of blocks that many threads change at once without a lock.
//!
//! Bits live in leaves of 32768 blocks (128 MiB of image), made when first needed, each with a
//! count of its set bits: a clean terabyte costs 128 KiB and 8192 looks to scan, a fully used one
//! 32 MiB. What a set means (dirty, missing, unrecorded) is its owner's business.

use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use dray_types::{BlockRange, BlockSet};

/// Blocks covered by one leaf.
pub const LEAF_BLOCKS: u64 = 32768;
const WORDS: usize = (LEAF_BLOCKS / 64) as usize;

struct Leaf {
    /// Set bits; ahead of them while they change.
    count: AtomicI64,
    words: [AtomicU64; WORDS],
}

/// A set of block numbers below a fixed bound.
pub struct AtomicBlockMap {
    count: AtomicI64,
    leaves: Box<[OnceLock<Box<Leaf>>]>,
}

impl Leaf {
    fn empty() -> Box<Self> {
        Box::new(Self {
            count: AtomicI64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        })
    }
}

/// The words a range touches: leaf, word in the leaf, mask of touched bits.
fn words(range: BlockRange) -> impl Iterator<Item = (usize, usize, u64)> {
    let first = range.start / 64;
    let last = if range.is_empty() { first } else { (range.end() - 1) / 64 + 1 };
    (first..last).map(move |word| {
        let base = word * 64;
        let low = u64::MAX << (range.start.max(base) - base);
        let high = u64::MAX >> (64 - (range.end().min(base + 64) - base));
        ((base / LEAF_BLOCKS) as usize, (word % WORDS as u64) as usize, low & high)
    })
}

/// Appends the runs of the set bits of the word whose first block is `base`.
fn push_runs(runs: &mut Vec<BlockRange>, base: u64, mut bits: u64) {
    while bits != 0 {
        let from = u64::from(bits.trailing_zeros());
        let len = u64::from((bits >> from).trailing_ones());
        bits &= u64::MAX.checked_shl((from + len) as u32).unwrap_or(0);
        match runs.last_mut() {
            Some(last) if last.end() == base + from => last.len += len,
            _ => runs.push(BlockRange::new(base + from, len)),
        }
    }
}

/// The lowest `count` set bits of `bits`.
fn lowest(bits: u64, count: u64) -> u64 {
    if u64::from(bits.count_ones()) <= count {
        return bits;
    }
    let mut rest = bits;
    for _ in 0..count {
        rest &= rest - 1;
    }
    bits & !rest
}

impl AtomicBlockMap {
    /// The empty set of blocks below `blocks`.
    pub fn new(blocks: u64) -> Self {
        let leaves = blocks.div_ceil(LEAF_BLOCKS);
        Self { count: AtomicI64::new(0), leaves: (0..leaves).map(|_| OnceLock::new()).collect() }
    }

    fn leaf(&self, index: usize) -> Option<&Leaf> {
        self.leaves.get(index).and_then(OnceLock::get).map(|leaf| &**leaf)
    }

    /// A leaf with something in it.
    fn used_leaf(&self, index: usize) -> Option<&Leaf> {
        self.leaf(index).filter(|leaf| leaf.count.load(Ordering::SeqCst) > 0)
    }

    fn add(&self, leaf: &Leaf, change: i64) {
        if change != 0 {
            leaf.count.fetch_add(change, Ordering::SeqCst);
            self.count.fetch_add(change, Ordering::SeqCst);
        }
    }

    /// Number of blocks in the set; exact when nobody changes it.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst).max(0) as u64
    }

    /// True when it holds no block: one load.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) <= 0
    }

    /// Adds every block of `range`; returns how many were not in it. Blocks past the bound are
    /// ignored.
    pub fn set(&self, range: BlockRange) -> u64 {
        let mut added = 0;
        for (index, word, mask) in words(range) {
            let Some(slot) = self.leaves.get(index) else { break };
            let leaf = slot.get_or_init(Leaf::empty);
            let word = &leaf.words[word];
            // Counted before the bits are set, so that the counts are never less than what is
            // set: a set that looks empty is empty.
            let guess = (mask & !word.load(Ordering::SeqCst)).count_ones();
            self.add(leaf, i64::from(guess));
            let before = word.fetch_or(mask, Ordering::SeqCst);
            let new = (mask & !before).count_ones();
            self.add(leaf, i64::from(new) - i64::from(guess));
            added += u64::from(new);
        }
        added
    }

    /// As [`set`](Self::set), but writes nothing where all are in it already.
    /// What the caller did before is seen by whoever takes the blocks out only if a sequentially
    /// consistent fence stands between it and this, and another one behind the taking out.
    pub fn ensure(&self, range: BlockRange) {
        let is_set = |(index, word, mask): (usize, usize, u64)| {
            self.leaf(index).is_some_and(|it| !it.words[word].load(Ordering::SeqCst) & mask == 0)
        };
        if !words(range).all(is_set) {
            self.set(range);
        }
    }

    /// Takes every block of `range` out; returns how many were in it.
    pub fn clear(&self, range: BlockRange) -> u64 {
        let mut removed = 0;
        for (index, word, mask) in words(range) {
            let Some(leaf) = self.leaf(index) else { continue };
            if leaf.words[word].load(Ordering::SeqCst) & mask == 0 {
                continue;
            }
            let before = leaf.words[word].fetch_and(!mask, Ordering::SeqCst);
            let old = u64::from((mask & before).count_ones());
            self.add(leaf, -(old as i64));
            removed += old;
        }
        removed
    }

    /// True when any block of `range` is in the set.
    pub fn intersects(&self, range: BlockRange) -> bool {
        words(range).any(|(index, word, mask)| {
            self.leaf(index).is_some_and(|leaf| leaf.words[word].load(Ordering::SeqCst) & mask != 0)
        })
    }

    /// How many blocks of `range` are in the set; a guess while others change it.
    pub fn count_in(&self, range: BlockRange) -> u64 {
        let bits = |(index, word, mask): (usize, usize, u64)| {
            let leaf = self.leaf(index)?;
            Some(u64::from((leaf.words[word].load(Ordering::SeqCst) & mask).count_ones()))
        };
        words(range).filter_map(bits).sum()
    }

    /// Calls `each` with the first block and the bits of every word of `range` that has some, in
    /// order, until it returns false.
    fn visit(&self, range: BlockRange, mut each: impl FnMut(u64, &AtomicU64, &Leaf, u64) -> bool) {
        let mut at = range.start;
        let end = range.end().min(self.leaves.len() as u64 * LEAF_BLOCKS);
        while at < end {
            let index = (at / LEAF_BLOCKS) as usize;
            let leaf_end = (index as u64 + 1) * LEAF_BLOCKS;
            let part = BlockRange::new(at, end.min(leaf_end) - at);
            at = part.end();
            let Some(leaf) = self.used_leaf(index) else { continue };
            for (_, word, mask) in words(part) {
                let bits = leaf.words[word].load(Ordering::SeqCst) & mask;
                let base = index as u64 * LEAF_BLOCKS + word as u64 * 64;
                if bits != 0 && !each(base, &leaf.words[word], leaf, bits) {
                    return;
                }
            }
        }
    }

    /// The runs of the blocks of `range` that are in the set.
    pub fn runs_in(&self, range: BlockRange) -> Vec<BlockRange> {
        let mut runs = Vec::new();
        self.visit(range, |base, _, _, bits| {
            push_runs(&mut runs, base, bits);
            true
        });
        runs
    }

    /// The first run of at most `max` blocks at or after block `from`.
    pub fn next_run(&self, from: u64, max: u64) -> Option<BlockRange> {
        let mut runs = Vec::new();
        let rest = BlockRange::new(from, u64::MAX / 2 - from);
        self.visit(rest, |base, _, _, bits| {
            push_runs(&mut runs, base, bits);
            let first: BlockRange = runs[0];
            runs.len() == 1 && first.len < max && first.end() == base + 64
        });
        let first = runs.first()?;
        Some(BlockRange::new(first.start, first.len.min(max)))
    }

    /// Takes out the first `max` blocks at or after block `from` and returns them as runs.
    pub fn take(&self, from: u64, max: u64) -> Vec<BlockRange> {
        let mut runs = Vec::new();
        let mut left = max;
        if left == 0 {
            return runs;
        }
        self.visit(BlockRange::new(from, u64::MAX / 2 - from), |base, word, leaf, bits| {
            let wanted = lowest(bits, left);
            let got = word.fetch_and(!wanted, Ordering::SeqCst) & wanted;
            self.add(leaf, -i64::from(got.count_ones()));
            push_runs(&mut runs, base, got);
            left -= u64::from(got.count_ones());
            left > 0
        });
        runs
    }

    /// Takes the blocks of `range` out and returns those that were in the set as runs: of two that
    /// take the same block only one gets it.
    pub fn take_in(&self, range: BlockRange) -> Vec<BlockRange> {
        let mut runs = Vec::new();
        self.visit(range, |base, word, leaf, bits| {
            let got = word.fetch_and(!bits, Ordering::SeqCst) & bits;
            self.add(leaf, -i64::from(got.count_ones()));
            push_runs(&mut runs, base, got);
            true
        });
        runs
    }

    /// All blocks of the set.
    pub fn snapshot(&self) -> BlockSet {
        let mut set = BlockSet::new();
        self.visit(BlockRange::new(0, u64::MAX / 2), |base, _, _, bits| {
            let mut runs = Vec::new();
            push_runs(&mut runs, base, bits);
            runs.into_iter().for_each(|run| set.insert(run));
            true
        });
        set
    }

    /// Bytes of memory in use.
    pub fn memory_bytes(&self) -> usize {
        let leaves = self.leaves.iter().filter(|leaf| leaf.get().is_some()).count();
        size_of_val(&*self.leaves) + leaves * size_of::<Leaf>()
    }
}
