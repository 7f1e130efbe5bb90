//! The files of this host.

use super::{BOOT_LEN, Files, MAX_LEN, StateFile};
use rustix::fs::FallocateFlags;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

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

    fn exists(&self, path: &Path) -> io::Result<bool> {
        path.try_exists()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
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
}

struct RealFile(File);

impl StateFile for RealFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        let len = self.len()?;
        if len > MAX_LEN {
            let why = format!("it has {len} bytes, more than any that dray writes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let mut bytes = vec![0; len as usize];
        self.0.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
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
}
