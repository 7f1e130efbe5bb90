//! Lists the files that a process has open, independent of their names and of its mount namespace.

use crate::FileId;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};
use std::collections::BTreeMap;
use std::fs::DirEntry;
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

/// The files that a process has open, by descriptor.
///
/// # Errors
/// When the process has ended, or its descriptors may not be seen.
pub fn open_files(pid: u32) -> io::Result<BTreeMap<u32, FileId>> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    let file = |entry: DirEntry| Some((number(&entry)?, at(&entry.path()).ok()?));
    Ok(open.filter_map(file).collect())
}

/// Those of them on which the process has a lock on this byte: one that belongs to the open file, and goes with it.
///
/// # Errors
/// When the process has ended, or its descriptors may not be seen.
pub fn files_locked_at(pid: u32, byte: u64) -> io::Result<BTreeMap<u32, FileId>> {
    let mut open = open_files(pid)?;
    open.retain(|descriptor, _| {
        let told = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}"));
        told.is_ok_and(|told| told.lines().any(|line| is_lock_on(line, byte)))
    });
    Ok(open)
}

fn number(entry: &DirEntry) -> Option<u32> {
    entry.file_name().to_str()?.parse().ok()
}

/// Whether a line of `fdinfo` tells of a lock on a byte. It ends with the first and the last byte, which may be the
/// file's end: `lock: 1: OFDLCK ADVISORY READ -1 fe:00:123 100 101`.
fn is_lock_on(line: &str, byte: u64) -> bool {
    let Some(lock) = line.strip_prefix("lock:").filter(|lock| lock.contains(" OFDLCK ")) else {
        return false;
    };
    let mut fields = lock.split_whitespace().rev();
    let (last, first) = (fields.next(), fields.next());
    let first: Option<u64> = first.and_then(|first| first.parse().ok());
    let last = last.and_then(|last| if last == "EOF" { Some(u64::MAX) } else { last.parse().ok() });
    first.zip(last).is_some_and(|(first, last)| (first..=last).contains(&byte))
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
    use crate::locks::{Hold, QemuLocks};
    use std::fs::{File, metadata, rename};
    use std::os::fd::AsRawFd;

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

    #[test]
    fn a_lock_is_on_each_byte_of_its_range() {
        let lock = "lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:1234 201 203";
        assert_eq!(
            [200, 201, 202, 203, 204].map(|byte| is_lock_on(lock, byte)),
            [false, true, true, true, false]
        );
        assert!(is_lock_on("lock:\t1: OFDLCK ADVISORY  WRITE -1 00:2a:7 100 EOF", 1 << 40));
        for other in
            ["pos:\t202", "lock:\t1: POSIX  ADVISORY  READ 7 fe:00:1234 202 202", "lock:", ""]
        {
            assert!(!is_lock_on(other, 202), "{other}");
        }
    }

    #[test]
    fn a_lock_is_of_the_descriptor_that_took_it() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("disk"), dir.path().join("other"));
        let open = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        let again = File::open(&path).unwrap();
        let _other = File::create(&other).unwrap();
        let me = std::process::id();
        // One of them makes another descriptor of the same open file.
        let locks = QemuLocks::take(&open, &path, Hold::Owner).unwrap();
        let mut locked = files_locked_at(me, 101).unwrap();
        let of_path = FileId::of(&metadata(&path).unwrap());
        // Other tests of this process have locks, too.
        locked.retain(|_, file| *file == of_path);
        assert!(!locked.is_empty());
        let again = u32::try_from(again.as_raw_fd()).unwrap();
        assert!(!locked.contains_key(&again), "{locked:?}");
        assert_eq!(open_files(me).unwrap().get(&again), Some(&of_path));
        drop(locks);
        assert!(files_locked_at(me, 101).unwrap().values().all(|file| *file != of_path));
    }
}
