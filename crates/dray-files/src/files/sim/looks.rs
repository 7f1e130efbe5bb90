//! Calls that only look: which of them fail.

use super::Fault;
use super::names::{Entry, Names};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// What a call looks at.
#[derive(Clone, Copy)]
pub(super) enum At<'a> {
    /// What is at a path, a file that is opened, or the names in a folder.
    Path(&'a Path),
    /// The content of an open file.
    Inode(u64),
    /// Nothing that lies on the disk.
    Host,
}

/// A place that cannot be read: the name, and the file if one has it.
struct Unreadable {
    path: Option<PathBuf>,
    inode: Option<u64>,
}

/// All such calls.
#[derive(Default)]
pub(super) struct Looks {
    count: u64,
    met: u64,
    faults: BTreeMap<u64, Fault>,
    unreadable: Option<Unreadable>,
}

impl Looks {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Faults that have happened.
    pub(super) fn met(&self) -> u64 {
        self.met
    }

    pub(super) fn plan(&mut self, call: u64, fault: Fault) {
        self.faults.insert(call, fault);
    }

    pub(super) fn mend(&mut self) {
        self.unreadable = None;
    }

    pub(super) fn clear(&mut self) {
        self.faults.clear();
        self.mend();
    }

    /// One more call. Fails if it is to.
    pub(super) fn see(&mut self, at: At<'_>, names: &Names) -> io::Result<()> {
        let inode = match at {
            At::Host => return Ok(()),
            At::Inode(inode) => Some(inode),
            At::Path(path) => match names.get(path) {
                Some(Entry::File(inode)) => Some(inode),
                _ => None,
            },
        };
        let path = if let At::Path(path) = at { Some(path) } else { None };
        self.count += 1;
        let fault = self.faults.remove(&self.count);
        self.met += u64::from(fault.is_some());
        if fault == Some(Fault::Unreadable) {
            self.unreadable = Some(Unreadable { path: path.map(Path::to_owned), inode });
        }
        let is_this = |place: &Unreadable| {
            path.is_some() && place.path.as_deref() == path
                || inode.is_some() && place.inode == inode
        };
        match fault.is_some() || self.unreadable.as_ref().is_some_and(is_this) {
            true => Err(Errno::IO.into()),
            false => Ok(()),
        }
    }
}
