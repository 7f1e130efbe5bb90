//! Lists the files that a process has open, independent of their names and of its mount namespace.
//!
//! A process has as many descriptors as it likes, and locks on them. So a look has an end: what it did not get to is not
//! known then, and an error says so.

use crate::FileId;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};
use std::collections::BTreeMap;
use std::fs::{DirEntry, File};
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant};

/// Descriptors of a process that are looked at: several times what a QEMU with hundreds of disks and queues has.
pub const MOST_DESCRIPTORS: usize = 8192;
/// Longest look, at as many processes as it may be.
const LONGEST: Duration = Duration::from_secs(2);
/// Bytes that are read of what the kernel tells of a descriptor: QEMU has some ten locks on a file, of 60 bytes each.
const MOST_TOLD: u64 = 64 << 10;

/// Whether process `pid` has a file open. A file system that hangs does not hold this up: it is asked nothing.
///
/// # Errors
/// As [`Descriptors::has_open`].
pub fn has_open(pid: u32, file: FileId) -> io::Result<bool> {
    Descriptors::begin().has_open(pid, file)
}

/// A look at descriptors, which does not take for ever.
#[derive(Debug)]
pub struct Descriptors {
    until: Instant,
    most: usize,
    most_told: u64,
}

impl Descriptors {
    /// One that begins now.
    pub fn begin() -> Self {
        Self { until: Instant::now() + LONGEST, most: MOST_DESCRIPTORS, most_told: MOST_TOLD }
    }

    /// Whether process `pid` has a file open.
    ///
    /// # Errors
    /// When the process has ended, or its descriptors may not be seen; [`is_unseen`] when there are too many of them.
    pub fn has_open(&self, pid: u32, file: FileId) -> io::Result<bool> {
        for entry in self.descriptors(pid)? {
            // One that was closed meanwhile is not it.
            if at(&entry?.path()).is_ok_and(|(found, _)| found == file) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether any process but this one has a file open, as far as their descriptors may be seen, and are not too many.
    ///
    /// # Errors
    /// When the processes cannot be listed.
    pub fn is_open_elsewhere(&self, file: FileId) -> io::Result<bool> {
        let all = std::fs::read_dir("/proc")?.flatten();
        let mut pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        Ok(pids.any(|pid| pid != std::process::id() && self.has_open(pid, file).unwrap_or(false)))
    }

    /// The files that a process has open, by descriptor.
    ///
    /// # Errors
    /// As [`has_open`](Self::has_open).
    pub fn open_files(&self, pid: u32) -> io::Result<BTreeMap<u32, FileId>> {
        let all = self.with_kind(pid)?.into_iter();
        Ok(all.map(|(descriptor, (file, _))| (descriptor, file)).collect())
    }

    /// Those of them on which the process has a lock on this byte: one that belongs to the open file, and goes with it.
    ///
    /// # Errors
    /// As [`has_open`](Self::has_open).
    pub fn files_locked_at(&self, pid: u32, byte: u64) -> io::Result<BTreeMap<u32, FileId>> {
        let mut locked = BTreeMap::new();
        for (descriptor, (file, kind)) in self.with_kind(pid)? {
            self.check_time(pid)?;
            // Nothing else holds an image.
            let is_image = matches!(kind, FileType::RegularFile | FileType::BlockDevice);
            if is_image && self.is_locked_at(pid, descriptor, byte)? {
                locked.insert(descriptor, file);
            }
        }
        Ok(locked)
    }

    fn with_kind(&self, pid: u32) -> io::Result<BTreeMap<u32, (FileId, FileType)>> {
        let mut all = BTreeMap::new();
        for entry in self.descriptors(pid)? {
            let entry = entry?;
            all.extend(number(&entry).zip(at(&entry.path()).ok()));
        }
        Ok(all)
    }

    /// The descriptors of a process; an error in the place of the first that is too many.
    fn descriptors(&self, pid: u32) -> io::Result<impl Iterator<Item = io::Result<DirEntry>>> {
        let all = std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten().enumerate();
        Ok(all.map(move |(nth, entry)| {
            if nth >= self.most {
                let what = format!("process {pid} has more than {} descriptors", self.most);
                return Err(io::Error::new(io::ErrorKind::QuotaExceeded, what));
            }
            self.check_time(pid)?;
            Ok(entry)
        }))
    }

    /// Whether the process has a lock on a byte of a file through this descriptor. One that was closed meanwhile has
    /// none.
    fn is_locked_at(&self, pid: u32, descriptor: u32, byte: u64) -> io::Result<bool> {
        let mut told = String::new();
        let read = File::open(format!("/proc/{pid}/fdinfo/{descriptor}"))
            .and_then(|all| all.take(self.most_told).read_to_string(&mut told));
        if told.len() as u64 >= self.most_told {
            let what = format!("process {pid} has too many locks on one file");
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, what));
        }
        Ok(read.is_ok() && told.lines().any(|line| is_lock_on(line, byte)))
    }

