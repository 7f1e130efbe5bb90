//! Which parts of an image are written at all: what a chunk's rate alone does not tell.
//!
//! A log of one block and a table of a thousand may be written equally often; the one is dirty again
//! in one block, the other all over. Areas of 64 KiB are marked when they are written, in a word for
//! each chunk of 4 MiB. Marks fade: what was marked neither in this nor in the last generation of
//! 20,000 writes is forgotten. Of the reads of such a chunk it is counted how many are of marked
//! areas: only these wait when what is written is missing. Two maps of at most three words for each
//! chunk written: 12 MiB for a disk of 1 TiB of which every chunk is.

use dray_types::BlockRange;
use std::collections::BTreeMap;
use std::mem;

/// Blocks of an area: 64 KiB.
const AREA: u64 = 16;
/// Areas of a word.
const WORD: u64 = 64;
/// Writes after which a generation ends: one round of heat.
const GENERATION: u32 = 20_000;
/// A read of an area that was not seen may have been missed: half a read, as where a share is
/// estimated of a few trials (Krichevsky and Trofimov).
const UNSEEN: f64 = 0.5;

/// The marks of one image.
#[derive(Clone, Debug, Default)]
pub struct Footprint {
    now: BTreeMap<u64, Word>,
    before: BTreeMap<u64, Word>,
    writes: u32,
}

/// What is known of 64 areas.
#[derive(Clone, Copy, Debug, Default)]
struct Word {
    marks: u64,
    /// Reads since the first mark.
    reads: u32,
    /// Those of an area that was marked.
    hits: u32,
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
        for (word, mask) in words(range) {
            self.now.entry(word).or_default().marks |= mask;
        }
    }

    /// These blocks were read.
    pub fn note_read(&mut self, range: BlockRange) {
        for (word, mask) in words(range) {
            if let Some(word) = self.now.get_mut(&word) {
                word.reads = word.reads.saturating_add(1);
                word.hits = word.hits.saturating_add(u32::from(word.marks & mask != 0));
            }
        }
    }

    /// The share of the reads of `range` that are of its areas: all of them as far as nobody knows.
    pub fn share_read(&self, range: BlockRange) -> f64 {
        let (mut reads, mut hits) = (0.0, 0.0);
        for (word, _) in words(range) {
            for word in [&self.now, &self.before].into_iter().filter_map(|map| map.get(&word)) {
                reads += f64::from(word.reads);
                hits += f64::from(word.hits);
            }
        }
        (hits + UNSEEN) / (reads + UNSEEN)
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
        let of = |map: &BTreeMap<u64, Word>| map.get(&word).map_or(0, |word| word.marks);
        of(&self.now) | of(&self.before)
    }

    /// Whether anything was written.
    pub fn is_empty(&self) -> bool {
        self.now.is_empty() && self.before.is_empty()
    }
}

/// The words that a range touches, and its areas in each.
fn words(range: BlockRange) -> impl Iterator<Item = (u64, u64)> {
    let (first, last) = (range.start / AREA, range.end().saturating_sub(1) / AREA);
    let words = first / WORD..if range.is_empty() { 0 } else { last / WORD + 1 };
    words.map(move |word| {
        let from = first.max(word * WORD) % WORD;
        let to = last.min(word * WORD + WORD - 1) % WORD;
        (word, u64::MAX >> (WORD - 1 - to) & u64::MAX << from)
    })
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
    fn reads_of_what_is_written_are_told_from_those_beside_it() {
        let mut seen = Footprint::default();
        let (chunk, log) = (BlockRange::new(0, 1024), BlockRange::new(32, 1));
        assert_eq!(seen.share_read(chunk), 1.0, "nobody knows");
        seen.note_read(log);
        seen.note(log);
        assert_eq!(seen.share_read(chunk), 1.0, "nor of reads before it was written");
        (0..99).for_each(|_| seen.note_read(BlockRange::new(64, 16)));
        assert!(seen.share_read(chunk) < 0.01);
        seen.note_read(BlockRange::new(40, 40));
        assert_eq!(seen.share_read(chunk), 1.5 / 100.5);
        assert_eq!(seen.share_read(BlockRange::new(1024, 1024)), 1.0);
        // Both generations count, and the next one does not.
        (0..GENERATION).for_each(|_| seen.note(log));
        (0..100).for_each(|_| seen.note_read(log));
        assert_eq!(seen.share_read(chunk), 101.5 / 200.5);
        (0..GENERATION).for_each(|_| seen.note(log));
        assert_eq!(seen.share_read(chunk), 1.0);
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
