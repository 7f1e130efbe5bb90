//! QEMU's byte-range locks on image files: who uses an image, and saying that dray does.
//!
//! QEMU marks what it does with an image by shared locks on single bytes: byte 100 + p says "I use
//! permission p", byte 200 + p says "I share p with nobody". Before it opens an image it looks at
//! the bytes of others. A lock taken at the wrong moment makes a running QEMU *abort*, so
//! [`probe`] only asks, and [`QemuLocks`] is to be taken only after QEMU has let go of the file and
//! dropped before QEMU gets it back.
//!
//! A [`FileId`] tells whether two names are names of the same file.

use crate::descriptors::has_open;
use crate::sys::{self, Lock};
use crate::{Error, ErrorKind, Result};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

const USED_BASE: u64 = 100;
const UNSHARED_BASE: u64 = 200;

/// A permission of QEMU's block layer; its number is its place among the locked bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Permission {
    /// To read and rely on what was read.
    ConsistentRead = 0,
    /// To change the content.
    Write = 1,
    /// To write what is there already.
    WriteUnchanged = 2,
    /// To change the length.
    Resize = 3,
}

const ALL: [Permission; 4] =
    [Permission::ConsistentRead, Permission::Write, Permission::WriteUnchanged, Permission::Resize];
/// What the owner of an image does with it.
const OWNER_USES: [Permission; 3] =
    [Permission::ConsistentRead, Permission::Write, Permission::Resize];
/// What an owner does while a QEMU still reads the file for it and wants its length kept.
const SUCCESSOR_USES: [Permission; 2] = [Permission::ConsistentRead, Permission::Write];
/// What someone does with an image who only reads it.
const READER_USES: [Permission; 1] = [Permission::ConsistentRead];
/// What dray lets nobody else do with an image, whether it writes the image or relies on its content.
const KEEPS: [Permission; 2] = [Permission::Write, Permission::Resize];

/// What dray does with an image that it has locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hold {
    /// It writes it.
    Owner,
    /// It writes it, and does not change its length: the QEMU that had it tells what it has written, through an
    /// export that does not share [`Resize`](Permission::Resize).
    Successor,
    /// It reads it, and relies on its content: others may read it as well.
    Reader,
}

impl Hold {
    fn uses(self) -> &'static [Permission] {
        match self {
            Self::Owner => &OWNER_USES,
            Self::Successor => &SUCCESSOR_USES,
            Self::Reader => &READER_USES,
        }
    }

    fn bytes(self) -> Vec<u64> {
        let used = self.uses().iter().map(|used| used.used_byte());
        used.chain(KEEPS.map(Permission::unshared_byte)).collect()
    }
}

/// Which file it is, whatever it is called: of two names with the same one, both are names of one
/// file. It stays that file's for as long as the file is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileId {
    /// A file: its file system and its number there.
    File(u64, u64),
    /// A block device, whatever node leads to it.
    Device(u64),
}

impl FileId {
    /// The identity that is in what the system tells of a file.
    pub fn of(meta: &std::fs::Metadata) -> Self {
        match meta.file_type().is_block_device() {
            true => Self::Device(meta.rdev()),
            false => Self::File(meta.dev(), meta.ino()),
        }
    }
}

impl Permission {
    fn used_byte(self) -> u64 {
        USED_BASE + self as u64
    }

    fn unshared_byte(self) -> u64 {
        UNSHARED_BASE + self as u64
    }
}

/// A program that has the image open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Process {
    /// Its process id.
    pub pid: u32,
    /// Its short name.
    pub name: String,
}

/// What others do with an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InUse {
    /// Permissions that someone uses.
    pub used: Vec<Permission>,
    /// Permissions that someone does not share.
    pub unshared: Vec<Permission>,
    /// Programs that have the file open, as far as can be seen.
    pub by: Vec<Process>,
}

impl InUse {
    /// True when an owner that writes could not open the image beside them.
    pub fn excludes_owner(&self) -> bool {
        self.excludes(Hold::Owner)
    }

    fn excludes(&self, hold: Hold) -> bool {
        self.used.iter().any(|used| KEEPS.contains(used))
            || self.unshared.iter().any(|kept| hold.uses().contains(kept))
    }
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.used.contains(&Permission::Write) {
            "it is open for writing"
        } else {
            "it is open"
        })?;
        for (nth, process) in self.by.iter().enumerate() {
            let before = if nth == 0 { " in " } else { ", " };
            write!(f, "{before}{} (pid {})", process.name, process.pid)?;
        }
        Ok(())
    }
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| Error::io(context(path), e))
}

