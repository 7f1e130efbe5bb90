//! QEMU's byte-range locks on image files: who uses an image, and saying that dray does.
//!
//! QEMU marks what it does with an image by shared locks on single bytes: byte 100 + p says "I use
//! permission p", byte 200 + p says "I share p with nobody". Before it opens an image it looks at
//! the bytes of others. A lock taken at the wrong moment makes a running QEMU *abort*, so
//! [`probe`] only asks, and [`QemuLocks`] is to be taken only after QEMU has let go of the file and
//! dropped before QEMU gets it back.

use crate::sys::{self, Lock};
use crate::{Error, ErrorKind, Result};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

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
/// What the owner of an image lets nobody else do.
const OWNER_KEEPS: [Permission; 2] = [Permission::Write, Permission::Resize];

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
        self.used.iter().any(|used| OWNER_KEEPS.contains(used))
            || self.unshared.iter().any(|kept| OWNER_USES.contains(kept))
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

fn probe_file(file: &File) -> std::io::Result<Option<InUse>> {
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
    let wanted = file.metadata()?;
    let has_it_open = |pid: u32| {
        let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        open.flatten().any(|entry| {
            std::fs::metadata(entry.path())
                .is_ok_and(|meta| (meta.dev(), meta.ino()) == (wanted.dev(), wanted.ino()))
        })
    };
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

/// The locks of an owner that writes. No QEMU can open the file for writing while this lives; the
/// locks go when it is dropped, and with the process.
#[derive(Debug)]
#[must_use = "dropping it lets the locks go"]
pub struct QemuLocks {
    _file: File,
}

impl QemuLocks {
    /// Takes the locks on the image at `path`.
    ///
    /// # Errors
    /// `InUse` when others use it in a way that excludes an owner that writes.
    pub fn take(path: &Path) -> Result<Self> {
        Self::take_file(open(path)?, path)
    }

    /// Takes the locks on an open file, which must not be in use for anything else: it is closed
    /// with the locks. `path` names it in errors.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_file(file: File, path: &Path) -> Result<Self> {
        let context = || format!("locking {}", path.display());
        let bytes = OWNER_USES
            .map(Permission::used_byte)
            .into_iter()
            .chain(OWNER_KEEPS.map(Permission::unshared_byte));
        for byte in bytes {
            sys::ofd_set(&file, Lock::Shared, byte, 1).map_err(|e| match e.kind() {
                std::io::ErrorKind::WouldBlock => {
                    Error::new(ErrorKind::InUse, context(), "another program has locked it")
                }
                _ => Error::io(context(), e),
            })?;
        }
        // Locked first, looked second: of two that do this at once, at least one sees the other.
        match probe_file(&file).map_err(|e| Error::io(context(), e))? {
            Some(others) if others.excludes_owner() => {
                Err(Error::new(ErrorKind::InUse, context(), &others.to_string()))
            }
            _ => Ok(Self { _file: file }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> tempfile::NamedTempFile {
        let file = tempfile::Builder::new().prefix("image-locks-").tempfile().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        file
    }

    #[test]
    fn a_second_open_file_sees_the_owner() {
        let image = image();
        assert_eq!(probe(image.path()).unwrap(), None);
        let locks = QemuLocks::take(image.path()).unwrap();
        let seen = probe(image.path()).unwrap().expect("the owner's locks");
        assert_eq!(seen.used, OWNER_USES);
        assert_eq!(seen.unshared, OWNER_KEEPS);
        assert!(seen.excludes_owner());
        let refused = QemuLocks::take(image.path()).unwrap_err();
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
        let _locks = QemuLocks::take(image.path()).unwrap();
    }

    #[test]
    fn an_exclusive_lock_is_in_use_not_an_io_error() {
        let image = image();
        let other = File::options().write(true).open(image.path()).unwrap();
        sys::ofd_set(&other, Lock::Exclusive, 101, 1).unwrap();
        assert_eq!(QemuLocks::take(image.path()).unwrap_err().kind, ErrorKind::InUse);
        sys::ofd_set(&other, Lock::Unlock, 101, 1).unwrap();
        let _locks = QemuLocks::take(image.path()).unwrap();
    }
}
