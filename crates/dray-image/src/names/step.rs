//! What changes a file's name or mode, one durable step at a time.

use crate::{Error, Result};
use rustix::fs::{CWD, RenameFlags};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Permission bits of a file's mode.
const MODE_BITS: u32 = 0o7777;

/// One step; durable when done, harmless when done twice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Step {
    SetMode(PathBuf, u32),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

pub(super) fn fail(what: &str, path: &Path, source: std::io::Error) -> Error {
    Error::io(format!("{what} {}", path.display()), source)
}

/// Makes the names in `dir` durable.
///
/// # Errors
/// What the system reports.
pub fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(|e| fail("syncing directory", dir, e))
}

/// Permission bits of the file at `path`.
///
/// # Errors
/// What the system reports.
pub fn file_mode(path: &Path) -> Result<u32> {
    let meta = std::fs::metadata(path).map_err(|e| fail("examining", path, e))?;
    Ok(meta.permissions().mode() & MODE_BITS)
}

pub(super) fn exists(path: &Path) -> Result<bool> {
    match std::fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(fail("examining", path, e)),
    }
}

impl Step {
    pub(super) fn run(&self, dir: &Path) -> Result<()> {
        match self {
            Step::SetMode(path, mode) => {
                set_mode(path, *mode).map_err(|e| fail("setting the mode of", path, e))?;
            }
            Step::Rename(from, to) => {
                rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE).map_err(
                    |e| {
                        let what = format!("renaming {} to", from.display());
                        fail(&what, to, e.into())
                    },
                )?;
            }
            Step::Remove(path) => {
                std::fs::remove_file(path).map_err(|e| fail("removing", path, e))?;
            }
        }
        sync_dir(dir)
    }
}

/// Sets a file's mode, durably: its directory's sync need not cover that.
fn set_mode(path: &Path, mode: u32) -> std::io::Result<()> {
    // Before, in case the new mode forbids it to whoever is not root; after, in case the old one did.
    let before = File::open(path);
    std::fs::set_permissions(path, Permissions::from_mode(mode))?;
    before.or_else(|_| File::open(path)).map_or(Ok(()), |file| file.sync_all())
}

/// Opens a file of mode 0000. Root just can; anyone else must open it up for a moment.
pub(super) fn open_closed(path: &Path, write: bool) -> Result<File> {
    let open = || File::options().read(true).write(write).open(path);
    let opened = open().or_else(|e| {
        if e.kind() != std::io::ErrorKind::PermissionDenied {
            return Err(e);
        }
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        let file = open()?;
        file.set_permissions(Permissions::from_mode(0o0))?;
        Ok(file)
    });
    opened.map_err(|e| fail("opening", path, e))
}
