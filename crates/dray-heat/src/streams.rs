//! [`Streams`]: places from which accesses go on by address, and what lies ahead of them.
//!
//! A log, a file that grows, a reader that goes through one: what they access next was often never
//! accessed before, so that no count tells of it, and yet nothing is easier to foretell. A stream is
//! a place at which one access after the other began where the last had ended. How far it will go on
//! is taken from how far it has come.

use dray_types::BlockRange;
use std::collections::{BTreeMap, VecDeque};

/// An access goes on a stream if it begins so many blocks behind its head, at most, or one before
/// it: requests end within blocks, and small gaps are left for alignment.
const GAP: u64 = 16;
/// A stream of fewer blocks is chance.
const LEAST: u64 = 64;
/// Ends of single accesses that are remembered, to become streams.
const YOUNG: usize = 256;
/// Streams that are remembered.
const MOST: usize = 64;

/// A place from which accesses went on.
#[derive(Clone, Copy, Debug)]
struct Stream {
    /// Blocks that it has come.
    come: u64,
    /// When it last went on, in accesses.
    at: u64,
}

/// Where accesses go on by address; see the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Streams {
    accesses: u64,
    /// By their heads: the first block behind the last access.
    heads: BTreeMap<u64, Stream>,
    /// How many of them have come [`LEAST`] blocks.
    grown: usize,
    /// Heads that had not, and their last access, in that order; some have gone on since.
    young: VecDeque<(u64, u64)>,
}

impl Streams {
    /// Counts an access.
    pub(crate) fn access(&mut self, range: BlockRange) {
        if range.is_empty() {
            return;
        }
        self.accesses += 1;
        let near = range.start.saturating_sub(GAP)..=range.start + 1;
        let before = self.heads.range(near).next_back().map(|(&head, _)| head);
        match before {
            // A block written again and again does not come on.
            Some(head) if range.end() <= head => {}
            Some(head) => {
                let come = self.take(head) + range.end() - head;
                self.put(range.end(), come);
            }
            None => self.put(range.end(), range.len.min(LEAST - 1)),
        }
        self.forget();
    }

    /// Removes a stream; how far it has come.
    fn take(&mut self, head: u64) -> u64 {
        let come = self.heads.remove(&head).map_or(0, |stream| stream.come);
        self.grown -= usize::from(come >= LEAST);
        come
    }

    /// A stream has come so far; where one has its head already, the longer counts.
    fn put(&mut self, head: u64, come: u64) {
        let come = come.max(self.take(head));
        self.heads.insert(head, Stream { come, at: self.accesses });
        if come >= LEAST {
            self.grown += 1;
        } else {
            self.young.push_back((head, self.accesses));
        }
    }

    fn forget(&mut self) {
        if self.young.len() > YOUNG
            && let Some((head, at)) = self.young.pop_front()
            && self.heads.get(&head).is_some_and(|stream| stream.at == at)
        {
            self.take(head);
        }
        if self.grown > MOST {
            let grown = self.heads.iter().filter(|(_, stream)| stream.come >= LEAST);
            if let Some((&oldest, _)) = grown.min_by_key(|(_, stream)| stream.at) {
                self.take(oldest);
            }
        }
    }

    /// Everything known counts half.
    pub(crate) fn age(&mut self) {
        self.young.clear();
        self.heads.values_mut().for_each(|stream| stream.come /= 2);
        self.heads.retain(|_, stream| stream.come >= LEAST);
        self.grown = self.heads.len();
    }

    /// What lies ahead of the streams, `times` as far as they have come, as chunks `from .. to`
    /// below `chunks`, in address order without overlaps.
    pub(crate) fn ahead(&self, chunk_blocks: u64, chunks: u64, times: u64) -> Vec<(u64, u64)> {
        let mut ahead: Vec<(u64, u64)> = Vec::new();
        for (&head, stream) in self.heads.iter().filter(|(_, stream)| stream.come >= LEAST) {
            let from = head / chunk_blocks;
            let to = (head + stream.come.saturating_mul(times)).div_ceil(chunk_blocks).min(chunks);
            match ahead.last_mut() {
                Some(last) if last.1 >= from => last.1 = last.1.max(to),
                _ if from < to => ahead.push((from, to)),
                _ => {}
            }
        }
        ahead
    }

    /// Heap bytes.
    pub(crate) fn memory(&self) -> usize {
        self.heads.len() * 2 * size_of::<(u64, Stream)>()
            + self.young.capacity() * size_of::<(u64, u64)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ahead(streams: &Streams) -> Vec<(u64, u64)> {
        streams.ahead(1, 1 << 30, 1)
    }

    /// Accesses of 8 blocks, the first at `from`.
    fn goes_on(streams: &mut Streams, from: u64, accesses: u64) {
        (0..accesses).for_each(|n| streams.access(BlockRange::new(from + n * 8, 8)));
    }

    #[test]
    fn a_stream_is_expected_to_go_as_far_as_it_has_come() {
        let mut streams = Streams::default();
        goes_on(&mut streams, 1000, 7);
        assert_eq!(ahead(&streams), [], "too short to tell");
        goes_on(&mut streams, 1056, 13);
        assert_eq!(ahead(&streams), [(1160, 1320)]);
        assert_eq!(streams.ahead(32, 40, 4), [(36, 40)], "in chunks, up to the end of the image");
        streams.age();
        assert_eq!(ahead(&streams), [(1160, 1240)]);
        streams.age();
        assert_eq!(ahead(&streams), [], "it has not gone on");
    }

    #[test]
    fn it_goes_on_among_others_with_small_gaps_and_parts_of_blocks() {
        let mut streams = Streams::default();
        for n in 0..40 {
            // One block is written twice each time, three are left out.
            streams.access(BlockRange::new(5000 + n * 10, 8));
            streams.access(BlockRange::new(5007 + n * 10, 1));
            streams.access(BlockRange::new(900_000 + n * n * 7919, 4));
        }
        assert_eq!(ahead(&streams), [(5398, 5398 + 398)]);
    }

    #[test]
    fn what_stays_in_its_place_is_no_stream() {
        let mut streams = Streams::default();
        for n in 0..1000 {
            streams.access(BlockRange::new(77, 8));
            streams.access(BlockRange::new(n * 7_368_787 % (1 << 28), 8));
        }
        assert_eq!(ahead(&streams), []);
        assert!(streams.memory() < 64 << 10);
    }

    #[test]
    fn the_streams_that_went_on_last_are_remembered() {
        let mut streams = Streams::default();
        for n in 0..200 {
            goes_on(&mut streams, n << 20, 10 + n);
        }
        let ahead = ahead(&streams);
        assert_eq!(ahead.len(), MOST);
        assert!(ahead.iter().all(|&(from, _)| from >> 20 >= 200 - MOST as u64));
        assert!(streams.memory() < 64 << 10);
    }

    #[test]
    fn a_stream_that_reaches_another_head_goes_on_from_there() {
        let mut streams = Streams::default();
        streams.access(BlockRange::new(160, 8));
        goes_on(&mut streams, 0, 21);
        assert_eq!(ahead(&streams), [(168, 336)]);
        // No single access that is forgotten takes it along.
        (0..1000).for_each(|n| streams.access(BlockRange::new((1 << 20) + n * 7919, 8)));
        assert_eq!(ahead(&streams), [(168, 336)]);
    }

    #[test]
    fn streams_that_meet_are_one_range() {
        let mut streams = Streams::default();
        goes_on(&mut streams, 0, 100);
        goes_on(&mut streams, 1000, 10);
        assert_eq!(ahead(&streams), [(800, 1600)]);
    }
}
