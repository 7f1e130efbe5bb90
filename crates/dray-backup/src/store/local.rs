//! A directory as a store.
//!
//! An object is written under a temporary name, synced, and renamed to its own unless that exists;
//! then the folder is synced. A crash leaves the object whole or not at all, and perhaps a file in
//! `.tmp`, which a later opening removes once it is a day old: no upload takes that long.

use super::{Object, Put, Store, check_name};
use crate::error::{Error, Kind, Result};
use crate::world::{SystemWorld, random_id};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const TEMPORARY: &str = ".tmp";
/// Age from which a temporary file is one that a crash left behind.
const LEFT_BEHIND: Duration = Duration::from_secs(24 * 3600);

/// A directory; every object is a file in it.
#[derive(Debug)]
pub struct LocalStore {
    root: PathBuf,
}

impl LocalStore {
    /// The store in `root`, which is created if it does not exist; leftovers of a crash go.
    ///
    /// # Errors
    /// `Unavailable`: the directory cannot be made or read.
    pub fn open(root: &Path) -> Result<Self> {
        let store = Self { root: root.to_path_buf() };
        store.make_folder(&root.join(TEMPORARY)).map_err(|e| failed("cannot create", root, e))?;
        store.clean().map_err(|e| failed("cannot read", root, e))?;
        Ok(store)
    }

    fn clean(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.root.join(TEMPORARY))? {
            let entry = entry?;
            let Ok(meta) = entry.metadata() else { continue };
            if age(meta.modified()?) >= LEFT_BEHIND {
                absent_is_fine(fs::remove_file(entry.path()))?;
            }
        }
        Ok(())
    }

    fn path(&self, name: &str) -> Result<PathBuf> {
        check_name(name)?;
        Ok(self.root.join(name))
    }

    /// Creates a folder and those above it, each durable in its parent.
    fn make_folder(&self, folder: &Path) -> io::Result<()> {
        if folder.is_dir() {
            return Ok(());
        }
        if let Some(parent) = folder.parent() {
            self.make_folder(parent)?;
        }
        match fs::create_dir(folder) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        sync_folder(folder.parent())
    }

    fn write_temporary(&self, bytes: &[u8]) -> io::Result<PathBuf> {
        let id = random_id(&SystemWorld).map_err(io::Error::other)?;
        let path = self.root.join(TEMPORARY).join(format!("{id:032x}"));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        if let Err(e) = written {
            fs::remove_file(&path)?;
            return Err(e);
        }
        Ok(path)
    }

    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<Put> {
        let folder = path.parent().unwrap_or(&self.root);
        self.make_folder(folder)?;
        let temporary = self.write_temporary(bytes)?;
        let renamed = rename_new(&temporary, path);
        if !matches!(renamed, Ok(Put::Created)) {
            absent_is_fine(fs::remove_file(&temporary))?;
        }
        // Also when it existed: whoever created it may not have synced the folder yet.
        sync_folder(Some(folder))?;
        renamed
    }

    fn walk(&self, folder: &Path, found: &mut Vec<Object>) -> io::Result<()> {
        let entries = match fs::read_dir(folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let path = entry.path();
            // A file that went since the folder was read is not an error.
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_dir() {
                if !entry.file_name().as_encoded_bytes().starts_with(b".") {
                    self.walk(&path, found)?;
                }
                continue;
            }
            let relative = path.strip_prefix(&self.root).ok().and_then(Path::to_str);
            if let Some(name) = relative.filter(|name| check_name(name).is_ok()) {
                let age = age(meta.modified()?);
                found.push(Object { name: name.to_owned(), bytes: meta.len(), age });
            }
        }
        Ok(())
    }
}

impl Store for LocalStore {
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        let path = self.path(name)?;
        self.create(&path, bytes).map_err(|e| failed("cannot write", &path, e))
    }

    fn get(&self, name: &str, limit: usize) -> Result<Vec<u8>> {
        let path = self.path(name)?;
        let read = || {
            let mut bytes = Vec::new();
            File::open(&path)?.take(limit as u64 + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|e| failed("cannot read", &path, e))?;
        if bytes.len() > limit {
            return Err(Error::damaged(format!("{name} is longer than {limit} bytes")));
        }
        Ok(bytes)
    }

    fn get_range(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        let path = self.path(name)?;
        let read = || {
            let mut bytes = vec![0; len];
            File::open(&path)?.read_exact_at(&mut bytes, offset)?;
            Ok(bytes)
        };
        read().map_err(|e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => {
                Error::damaged(format!("{name} ends before byte {}", offset + len as u64))
            }
            _ => failed("cannot read", &path, e),
        })
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>> {
        let folder = match prefix.strip_suffix('/') {
            Some(folder) => self.path(folder)?,
            None if prefix.is_empty() => self.root.clone(),
            None => return Err(Error::invalid(format!("the prefix '{prefix}' ends in no /"))),
        };
        let mut found = Vec::new();
        self.walk(&folder, &mut found).map_err(|e| failed("cannot list", &folder, e))?;
        Ok(found)
    }

    fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name)?;
        // Durable as well: a backup that was removed must not be back, without its packs, after a
        // power cut.
        let remove = || match fs::remove_file(&path) {
            Ok(()) => sync_folder(path.parent()),
            gone => absent_is_fine(gone),
        };
        remove().map_err(|e| failed("cannot remove", &path, e))
    }

    fn exists(&self, name: &str) -> Result<bool> {
        let path = self.path(name)?;
        path.try_exists().map_err(|e| failed("cannot read", &path, e))
    }
}

