//! A file system that is not there when it should be, or that takes no changes.

use super::looks::At;
use super::names::Entry;
use super::state::State;
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// What is wrong with the file system below a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mount {
    /// It is not mounted: neither the folder nor anything in it is there.
    Away,
    /// It is mounted for reading only: no file of it can be opened, as they are opened for writing too.
    ReadOnly,
}

/// The folder of such a file system.
pub(super) struct Mounted {
    pub(super) folder: PathBuf,
    pub(super) how: Mount,
}

impl State {
    fn mounted_at(&self, path: &Path) -> Option<Mount> {
        self.mounted.as_ref().filter(|mounted| path.starts_with(&mounted.folder)).map(|m| m.how)
    }

    /// Which life of its file system a folder is in.
    pub(super) fn instance(&self, folder: &Path) -> u64 {
        let times = self.remounts.iter().find(|(at, _)| folder.starts_with(at));
        times.map_or(0, |(_, times)| *times)
    }

    /// The names in it stay, and of the content of its files what was synced, or any part of the rest.
    pub(super) fn remount(&mut self, folder: &Path) {
        let dirs = self.pending.keys().filter(|dir| dir.starts_with(folder));
        let dirs: Vec<_> = dirs.cloned().collect();
        dirs.iter().for_each(|dir| self.sync_dir(dir));
        let of_file = |(path, entry): (&Path, Entry)| match entry {
            Entry::File(number) if path.starts_with(folder) => Some(number),
            _ => None,
        };
        let numbers: Vec<_> = self.live.iter().filter_map(of_file).collect();
        for number in numbers {
            if let Some(inode) = self.inodes.get_mut(&number) {
                inode.cut(&mut self.random);
            }
        }
        *self.remounts.entry(folder.to_owned()).or_default() += 1;
        self.life += 1;
    }

    /// Whether nobody can look there.
    pub(super) fn refuse_look(&self, path: &Path) -> io::Result<()> {
        match self.mounted_at(path) {
            Some(Mount::Away) => Err(io::ErrorKind::NotFound.into()),
            Some(Mount::ReadOnly) | None => Ok(()),
        }
    }

    /// Whether nothing there can be changed, nor a file be opened.
    pub(super) fn refuse_change(&self, at: At<'_>) -> io::Result<()> {
        let of_inode = |number| {
            let mut names = self.live.iter();
            names.find(|(_, entry)| *entry == Entry::File(number)).map(|(path, _)| path)
        };
        let path = match at {
            At::Path(path) => Some(path),
            At::Inode(number) => of_inode(number),
            At::Host => None,
        };
        match path.and_then(|path| self.mounted_at(path)) {
            Some(Mount::Away) => Err(io::ErrorKind::NotFound.into()),
            Some(Mount::ReadOnly) => Err(Errno::ROFS.into()),
            None => Ok(()),
        }
    }
}
