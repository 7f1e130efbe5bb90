//! Which parts of an image are written at all: what a chunk's rate alone does not tell.
//!
//! A log of one block and a table of a thousand may be written equally often; the one is dirty again
//! in one block, the other all over. Areas of 64 KiB are marked when they are written, in a word for
//! each chunk of 4 MiB. Marks fade: what was marked neither in this nor in the last generation of
//! 20,000 writes is forgotten. Two maps of at most a word and a number for each chunk written: 8 MiB
//! for a disk of 1 TiB of which every chunk is.

use dray_types::{BLOCK_SIZE, BlockRange};
use std::collections::BTreeMap;
use std::mem;

/// Blocks of an area: 64 KiB.
const AREA: u64 = 16;
/// Areas of a word.
const WORD: u64 = 64;
/// Writes after which a generation ends: one round of heat.
const GENERATION: u32 = 20_000;

/// The marks of one image.
#[derive(Clone, Debug, Default)]
pub struct Footprint {
    now: BTreeMap<u64, u64>,
    before: BTreeMap<u64, u64>,
    writes: u32,
}

impl Footprint {
    /// These blocks were written.
    pub fn note(&mut self, range: BlockRange) {
        if range.is_empty() {
            return;
        }
        if self.writes == GENERATION {
            self.before = mem::take(&mut self.now);
            self.writes = 0;
        }
        self.writes += 1;
        let mut area = range.start / AREA;
        let last = (range.end() - 1) / AREA;
        while area <= last {
            let (word, from) = (area / WORD, area % WORD);
            let count = (last - area + 1).min(WORD - from);
            let mask = if count == WORD { u64::MAX } else { ((1 << count) - 1) << from };
            *self.now.entry(word).or_default() |= mask;
            area += count;
        }
    }

    /// Bytes of `range` that are written lately, in whole areas.
    pub fn bytes(&self, range: BlockRange) -> u64 {
        if range.is_empty() || self.now.is_empty() && self.before.is_empty() {
            return 0;
        }
        let (first, last) = (range.start / AREA, (range.end() - 1) / AREA);
        let words = first / WORD..=last / WORD;
        let areas: u64 = words.map(|word| self.in_word(word, first, last)).sum();
        (areas * AREA * BLOCK_SIZE).min(range.len * BLOCK_SIZE)
    }

    fn in_word(&self, word: u64, first: u64, last: u64) -> u64 {
        let marks = |map: &BTreeMap<u64, u64>| map.get(&word).copied().unwrap_or(0);
        let (low, high) = (word * WORD, word * WORD + WORD - 1);
        let below = u64::MAX << first.saturating_sub(low).min(WORD - 1);
        let above = u64::MAX >> high.saturating_sub(last).min(WORD - 1);
        u64::from(((marks(&self.now) | marks(&self.before)) & below & above).count_ones())
    }

    /// Whether anything was written.
    pub fn is_empty(&self) -> bool {
        self.now.is_empty() && self.before.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB64: u64 = 65_536;

    #[test]
    fn areas_count_once_and_only_inside() {
        let mut seen = Footprint::default();
        let blocks = BlockRange::new;
        assert_eq!(seen.bytes(blocks(0, 1 << 20)), 0);
        (0..100).for_each(|_| seen.note(blocks(5, 1)));
        seen.note(blocks(15, 2));
        seen.note(blocks(0, 0));
        assert_eq!(seen.bytes(blocks(0, 1024)), 2 * KIB64);
        assert_eq!(seen.bytes(blocks(16, 1008)), KIB64);
        assert_eq!(seen.bytes(blocks(32, 1024)), 0);
        assert_eq!(seen.bytes(blocks(5, 1)), BLOCK_SIZE, "no more than was asked for");
        // Over the ends of words.
        seen.note(blocks(1000, 2100));
        assert_eq!(seen.bytes(blocks(1024, 1024)), 64 * KIB64);
        assert_eq!(seen.bytes(blocks(3072, 1024)), 2 * KIB64);
    }

    #[test]
    fn what_is_not_written_any_more_fades() {
        let mut seen = Footprint::default();
        seen.note(BlockRange::new(0, 1));
        (0..2 * GENERATION).for_each(|_| seen.note(BlockRange::new(1024, 1)));
        assert_eq!(seen.bytes(BlockRange::new(0, 1024)), 0);
        assert_eq!(seen.bytes(BlockRange::new(1024, 1024)), KIB64);
        assert!(!seen.is_empty());
    }
}
