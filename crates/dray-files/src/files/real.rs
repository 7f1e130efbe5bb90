//! The files of this host.

use super::{BOOT_LEN, Device, Files, Kind, Look, Place, StateFile};
use rustix::fs::{CWD, FallocateFlags, RenameFlags, Timespec, Timestamps, UTIME_NOW, futimens};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Permission bits of a file's mode.
const MODE_BITS: u32 = 0o7777;

/// When a file was made: seconds since 1970, and nanoseconds; none where the file system does not tell.
pub fn birth_of(meta: &Metadata) -> Option<(i64, i64)> {
    let seconds = |time: Duration| i64::try_from(time.as_secs()).ok();
    match meta.created().ok()?.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => Some((seconds(since)?, since.subsec_nanos().into())),
        // Before 1970, on a host whose clock was wrong.
        Err(before) => {
            let until = before.duration();
            Some((-seconds(until)?, -i64::from(until.subsec_nanos())))
        }
    }
}

/// The files of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealFiles;

impl Files for RealFiles {
    fn open(&self, path: &Path) -> io::Result<Box<dyn StateFile>> {
        Ok(Box::new(RealFile(File::options().read(true).write(true).open(path)?)))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StateFile>> {
        let mut options = File::options();
        // For the agent's eyes alone.
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        Ok(Box::new(RealFile(options.open(path)?)))
    }

    fn create_closed(&self, path: &Path) -> io::Result<Box<dyn StateFile>> {
        let mut options = File::options();
        options.read(true).write(true).create_new(true).mode(0o0);
        Ok(Box::new(RealFile(options.open(path)?)))
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        match fs::symlink_metadata(path) {
            Ok(_) => Ok(true),
            Err(why) => match why.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(false),
                _ => Err(why),
            },
        }
    }

    fn look(&self, path: &Path) -> io::Result<Look> {
        let meta = fs::metadata(path)?;
        let kind = match meta.file_type() {
            kind if kind.is_file() => Kind::File,
            kind if kind.is_dir() => Kind::Folder,
            _ => Kind::Other,
        };
        Ok(Look {
            kind,
            len: meta.len(),
            mode: meta.mode() & MODE_BITS,
            inode: meta.ino(),
            birth: birth_of(&meta),
            changed: (meta.mtime(), meta.mtime_nsec()),
            touched: (meta.ctime(), meta.ctime_nsec()),
        })
    }

    fn link(&self, path: &Path) -> Option<PathBuf> {
        fs::read_link(path).ok()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
    }

    fn set_mode(&self, path: &Path, mode: u32) -> io::Result<()> {
        let place = Place::of(path)?;
        // Opened before, in case the new mode forbids it to whoever is not root; after, in case the old
        // one did. The sync of the folder need not cover the mode.
        let before = place.open(File::options().read(true));
        place.set_mode(mode)?;
        let file = before.or_else(|_| place.open(File::options().read(true)));
        file.map_or(Ok(()), |file| file.sync_all())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        match fs::create_dir(path) {
            Err(why) if why.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            made => made,
        }
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        let mut found: Vec<PathBuf> =
            fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
        found.sort();
        Ok(found)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }

    fn boot(&self) -> io::Result<[u8; BOOT_LEN]> {
        let text = fs::read("/proc/sys/kernel/random/boot_id")?;
        let id = text.get(..BOOT_LEN).and_then(|id| id.try_into().ok());
        id.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the boot's id is too short"))
    }

    fn instance(&self, folder: &Path) -> io::Result<Option<u64>> {
        super::instance::instance(folder)
    }

    fn device(&self, path: &Path) -> io::Result<Device> {
        Device::at(path)
    }
}

#[derive(Debug)]
struct RealFile(File);

impl StateFile for RealFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        let len = self.len()?;
        let mut bytes = vec![0; len as usize];
        // Who writes to it may have cut it off meanwhile.
        let read = self.read_at(&mut bytes, 0)?;
        bytes.truncate(read);
        Ok(bytes)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match self.0.read_at(&mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
        Ok(done)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(&self.0, FallocateFlags::KEEP_SIZE, offset, len)?)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn touch(&self, not_before: (i64, i64)) -> io::Result<(i64, i64)> {
        self.set_time(Timespec { tv_sec: 0, tv_nsec: UTIME_NOW })?;
        let meta = self.0.metadata()?;
        let now = (meta.mtime(), meta.mtime_nsec());
        if now >= not_before {
            return Ok(now);
        }
        self.set_time(Timespec { tv_sec: not_before.0, tv_nsec: not_before.1 })?;
        Ok(not_before)
    }
}

impl RealFile {
    fn set_time(&self, time: Timespec) -> io::Result<()> {
        Ok(futimens(&self.0, &Timestamps { last_access: time, last_modification: time })?)
    }
}