fn context(path: &Path) -> String {
    format!("looking at the locks of {}", path.display())
}

/// Asks what others do with the image at `path`; takes no lock.
///
/// # Errors
/// When the file cannot be opened for reading or has no locks.
pub fn probe(path: &Path) -> Result<Option<InUse>> {
    let file = open(path)?;
    probe_file(&file).map_err(|e| Error::io(context(path), e))
}

/// [`probe`] of an open file. Its own locks are not told of.
///
/// # Errors
/// What the system reports.
pub fn probe_file(file: &File) -> std::io::Result<Option<InUse>> {
    let locked = |byte: u64| sys::ofd_is_locked(file, Lock::Exclusive, byte, 1);
    let (mut used, mut unshared) = (Vec::new(), Vec::new());
    for permission in ALL {
        if locked(permission.used_byte())? {
            used.push(permission);
        }
        if locked(permission.unshared_byte())? {
            unshared.push(permission);
        }
    }
    if used.is_empty() && unshared.is_empty() {
        return Ok(None);
    }
    Ok(Some(InUse { used, unshared, by: users(file)? }))
}

/// Other programs that have the same file open. Those of other users may stay unseen.
fn users(file: &File) -> std::io::Result<Vec<Process>> {
    let wanted = FileId::of(&file.metadata()?);
    let has_it_open = |pid: u32| has_open(pid, wanted).unwrap_or(false);
    let pids = std::fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|&pid| pid != std::process::id() && has_it_open(pid));
    Ok(pids.map(|pid| Process { pid, name: name_of(pid) }).collect())
}

