//! The durable part of the index: an embedded store in the state directory.
//!
//! ```text
//! pieces: first 16 bytes of a hash, in its scope → file (u32), piece (u32)
//! files:  file (u32) → postcard of a `Scanned`
//! ```
//! Nothing depends on it. A store that cannot be read is begun anew; what it says is followed to the
//! content and compared there. A damaged page makes redb panic: that is an error like any other here.

use super::files::FileRef;
use super::index::{Key, Spot};
use super::scope::Scope;
use redb::{
    Builder, Database, Durability, ReadableDatabase, ReadableTable, ReadableTableMetadata,
    TableDefinition,
};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

const PIECES: TableDefinition<Key, u64> = TableDefinition::new("pieces");
const FILES: TableDefinition<u32, &[u8]> = TableDefinition::new("files");

/// Memory for the store's pages.
const CACHE: usize = 16 << 20;

/// A file whose content is in the store, or is being put there.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Scanned {
    /// The file.
    pub(super) file: FileRef,
    /// Its length and times when reading it began: a file that looks otherwise is read again.
    pub(super) stamp: (u64, i64, i64),
    /// Piece to go on with; none when all of it was read.
    pub(super) next: Option<u64>,
    /// Milliseconds since 1970 when reading it ended.
    pub(super) ended_unix_ms: u64,
    /// Who may be told of it: otherwise it is read again.
    pub(super) scope: Scope,
}

/// What is written together.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) pieces: Vec<(Key, Spot)>,
    /// Entries that proved wrong.
    pub(super) wrong: Vec<(Key, Spot)>,
    pub(super) files: Vec<(u32, Scanned)>,
}

/// The store.
pub(super) struct Store {
    db: Database,
    path: PathBuf,
}

fn pack(spot: Spot) -> u64 {
    u64::from(spot.file) << 32 | u64::from(spot.piece)
}

fn unpack(packed: u64) -> Spot {
    Spot { file: (packed >> 32) as u32, piece: packed as u32 }
}

fn failed(why: impl Into<redb::Error>) -> io::Error {
    io::Error::other(why.into())
}

fn guarded<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    // Whatever state redb is in after it, only this is asked for it again.
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(io::Error::other("the index of content is damaged")))
}

