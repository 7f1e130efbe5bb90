//! What is on a simulated disk: what a process sees, what is durable, and what is between the two.

use super::inode::Inode;
use super::looks::{At, Looks};
use super::mount::Mounted;
use super::names::{Entry, Names};
use super::{Device, Fault};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Seconds, and nanoseconds.
pub(super) type When = (i64, i64);

/// Permission bits of a file that was made for the agent alone.
pub(super) const MODE: u32 = 0o600;

/// What a call that changes something does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    /// Changes something and takes room for it.
    Grow,
    /// Changes something and needs no room.
    Change,
    Write,
    Sync,
}

#[derive(Clone)]
pub(super) enum NameChange {
    Put(PathBuf, Entry),
    Take(PathBuf),
    Move(PathBuf, PathBuf),
}

impl NameChange {
    fn apply(&self, names: &mut Names) {
        match self {
            Self::Put(path, entry) => names.put(path, *entry),
            // A folder that is gone has nothing in it.
            Self::Take(path) => names.take_all(path),
            Self::Move(from, to) => {
                if let Some(entry) = names.take(from) {
                    names.put(to, entry);
                }
            }
        }
    }
}

/// SplitMix64: the same faults from the same seed.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ mixed >> 31) % end
    }

    pub(super) fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}

pub(super) struct State {
    pub(super) inodes: BTreeMap<u64, Inode>,
    pub(super) next_inode: u64,
    /// Numbers of files that are gone, as they were shown: the next file that is made gets one of them.
    free: Vec<u64>,
    pub(super) live: Names,
    pub(super) durable: Names,
    /// By folder, since it was last synced.
    pub(super) pending: BTreeMap<PathBuf, Vec<NameChange>>,
    /// What time it is.
    pub(super) clock: When,
    /// Calls so far, of every process.
    pub(super) calls: u64,
    pub(super) faults: BTreeMap<u64, Fault>,
    /// Faults of them that have happened.
    pub(super) met: u64,
    /// Syncs of files that have failed.
    pub(super) failed_syncs: u64,
    /// Calls that only look.
    pub(super) looks: Looks,
    /// Only this process is alive.
    pub(super) life: u64,
    pub(super) boot: u64,
    /// Nothing that takes room succeeds.
    pub(super) full: bool,
    /// A file system that is not mounted as it should be.
    pub(super) mounted: Option<Mounted>,
    /// How often the file systems of these folders were mounted anew.
    pub(super) remounts: BTreeMap<PathBuf, u64>,
    /// Block devices.
    pub(super) devices: BTreeMap<PathBuf, Device>,
    pub(super) random: Random,
}

pub(super) fn dead() -> io::Error {
    io::Error::other("the process is dead")
}

impl State {
    /// A disk with these names, durably. What power cuts leave follows from `seed`.
    pub(super) fn new(names: Names, seed: u64) -> Self {
        Self {
            inodes: BTreeMap::new(),
            next_inode: 1,
            free: Vec::new(),
            live: names.clone(),
            durable: names,
            pending: BTreeMap::new(),
            clock: (0, 0),
            calls: 0,
            faults: BTreeMap::new(),
            met: 0,
            failed_syncs: 0,
            looks: Looks::default(),
            life: 0,
            boot: 0,
            full: false,
            mounted: None,
            remounts: BTreeMap::new(),
            devices: BTreeMap::new(),
            random: Random(seed),
        }
    }

    /// What time it is; every time that it is asked for is later than the one before.
    pub(super) fn now(&mut self) -> When {
        self.clock.1 += 1;
        self.clock
    }

    pub(super) fn rename(&mut self, change: NameChange, dir: &Path) {
        change.apply(&mut self.live);
        self.pending.entry(dir.to_owned()).or_default().push(change);
    }

    pub(super) fn move_name(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let dir = self.folder_is_there(from)?;
        match self.live.get(from) {
            None => return Err(io::ErrorKind::NotFound.into()),
            Some(Entry::File(number)) => {
                let now = self.now();
                self.inode(number)?.touched = now;
            }
            Some(Entry::Folder) => {}
        }
        self.rename(NameChange::Move(from.to_owned(), to.to_owned()), &dir);
        Ok(())
    }

    pub(super) fn sync_dir(&mut self, dir: &Path) {
        let changes = self.pending.remove(dir).unwrap_or_default();
        changes.iter().for_each(|change| change.apply(&mut self.durable));
    }

    pub(super) fn cut(&mut self) {
        for (_, changes) in std::mem::take(&mut self.pending) {
            let kept = self.random.below(changes.len() as u64 + 1) as usize;
            changes[..kept].iter().for_each(|change| change.apply(&mut self.durable));
        }
        self.live.clone_from(&self.durable);
        // Files that were removed may be there again.
        self.free.clear();
        for inode in self.inodes.values_mut() {
            inode.cut(&mut self.random);
        }
        self.boot += 1;
        self.life += 1;
    }

    /// Counts a call that may change something; what is to happen at it.
    pub(super) fn next_call(&mut self) -> Option<Fault> {
        self.calls += 1;
        let fault = self.faults.remove(&self.calls);
        self.met += u64::from(fault.is_some());
        fault
    }

    /// Who calls ends before or after the call, if the fault says so.
    pub(super) fn end(&mut self, fault: Option<Fault>, before: bool) -> io::Result<()> {
        match (fault, before) {
            (Some(Fault::KillBefore), true) | (Some(Fault::KillAfter), false) => self.life += 1,
            (Some(Fault::CutBefore), true) | (Some(Fault::CutAfter), false) => self.cut(),
            _ => return Ok(()),
        }
        Err(dead())
    }

    /// Somebody looks.
    pub(super) fn see(&mut self, at: At<'_>) -> io::Result<()> {
        self.looks.see(at, &self.live)?;
        if let At::Path(path) = at { self.refuse_look(path) } else { Ok(()) }
    }

    /// A sync of this file fails.
    pub(super) fn fail_sync(&mut self, number: u64) -> io::Result<()> {
        let inode = self.inodes.get_mut(&number).ok_or(io::ErrorKind::NotFound)?;
        inode.fail_sync(&mut self.random);
        self.failed_syncs += 1;
        Ok(())
    }

    /// The file was opened.
    pub(super) fn opened(&mut self, number: u64) {
        if let Some(inode) = self.inodes.get_mut(&number) {
            inode.forget_lost(&mut self.random);
        }
    }

    /// The file loses its name.
    pub(super) fn removed(&mut self, number: u64) {
        self.free.extend(self.inodes.get(&number).map(|inode| inode.shown));
    }

    /// A new file. It gets the number of one that is gone, as with ext4.
    pub(super) fn make(&mut self, path: &Path, dir: &Path, mode: u32) -> u64 {
        let inode = self.next_inode;
        self.next_inode += 1;
        let shown = self.free.pop().unwrap_or(inode);
        let now = self.now();
        self.inodes.insert(inode, Inode::new(mode, shown, now));
        self.rename(NameChange::Put(path.to_owned(), Entry::File(inode)), dir);
        inode
    }

    pub(super) fn folder_is_there(&self, path: &Path) -> io::Result<PathBuf> {
        let dir = path.parent().unwrap_or(Path::new("/")).to_owned();
        match self.live.get(&dir) {
            Some(Entry::Folder) => Ok(dir),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    pub(super) fn inode(&mut self, number: u64) -> io::Result<&mut Inode> {
        self.inodes.get_mut(&number).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}
