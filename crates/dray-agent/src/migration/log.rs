//! The engine's records in a migration's journal, and the folder they live in.

use crate::migration::{abort, source, target};
use crate::store::{self, Store};
use dray_image::journal::Journal;
use dray_types::MigrationId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// Room for records to come that is taken when a journal is opened: an attempt, its end and what
/// ownership needs take less than 100 bytes each, so a full disk stops no decision.
const RESERVE: u64 = 64 << 10;

/// What names a migration of either side: without one there is none.
const INTENTS: [&str; 2] = [source::INTENT, target::INTENT];

/// What an intent's name ends in when its migration is void.
const VOID: &str = "void";

/// The folder of one migration.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Makes the folder of `migration`.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn create(store: &Store, migration: MigrationId) -> io::Result<Self> {
        let folder = Self::of(store, migration);
        std::fs::create_dir_all(&folder.0)?;
        store::sync_parent(&folder.0)?;
        Ok(folder)
    }

    /// The folder of `migration`, which may not be there.
    pub fn of(store: &Store, migration: MigrationId) -> Self {
        Self(store.migrations().join(migration.to_string()))
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether it exists.
    pub fn is_there(&self) -> bool {
        self.0.is_dir()
    }

    /// The migration that its name says it is of.
    pub fn migration(&self) -> Option<MigrationId> {
        self.0.file_name()?.to_str()?.parse().ok()
    }

    /// A file in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Removes the folder with all that is in it; it may be gone already. The intents go first,
    /// durably: one without its journal would be taken for a migration that has not begun. What a
    /// crash leaves behind goes with [`sweep`](Self::sweep).
    ///
    /// # Errors
    /// What the file system reports.
    pub fn remove(&self) -> io::Result<()> {
        if !self.0.exists() {
            return Ok(());
        }
        self.remove_intents()?;
        abort::before(|| vec!["RemoveFolder".to_owned()]);
        std::fs::remove_dir_all(&self.0)?;
        store::sync_parent(&self.0)
    }

    /// From here on a restart no longer knows the migration.
    fn remove_intents(&self) -> io::Result<()> {
        INTENTS.iter().try_for_each(|intent| {
            store::remove(&self.file(intent))?;
            store::remove(&self.void_file(intent))
        })
    }

    /// The migration is void, durably: no restart brings it back, and what its folder says stays for
    /// those who claim its images. It takes no room, and can be repeated.
    ///
    /// # Errors
    /// What the file system reports; the migration then is as before, or void.
    pub fn set_void(&self) -> io::Result<()> {
        if !self.0.exists() {
            return Ok(());
        }
        for intent in INTENTS {
            match std::fs::rename(self.file(intent), self.void_file(intent)) {
                Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
                _ => {}
            }
        }
        store::sync_parent(&self.file(VOID))
    }

    /// Whether the migration is void and its images are still to be claimed.
    pub fn is_void(&self) -> bool {
        let exists = |path: PathBuf| path.exists();
        !INTENTS.iter().any(|intent| exists(self.file(intent)))
            && INTENTS.iter().any(|intent| exists(self.void_file(intent)))
    }

    /// The folders of void migrations whose images are still to be claimed.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn voids(store: &Store) -> io::Result<Vec<Self>> {
        let all = store::entries(&store.migrations(), "")?;
        Ok(all.into_iter().map(Self).filter(Self::is_void).collect())
    }

    /// Whether it is the folder of `migration`.
    pub fn is_of(&self, migration: MigrationId) -> bool {
        self.0.file_name().is_some_and(|name| name.to_string_lossy() == migration.to_string())
    }

    /// The intent called `name`, whether the migration is void or not.
    pub fn intent_file(&self, name: &str) -> PathBuf {
        let void = self.void_file(name);
        if void.exists() { void } else { self.file(name) }
    }

    fn void_file(&self, intent: &str) -> PathBuf {
        self.file(intent).with_extension(VOID)
    }

    /// Removes the folders that have no intent: a crash came while they were made or removed.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn sweep(store: &Store) -> io::Result<()> {
        for path in store::entries(&store.migrations(), "")? {
            let begun = INTENTS.iter().any(|intent| path.join(intent).exists());
            let folder = Self(path);
            if folder.0.is_dir() && !begun && !folder.is_void() {
                folder.remove()?;
            }
        }
        Ok(())
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
        let (mut journal, payloads) = Journal::open(path).map_err(named)?;
        if let Err(why) = journal.reserve(RESERVE) {
            // A file system without such a thing, or a full one: then each record is as it comes.
            tracing::debug!(%why, "no room is taken for records to come");
        }
        let records = payloads
            .iter()
            .map(|payload| postcard::from_bytes(payload).map_err(io::Error::other))
            .collect::<io::Result<_>>()?;
        Ok((Self { journal, records: PhantomData }, records))
    }

    /// Appends records; they are durable together on return.
    ///
    /// # Errors
    /// What the file system reports. They are then certainly not there, unless it
    /// [is unsure](Self::is_unsure).
    pub fn append(&mut self, records: &[R]) -> io::Result<()> {
        let payloads = records
            .iter()
            .map(|record| postcard::to_allocvec(record).map_err(io::Error::other))
            .collect::<io::Result<Vec<_>>>()?;
        let slices: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
        self.journal.append_all(&slices).map_err(named)
    }

    /// Whether nobody knows if what was last appended is durable. The next append decides: then it
    /// is not there.
    pub fn is_unsure(&self) -> bool {
        self.journal.is_unsure()
    }
}

/// An error of the kind that callers decide on.
fn named(why: dray_image::Error) -> io::Error {
    let kind = match why.kind {
        dray_image::ErrorKind::NoSpace => io::ErrorKind::StorageFull,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_death_while_a_folder_goes_leaves_no_migration() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        for intent in INTENTS {
            let folder = Folder::create(&store, MigrationId(7)).unwrap();
            store::replace_json(&folder.file(intent), &1).unwrap();
            Log::<u8>::open(&folder.file("journal")).unwrap().0.append(&[1]).unwrap();
            Folder::sweep(&store).unwrap();
            assert_eq!(Folder::all(&store, intent).unwrap().len(), 1);
            folder.set_void().unwrap();
            folder.set_void().unwrap();
            Folder::sweep(&store).unwrap();
            assert!(folder.is_void() && folder.intent_file(intent).exists());
            assert_eq!(Folder::all(&store, intent).unwrap().len(), 0);
            folder.remove_intents().unwrap();
            assert!(!folder.is_void());
            assert!(folder.file("journal").exists());
            assert_eq!(Folder::all(&store, intent).unwrap().len(), 0);
            Folder::sweep(&store).unwrap();
            assert!(!folder.0.exists());
            folder.remove().unwrap();
        }
    }
}