impl Store {
    /// Opens the store at `path`, or begins one: instead of one that is damaged, too.
    ///
    /// # Errors
    /// What the file system reports.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let open = || {
            guarded(|| {
                let db = Builder::new().set_cache_size(CACHE).create(path).map_err(failed)?;
                let store = Self { db, path: path.to_owned() };
                store.apply(&Batch::default())?;
                Ok(store)
            })
        };
        open().or_else(|why: io::Error| {
            tracing::warn!(path = %path.display(), %why, "the index of content begins anew");
            dray_files::StatePath::real(path).remove()?;
            open()
        })
    }

    /// Bytes of the store's file.
    pub(super) fn bytes(&self) -> u64 {
        self.path.metadata().map_or(0, |meta| meta.len())
    }

    /// Entries.
    pub(super) fn pieces(&self) -> u64 {
        let table = || self.db.begin_read().map_err(failed)?.open_table(PIECES).map_err(failed);
        guarded(|| table()?.len().map_err(failed)).unwrap_or(0)
    }

    /// Where content with one of these keys was seen, in their order; an error is a miss.
    pub(super) fn get(&self, keys: &[Key]) -> Vec<Spot> {
        let find = || {
            let table = self.db.begin_read().map_err(failed)?.open_table(PIECES).map_err(failed)?;
            let found = keys.iter().map(|key| table.get(key).map_err(failed));
            let found: io::Result<Vec<_>> = found.collect();
            Ok(found?.into_iter().flatten().map(|found| unpack(found.value())).collect())
        };
        guarded(find).unwrap_or_default()
    }

    /// Every file of the store; one that cannot be understood is left out.
    ///
    /// # Errors
    /// What the store reports.
    pub(super) fn files(&self) -> io::Result<Vec<(u32, Scanned)>> {
        guarded(|| self.read_files())
    }

    fn read_files(&self) -> io::Result<Vec<(u32, Scanned)>> {
        let table = self.db.begin_read().map_err(failed)?.open_table(FILES).map_err(failed)?;
        let mut files = Vec::new();
        for entry in table.iter().map_err(failed)? {
            let (number, bytes) = entry.map_err(failed)?;
            if let Ok(scanned) = postcard::from_bytes(bytes.value()) {
                files.push((number.value(), scanned));
            }
        }
        Ok(files)
    }

    /// Writes a batch durably, all or nothing.
    ///
    /// # Errors
    /// What the store reports.
    pub(super) fn apply(&self, batch: &Batch) -> io::Result<()> {
        guarded(|| self.write(batch))
    }

    fn write(&self, batch: &Batch) -> io::Result<()> {
        let mut write = self.db.begin_write().map_err(failed)?;
        write.set_durability(Durability::Immediate).map_err(failed)?;
        {
            let mut pieces = write.open_table(PIECES).map_err(failed)?;
            for (key, spot) in &batch.wrong {
                let same = |value: u64| value == pack(*spot);
                if pieces.get(key).map_err(failed)?.is_some_and(|found| same(found.value())) {
                    pieces.remove(key).map_err(failed)?;
                }
            }
            for (key, spot) in &batch.pieces {
                pieces.insert(key, pack(*spot)).map_err(failed)?;
            }
            let mut files = write.open_table(FILES).map_err(failed)?;
            for (number, scanned) in &batch.files {
                let bytes = postcard::to_allocvec(scanned).map_err(io::Error::other)?;
                files.insert(number, bytes.as_slice()).map_err(failed)?;
            }
        }
        write.commit().map_err(failed)
    }

    /// Forgets files and every piece of them.
    ///
    /// # Errors
    /// What the store reports.
    pub(super) fn forget(&self, gone: &HashSet<u32>) -> io::Result<()> {
        guarded(|| self.remove(gone))
    }

    fn remove(&self, gone: &HashSet<u32>) -> io::Result<()> {
        let write = self.db.begin_write().map_err(failed)?;
        {
            let mut pieces = write.open_table(PIECES).map_err(failed)?;
            pieces.retain(|_, packed| !gone.contains(&unpack(packed).file)).map_err(failed)?;
            let mut files = write.open_table(FILES).map_err(failed)?;
            for number in gone {
                files.remove(number).map_err(failed)?;
            }
        }
        write.commit().map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scanned(path: &str, next: Option<u64>) -> Scanned {
        let file = FileRef::Plain { path: path.into() };
        Scanned { file, stamp: (1, 2, 3), next, ended_unix_ms: 0, scope: 4 }
    }

    #[test]
    fn a_restart_finds_what_was_written_and_a_damaged_store_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("content.redb");
        let spot = |file, piece| Spot { file, piece };
        let store = Store::open(&path).unwrap();
        let batch = Batch {
            pieces: vec![([1; 16], spot(7, 9)), ([2; 16], spot(8, u32::MAX))],
            wrong: Vec::new(),
            files: vec![(7, scanned("/a", Some(100))), (8, scanned("/b", None))],
        };
        store.apply(&batch).unwrap();
        drop(store);
        let store = Store::open(&path).unwrap();
        assert_eq!(store.get(&[[1; 16], [2; 16]]), [spot(7, 9), spot(8, u32::MAX)]);
        assert_eq!(store.files().unwrap(), batch.files);
        let wrong = vec![([1; 16], spot(7, 8)), ([2; 16], spot(8, u32::MAX))];
        store.apply(&Batch { wrong, ..Batch::default() }).unwrap();
        assert_eq!(store.get(&[[2; 16], [1; 16]]), [spot(7, 9)], "another entry proved wrong");
        store.forget(&[7].into()).unwrap();
        assert!(store.get(&[[1; 16]]).is_empty());
        assert_eq!(store.files().unwrap(), [(8, scanned("/b", None))]);
        drop(store);
        std::fs::write(&path, b"no store at all").unwrap();
        assert!(Store::open(&path).unwrap().files().unwrap().is_empty());
    }
}
