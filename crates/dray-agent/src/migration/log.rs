//! The engine's records in a migration's journal, and the folder they live in.

use crate::store::{self, Store};
use dray_image::journal::Journal;
use dray_types::MigrationId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// The folder of one migration.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Makes the folder of `migration`.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn create(store: &Store, migration: MigrationId) -> io::Result<Self> {
        let path = store.migrations().join(migration.to_string());
        std::fs::create_dir_all(&path)?;
        store::sync_parent(&path)?;
        Ok(Self(path))
    }

    /// The folders of all migrations that have an intent of this name.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn all(store: &Store, intent: &str) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for path in store::entries(&store.migrations(), "")? {
            if path.join(intent).is_file() {
                found.push(Self(path));
            }
        }
        Ok(found)
    }

    /// A file in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Removes the folder with all that is in it.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn remove(&self) -> io::Result<()> {
        std::fs::remove_dir_all(&self.0)?;
        store::sync_parent(&self.0)
    }
}

/// A journal of records of one type.
pub struct Log<R> {
    journal: Journal,
    records: PhantomData<R>,
}

impl<R: Serialize + DeserializeOwned> Log<R> {
    /// Opens or makes the journal at `path` and returns what it holds.
    ///
    /// # Errors
    /// What the file system reports, or that the journal is damaged.
    pub fn open(path: &Path) -> io::Result<(Self, Vec<R>)> {
        let (journal, payloads) = Journal::open(path).map_err(io::Error::other)?;
        let records = payloads
            .iter()
            .map(|payload| postcard::from_bytes(payload).map_err(io::Error::other))
            .collect::<io::Result<_>>()?;
        Ok((Self { journal, records: PhantomData }, records))
    }

    /// Appends records; they are durable together on return.
    ///
    /// # Errors
    /// What the file system reports; it is then not known whether they are durable.
    pub fn append(&mut self, records: &[R]) -> io::Result<()> {
        let payloads = records
            .iter()
            .map(|record| postcard::to_allocvec(record).map_err(io::Error::other))
            .collect::<io::Result<Vec<_>>>()?;
        let slices: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
        self.journal.append_all(&slices).map_err(io::Error::other)
    }
}
