//! Which parts of an image are written at all: what a chunk's rate alone does not tell.
//!
//! A log of one block and a table of a thousand may be written equally often; the one is dirty again
//! in one block, the other all over. Areas of 64 KiB are marked when they are written, in a word for
//! each chunk of 4 MiB. Marks fade: what was marked neither in this nor in the last generation of
//! 20,000 writes is forgotten. Two maps of at most a word and a number for each chunk written: 8 MiB
//! for a disk of 1 TiB of which every chunk is.

use dray_types::BlockRange;
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

    /// What of `range` is written lately, in whole areas of it, neighbours joined.
    pub fn areas(&self, range: BlockRange) -> Vec<BlockRange> {
        let mut areas: Vec<BlockRange> = Vec::new();
        if range.is_empty() || self.is_empty() {
            return areas;
        }
        for word in range.start / AREA / WORD..=(range.end() - 1) / AREA / WORD {
            let mut marks = self.marks(word);
            while marks != 0 {
                let area = word * WORD + u64::from(marks.trailing_zeros());
                marks &= marks - 1;
                let here = BlockRange::new(area * AREA, AREA).intersect(range);
                match areas.last_mut() {
                    Some(last) if last.end() == here.start => last.len += here.len,
                    _ if here.is_empty() => {}
                    _ => areas.push(here),
                }
            }
        }
        areas
    }

    fn marks(&self, word: u64) -> u64 {
        let of = |map: &BTreeMap<u64, u64>| map.get(&word).copied().unwrap_or(0);
        of(&self.now) | of(&self.before)
    }

    /// Whether anything was written.
    pub fn is_empty(&self) -> bool {
        self.now.is_empty() && self.before.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of `range` that are written, and in how many pieces.
    fn written(seen: &Footprint, range: BlockRange) -> (u64, usize) {
        let areas = seen.areas(range);
        assert!(areas.windows(2).all(|pair| pair[0].end() < pair[1].start), "{areas:?}");
        assert!(areas.iter().all(|area| range.contains(*area)), "{areas:?}");
        (areas.iter().map(|area| area.len).sum(), areas.len())
    }

    #[test]
    fn areas_count_once_and_only_inside() {
        let mut seen = Footprint::default();
        let blocks = BlockRange::new;
        assert_eq!(written(&seen, blocks(0, 1 << 20)), (0, 0));
        (0..100).for_each(|_| seen.note(blocks(5, 1)));
        seen.note(blocks(15, 2));
        seen.note(blocks(0, 0));
        assert_eq!(written(&seen, blocks(0, 1024)), (32, 1));
        assert_eq!(written(&seen, blocks(16, 1008)), (16, 1));
        assert_eq!(written(&seen, blocks(32, 1024)), (0, 0));
        assert_eq!(written(&seen, blocks(5, 1)), (1, 1), "no more than was asked for");
        seen.note(blocks(64, 1));
        assert_eq!(written(&seen, blocks(0, 1024)), (48, 2));
        // Over the ends of words.
        seen.note(blocks(1000, 2100));
        assert_eq!(written(&seen, blocks(1024, 1024)), (1024, 1));
        assert_eq!(written(&seen, blocks(3072, 1024)), (32, 1));
        assert_eq!(written(&seen, blocks(64, 4096)), (16 + 32 + 2048 + 32, 2));
    }

    #[test]
    fn what_is_not_written_any_more_fades() {
        let mut seen = Footprint::default();
        seen.note(BlockRange::new(0, 1));
        (0..2 * GENERATION).for_each(|_| seen.note(BlockRange::new(1024, 1)));
        assert_eq!(written(&seen, BlockRange::new(0, 1024)), (0, 0));
        assert_eq!(written(&seen, BlockRange::new(1024, 1024)), (16, 1));
        assert!(!seen.is_empty());
    }
}
