//! The files in which state is kept, as few verbs as are needed: so that a test can be the disk.
//!
//! Nothing is durable because it was written: the content of a file is after [`StateFile::sync`], its
//! name after [`Files::sync_dir`] of the folder that it is in.

mod device;
mod instance;
mod place;
mod real;
pub mod sim;

pub use device::Device;
pub use place::Place;
pub use real::{RealFiles, birth_of};

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

/// Length of the id of a boot.
pub const BOOT_LEN: usize = 36;

/// What is at a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A device, a socket or a pipe.
    Other,
}

/// How something at a path looks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look {
    /// Whether it is a file, a directory or something else.
    pub kind: Kind,
    /// Length in bytes.
    pub len: u64,
    /// Permission bits.
    pub mode: u32,
    /// Number of its inode; that of a file that is gone may be another one's.
    pub inode: u64,
    /// When it was made: seconds since 1970, and nanoseconds; none where the file system does not tell.
    pub birth: Option<(i64, i64)>,
    /// When its content was last changed: seconds since 1970, and nanoseconds.
    pub changed: (i64, i64),
    /// When anything of it was, its name and mode included; nobody can set this back.
    pub touched: (i64, i64),
}

/// Names of files and folders.
pub trait Files: Send + Sync + Debug {
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

    /// Makes an empty file at `path` that nobody but root may open.
    ///
    /// # Errors
    /// `AlreadyExists` when there is one, or what the system reports.
    fn create_closed(&self, path: &Path) -> io::Result<Box<dyn StateFile>>;

    /// Whether something is at `path`, if only a symbolic link to nothing. That it cannot be told is an
    /// error, and not the answer that there is nothing.
    ///
    /// # Errors
    /// What the system reports.
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// How what is at `path` looks, or what a symbolic link there leads to.
    ///
    /// # Errors
    /// `NotFound` when nothing is there, or what the system reports.
    fn look(&self, path: &Path) -> io::Result<Look>;

    /// Where the symbolic link at `path` leads; none when there is no link.
    fn link(&self, path: &Path) -> Option<PathBuf>;

    /// Gives the file at `from` the name `to`, in the same folder; what had it is gone. A crash leaves
    /// the one or the other.
    ///
    /// # Errors
    /// What the system reports.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Gives the file at `from` the name `to`, in the same folder.
    ///
    /// # Errors
    /// `AlreadyExists` when something has that name, or what the system reports.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Sets the permission bits of the file at `path`, durably.
    ///
    /// # Errors
    /// What the system reports.
    fn set_mode(&self, path: &Path, mode: u32) -> io::Result<()>;

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

    /// What tells one life of the mounted file system that has `folder` from another life of it in the same boot: what
    /// was written and not synced is lost when it is unmounted after its device has failed, and the host goes on. It
    /// stays the same however often and wherever it is mounted as well. None where the system does not tell.
    ///
    /// # Errors
    /// `NotFound` when nothing is there, or what the system reports.
    fn instance(&self, folder: &Path) -> io::Result<Option<u64>>;

    /// What the kernel tells of the block device at `path`. It counts what has reached the device, so what
    /// waits in the page cache is written first.
    ///
    /// # Errors
    /// `NotFound` when nothing is there, `Unsupported` when it is no block device or the kernel does not count,
    /// or what the system reports.
    fn device(&self, path: &Path) -> io::Result<Device>;
}

/// An open file.
pub trait StateFile: Send + Sync + Debug {
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
    /// What the system reports.
    fn read(&self) -> io::Result<Vec<u8>>;

    /// Fills as much of `buf` from byte `offset` as there is of the file; returns how much that is.
    ///
    /// # Errors
    /// What the system reports.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

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

    /// Says that its content was changed now, by the clock of its file system, but not before a time (seconds since
    /// 1970, and nanoseconds), whatever has become of the clock. Needs no room, and is not durable. Returns the time
    /// that it has now.
    ///
    /// # Errors
    /// What the system reports.
    fn touch(&self, not_before: (i64, i64)) -> io::Result<(i64, i64)>;
}

/// For how long what was written to a file and not synced is still there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cache {
    /// The boot of the host.
    pub boot: [u8; BOOT_LEN],
    /// The [life](Files::instance) of the file system; without one the boot alone has to tell.
    pub instance: Option<u64>,
}

impl Cache {
    /// That of files in `folder`.
    ///
    /// # Errors
    /// As [`Files::boot`] and [`Files::instance`].
    pub fn of(files: &dyn Files, folder: &Path) -> io::Result<Self> {
        Ok(Self { boot: files.boot()?, instance: files.instance(folder)? })
    }

    /// Both in the length of a boot's id: that id itself where there is no instance.
    pub fn id(&self) -> [u8; BOOT_LEN] {
        let Some(instance) = self.instance else { return self.boot };
        let sum = xxh3_128(&[&self.boot[..], &instance.to_le_bytes()].concat());
        let mut id = [b'0'; BOOT_LEN];
        id.iter_mut().zip(format!("fs1-{sum:032x}").bytes()).for_each(|(byte, of)| *byte = of);
        id
    }
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
    files.rename(&new, path).inspect_err(|_| {
        let _ = files.remove(&new);
    })?;
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

/// Makes a folder and those above it that are not there; durable on return, also if an earlier process had
/// made it and was killed before it was durable.
///
/// # Errors
/// What the system reports.
pub fn make_dirs(files: &dyn Files, path: &Path) -> io::Result<()> {
    if !files.exists(path)? {
        if let Some(parent) = path.parent() {
            make_dirs(files, parent)?;
        }
        files.make_dir(path)?;
    }
    sync_parent(files, path)
}

/// Removes a folder with the files that are in it, durably; it may be gone already. There are no folders
/// in it.
///
/// # Errors
/// What the system reports.
pub fn remove_folder(files: &dyn Files, path: &Path) -> io::Result<()> {
    if files.exists(path)? {
        for file in files.list(path)? {
            files.remove(&file)?;
        }
        files.remove_dir(path)?;
    }
    sync_parent(files, path)
}

/// The entries of a folder whose name ends in `suffix`, in the order of names.
///
/// # Errors
/// What the system reports.
pub fn entries(files: &dyn Files, folder: &Path, suffix: &str) -> io::Result<Vec<PathBuf>> {
    let mut found = files.list(folder)?;
    found.retain(|path| path.to_string_lossy().ends_with(suffix));
    Ok(found)
}

/// Makes durable what names there are beside `path`.
///
/// # Errors
/// What the system reports.
pub fn sync_parent(files: &dyn Files, path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |parent| files.sync_dir(parent))
}
