//! Lists the files that a process has open, independent of their names and of its mount namespace.

use crate::FileId;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};
use std::io;
use std::path::Path;

/// Whether process `pid` has a file open. A file system that hangs does not hold this up: it is asked nothing.
///
/// # Errors
/// When the process has ended, or its descriptors may not be seen.
pub fn has_open(pid: u32, file: FileId) -> io::Result<bool> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd"))?;
    // One that was closed meanwhile is not it.
    Ok(open.flatten().any(|entry| at(&entry.path()).is_ok_and(|found| found == file)))
}

/// Whether any process but this one has a file open, as far as their descriptors may be seen.
///
/// # Errors
/// When the processes cannot be listed.
pub fn is_open_elsewhere(file: FileId) -> io::Result<bool> {
    let all = std::fs::read_dir("/proc")?.flatten();
    let mut pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    Ok(pids.any(|pid| pid != std::process::id() && has_open(pid, file).unwrap_or(false)))
}

/// What a descriptor's link leads to, as far as the kernel knows by itself.
fn at(link: &Path) -> io::Result<FileId> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO;
    let found = statx(CWD, link, AtFlags::STATX_DONT_SYNC, wanted)?;
    let kind = FileType::from_raw_mode(found.stx_mode.into());
    Ok(match kind {
        FileType::BlockDevice => {
            FileId::Device(makedev(found.stx_rdev_major, found.stx_rdev_minor))
        }
        _ => FileId::File(makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{File, metadata, rename};

    #[test]
    fn a_file_is_open_whatever_it_is_called() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("disk"), dir.path().join("other"));
        let open = File::create(&path).unwrap();
        drop(File::create(&other).unwrap());
        let me = std::process::id();
        let id = |path: &Path| FileId::of(&metadata(path).unwrap());
        let first = id(&path);
        assert!(has_open(me, first).unwrap() && !has_open(me, id(&other)).unwrap());
        rename(&other, &path).unwrap();
        assert!(!has_open(me, id(&path)).unwrap(), "another file has the name");
        assert!(has_open(me, first).unwrap());
        drop(open);
        assert!(!has_open(me, first).unwrap());
        assert!(has_open(u32::MAX, first).is_err());
        let mut other = std::process::Command::new("cat");
        let (stdin, id) = (File::open(&path).unwrap(), id(&path));
        assert!(!is_open_elsewhere(id).unwrap(), "it is open here");
        let kept = std::process::Stdio::piped();
        let mut other = other.stdin(kept).stderr(stdin).spawn().unwrap();
        assert!(is_open_elsewhere(id).unwrap());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
