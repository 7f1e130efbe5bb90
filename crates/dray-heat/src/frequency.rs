//! [`FrequencyList`]: chunks in the order of their access frequency, always ready.
//!
//! The structure of the Scheduling paper's figure 10: a list of frequencies, in each the list of
//! the chunks that have it. An access moves its chunk to the head of the list of its new
//! frequency. Links are indices into two arrays; a chunk has an entry from its first access on.

use crate::index::Index;
use crate::lows::{self, Lows};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Chunk {
    id: u64,
    bucket: u32,
    prev: u32,
    next: u32,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    frequency: u64,
    head: u32,
    tail: u32,
    prev: u32,
    next: u32,
}

/// Chunks by frequency; see the module.
#[derive(Clone, Debug)]
pub(crate) struct FrequencyList {
    /// Places in `chunks` by chunk number.
    index: Index,
    chunks: Vec<Chunk>,
    buckets: Vec<Bucket>,
    unused: Vec<u32>,
    /// Places in `buckets` by frequency, of those that are low.
    lows: Lows,
    lowest: u32,
    highest: u32,
}

impl Default for FrequencyList {
    fn default() -> Self {
        Self {
            index: Index::default(),
            chunks: Vec::new(),
            buckets: Vec::new(),
            unused: Vec::new(),
            lows: Lows::default(),
            lowest: NONE,
            highest: NONE,
        }
    }
}

impl FrequencyList {
    /// Without chunks, with room for `len`.
    fn with_capacity(len: usize) -> Self {
        Self {
            index: Index::with_capacity(len),
            chunks: Vec::with_capacity(len),
            ..Self::default()
        }
    }

    /// Number of chunks with a frequency above zero.
    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(crate) fn contains(&self, id: u64) -> bool {
        self.place(id).is_some()
    }

