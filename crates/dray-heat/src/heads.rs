//! [`Heads`]: a few hundred values by block number, found by a range of a few blocks.
//!
//! A table of chains, one for neighbourhoods of 32 blocks whose numbers spread to it: a search for
//! what is near a block looks into two of them at most, and what a search, an insertion or a removal
//! costs does not grow with what is there, as long as it is a few hundred.

use crate::spread::spread;

const NONE: u32 = u32::MAX;
/// Blocks of a neighbourhood.
const NEAR: u64 = 32;
const CHAINS: usize = 512;

/// Where a value lies, for as long as it is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot(u32);

#[derive(Clone, Copy, Debug)]
struct Entry<T> {
    block: u64,
    /// The next one of its chain.
    next: u32,
    value: Option<T>,
}

/// Values by block numbers; see the module.
#[derive(Clone, Debug)]
pub(crate) struct Heads<T> {
    /// The first entry of each chain; empty before the first insertion.
    chains: Vec<u32>,
    entries: Vec<Entry<T>>,
    unused: Vec<u32>,
}

impl<T> Default for Heads<T> {
    fn default() -> Self {
        Self { chains: Vec::new(), entries: Vec::new(), unused: Vec::new() }
    }
}

fn chain(neighbourhood: u64) -> usize {
    spread(neighbourhood) as usize % CHAINS
}

impl<T: Copy> Heads<T> {
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.unused.len()
    }

    /// What is at a place, and the block it belongs to.
    pub(crate) fn at(&self, place: Slot) -> Option<(u64, T)> {
        let entry = self.entries.get(place.0 as usize)?;
        entry.value.map(|value| (entry.block, value))
    }

    /// Where the value of a block is.
    pub(crate) fn place(&self, block: u64) -> Option<Slot> {
        self.last_in(block, block).map(|(_, place)| place)
    }

    /// The last block with a value in `from ..= to`, which are no more than [`NEAR`] blocks.
    pub(crate) fn last_in(&self, from: u64, to: u64) -> Option<(u64, Slot)> {
        if self.chains.is_empty() {
            return None;
        }
        let last = self.last_of(to / NEAR, from, to);
        if last.is_some() || from / NEAR == to / NEAR {
            return last;
        }
        self.last_of(from / NEAR, from, to)
    }

    fn last_of(&self, neighbourhood: u64, from: u64, to: u64) -> Option<(u64, Slot)> {
        let mut last: Option<(u64, Slot)> = None;
        let mut at = self.chains[chain(neighbourhood)];
        while at != NONE {
            let entry = &self.entries[at as usize];
            if (from..=to).contains(&entry.block) && last.is_none_or(|last| last.0 < entry.block) {
                last = Some((entry.block, Slot(at)));
            }
            at = entry.next;
        }
        last
    }

    /// Gives a block that has none a value.
    pub(crate) fn insert(&mut self, block: u64, value: T) -> Slot {
        if self.chains.is_empty() {
            self.chains = vec![NONE; CHAINS];
        }
        let first = &mut self.chains[chain(block / NEAR)];
        let entry = Entry { block, next: *first, value: Some(value) };
        let at = match self.unused.pop() {
            Some(at) => {
                self.entries[at as usize] = entry;
                at
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        *first = at;
        Slot(at)
    }

    /// Takes the value at a place, if there is one.
    pub(crate) fn remove(&mut self, place: Slot) -> Option<T> {
        let entry = self.entries.get_mut(place.0 as usize)?;
        let (value, next) = (entry.value.take()?, entry.next);
        let chain = chain(entry.block / NEAR);
        let (mut before, mut at) = (NONE, self.chains[chain]);
        while at != place.0 {
            (before, at) = (at, self.entries[at as usize].next);
        }
        match before {
            NONE => self.chains[chain] = next,
            before => self.entries[before as usize].next = next,
        }
        self.unused.push(place.0);
        Some(value)
    }

    /// Removes the values for which `keep`, which may change them, is false.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&mut T) -> bool) {
        for at in 0..self.entries.len() {
            if self.entries[at].value.as_mut().is_some_and(|value| !keep(value)) {
                self.remove(Slot(at as u32));
            }
        }
    }

    /// Blocks and their values, in no order that means anything.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, T)> + '_ {
        self.entries.iter().filter_map(|entry| entry.value.map(|value| (entry.block, value)))
    }

    /// Heap bytes.
    pub(crate) fn memory(&self) -> usize {
        (self.chains.capacity() + self.unused.capacity()) * size_of::<u32>()
            + self.entries.capacity() * size_of::<Entry<T>>()
    }
}