fn name_of(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

/// The locks on an image that dray writes or relies on. No QEMU can open the file for writing while this
/// lives; the locks go when it is dropped, and with the process.
#[derive(Debug)]
#[must_use = "dropping it lets the locks go"]
pub struct QemuLocks {
    /// Shares its locks with the open image: they are on the very file that is served.
    file: File,
    path: PathBuf,
    hold: Hold,
}

impl QemuLocks {
    /// Takes the locks on an open image, of which there are none yet. `path` names it in errors.
    ///
    /// # Errors
    /// `InUse` when others use it in a way that excludes this hold; nothing is locked then.
    pub fn take(image: &File, path: &Path, hold: Hold) -> Result<Self> {
        let file = image.try_clone().map_err(|e| Error::io(locking(path), e))?;
        // Whatever fails, what was locked until then goes with it.
        let locks = Self { file, path: path.to_owned(), hold };
        locks.set(hold)?;
        Ok(locks)
    }

    /// What the locks allow dray.
    pub fn hold(&self) -> Hold {
        self.hold
    }

    /// Changes what is locked without ever letting a writer in. Locking less cannot be refused by others.
    ///
    /// # Errors
    /// As [`take`](Self::take); the locks are as they were then.
    pub fn change(&mut self, hold: Hold) -> Result<()> {
        let held = self.hold.bytes();
        if hold.bytes().iter().any(|byte| !held.contains(byte)) {
            self.set(hold).inspect_err(|_| self.unset_beyond(self.hold))?;
        }
        self.hold = hold;
        self.unset_beyond(hold);
        Ok(())
    }

    /// Looked first: a QEMU that has the file, and changes what it locks, ends when another one's lock is in its
    /// way. Then locked, and looked once more: of two that do this at once, at least one sees the other.
    fn set(&self, hold: Hold) -> Result<()> {
        let context = || locking(&self.path);
        self.look(hold)?;
        for byte in hold.bytes() {
            sys::ofd_set(&self.file, Lock::Shared, byte, 1).map_err(|e| match e.kind() {
                std::io::ErrorKind::WouldBlock => {
                    Error::new(ErrorKind::InUse, context(), "another program has locked it")
                }
                _ => Error::io(context(), e),
            })?;
        }
        self.look(hold)
    }

    /// Refuses what others use in a way that excludes this hold.
    fn look(&self, hold: Hold) -> Result<()> {
        let context = || locking(&self.path);
        match probe_file(&self.file).map_err(|e| Error::io(context(), e))? {
            Some(others) if others.excludes(hold) => {
                Err(Error::new(ErrorKind::InUse, context(), &others.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// Unlocks what an owner locks and `hold` does not.
    fn unset_beyond(&self, hold: Hold) {
        let kept = hold.bytes();
        self.unset(Hold::Owner.bytes().into_iter().filter(|byte| !kept.contains(byte)));
    }

    fn unset(&self, bytes: impl Iterator<Item = u64>) {
        for byte in bytes {
            if let Err(why) = sys::ofd_set(&self.file, Lock::Unlock, byte, 1) {
                tracing::warn!(image = %self.path.display(), %why, "cannot unlock an image");
            }
        }
    }
}

impl Drop for QemuLocks {
    fn drop(&mut self) {
        self.unset(Hold::Owner.bytes().into_iter());
    }
}

fn locking(path: &Path) -> String {
    format!("locking {}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> tempfile::NamedTempFile {
        let file = tempfile::Builder::new().prefix("image-locks-").tempfile().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        file
    }

    fn take(path: &Path) -> Result<QemuLocks> {
        QemuLocks::take(&open(path).unwrap(), path, Hold::Owner)
    }

    #[test]
    fn a_second_open_file_sees_the_owner() {
        let image = image();
        assert_eq!(probe(image.path()).unwrap(), None);
        let locks = take(image.path()).unwrap();
        let seen = probe(image.path()).unwrap().expect("the owner's locks");
        assert_eq!(seen.used, OWNER_USES);
        assert_eq!(seen.unshared, KEEPS);
        assert!(seen.excludes_owner());
        let refused = take(image.path()).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::InUse);
        assert!(probe(image.path()).unwrap().is_some(), "the refused one took the locks along");
        drop(locks);
        assert_eq!(probe(image.path()).unwrap(), None);
    }

    #[test]
    fn a_reader_that_shares_everything_excludes_nobody() {
        let image = image();
        let reader = File::open(image.path()).unwrap();
        sys::ofd_set(&reader, Lock::Shared, Permission::ConsistentRead.used_byte(), 1).unwrap();
        assert!(!probe(image.path()).unwrap().unwrap().excludes_owner());
        let _locks = take(image.path()).unwrap();
    }

    #[test]
    fn an_exclusive_lock_is_in_use_not_an_io_error() {
        let image = image();
        let other = File::options().write(true).open(image.path()).unwrap();
        sys::ofd_set(&other, Lock::Exclusive, 101, 1).unwrap();
        assert_eq!(take(image.path()).unwrap_err().kind, ErrorKind::InUse);
        sys::ofd_set(&other, Lock::Unlock, 101, 1).unwrap();
        let _locks = take(image.path()).unwrap();
    }

    #[test]
    fn a_reader_keeps_writers_out_and_becomes_an_owner_when_nobody_else_reads() {
        let image = image();
        let file = open(image.path()).unwrap();
        let mut locks = QemuLocks::take(&file, image.path(), Hold::Owner).unwrap();
        locks.change(Hold::Reader).unwrap();
        let other = open(image.path()).unwrap();
        let second = QemuLocks::take(&other, image.path(), Hold::Reader).unwrap();
        assert_eq!(take(image.path()).unwrap_err().kind, ErrorKind::InUse);
        assert_eq!(locks.change(Hold::Owner).unwrap_err().kind, ErrorKind::InUse);
        assert_eq!(locks.hold(), Hold::Reader);
        let seen = probe(image.path()).unwrap().unwrap();
        assert_eq!(seen.used, READER_USES, "the refused owner left locks");
        drop(second);
        locks.change(Hold::Owner).unwrap();
        drop(locks);
        assert_eq!(
            probe(image.path()).unwrap(),
            None,
            "the file is still open, and locked by nobody"
        );
    }

    #[test]
    fn hard_links_are_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let (one, link, other) =
            (dir.path().join("one"), dir.path().join("link"), dir.path().join("other"));
        std::fs::write(&one, [1]).unwrap();
        std::fs::write(&other, [1]).unwrap();
        std::fs::hard_link(&one, &link).unwrap();
        let id = |path| FileId::of(&std::fs::metadata(path).unwrap());
        assert_eq!(id(&one), id(&link));
        assert_ne!(id(&one), id(&other));
    }
}