    /// The chunks with a frequency, in no order that means anything.
    pub(crate) fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        self.chunks.iter().map(|chunk| chunk.id)
    }

    /// The frequency of a chunk, zero when it was never accessed.
    pub(crate) fn frequency(&self, id: u64) -> u64 {
        let Some(chunk) = self.place(id) else { return 0 };
        self.buckets[self.chunks[chunk as usize].bucket as usize].frequency
    }

    fn place(&self, id: u64) -> Option<u32> {
        self.index.get(id, |place| self.chunks[place as usize].id)
    }

    /// Raises the frequency of a chunk by `by`. Steps over the frequencies that lie between the old
    /// and the new one where they are not low ([`Lows`]): none when `by` is one, never more than `by`.
    pub(crate) fn add(&mut self, id: u64, by: u64) {
        if by == 0 {
            return;
        }
        let (chunk, from) = match self.place(id) {
            Some(chunk) => (chunk, self.chunks[chunk as usize].bucket),
            None => (self.new_chunk(id), NONE),
        };
        let before = if from == NONE { 0 } else { self.buckets[from as usize].frequency };
        let frequency = before.saturating_add(by);
        let below = self.last_at_most(from, frequency);
        let to = if below != NONE && self.buckets[below as usize].frequency == frequency {
            below
        } else {
            self.new_bucket(frequency, below)
        };
        if to != from {
            self.unlink(chunk);
            self.link_head(chunk, to);
        }
    }

    /// Chunks and frequencies, least frequent first; in a frequency the last accessed first.
    pub(crate) fn ascending(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.walk(self.lowest, |bucket| bucket.next, |bucket| bucket.head, |chunk| chunk.next)
    }

    /// Most frequent first; in a frequency the last accessed first.
    pub(crate) fn descending(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.walk(self.highest, |bucket| bucket.prev, |bucket| bucket.head, |chunk| chunk.next)
    }

    /// Chunks in ascending order, oldest first in a frequency: adding them in this order to an
    /// empty list with [`Self::push_highest`] makes the same list.
    pub(crate) fn ascending_oldest_first(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.walk(self.lowest, |bucket| bucket.next, |bucket| bucket.tail, |chunk| chunk.prev)
    }

    /// Adds a chunk that is not in the list and not below any frequency in it; false otherwise.
    pub(crate) fn push_highest(&mut self, id: u64, frequency: u64) -> bool {
        let highest = match self.highest {
            NONE => 0,
            highest => self.buckets[highest as usize].frequency,
        };
        if frequency == 0 || frequency < highest || self.contains(id) {
            return false;
        }
        let chunk = self.new_chunk(id);
        let bucket = if frequency == highest {
            self.highest
        } else {
            self.new_bucket(frequency, self.highest)
        };
        self.link_head(chunk, bucket);
        true
    }

    /// The list with every frequency halved, rounded down; chunks that reach zero are forgotten.
    /// Halves from `16 × unit` on are rounded down to a multiple of `unit`: a step of a few units
    /// then passes a few frequencies, however long ago they were counted.
    pub(crate) fn halved(&self, unit: u64) -> Self {
        let mut list = Self::with_capacity(self.len());
        for (id, frequency) in self.ascending_oldest_first() {
            let half = frequency / 2;
            let odd = if half < 16 * unit { 0 } else { half % unit };
            list.push_highest(id, half - odd);
        }
        list
    }

    /// The list for chunks of twice the size: pairs become one chunk with the sum of both.
    pub(crate) fn paired(&self) -> Self {
        let mut sums = std::collections::BTreeMap::new();
        for (id, frequency) in self.ascending_oldest_first() {
            let sum: &mut u64 = sums.entry(id / 2).or_default();
            *sum = sum.saturating_add(frequency);
        }
        let mut pairs: Vec<_> = sums.into_iter().collect();
        pairs.sort_by_key(|&(_, frequency)| frequency);
        let mut list = Self::with_capacity(pairs.len());
        for (id, frequency) in pairs {
            list.push_highest(id, frequency);
        }
        list
    }

    /// Heap bytes.
    pub(crate) fn memory(&self) -> usize {
        self.index.memory()
            + self.lows.memory()
            + self.chunks.capacity() * size_of::<Chunk>()
            + self.buckets.capacity() * size_of::<Bucket>()
            + self.unused.capacity() * size_of::<u32>()
    }

    fn walk<'a>(
        &'a self,
        first: u32,
        next_bucket: fn(&Bucket) -> u32,
        first_chunk: fn(&Bucket) -> u32,
        next_chunk: fn(&Chunk) -> u32,
    ) -> impl Iterator<Item = (u64, u64)> + 'a {
        let mut bucket = first;
        let mut chunk =
            if first == NONE { NONE } else { first_chunk(&self.buckets[first as usize]) };
        std::iter::from_fn(move || {
            if chunk == NONE {
                return None;
            }
            let of = &self.buckets[bucket as usize];
            let at = &self.chunks[chunk as usize];
            let found = (at.id, of.frequency);
            chunk = next_chunk(at);
            if chunk == NONE {
                bucket = next_bucket(of);
                if bucket != NONE {
                    chunk = first_chunk(&self.buckets[bucket as usize]);
                }
            }
            Some(found)
        })
    }

    fn new_chunk(&mut self, id: u64) -> u32 {
        let chunk = self.chunks.len() as u32;
        self.chunks.push(Chunk { id, bucket: NONE, prev: NONE, next: NONE });
        self.index.insert(id, chunk, |place| self.chunks[place as usize].id);
        chunk
    }

    /// The last bucket whose frequency is at most `frequency`, sought from bucket `from`, or the last
    /// low one, upwards.
    fn last_at_most(&self, from: u32, frequency: u64) -> u32 {
        let is_low = from == NONE || self.buckets[from as usize].frequency < lows::END;
        let mut at = if is_low { self.lows.last_at_most(frequency).unwrap_or(NONE) } else { from };
        loop {
            let next = if at == NONE { self.lowest } else { self.buckets[at as usize].next };
            if next == NONE || self.buckets[next as usize].frequency > frequency {
                return at;
            }
            at = next;
        }
    }

    fn new_bucket(&mut self, frequency: u64, below: u32) -> u32 {
        let above = if below == NONE { self.lowest } else { self.buckets[below as usize].next };
        let new = Bucket { frequency, head: NONE, tail: NONE, prev: below, next: above };
        let at = match self.unused.pop() {
            Some(at) => {
                self.buckets[at as usize] = new;
                at
            }
            None => {
                self.buckets.push(new);
                (self.buckets.len() - 1) as u32
            }
        };
        self.lows.insert(frequency, at);
        match below {
            NONE => self.lowest = at,
            below => self.buckets[below as usize].next = at,
        }
        match above {
            NONE => self.highest = at,
            above => self.buckets[above as usize].prev = at,
        }
        at
    }

    fn unlink(&mut self, chunk: u32) {
        let Chunk { bucket, prev, next, .. } = self.chunks[chunk as usize];
        if bucket == NONE {
            return;
        }
        match prev {
            NONE => self.buckets[bucket as usize].head = next,
            prev => self.chunks[prev as usize].next = next,
        }
        match next {
            NONE => self.buckets[bucket as usize].tail = prev,
            next => self.chunks[next as usize].prev = prev,
        }
        if self.buckets[bucket as usize].head == NONE {
            self.remove_bucket(bucket);
        }
    }

    fn remove_bucket(&mut self, bucket: u32) {
        let Bucket { frequency, prev, next, .. } = self.buckets[bucket as usize];
        self.lows.remove(frequency);
        match prev {
            NONE => self.lowest = next,
            prev => self.buckets[prev as usize].next = next,
        }
        match next {
            NONE => self.highest = prev,
            next => self.buckets[next as usize].prev = prev,
        }
        self.unused.push(bucket);
    }

    fn link_head(&mut self, chunk: u32, bucket: u32) {
        let head = self.buckets[bucket as usize].head;
        match head {
            NONE => self.buckets[bucket as usize].tail = chunk,
            head => self.chunks[head as usize].prev = chunk,
        }
        self.buckets[bucket as usize].head = chunk;
        let at = &mut self.chunks[chunk as usize];
        (at.bucket, at.prev, at.next) = (bucket, NONE, head);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Chunks and frequencies, those that were accessed last in front.
    #[derive(Default)]
    struct Model(Vec<(u64, u64)>);

    impl Model {
        fn add(&mut self, id: u64, by: u64) {
            let at = self.0.iter().position(|it| it.0 == id);
            let before = at.map_or(0, |at| self.0[at].1);
            let frequency = before.saturating_add(by);
            if frequency != before {
                at.map(|at| self.0.remove(at));
                self.0.insert(0, (id, frequency));
            }
        }

        fn ascending(&self) -> Vec<(u64, u64)> {
            let mut all = self.0.clone();
            all.sort_by_key(|it| it.1);
            all
        }

        fn halved(&self, unit: u64) -> Self {
            let mut all: Vec<(u64, u64)> = self.0.clone();
            // Those that were more frequent count as accessed later.
            all.sort_by_key(|it| std::cmp::Reverse(it.1));
            all.iter_mut().for_each(|it| it.1 /= 2);
            let round = |it: &mut (u64, u64)| {
                it.1 -= if it.1 < 16 * unit { 0 } else { it.1 % unit };
            };
            all.iter_mut().for_each(round);
            all.retain(|it| it.1 > 0);
            Self(all)
        }
    }

    fn same(list: &FrequencyList, model: &Model) {
        let ascending = model.ascending();
        assert_eq!(list.ascending().collect::<Vec<_>>(), ascending);
        let mut descending = model.0.clone();
        descending.sort_by_key(|it| std::cmp::Reverse(it.1));
        assert_eq!(list.descending().collect::<Vec<_>>(), descending);
        let mut oldest: Vec<_> = model.0.iter().rev().copied().collect();
        oldest.sort_by_key(|it| it.1);
        assert_eq!(list.ascending_oldest_first().collect::<Vec<_>>(), oldest);
        assert_eq!(list.len(), ascending.len());
        for (id, frequency) in ascending {
            assert_eq!((list.frequency(id), list.contains(id)), (frequency, true));
        }
        assert!(!list.contains(1 << 40));
    }

    proptest! {
        #[test]
        fn the_list_is_a_stable_sort_by_frequency(
            steps in prop::collection::vec(
                (0u64..40, prop_oneof![Just(16u64), 0u64..600, 900u64..5000, Just(u64::MAX / 2)]),
                0..300,
            ),
            every in 5usize..100,
        ) {
            let (mut list, mut model) = (FrequencyList::default(), Model::default());
            for (at, (id, by)) in steps.into_iter().enumerate() {
                list.add(id * id * 7919, by);
                model.add(id * id * 7919, by);
                if at % every == 0 {
                    same(&list, &model);
                    (list, model) = (list.halved(16), model.halved(16));
                    same(&list, &model);
                }
            }
            same(&list, &model);
        }
    }
}