    fn check_time(&self, pid: u32) -> io::Result<()> {
        if Instant::now() < self.until {
            return Ok(());
        }
        let what = format!("looking at the descriptors of process {pid} takes too long");
        Err(io::Error::new(io::ErrorKind::TimedOut, what))
    }
}

/// Whether a look has failed because it had to end, and the process may have any file open.
pub fn is_unseen(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::QuotaExceeded | io::ErrorKind::TimedOut)
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

/// What a descriptor's link leads to, and of what kind that is, as far as the kernel knows by itself.
fn at(link: &Path) -> io::Result<(FileId, FileType)> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO;
    let found = statx(CWD, link, AtFlags::STATX_DONT_SYNC, wanted)?;
    let kind = FileType::from_raw_mode(found.stx_mode.into());
    let file = match kind {
        FileType::BlockDevice => {
            FileId::Device(makedev(found.stx_rdev_major, found.stx_rdev_minor))
        }
        _ => FileId::File(makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino),
    };
    Ok((file, kind))
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
        assert!(!Descriptors::begin().is_open_elsewhere(id).unwrap(), "it is open here");
        let kept = std::process::Stdio::piped();
        let mut other = other.stdin(kept).stderr(stdin).spawn().unwrap();
        assert!(Descriptors::begin().is_open_elsewhere(id).unwrap());
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
        let look = Descriptors::begin();
        let mut locked = look.files_locked_at(me, 101).unwrap();
        let of_path = FileId::of(&metadata(&path).unwrap());
        // Other tests of this process have locks, too.
        locked.retain(|_, file| *file == of_path);
        assert!(!locked.is_empty());
        let again = u32::try_from(again.as_raw_fd()).unwrap();
        assert!(!locked.contains_key(&again), "{locked:?}");
        assert_eq!(look.open_files(me).unwrap().get(&again), Some(&of_path));
        drop(locks);
        assert!(look.files_locked_at(me, 101).unwrap().values().all(|file| *file != of_path));
    }

    #[test]
    fn a_look_ends_however_much_a_process_has_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let open = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        let (me, file) = (std::process::id(), FileId::of(&metadata(&path).unwrap()));
        let few = Descriptors { most: 1, ..Descriptors::begin() };
        let elsewhere = FileId::File(0, 0);
        for why in [
            few.has_open(me, elsewhere).unwrap_err(),
            few.open_files(me).unwrap_err(),
            few.files_locked_at(me, 101).unwrap_err(),
        ] {
            assert!(
                is_unseen(&why) && why.to_string().contains("more than 1 descriptors"),
                "{why}"
            );
        }
        let late = Descriptors { until: Instant::now(), ..Descriptors::begin() };
        for why in [late.has_open(me, file).unwrap_err(), late.open_files(me).unwrap_err()] {
            assert!(is_unseen(&why) && why.to_string().contains("takes too long"), "{why}");
        }
        assert!(
            !is_unseen(&Descriptors::begin().open_files(u32::MAX).unwrap_err()),
            "it has ended"
        );
        // QEMU's locks take more than that to tell.
        let _locks = QemuLocks::take(&open, &path, Hold::Owner).unwrap();
        let short = Descriptors { most_told: 100, ..Descriptors::begin() };
        let why = short.files_locked_at(me, 101).unwrap_err();
        assert!(is_unseen(&why) && why.to_string().contains("too many locks"), "{why}");
    }
}
