//! How it is known that a file was not changed: by what it looks like from outside.

use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// How a file looks from outside. Whoever writes to it, or puts another one in its place, changes that.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileStamp {
    /// The file system's device number.
    pub device: u64,
    /// The file's number in it.
    pub inode: u64,
    /// Its length in bytes.
    pub len: u64,
    /// When its content was changed: seconds and nanoseconds since 1970.
    pub modified: (i64, i64),
    /// When anything of it was changed.
    pub changed: (i64, i64),
}

impl FileStamp {
    /// How the file at `path` looks now, links followed.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn of(path: &Path) -> io::Result<Self> {
        Ok(Self::from(&std::fs::metadata(path)?))
    }

    /// How an open file looks now, whatever it is called.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn of_open(file: &File) -> io::Result<Self> {
        Ok(Self::from(&file.metadata()?))
    }

    /// Whether nobody has written to the file between this look and another. Its owner and mode may have
    /// changed, and its device number over a reboot.
    pub fn has_same_content(&self, other: &Self) -> bool {
        (self.inode, self.len, self.modified) == (other.inode, other.len, other.modified)
    }
}

impl From<&Metadata> for FileStamp {
    fn from(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            len: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}
