//! What a journal is kept in; a trait, so that tests can cut the power.

use rustix::fs::{FallocateFlags, fallocate};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A sequence of bytes that can be made durable.
pub trait Storage: Send {
    /// Everything; empty when it does not exist yet.
    ///
    /// # Errors
    /// What the storage reports.
    fn read(&mut self) -> io::Result<Vec<u8>>;

    /// Writes all of `bytes` at `offset`; not durable.
    ///
    /// # Errors
    /// What the storage reports; part of it may have been written.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Cuts it off after `len` bytes; not durable.
    ///
    /// # Errors
    /// What the storage reports.
    fn truncate(&mut self, len: u64) -> io::Result<()>;

    /// Makes everything durable.
    ///
    /// # Errors
    /// What the storage reports.
    fn sync(&mut self) -> io::Result<()>;

    /// Makes durable what is to be seen, its name included: a process that was killed may have left it
    /// in the page cache only.
    ///
    /// # Errors
    /// What the storage reports.
    fn settle(&mut self) -> io::Result<()> {
        self.sync()
    }

    /// Takes room for `len` bytes at `offset`, so that writing them later cannot fail for lack of it.
    /// Changes no byte and no length.
    ///
    /// # Errors
    /// What the storage reports; some of the room may have been taken.
    fn reserve(&mut self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// Replaces everything, durably: a crash leaves the old bytes or the new ones.
    ///
    /// # Errors
    /// What the storage reports; the old or the new bytes are there.
    fn replace(&mut self, bytes: &[u8]) -> io::Result<()>;
}

/// A file.
pub struct FileStorage {
    path: PathBuf,
    file: Option<File>,
}

impl FileStorage {
    /// The file at `path`, which need not exist.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), file: None }
    }

    fn file(&mut self) -> io::Result<&File> {
        if self.file.is_none() {
            self.file = Some(File::options().read(true).write(true).open(&self.path)?);
        }
        self.file.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Storage for FileStorage {
    fn read(&mut self) -> io::Result<Vec<u8>> {
        match std::fs::read(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            result => result,
        }
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file()?.write_all_at(bytes, offset)
    }

    fn truncate(&mut self, len: u64) -> io::Result<()> {
        self.file()?.set_len(len)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file()?.sync_data()
    }

    fn settle(&mut self) -> io::Result<()> {
        self.file()?.sync_all()?;
        self.path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    }

    fn reserve(&mut self, offset: u64, len: u64) -> io::Result<()> {
        fallocate(self.file()?, FallocateFlags::KEEP_SIZE, offset, len).map_err(io::Error::from)
    }

    fn replace(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let new = self.path.with_file_name(name);
        let mut file =
            File::options().read(true).write(true).create(true).truncate(true).open(&new)?;
        let made = file.write_all(bytes).and_then(|()| file.sync_all());
        if let Err(why) = made.and_then(|()| std::fs::rename(&new, &self.path)) {
            // Half a journal is of no use, and on a full disk in the way.
            let _ = std::fs::remove_file(&new);
            return Err(why);
        }
        self.file = Some(file);
        let dir = match self.path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        File::open(dir)?.sync_all()
    }
}
