//! Where content was seen, by the first 16 bytes of its hash: whoever follows an entry compares all
//! 32 of what is there.

use dray_wire::frame::PieceHash;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Entries of one half of the memory; with two halves about 30 MB.
const HALF: usize = 1 << 18;

/// The part of a hash that finds an entry.
type Key = [u8; 16];

/// A piece of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Spot {
    pub(super) file: u32,
    pub(super) piece: u32,
}

fn key(hash: &PieceHash) -> Key {
    let mut key = [0; 16];
    key.copy_from_slice(&hash[..16]);
    key
}

/// Entries in two halves: when the younger one is full it becomes the older one, and what was in
/// that is forgotten.
#[derive(Default)]
struct Halves {
    young: HashMap<Key, Spot>,
    old: HashMap<Key, Spot>,
}

/// The entries.
#[derive(Default)]
pub(super) struct Index {
    memory: Mutex<Halves>,
}

impl Index {
    fn memory(&self) -> MutexGuard<'_, Halves> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, hash: &PieceHash) -> Option<Spot> {
        let memory = self.memory();
        let key = key(hash);
        memory.young.get(&key).or_else(|| memory.old.get(&key)).copied()
    }

    pub(super) fn insert(&self, hash: &PieceHash, spot: Spot) {
        let mut memory = self.memory();
        if memory.young.len() >= HALF {
            memory.old = std::mem::take(&mut memory.young);
        }
        memory.young.insert(key(hash), spot);
    }

    /// The entry proved wrong; a younger one in its place stays.
    pub(super) fn remove(&self, hash: &PieceHash, wrong: Spot) {
        let mut memory = self.memory();
        let key = key(hash);
        let Halves { young, old } = &mut *memory;
        for half in [young, old] {
            if half.get(&key) == Some(&wrong) {
                half.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_a_younger_entry_survives_a_wrong_one() {
        let index = Index::default();
        let hash = |nth: u32| {
            let mut hash = [0; 32];
            hash[..4].copy_from_slice(&nth.to_le_bytes());
            hash
        };
        for nth in 0..3 * HALF as u32 {
            index.insert(&hash(nth), Spot { file: 1, piece: nth });
        }
        assert!(index.memory().young.len() + index.memory().old.len() <= 2 * HALF);
        assert_eq!(index.get(&hash(0)), None);
        let last = 3 * HALF as u32 - 1;
        assert_eq!(index.get(&hash(last)), Some(Spot { file: 1, piece: last }));
        index.remove(&hash(last), Spot { file: 9, piece: 9 });
        assert!(index.get(&hash(last)).is_some());
        index.remove(&hash(last), Spot { file: 1, piece: last });
        assert!(index.get(&hash(last)).is_none());
    }
}
