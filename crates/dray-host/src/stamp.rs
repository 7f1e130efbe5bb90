//! Detects changes of a file by its properties: length, times and identity.

use dray_engine::lineage::FileIdentity;
use dray_files::files::birth_of;
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
    /// Which file of it.
    pub file: FileIdentity,
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
        let same = (self.len, self.modified) == (other.len, other.modified);
        same && self.file.is_same(&other.file)
    }
}

/// How a file below a disk looks, which nobody writes as long as the disk is where it is; none of a block device, whose
/// times tell nothing.
///
/// # Errors
/// What the file system reports.
pub fn unwritten(path: &Path) -> io::Result<Option<FileStamp>> {
    let meta = std::fs::metadata(path)?;
    Ok(meta.is_file().then(|| FileStamp::from(&meta)))
}

/// Refuses a file that was written to since it was `seen`, or that is another one.
///
/// # Errors
/// Which, or what the file system reports.
pub fn check_unwritten(path: &Path, seen: Option<&FileStamp>) -> io::Result<()> {
    let Some(seen) = seen else { return Ok(()) };
    let failed = |why: io::Error| io::Error::new(why.kind(), format!("{}: {why}", path.display()));
    check_same(path, &FileStamp::of(path).map_err(failed)?, seen)
}

/// The same of a file that is open.
///
/// # Errors
/// As of [`check_unwritten`].
pub fn check_open(path: &Path, file: &File, seen: Option<&FileStamp>) -> io::Result<()> {
    let Some(seen) = seen else { return Ok(()) };
    check_same(path, &FileStamp::of_open(file)?, seen)
}

fn check_same(path: &Path, now: &FileStamp, seen: &FileStamp) -> io::Result<()> {
    let why = match now.has_same_content(seen) {
        true => return Ok(()),
        false if now.file.is_same(&seen.file) => {
            "another program has written to it, and nobody may"
        }
        false => "another file was put there",
    };
    Err(io::Error::other(format!("{}: {why}", path.display())))
}

/// Which file of its file system it is that looks like this.
pub fn identity_of(meta: &Metadata) -> FileIdentity {
    FileIdentity { inode: meta.ino(), birth: birth_of(meta) }
}

impl From<&Metadata> for FileStamp {
    fn from(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            file: identity_of(meta),
            len: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::FileTimes;

    #[test]
    fn a_file_that_was_made_again_has_not_the_same_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("base");
        std::fs::write(&path, [5; 100]).unwrap();
        let old = FileStamp::of(&path).unwrap();
        assert!(FileStamp::of(&path).unwrap().has_same_content(&old));
        if old.file.birth.is_none() {
            println!("SKIP: the file system does not tell when a file was made");
            return;
        }
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        // The file system's clock is coarse.
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, [6; 100]).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_times(FileTimes::new().set_modified(time)).unwrap();
        let new = FileStamp::of(&path).unwrap();
        assert_eq!((new.len, new.modified), (old.len, old.modified));
        assert!(!new.has_same_content(&old), "{new:?}");
        assert_ne!(new.file.birth, old.file.birth);
    }

    #[test]
    fn a_file_that_nobody_may_write_is_refused_when_somebody_has() {
        let dir = tempfile::tempdir().unwrap();
        let [path, new] = ["base", "new"].map(|name| dir.path().join(name));
        std::fs::write(&path, [5; 100]).unwrap();
        let seen = unwritten(&path).unwrap().unwrap();
        check_unwritten(&path, Some(&seen)).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(&path, [6; 100]).unwrap();
        let why = check_unwritten(&path, Some(&seen)).unwrap_err().to_string();
        assert!(why.ends_with("base: another program has written to it, and nobody may"), "{why}");
        std::fs::write(&new, [5; 100]).unwrap();
        std::fs::rename(&new, &path).unwrap();
        let why = check_unwritten(&path, Some(&seen)).unwrap_err().to_string();
        assert!(why.ends_with("base: another file was put there"), "{why}");
        std::fs::remove_file(&path).unwrap();
        check_unwritten(&path, Some(&seen)).unwrap_err();
        check_unwritten(&path, None).unwrap();
        assert_eq!(unwritten(Path::new("/dev/null")).unwrap(), None);
    }

    #[test]
    fn the_number_tells_where_a_birth_is_not_known() {
        let [unknown, one, other] =
            [None, Some((5, 0)), Some((5, 1))].map(|birth| FileIdentity { inode: 7, birth });
        assert!(unknown.is_same(&one) && other.is_same(&unknown) && one.is_same(&one));
        assert!(!one.is_same(&other));
        assert!(!one.is_same(&FileIdentity { inode: 8, ..one }));
    }
}
