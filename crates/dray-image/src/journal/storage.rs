//! The storage of a journal, as a trait, so that tests can simulate power cuts.

use dray_files::StatePath;
use dray_files::files::StateFile;
use std::io;

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
    path: StatePath,
    file: Option<Box<dyn StateFile>>,
}

impl FileStorage {
    /// The file at `path`, which need not exist.
    pub fn new(path: &StatePath) -> Self {
        Self { path: path.clone(), file: None }
    }

    fn file(&mut self) -> io::Result<&dyn StateFile> {
        if self.file.is_none() {
            self.file = Some(self.path.open()?);
        }
        self.file.as_deref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Storage for FileStorage {
    fn read(&mut self) -> io::Result<Vec<u8>> {
        match self.path.read() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Ok(bytes) if bytes.is_empty() => {
                Err(io::Error::new(io::ErrorKind::InvalidData, super::Damage::Empty))
            }
            result => result,
        }
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file()?.write_at(bytes, offset)
    }

    fn truncate(&mut self, len: u64) -> io::Result<()> {
        self.file()?.set_len(len)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file()?.sync()
    }

    fn settle(&mut self) -> io::Result<()> {
        self.file()?.sync()?;
        self.path.sync_parent()
    }

    fn reserve(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.file()?.reserve(offset, len)
    }

    fn replace(&mut self, bytes: &[u8]) -> io::Result<()> {
        // Until it is certain which one has the name, none is written to.
        self.file = None;
        self.file = Some(self.path.replace(bytes)?);
        Ok(())
    }
}
