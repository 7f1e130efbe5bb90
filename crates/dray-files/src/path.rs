//! A path and the files that it leads to: who is given one need not know whether the disk is a real
//! one.

use crate::files::{self, Device, Files, Look, RealFiles, StateFile};
use crate::record;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Display, Path, PathBuf};
use std::sync::Arc;

/// A path among some files.
#[derive(Clone, Debug)]
pub struct StatePath {
    files: Arc<dyn Files>,
    path: PathBuf,
}

impl AsRef<Path> for StatePath {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl StatePath {
    /// A path among `files`.
    pub fn new(files: Arc<dyn Files>, path: impl Into<PathBuf>) -> Self {
        Self { files, path: path.into() }
    }

    /// A path among the files of this host.
    pub fn real(path: impl Into<PathBuf>) -> Self {
        Self::new(Arc::new(RealFiles), path)
    }

    /// The files that it leads to.
    pub fn files(&self) -> &Arc<dyn Files> {
        &self.files
    }

    /// The path itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// To be shown.
    pub fn display(&self) -> Display<'_> {
        self.path.display()
    }

    /// A path below it.
    pub fn join(&self, name: impl AsRef<Path>) -> Self {
        self.at(self.path.join(name))
    }

    /// The path beside it with another extension.
    pub fn with_extension(&self, extension: &str) -> Self {
        self.at(self.path.with_extension(extension))
    }

    fn at(&self, path: PathBuf) -> Self {
        Self { files: Arc::clone(&self.files), path }
    }

    /// Its name without the extension, if that is text.
    pub fn stem(&self) -> Option<&str> {
        self.path.file_stem()?.to_str()
    }

    /// As [`Files::exists`].
    ///
    /// # Errors
    /// What the system reports.
    pub fn exists(&self) -> io::Result<bool> {
        self.files.exists(&self.path)
    }

    /// As [`Files::look`].
    ///
    /// # Errors
    /// `NotFound` when nothing is there, or what the system reports.
    pub fn look(&self) -> io::Result<Look> {
        self.files.look(&self.path)
    }

    /// As [`Files::device`].
    ///
    /// # Errors
    /// `NotFound` when nothing is there, `Unsupported` when it is no block device or the kernel does not count,
    /// or what the system reports.
    pub fn device(&self) -> io::Result<Device> {
        self.files.device(&self.path)
    }

    /// As [`Files::open`].
    ///
    /// # Errors
    /// `NotFound` without a file, or what the system reports.
    pub fn open(&self) -> io::Result<Box<dyn StateFile>> {
        self.files.open(&self.path)
    }

    /// The file there, or an empty one that is made; what is in it stays.
    ///
    /// # Errors
    /// What the system reports.
    pub fn open_or_create(&self) -> io::Result<Box<dyn StateFile>> {
        match self.open() {
            Err(why) if why.kind() == io::ErrorKind::NotFound => self.create(),
            opened => opened,
        }
    }

    /// As [`Files::create`].
    ///
    /// # Errors
    /// What the system reports.
    pub fn create(&self) -> io::Result<Box<dyn StateFile>> {
        self.files.create(&self.path)
    }

    /// Everything in the file.
    ///
    /// # Errors
    /// As [`Files::open`] and [`StateFile::read`].
    pub fn read(&self) -> io::Result<Vec<u8>> {
        files::read(&*self.files, &self.path)
    }

    /// As [`files::replace`].
    ///
    /// # Errors
    /// What the system reports; the old file or the new one is there.
    pub fn replace(&self, bytes: &[u8]) -> io::Result<Box<dyn StateFile>> {
        files::replace(&*self.files, &self.path, bytes)
    }

    /// Gives the file the name `to`, in the same folder, in the place of what has it.
    ///
    /// # Errors
    /// What the system reports.
    pub fn rename(&self, to: &Self) -> io::Result<()> {
        self.files.rename(&self.path, &to.path)
    }

    /// As [`files::remove`].
    ///
    /// # Errors
    /// What the system reports.
    pub fn remove(&self) -> io::Result<()> {
        files::remove(&*self.files, &self.path)
    }

    /// As [`files::make_dirs`].
    ///
    /// # Errors
    /// What the system reports.
    pub fn make_dirs(&self) -> io::Result<()> {
        files::make_dirs(&*self.files, &self.path)
    }

    /// As [`files::remove_folder`].
    ///
    /// # Errors
    /// What the system reports.
    pub fn remove_folder(&self) -> io::Result<()> {
        files::remove_folder(&*self.files, &self.path)
    }

    /// As [`files::sync_parent`].
    ///
    /// # Errors
    /// What the system reports.
    pub fn sync_parent(&self) -> io::Result<()> {
        files::sync_parent(&*self.files, &self.path)
    }

    /// The entries of the folder whose name ends in `suffix`, in the order of names.
    ///
    /// # Errors
    /// What the system reports.
    pub fn entries(&self, suffix: &str) -> io::Result<Vec<Self>> {
        let found = files::entries(&*self.files, &self.path, suffix)?;
        Ok(found.into_iter().map(|path| self.at(path)).collect())
    }

    /// Replaces the value in the file, as [`record::replace`].
    ///
    /// # Errors
    /// What the system reports.
    pub fn put<T: Serialize>(&self, value: &T) -> io::Result<()> {
        record::replace(&*self.files, &self.path, value)
    }

    /// The value in the file, which outlives a power cut, as [`record::read`].
    ///
    /// # Errors
    /// `NotFound` without a file, `InvalidData` for a damaged one, or what the system reports.
    pub fn get<T: DeserializeOwned>(&self) -> io::Result<T> {
        record::read(&*self.files, &self.path)
    }

    /// The value in the file, to be shown, as [`record::look`].
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn peek<T: DeserializeOwned>(&self) -> io::Result<T> {
        record::look(&*self.files, &self.path)
    }
}
