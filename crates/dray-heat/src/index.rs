//! [`Index`]: where in an array the entry of a number lies.
//!
//! A hash table of nothing but places: the numbers are read where they lie, in the entries that the
//! caller wants next anyway. Half of it is empty at least, so that a search looks at a place or two.

use crate::spread::spread;

const NONE: u32 = u32::MAX;
const LEAST: usize = 64;

/// Places by number; see the module. `number` of each call tells the number at a place.
#[derive(Clone, Debug, Default)]
pub(crate) struct Index {
    /// As many as a power of two, or none.
    places: Vec<u32>,
    len: usize,
}

impl Index {
    /// With room for `len` numbers.
    pub(crate) fn with_capacity(len: usize) -> Self {
        Self { places: vec![NONE; (2 * len).next_power_of_two().max(LEAST)], len: 0 }
    }

    /// The place of `id`.
    pub(crate) fn get(&self, id: u64, number: impl Fn(u32) -> u64) -> Option<u32> {
        let mask = self.places.len().checked_sub(1)?;
        let mut at = spread(id) as usize & mask;
        loop {
            match self.places[at] {
                NONE => return None,
                place if number(place) == id => return Some(place),
                _ => at = (at + 1) & mask,
            }
        }
    }

    /// Adds a number that is not there.
    pub(crate) fn insert(&mut self, id: u64, place: u32, number: impl Fn(u32) -> u64) {
        if 2 * (self.len + 1) > self.places.len() {
            let mut wider = Self::with_capacity(2 * self.len);
            for place in self.places.iter().copied().filter(|&place| place != NONE) {
                wider.put(number(place), place);
            }
            *self = wider;
        }
        self.put(id, place);
    }

    fn put(&mut self, id: u64, place: u32) {
        let mask = self.places.len() - 1;
        let mut at = spread(id) as usize & mask;
        while self.places[at] != NONE {
            at = (at + 1) & mask;
        }
        self.places[at] = place;
        self.len += 1;
    }

    /// Heap bytes.
    pub(crate) fn memory(&self) -> usize {
        self.places.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_in_is_found_and_nothing_else() {
        let numbers: Vec<u64> = (0..5000).map(|n| n * n * 977).collect();
        let number = |place: u32| numbers[place as usize];
        let mut index = Index::default();
        assert_eq!(index.get(0, number), None);
        for (place, &id) in numbers.iter().enumerate() {
            index.insert(id, place as u32, number);
        }
        for (place, &id) in numbers.iter().enumerate() {
            assert_eq!(index.get(id, number), Some(place as u32));
            assert_eq!(index.get(id + 1, number).is_some(), numbers.contains(&(id + 1)));
        }
        assert!(index.memory() <= 4 * 4 * 5000, "{}", index.memory());
    }
}
