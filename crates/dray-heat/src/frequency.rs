//! [`FrequencyList`]: chunks in the order of their access frequency, always ready.
//!
//! The structure of the Scheduling paper's figure 10: a list of frequencies, in each the list of
//! the chunks that have it. An access moves its chunk to the head of the list of its new
//! frequency. Links are indices into two arrays; a chunk has an entry from its first access on.

use crate::spread::Spread;
use std::collections::HashMap;

const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Chunk {
    id: u64,
    bucket: u32,
    prev: u32,
    next: u32,
}

#[derive(Clone, Debug)]
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
    index: HashMap<u64, u32, Spread>,
    chunks: Vec<Chunk>,
    buckets: Vec<Bucket>,
    unused: Vec<u32>,
    lowest: u32,
    highest: u32,
}

impl Default for FrequencyList {
    fn default() -> Self {
        Self {
            index: HashMap::default(),
            chunks: Vec::new(),
            buckets: Vec::new(),
            unused: Vec::new(),
            lowest: NONE,
            highest: NONE,
        }
    }
}

impl FrequencyList {
    /// Number of chunks with a frequency above zero.
    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(crate) fn contains(&self, id: u64) -> bool {
        self.index.contains_key(&id)
    }

    /// The frequency of a chunk, zero when it was never accessed.
    pub(crate) fn frequency(&self, id: u64) -> u64 {
        let Some(&chunk) = self.index.get(&id) else { return 0 };
        self.buckets[self.chunks[chunk as usize].bucket as usize].frequency
    }

    /// Raises the frequency of a chunk by `by`. Steps over the frequencies that lie between the old
    /// and the new one: none when `by` is one, never more than `by`.
    pub(crate) fn add(&mut self, id: u64, by: u64) {
        if by == 0 {
            return;
        }
        let (chunk, from) = match self.index.get(&id) {
            Some(&chunk) => (chunk, self.chunks[chunk as usize].bucket),
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
        let mut list = Self::default();
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
        let mut list = Self::default();
        for (id, frequency) in pairs {
            list.push_highest(id, frequency);
        }
        list
    }

    /// Heap bytes.
    pub(crate) fn memory(&self) -> usize {
        // std's table holds an entry and a control byte per place.
        self.index.capacity() * (size_of::<(u64, u32)>() + 1) * 8 / 7
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
        self.index.insert(id, chunk);
        chunk
    }

    /// The last bucket whose frequency is at most `frequency`, sought from bucket `from` upwards.
    fn last_at_most(&self, from: u32, frequency: u64) -> u32 {
        let mut at = from;
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
        let Bucket { prev, next, .. } = self.buckets[bucket as usize];
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
