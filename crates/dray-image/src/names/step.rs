//! Changes a file's name or mode, one durable step at a time.

use crate::{Error, Result};
use dray_files::files::{Files, Place, RealFiles};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

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
    sync(&RealFiles, dir)
}

/// Permission bits of the file at `path`.
///
/// # Errors
/// What the system reports.
pub fn file_mode(path: &Path) -> Result<u32> {
    RealFiles.look(path).map(|look| look.mode).map_err(|e| fail("examining", path, e))
}

impl Step {
    pub(super) fn run(&self, files: &dyn Files, dir: &Path) -> Result<()> {
        match self {
            Step::SetMode(path, mode) => {
                files.set_mode(path, *mode).map_err(|e| fail("setting the mode of", path, e))?;
            }
            Step::Rename(from, to) => files.rename_new(from, to).map_err(|e| {
                let what = format!("renaming {} to", from.display());
                fail(&what, to, e)
            })?,
            Step::Remove(path) => files.remove(path).map_err(|e| fail("removing", path, e))?,
        }
        sync(files, dir)
    }
}

/// Makes the names in `dir` durable.
pub(super) fn sync(files: &dyn Files, dir: &Path) -> Result<()> {
    files.sync_dir(dir).map_err(|e| fail("syncing directory", dir, e))
}

/// Opens a file of mode 0000. Root just can; anyone else must open it up for a moment.
///
/// # Errors
/// What the system reports; that it is a link.
pub fn open_closed(path: &Path, write: bool) -> Result<File> {
    let place = Place::of(path).map_err(|e| fail("opening", path, e))?;
    open_closed_at(&place, path, write)
}

/// The same for one that was found already; `path` names it in errors.
///
/// # Errors
/// What the system reports.
pub fn open_closed_at(place: &Place, path: &Path, write: bool) -> Result<File> {
    let open = || place.open(File::options().read(true).write(write));
    let opened = open().or_else(|e| {
        if e.kind() != std::io::ErrorKind::PermissionDenied {
            return Err(e);
        }
        place.set_mode(0o600)?;
        let file = open()?;
        file.set_permissions(Permissions::from_mode(0o0))?;
        Ok(file)
    });
    opened.map_err(|e| fail("opening", path, e))
}
