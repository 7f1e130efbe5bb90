//! The content of one leaf of a set that is neither empty nor full.

use super::LEAF_BLOCKS;

/// Words of a leaf's bitmap.
const WORDS: usize = (LEAF_BLOCKS / 64) as usize;
/// A leaf of more runs than this is a bitmap of 4 KiB; one of so many takes half a KiB.
const FEW: usize = 128;

/// The blocks `from .. to` of a leaf, `from < to`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Span {
    from: u16,
    to: u16,
}

impl Span {
    fn new(from: u64, to: u64) -> Self {
        debug_assert!(from < to && to <= LEAF_BLOCKS);
        Self { from: from as u16, to: to as u16 }
    }

    fn len(self) -> u64 {
        u64::from(self.to - self.from)
    }
}

/// The blocks of a leaf. Most leaves of a large image that is written here and there have a few runs.
#[derive(Clone)]
enum Blocks {
    /// Its runs, in order; none touches the next.
    Few(Vec<Span>),
    /// A bit for each block, and how many are set.
    Many(Box<[u64; WORDS]>, u32),
}

/// A leaf that is neither empty nor full, or is about to be told to be.
#[derive(Clone)]
pub(super) struct Leaf(Blocks);

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

fn find_span(spans: &[Span], from: u64, wanted: bool) -> Option<u64> {
    let next = spans.get(spans.partition_point(|span| u64::from(span.to) <= from));
    let at = match (next, wanted) {
        (Some(span), true) => from.max(span.from.into()),
        (Some(span), false) if u64::from(span.from) <= from => span.to.into(),
        (_, false) => from,
        (None, true) => return None,
    };
    (at < LEAF_BLOCKS).then_some(at)
}

impl Leaf {
    /// The blocks `from .. to`.
    pub(super) fn of(from: u64, to: u64) -> Self {
        Self(Blocks::Few(vec![Span::new(from, to)]))
    }

    /// All blocks.
    pub(super) fn full() -> Self {
        Self::of(0, LEAF_BLOCKS)
    }

    /// The blocks of a bitmap.
    pub(super) fn of_bits(bits: Box<[u64; WORDS]>) -> Self {
        let count = bits.iter().map(|word| word.count_ones()).sum();
        Self(Blocks::Many(bits, count))
    }

    /// Number of blocks in the leaf.
    pub(super) fn len(&self) -> u64 {
        match &self.0 {
            Blocks::Few(spans) => spans.iter().map(|span| span.len()).sum(),
            Blocks::Many(_, count) => u64::from(*count),
        }
    }

    /// Adds the blocks `from .. to`.
    pub(super) fn insert(&mut self, from: u64, to: u64) {
        match &mut self.0 {
            Blocks::Few(spans) => {
                let first = spans.partition_point(|span| u64::from(span.to) < from);
                let behind = spans.partition_point(|span| u64::from(span.from) <= to);
                let touched = &spans[first..behind];
                let from = touched.first().map_or(from, |span| from.min(span.from.into()));
                let to = touched.last().map_or(to, |span| to.max(span.to.into()));
                spans.splice(first..behind, [Span::new(from, to)]);
                self.widen();
            }
            Blocks::Many(bits, count) => {
                for (word, mask) in words(from, to) {
                    *count += (mask & !bits[word]).count_ones();
                    bits[word] |= mask;
                }
            }
        }
    }

    /// Takes the blocks `from .. to` out.
    pub(super) fn remove(&mut self, from: u64, to: u64) {
        match &mut self.0 {
            Blocks::Few(spans) => {
                let first = spans.partition_point(|span| u64::from(span.to) <= from);
                let behind = spans.partition_point(|span| u64::from(span.from) < to);
                let touched = &spans[first..behind];
                let start = touched.first().map(|span| u64::from(span.from));
                let end = touched.last().map(|span| u64::from(span.to));
                let before = start.filter(|&start| start < from).map(|at| Span::new(at, from));
                let after = end.filter(|&end| end > to).map(|at| Span::new(to, at));
                spans.splice(first..behind, before.into_iter().chain(after));
                self.widen();
            }
            Blocks::Many(bits, count) => {
                for (word, mask) in words(from, to) {
                    *count -= (mask & bits[word]).count_ones();
                    bits[word] &= !mask;
                }
            }
        }
    }

    /// A list that has become too long is a bitmap from here on.
    fn widen(&mut self) {
        let Blocks::Few(spans) = &self.0 else { return };
        if spans.len() <= FEW {
            return;
        }
        let mut bits = Box::new([0; WORDS]);
        for span in spans {
            for (word, mask) in words(span.from.into(), span.to.into()) {
                bits[word] |= mask;
            }
        }
        *self = Self::of_bits(bits);
    }

    /// How many of the blocks `from .. to`.
    pub(super) fn count(&self, from: u64, to: u64) -> u64 {
        match &self.0 {
            Blocks::Few(spans) => {
                let first = spans.partition_point(|span| u64::from(span.to) <= from);
                let inside = spans[first..].iter().take_while(|span| u64::from(span.from) < to);
                inside.map(|span| to.min(span.to.into()) - from.max(span.from.into())).sum()
            }
            Blocks::Many(..) if to - from == LEAF_BLOCKS => self.len(),
            Blocks::Many(bits, _) => words(from, to)
                .map(|(word, mask)| u64::from((bits[word] & mask).count_ones()))
                .sum(),
        }
    }

    /// First position at or after `from` that is in it, or, unless `wanted`, that is not.
    pub(super) fn find(&self, from: u64, wanted: bool) -> Option<u64> {
        match &self.0 {
            Blocks::Few(spans) => find_span(spans, from, wanted),
            Blocks::Many(bits, _) => find_bit(bits, from, wanted),
        }
    }

    /// Its runs, in order: first block and the one behind the last.
    pub(super) fn spans(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.find(at, true)?;
            at = self.find(start, false).unwrap_or(LEAF_BLOCKS);
            Some((start, at))
        })
    }

    /// A bit for each block, in words.
    pub(super) fn bits(&self) -> Box<[u64; WORDS]> {
        match &self.0 {
            Blocks::Many(bits, _) => bits.clone(),
            Blocks::Few(_) => {
                let mut bits = Box::new([0; WORDS]);
                for (from, to) in self.spans() {
                    words(from, to).for_each(|(word, mask)| bits[word] |= mask);
                }
                bits
            }
        }
    }

    /// Whether it takes a whole bitmap of memory.
    pub(super) fn is_large(&self) -> bool {
        matches!(self.0, Blocks::Many(..))
    }
}

/// Of the same blocks, however they are kept.
impl PartialEq for Leaf {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Blocks::Few(one), Blocks::Few(other)) => one == other,
            (Blocks::Many(one, _), Blocks::Many(other, _)) => one == other,
            _ => self.spans().eq(other.spans()),
        }
    }
}

impl Eq for Leaf {}
