//! [`Streams`]: places from which accesses go on by address, and what lies ahead of them.
//!
//! A log, a file that grows, a reader that goes through one: what they access next was often never
//! accessed before, so that no count tells of it, and yet nothing is easier to foretell. A stream is
//! a place at which one access after the other began where the last had ended. How far it will go on
//! is taken from how far it has come.

use crate::heads::{Heads, Slot};
use dray_types::BlockRange;
use std::collections::VecDeque;

/// An access goes on a stream if it begins so many blocks behind its head, at most, or one before
/// it: requests end within blocks, and small gaps are left for alignment.
const GAP: u64 = 16;
/// A stream of fewer blocks is chance.
const LEAST: u64 = 64;
/// Ends of single accesses that are remembered, to become streams.
pub(crate) const YOUNG: usize = 256;
/// Streams that are remembered.
pub(crate) const MOST: usize = 64;

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
    heads: Heads<Stream>,
    /// How many of them have come [`LEAST`] blocks.
    grown: usize,
    /// Heads that had not, and their last access, in that order; some have gone on since.
    young: VecDeque<(Slot, u64)>,
    /// The same of heads that had, so that the oldest need not be searched for.
    old: VecDeque<(Slot, u64)>,
}

impl Streams {
    /// The stream on which an access goes on.
    fn before(&self, range: BlockRange) -> Option<(u64, Slot)> {
        self.heads.last_in(range.start.saturating_sub(GAP), range.start + 1)
    }

    /// Whether an access goes on where another one ended.
    pub(crate) fn goes_on(&self, range: BlockRange) -> bool {
        self.before(range).is_some()
    }

    /// Counts an access.
    pub(crate) fn access(&mut self, range: BlockRange) {
        if range.is_empty() {
            return;
        }
        self.accesses += 1;
        match self.before(range) {
            // A block written again and again does not come on.
            Some((head, _)) if range.end() <= head => {}
            Some((head, place)) => {
                let come = self.take(place) + range.end() - head;
                self.put(range.end(), come);
            }
            None => self.put(range.end(), range.len.min(LEAST - 1)),
        }
        self.forget();
    }

    /// Removes a stream; how far it has come.
    fn take(&mut self, place: Slot) -> u64 {
        let come = self.heads.remove(place).map_or(0, |stream| stream.come);
        self.grown -= usize::from(come >= LEAST);
        come
    }

    /// A stream has come so far; where one has its head already, the longer counts.
    fn put(&mut self, head: u64, come: u64) {
        let come = match self.heads.place(head) {
            Some(place) => come.max(self.take(place)),
            None => come,
        };
        let at = self.accesses;
        let place = self.heads.insert(head, Stream { come, at });
        if come >= LEAST {
            self.grown += 1;
            self.old.push_back((place, at));
        } else {
            self.young.push_back((place, at));
        }
    }

    /// Head and blocks come of the stream whose last access this is.
    fn there(&self, &(place, at): &(Slot, u64)) -> Option<(u64, u64)> {
        let (head, stream) = self.heads.at(place)?;
        (stream.at == at).then_some((head, stream.come))
    }

    fn is_there(&self, last: &(Slot, u64)) -> bool {
        self.there(last).is_some()
    }

    fn forget(&mut self) {
        if self.young.len() > YOUNG
            && let Some(first) = self.young.pop_front()
            && self.is_there(&first)
        {
            self.take(first.0);
        }
        while self.grown > MOST
            && let Some(first) = self.old.pop_front()
        {
            if self.is_there(&first) {
                self.take(first.0);
            }
        }
        if self.old.len() > 4 * MOST {
            self.forget_gone();
        }
    }

    /// Of each stream only its last access stays in the list of them.
    fn forget_gone(&mut self) {
        let mut old = std::mem::take(&mut self.old);
        old.retain(|last| self.is_there(last));
        self.old = old;
    }

    /// Everything known counts half.
    pub(crate) fn age(&mut self) {
        self.young.clear();
        self.heads.retain(|stream| {
            stream.come /= 2;
            stream.come >= LEAST
        });
        self.grown = self.heads.len();
        self.forget_gone();
    }

    /// What lies ahead of the streams, `times` as far as they have come, as chunks `from .. to`
    /// below `chunks`, in address order without overlaps.
    pub(crate) fn ahead(&self, chunk_blocks: u64, chunks: u64, times: u64) -> Vec<(u64, u64)> {
        let mut grown: Vec<(u64, u64)> = self
            .heads
            .iter()
            .filter(|(_, stream)| stream.come >= LEAST)
            .map(|(head, stream)| (head, stream.come))
            .collect();
        grown.sort_unstable();
        let mut ahead: Vec<(u64, u64)> = Vec::new();
        for (head, come) in grown {
            let from = head / chunk_blocks;
            let to = (head + come.saturating_mul(times)).div_ceil(chunk_blocks).min(chunks);
            match ahead.last_mut() {
                Some(last) if last.1 >= from => last.1 = last.1.max(to),
                _ if from < to => ahead.push((from, to)),
                _ => {}
            }
        }
        ahead
    }

    /// Heads of streams and the blocks that they have come, those that went on last behind.
    pub(crate) fn grown(&self) -> Vec<(u64, u64)> {
        self.old.iter().filter_map(|last| self.there(last)).collect()
    }

    /// The same of what may become one; none where it has gone on since.
    pub(crate) fn young(&self) -> Vec<Option<(u64, u64)>> {
        self.young.iter().map(|last| self.there(last)).collect()
    }