/// Renames unless `to` exists. Where the file system cannot, a hard link does the same.
fn rename_new(from: &Path, to: &Path) -> io::Result<Put> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(Put::Created),
        Err(Errno::EXIST) => Ok(Put::Existed),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => match fs::hard_link(from, to) {
            Ok(()) => fs::remove_file(from).map(|()| Put::Created),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(Put::Existed),
            Err(e) => Err(e),
        },
        Err(e) => Err(e.into()),
    }
}

fn sync_folder(folder: Option<&Path>) -> io::Result<()> {
    match folder {
        Some(folder) if folder.as_os_str().is_empty() => File::open(".")?.sync_all(),
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

fn absent_is_fine(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn age(modified: SystemTime) -> Duration {
    SystemTime::now().duration_since(modified).unwrap_or_default()
}

fn failed(what: &str, path: &Path, e: io::Error) -> Error {
    let text = format!("{what} {}", path.display());
    match e.kind() {
        io::ErrorKind::NotFound => Error::new(Kind::NotFound, format!("{text} does not exist")),
        _ => Error::unavailable(text, e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, LocalStore) {
        let folder = tempfile::tempdir().unwrap();
        let store = LocalStore::open(&folder.path().join("deep/repository")).unwrap();
        (folder, store)
    }

    #[test]
    fn a_name_is_created_once() {
        let (_folder, store) = store();
        assert_eq!(store.put_new("packs/a/1", b"one").unwrap(), Put::Created);
        assert_eq!(store.put_new("packs/a/1", b"two").unwrap(), Put::Existed);
        assert_eq!(store.get("packs/a/1", 3).unwrap(), b"one");
        assert_eq!(store.get("packs/a/1", 2).unwrap_err().kind(), Kind::Damaged);
        assert_eq!(store.get_range("packs/a/1", 1, 2).unwrap(), b"ne");
        assert_eq!(store.get_range("packs/a/1", 1, 3).unwrap_err().kind(), Kind::Damaged);
        assert_eq!(store.get("packs/a/2", 9).unwrap_err().kind(), Kind::NotFound);
        assert!(store.exists("packs/a/1").unwrap() && !store.exists("packs/b").unwrap());
        store.delete("packs/a/1").unwrap();
        store.delete("packs/a/1").unwrap();
        assert!(store.list("").unwrap().is_empty());
        assert_eq!(fs::read_dir(store.root.join(TEMPORARY)).unwrap().count(), 0);
    }

    #[test]
    fn one_of_many_racing_writers_creates() {
        let (_folder, store) = store();
        let created = std::thread::scope(|scope| {
            let put = |n: u8| store.put_new("a/b/c", &[n; 100]).unwrap() == Put::Created;
            let all: Vec<_> = (0..8).map(|n| scope.spawn(move || put(n))).collect();
            all.into_iter().map(|t| t.join().unwrap()).filter(|created| *created).count()
        });
        assert_eq!(created, 1);
    }

    #[test]
    fn listings_see_whole_objects_below_the_prefix_only() {
        let (_folder, store) = store();
        store.put_new("config", b"1").unwrap();
        store.put_new("packs/a/1", b"12").unwrap();
        fs::write(store.root.join(TEMPORARY).join("half"), b"x").unwrap();
        fs::write(store.root.join("lost+FOUND"), b"x").unwrap();
        let mut all = store.list("").unwrap();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        let all: Vec<_> = all.iter().map(|o| (o.name.as_str(), o.bytes)).collect();
        assert_eq!(all, [("config", 1), ("packs/a/1", 2)]);
        assert_eq!(store.list("packs/").unwrap().len(), 1);
        assert!(store.list("packs/b/").unwrap().is_empty());
        assert!(store.list("../").is_err() && store.put_new("../x", b"").is_err());
    }

    #[test]
    fn what_a_crash_left_behind_goes_when_it_is_old() {
        let (_folder, store) = store();
        let (old, young) = (store.root.join(".tmp/old"), store.root.join(".tmp/young"));
        fs::write(&old, b"x").unwrap();
        fs::write(&young, b"x").unwrap();
        File::open(&old).unwrap().set_modified(SystemTime::now() - LEFT_BEHIND).unwrap();
        LocalStore::open(&store.root).unwrap();
        assert!(!old.exists() && young.exists());
    }
}
