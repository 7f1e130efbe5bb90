//! The places of known content, by its scope and the first 16 bytes of its hash. A reader that follows an entry
//! compares all 32 bytes of the hash. Entries of arriving content are in memory; entries from the
//! background are in the store.

use super::scope::Scope;
use super::store::{Batch, Store};
use dray_wire::frame::PieceHash;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::io;
use std::sync::OnceLock;

/// Entries of one half of the memory; with two halves about 30 MB.
const HALF: usize = 1 << 18;

/// The part of a hash that finds an entry.
pub(super) type Key = [u8; 16];

/// A piece of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Spot {
    pub(super) file: u32,
    pub(super) piece: u32,
}

/// The key of a hash in a scope.
fn scoped(scope: Scope, hash: &PieceHash) -> Key {
    let mut key = [0; 16];
    key.copy_from_slice(&hash[..16]);
    key.iter_mut().zip(scope.to_le_bytes()).for_each(|(byte, scope)| *byte ^= scope);
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
    /// There once it has been opened.
    store: OnceLock<Store>,
    /// Entries of the store that proved wrong, until the next batch.
    wrong: Mutex<Vec<(Key, Spot)>>,
}

impl Batch {
    /// Content of this scope with this hash is there.
    pub(super) fn add(&mut self, scope: Scope, hash: &PieceHash, file: u32, piece: u64) {
        if let Ok(piece) = u32::try_from(piece) {
            self.pieces.push((scoped(scope, hash), Spot { file, piece }));
        }
    }
}

/// Wrong entries that wait at most; others are found wrong once more.
const MOST_WRONG: usize = 65_536;

impl Index {
    fn memory(&self) -> MutexGuard<'_, Halves> {
        self.memory.lock()
    }

    /// From now on this is the durable part; the first one stays.
    pub(super) fn set_store(&self, store: Store) {
        let _ = self.store.set(store);
    }

    /// Every place that may have content with this hash for these scopes, what is in memory first.
    pub(super) fn get(&self, scopes: &[Scope], hash: &PieceHash) -> impl Iterator<Item = Spot> {
        let keys: Vec<_> = scopes.iter().map(|scope| scoped(*scope, hash)).collect();
        let memory = self.memory();
        let young = |key| memory.young.get(key).or_else(|| memory.old.get(key)).copied();
        let young = keys.iter().find_map(young);
        drop(memory);
        let stored = move || self.store.get().map(|store| store.get(&keys)).unwrap_or_default();
        // Asked only when what is in memory was not it.
        young.into_iter().chain(std::iter::once_with(stored).flatten())
    }

    /// The durable part, if there is one.
    pub(super) fn store(&self) -> Option<&Store> {
        self.store.get()
    }

    /// Writes what the background has read, and takes out what has proved wrong.
    pub(super) fn write(&self, mut batch: Batch) -> io::Result<()> {
        let Some(store) = self.store.get() else { return Ok(()) };
        let mut wrong = self.wrong.lock();
        batch.wrong = std::mem::take(&mut *wrong);
        drop(wrong);
        if batch.pieces.is_empty() && batch.wrong.is_empty() && batch.files.is_empty() {
            return Ok(());
        }
        store.apply(&batch)
    }

    pub(super) fn insert(&self, scope: Scope, hash: &PieceHash, spot: Spot) {
        let mut memory = self.memory();
        if memory.young.len() >= HALF {
            memory.old = std::mem::take(&mut memory.young);
        }
        memory.young.insert(scoped(scope, hash), spot);
    }

    /// The entry of one of these scopes proved wrong; a younger one in its place stays.
    pub(super) fn remove(&self, scopes: &[Scope], hash: &PieceHash, wrong: Spot) {
        let keys = scopes.iter().map(|scope| scoped(*scope, hash));
        keys.for_each(|key| self.remove_at(key, wrong));
    }

    fn remove_at(&self, key: Key, wrong: Spot) {
        let mut memory = self.memory();
        let halves = &mut *memory;
        for half in [&mut halves.young, &mut halves.old] {
            if half.get(&key) == Some(&wrong) {
                half.remove(&key);
            }
        }
        drop(memory);
        let mut waits = self.wrong.lock();
        if self.store.get().is_some() && waits.len() < MOST_WRONG {
            waits.push((key, wrong));
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
            index.insert(7, &hash(nth), Spot { file: 1, piece: nth });
        }
        let memory = index.memory();
        assert!(memory.young.len() <= HALF && memory.old.len() <= HALF);
        drop(memory);
        assert_eq!(index.get(&[7], &hash(0)).next(), None);
        let last = 3 * HALF as u32 - 1;
        assert_eq!(index.get(&[7], &hash(last)).next(), Some(Spot { file: 1, piece: last }));
        index.remove(&[7], &hash(last), Spot { file: 9, piece: 9 });
        assert!(index.get(&[7], &hash(last)).next().is_some());
        index.remove(&[7], &hash(last), Spot { file: 1, piece: last });
        assert!(index.get(&[7], &hash(last)).next().is_none());
    }

    /// Another's content with the same hash takes nobody's place: nor tells that it is there by taking it.
    #[test]
    fn each_scope_has_a_place_of_its_own_for_a_hash() {
        let dir = tempfile::tempdir().unwrap();
        let index = Index::default();
        index.set_store(Store::open(&dir.path().join("content.redb")).unwrap());
        let (hash, spots) = ([5; 32], [1, 2].map(|file| Spot { file, piece: 0 }));
        let mut batch = Batch::default();
        spots.iter().for_each(|spot| batch.add(spot.file.into(), &hash, spot.file, 0));
        index.write(batch).unwrap();
        let found = |scopes: &[Scope]| index.get(scopes, &hash).collect::<Vec<_>>();
        assert_eq!(found(&[1]), [spots[0]]);
        assert_eq!(found(&[2]), [spots[1]]);
        assert_eq!(found(&[2, 1]), [spots[1], spots[0]]);
        assert!(found(&[3]).is_empty());
        index.remove(&[2, 3], &hash, spots[1]);
        index.write(Batch::default()).unwrap();
        assert_eq!(found(&[1, 2]), [spots[0]]);
    }
}