    /// What [`Self::grown`] and [`Self::young`] told of an image of `blocks` blocks; none when they
    /// can not have told that.
    pub(crate) fn restored(
        grown: &[(u64, u64)],
        young: &[Option<(u64, u64)>],
        blocks: u64,
    ) -> Option<Self> {
        let mut streams = Self::default();
        if grown.len() > MOST || young.len() > YOUNG {
            return None;
        }
        let known = grown.iter().map(|&it| (Some(it), true));
        for (it, is_grown) in known.chain(young.iter().map(|&it| (it, false))) {
            let Some((head, come)) = it else {
                // Nothing was ever at a place before the first access.
                streams.young.push_back((Slot::default(), 0));
                continue;
            };
            let bounded = head <= blocks && come <= blocks.saturating_add(LEAST);
            if !bounded || (come >= LEAST) != is_grown || streams.heads.place(head).is_some() {
                return None;
            }
            streams.accesses += 1;
            streams.put(head, come);
        }
        Some(streams)
    }

    /// Heap bytes.
    pub(crate) fn memory(&self) -> usize {
        self.heads.memory()
            + (self.young.capacity() + self.old.capacity()) * size_of::<(Slot, u64)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    /// The same, found by a search through everything.
    #[derive(Default)]
    struct Model {
        accesses: u64,
        /// Head, blocks come, last access.
        all: Vec<(u64, u64, u64)>,
        young: Vec<(u64, u64)>,
    }

    impl Model {
        fn access(&mut self, range: BlockRange) {
            self.accesses += 1;
            let near = range.start.saturating_sub(GAP)..=range.start + 1;
            let before = self.all.iter().copied().filter(|it| near.contains(&it.0)).max();
            let mut come = range.len.min(LEAST - 1);
            if let Some((head, far, _)) = before {
                if range.end() <= head {
                    return self.forget();
                }
                come = far + range.end() - head;
            }
            let head = range.end();
            let there = self.all.iter().filter(|it| it.0 == head).map(|it| it.1).max();
            self.all.retain(|it| it.0 != head && before != Some(*it));
            let come = come.max(there.unwrap_or(0));
            self.all.push((head, come, self.accesses));
            if come < LEAST {
                self.young.push((head, self.accesses));
            }
            self.forget();
        }

        fn forget(&mut self) {
            if self.young.len() > YOUNG {
                let (head, at) = self.young.remove(0);
                self.all.retain(|it| (it.0, it.2) != (head, at));
            }
            let grown = self.all.iter().filter(|it| it.1 >= LEAST);
            if grown.clone().count() > MOST {
                let oldest = grown.map(|it| it.2).min();
                self.all.retain(|it| it.1 < LEAST || Some(it.2) != oldest);
            }
        }

        fn age(&mut self) {
            self.young.clear();
            self.all.iter_mut().for_each(|it| it.1 /= 2);
            self.all.retain(|it| it.1 >= LEAST);
        }

        fn grown(&self) -> Vec<(u64, u64)> {
            let mut grown: Vec<_> = self.all.iter().filter(|it| it.1 >= LEAST).collect();
            grown.sort_by_key(|it| it.2);
            grown.into_iter().map(|it| (it.0, it.1)).collect()
        }
    }

    /// Accesses that go on, collide, or are single ones, by three numbers drawn at random.
    fn step(heads: &mut [u64], (which, kind, len): (usize, u8, u64)) -> BlockRange {
        let head = &mut heads[which];
        let start = match kind {
            0 => *head + len % GAP,
            1 => head.saturating_sub(len % 3),
            2 => which as u64 * 7919 + len * 104_729 % (1 << 20),
            _ => *head,
        };
        *head = start + len;
        BlockRange::new(start, len)
    }

    proptest! {
        #[test]
        fn streams_are_those_of_a_search(
            count in 1usize..200,
            steps in prop::collection::vec((any::<prop::sample::Index>(), 0u8..6, 1u64..90), 0..1500),
            every in 100usize..2000,
        ) {
            let mut heads: Vec<u64> = (0..count as u64).map(|n| n * 1000).collect();
            let (mut streams, mut model) = (Streams::default(), Model::default());
            for (at, (which, kind, len)) in steps.into_iter().enumerate() {
                let range = step(&mut heads, (which.index(count), kind, len));
                streams.access(range);
                model.access(range);
                prop_assert_eq!(streams.grown(), model.grown());
                if at % every == every - 1 {
                    streams.age();
                    model.age();
                }
                if at % 97 == 0 {
                    streams = Streams::restored(&streams.grown(), &streams.young(), 1 << 40).unwrap();
                }
            }
            prop_assert!(streams.memory() < 64 << 10, "{}", streams.memory());
        }
    }

    #[test]
    fn what_can_not_have_been_kept_is_refused() {
        let restored = |grown: &[_], young: &[_]| Streams::restored(grown, young, 1000).is_some();
        assert!(restored(&[(5, 64), (1000, 1064)], &[None, Some((7, 63))]));
        assert!(!restored(&[(1001, 64)], &[]), "past the image's end");
        assert!(!restored(&[(9, 1065)], &[]), "further than the image is long");
        assert!(!restored(&[(9, 63)], &[]), "not grown");
        assert!(!restored(&[], &[Some((9, 64))]), "grown");
        assert!(!restored(&[(9, 64)], &[Some((9, 3))]), "twice");
        let many: Vec<_> = (0..=MOST as u64).map(|n| (n, 64)).collect();
        assert!(!restored(&many, &[]));
        assert!(!restored(&[], &[None; YOUNG + 1]));
    }
}
