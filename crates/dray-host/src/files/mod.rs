//! The files in which state is kept, as few verbs as are needed: so that a test can be the disk.
//!
//! Nothing is durable because it was written: the content of a file is after [`StateFile::sync`], its
//! name after [`Files::sync_dir`] of the folder that it is in.

mod real;
pub mod sim;

pub use real::RealFiles;

use std::io;
use std::path::{Path, PathBuf};

/// Most that is read of one file: the largest journal that is written is far smaller, and a file of
/// any length may lie where a record is expected.
pub const MAX_LEN: u64 = 1 << 30;

/// Length of the id of a boot.
pub const BOOT_LEN: usize = 36;

/// Names of files and folders.
pub trait Files: Send + Sync {
    /// Opens the file at `path` for reading and writing.
    ///
    /// # Errors
    /// `NotFound` without one, or what the system reports.
    fn open(&self, path: &Path) -> io::Result<Box<dyn StateFile>>;

    /// Makes an empty file at `path`, in the place of one that is there.
    ///
    /// # Errors
    /// What the system reports.
    fn create(&self, path: &Path) -> io::Result<Box<dyn StateFile>>;

    /// Whether something is at `path`.
    ///
    /// # Errors
    /// What the system reports.
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// Gives the file at `from` the name `to`, in the same folder; what had it is gone. A crash leaves
    /// the one or the other.
    ///
    /// # Errors
    /// What the system reports.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Takes the name of a file away.
    ///
    /// # Errors
    /// `NotFound` without one, or what the system reports.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Makes a folder; it may be there.
    ///
    /// # Errors
    /// What the system reports.
    fn make_dir(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    ///
    /// # Errors
    /// What the system reports.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;

    /// What is in a folder, in the order of names.
    ///
    /// # Errors
    /// What the system reports.
    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>>;

    /// Makes durable which names are in a folder.
    ///
    /// # Errors
    /// What the system reports.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;

    /// What tells one boot of the host from another: what was written and not synced is still there
    /// in the boot that wrote it.
    ///
    /// # Errors
    /// What the system reports.
    fn boot(&self) -> io::Result<[u8; BOOT_LEN]>;
}

/// An open file.
pub trait StateFile: Send {
    /// Its length.
    ///
    /// # Errors
    /// What the system reports.
    fn len(&self) -> io::Result<u64>;

    /// Whether nothing is in it.
    ///
    /// # Errors
    /// What the system reports.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Everything in it.
    ///
    /// # Errors
    /// `InvalidData` for more than [`MAX_LEN`], or what the system reports.
    fn read(&self) -> io::Result<Vec<u8>>;

    /// Writes all of `bytes` at `offset`; not durable.
    ///
    /// # Errors
    /// What the system reports; the first part of it may be written then.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Cuts it off, or fills it up with zeros; not durable.
    ///
    /// # Errors
    /// What the system reports.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Takes the room that `len` bytes at `offset` need, also behind the end: to write them later then
    /// needs none. The length stays.
    ///
    /// # Errors
    /// What the system reports.
    fn reserve(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes the content durable, and the length.
    ///
    /// # Errors
    /// What the system reports; what was written since the last success may then never be durable,
    /// however often this is called.
    fn sync(&self) -> io::Result<()>;
}

/// Everything in the file at `path`.
///
/// # Errors
/// As [`Files::open`] and [`StateFile::read`].
pub fn read(files: &dyn Files, path: &Path) -> io::Result<Vec<u8>> {
    files.open(path)?.read()
}

/// Everything in the file at `path`, made durable first: what a process that was killed had written and
/// not synced is still to be seen, and must not be believed before it outlives a power cut too.
///
/// # Errors
/// As [`Files::open`] and [`StateFile::read`], or that it cannot be made durable.
pub fn read_settled(files: &dyn Files, path: &Path) -> io::Result<Vec<u8>> {
    let file = files.open(path)?;
    file.sync()?;
    sync_parent(files, path)?;
    file.read()
}

/// Replaces the file at `path` by one that holds `bytes`; durable on return, and a crash leaves the
/// old one or the new one.
///
/// # Errors
/// What the system reports; the old file or the new one is there.
pub fn replace(files: &dyn Files, path: &Path, bytes: &[u8]) -> io::Result<Box<dyn StateFile>> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let written = files.create(&new).and_then(|file| {
        file.write_at(bytes, 0)?;
        file.sync()?;
        Ok(file)
    });
    let file = written.inspect_err(|_| {
        // Half a file is of no use, and on a full disk in the way.
        let _ = files.remove(&new);
    })?;
    files.rename(&new, path)?;
    sync_parent(files, path)?;
    Ok(file)
}

/// Removes the file at `path`, durably; it may be gone already.
///
/// # Errors
/// What the system reports.
pub fn remove(files: &dyn Files, path: &Path) -> io::Result<()> {
    match files.remove(path) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => Err(why),
        _ => sync_parent(files, path),
    }
}

/// Makes durable what names there are beside `path`.
///
/// # Errors
/// What the system reports.
pub fn sync_parent(files: &dyn Files, path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |parent| files.sync_dir(parent))
}
