//! The agent's state directory: small records replaced as a whole, and a folder per migration.
//!
//! ```text
//! images/NAME.json            one record per image
//! images/NAME.heat            what is known of its accesses (docs/formats.md); not synced, may be lost
//! released/ID.json            an image that QEMU has taken back, and its line (ID.line)
//! seeds/NAME.json             an image that is being read from backups
//! digests.json                the digests of base images; may be lost
//! content.redb                which content is where, by hash; may be lost
//! backups/NAME.json           which of its generations are in backup where
//! backups/.schedule.json      when what was last backed up by itself
//! batches/ID.json             one record per batch
//! migrations/ID/intent.json   what was asked for
//! migrations/ID/journal       what has happened (see docs/formats.md)
//! migrations/ID/counts.json   what the summary counts; not synced, lost with the host
//! ```

use dray_host::files::{self, RealFiles};
use dray_host::record;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The state directory.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// The store below `root`, which is made if it does not exist.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn open(root: &Path) -> io::Result<Self> {
        fs::create_dir_all(root.join("images"))?;
        fs::create_dir_all(root.join("migrations"))?;
        fs::create_dir_all(root.join("released"))?;
        fs::create_dir_all(root.join("seeds"))?;
        fs::create_dir_all(root.join("batches"))?;
        Ok(Self { root: root.to_owned() })
    }

    /// Where the records of images are.
    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// The file of what links have carried.
    pub fn links(&self) -> PathBuf {
        self.root.join("links.json")
    }

    /// Where the notes of images are that QEMU has taken back.
    pub fn released(&self) -> PathBuf {
        self.root.join("released")
    }

    /// The file of who gave targets what of images.
    pub fn given(&self) -> PathBuf {
        self.root.join("given.json")
    }

    /// Where the notes of images are that are being read from backups.
    pub fn seeds(&self) -> PathBuf {
        self.root.join("seeds")
    }

    /// The file of the digests of base images.
    pub fn digests(&self) -> PathBuf {
        self.root.join("digests.json")
    }

    /// The index of content.
    pub fn content(&self) -> PathBuf {
        self.root.join("content.redb")
    }

    /// The folder of what is known of backups.
    pub fn backups(&self) -> PathBuf {
        self.root.join("backups")
    }

    /// Where the records of batches are.
    pub fn batches(&self) -> PathBuf {
        self.root.join("batches")
    }

    /// The folder of all migrations.
    pub fn migrations(&self) -> PathBuf {
        self.root.join("migrations")
    }
}

/// Replaces the record at `path` by `value`, durably: after a crash it holds the old or the new.
///
/// # Errors
/// What the file system reports.
pub fn replace_json<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    record::replace(&RealFiles, path, value)
}

/// Reads the record at `path`, and makes it durable first: what a process that was killed has written
/// is to be seen, and must not be believed before it outlives a power cut too.
///
/// # Errors
/// As [`read_json`], or that it cannot be made durable.
pub fn read_settled<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    record::read(&RealFiles, path)
}

/// Reads the record at `path`.
///
/// # Errors
/// What the file system reports, or `InvalidData` when it is not one, or damaged.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    record::look(&RealFiles, path)
}

/// Removes `path` durably; it may be gone already.
///
/// # Errors
/// What the file system reports.
pub fn remove(path: &Path) -> io::Result<()> {
    files::remove(&RealFiles, path)
}

/// Makes a new, renamed or removed name in `path`'s folder durable.
///
/// # Errors
/// What the file system reports.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    files::sync_parent(&RealFiles, path)
}

/// The entries of a folder whose name ends in `suffix`, in name order.
///
/// # Errors
/// What the file system reports.
pub fn entries(folder: &Path, suffix: &str) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with(suffix) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_replaced_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let path = store.images().join("a.json");
        replace_json(&path, &vec![1, 2]).unwrap();
        replace_json(&path, &vec![3]).unwrap();
        assert_eq!(read_json::<Vec<i32>>(&path).unwrap(), [3]);
        assert_eq!(entries(&store.images(), ".json").unwrap(), std::slice::from_ref(&path));
        remove(&path).unwrap();
        remove(&path).unwrap();
        fs::write(&path, "{").unwrap();
        assert_eq!(read_json::<i32>(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
