//! A disk that dies as a test says: any call may be the last one of the process or of the host, may
//! meet a full disk or an error.
//!
//! It knows three states of everything: what is *live* (the page cache: a process that is killed
//! leaves it as it is), what is *durable*, and what a power cut may make of the difference: of each
//! write since the last sync any sectors, of each folder's changes of names any first part.

use super::{BOOT_LEN, Files, StateFile};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes that reach the disk together or not at all.
const SECTOR: usize = 512;

/// What happens at a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The process is killed before the call has an effect.
    KillBefore,
    /// It is killed when the call has had its effect.
    KillAfter,
    /// The host loses power before the call has an effect.
    CutBefore,
    /// It loses power when the call has had its effect.
    CutAfter,
    /// The disk is full: what takes room fails, a write perhaps in the middle.
    NoSpace,
    /// The device fails: nothing is changed, and a sync makes its data lost for ever.
    Broken,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::KillBefore,
        Self::KillAfter,
        Self::CutBefore,
        Self::CutAfter,
        Self::NoSpace,
        Self::Broken,
    ];

    /// Whether the process does not live on.
    pub const fn ends(self) -> bool {
        matches!(self, Self::KillBefore | Self::KillAfter | Self::CutBefore | Self::CutAfter)
    }
}

/// What a call does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    /// Reads only: no fault but the end of the process can hurt it.
    Look,
    /// Changes something and takes room for it.
    Grow,
    /// Changes something and needs no room.
    Change,
    Write,
    Sync,
}

#[derive(Clone)]
enum Change {
    Write { at: usize, bytes: Vec<u8> },
    Len(usize),
}

impl Change {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            Self::Len(len) => content.resize(*len, 0),
            Self::Write { at, bytes } => put(content, *at, bytes),
        }
    }
}

fn put(content: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    content.resize(content.len().max(at + bytes.len()), 0);
    content[at..at + bytes.len()].copy_from_slice(bytes);
}

#[derive(Clone, Default)]
struct Inode {
    live: Vec<u8>,
    durable: Vec<u8>,
    /// Since the last sync.
    pending: Vec<Change>,
    /// What a failed sync has lost: no later one makes it durable.
    lost: Vec<Change>,
    /// Up to here there is room.
    room: usize,
}

impl Inode {
    fn change(&mut self, change: Change) {
        change.apply(&mut self.live);
        self.room = self.room.max(self.live.len());
        self.pending.push(change);
    }

    fn sync(&mut self) {
        self.pending.drain(..).for_each(|change| change.apply(&mut self.durable));
    }

    fn lose(&mut self) {
        self.lost.append(&mut self.pending);
    }

    /// What a power cut leaves.
    fn cut(&mut self, random: &mut Random) {
        let mut left = std::mem::take(&mut self.durable);
        for change in self.lost.drain(..).chain(self.pending.drain(..)) {
            match change {
                Change::Len(_) if random.coin() => change.apply(&mut left),
                Change::Len(_) => {}
                Change::Write { at, bytes } => tear(&mut left, at, &bytes, random),
            }
        }
        self.live.clone_from(&left);
        self.durable = left;
    }
}

/// Any sectors of a write reach the disk.
fn tear(left: &mut Vec<u8>, at: usize, bytes: &[u8], random: &mut Random) {
    // Often all or nothing, as on a real disk; else any of them.
    let (all, none) = (random.below(4) == 0, random.below(4) == 0);
    let mut from = 0;
    while from < bytes.len() {
        let to = (from + SECTOR - (at + from) % SECTOR).min(bytes.len());
        if all || !none && random.coin() {
            put(left, at + from, &bytes[from..to]);
        }
        from = to;
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Entry {
    Folder,
    File(u64),
}

#[derive(Clone)]
enum NameChange {
    Put(PathBuf, Entry),
    Take(PathBuf),
    Move(PathBuf, PathBuf),
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<PathBuf, Entry>) {
        match self {
            Self::Put(path, entry) => drop(names.insert(path.clone(), *entry)),
            Self::Take(path) => drop(names.remove(path)),
            Self::Move(from, to) => {
                if let Some(entry) = names.remove(from) {
                    names.insert(to.clone(), entry);
                }
            }
        }
    }
}

/// SplitMix64: the same faults from the same seed.
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ mixed >> 31) % end
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}

struct State {
    inodes: BTreeMap<u64, Inode>,
    next_inode: u64,
    live: BTreeMap<PathBuf, Entry>,
    durable: BTreeMap<PathBuf, Entry>,
    /// By folder, since it was last synced.
    pending: BTreeMap<PathBuf, Vec<NameChange>>,
    /// Calls so far, of every process.
    calls: u64,
    faults: BTreeMap<u64, Fault>,
    /// Only this process is alive.
    life: u64,
    boot: u64,
    /// Nothing that takes room succeeds.
    full: bool,
    random: Random,
}

fn dead() -> io::Error {
    io::Error::other("the process is dead")
}

impl State {
    fn rename(&mut self, change: NameChange, dir: &Path) {
        change.apply(&mut self.live);
        self.pending.entry(dir.to_owned()).or_default().push(change);
    }

    fn sync_dir(&mut self, dir: &Path) {
        let changes = self.pending.remove(dir).unwrap_or_default();
        changes.iter().for_each(|change| change.apply(&mut self.durable));
    }

    fn cut(&mut self) {
        for (_, changes) in std::mem::take(&mut self.pending) {
            let kept = self.random.below(changes.len() as u64 + 1) as usize;
            changes[..kept].iter().for_each(|change| change.apply(&mut self.durable));
        }
        self.live.clone_from(&self.durable);
        for inode in self.inodes.values_mut() {
            inode.cut(&mut self.random);
        }
        self.boot += 1;
        self.life += 1;
    }

    /// Who calls ends before or after the call, if the fault says so.
    fn end(&mut self, fault: Option<Fault>, before: bool) -> io::Result<()> {
        match (fault, before) {
            (Some(Fault::KillBefore), true) | (Some(Fault::KillAfter), false) => self.life += 1,
            (Some(Fault::CutBefore), true) | (Some(Fault::CutAfter), false) => self.cut(),
            _ => return Ok(()),
        }
        Err(dead())
    }

    fn folder_is_there(&self, path: &Path) -> io::Result<PathBuf> {
        let dir = path.parent().unwrap_or(Path::new("/")).to_owned();
        match self.live.get(&dir) {
            Some(Entry::Folder) => Ok(dir),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn inode(&mut self, number: u64) -> io::Result<&mut Inode> {
        self.inodes.get_mut(&number).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// A simulated disk; it outlives the processes that use it.
pub struct SimDisk(Mutex<State>);

impl SimDisk {
    /// An empty disk with these folders, durably. What power cuts leave follows from `seed`.
    pub fn new(seed: u64, folders: &[&Path]) -> Arc<Self> {
        let names: BTreeMap<_, _> =
            folders.iter().map(|folder| (folder.to_path_buf(), Entry::Folder)).collect();
        Arc::new(Self(Mutex::new(State {
            inodes: BTreeMap::new(),
            next_inode: 1,
            live: names.clone(),
            durable: names,
            pending: BTreeMap::new(),
            calls: 0,
            faults: BTreeMap::new(),
            life: 0,
            boot: 0,
            full: false,
            random: Random(seed),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the process that is alive now sees of it: the first one, or the one that is started after
    /// the last has died.
    pub fn files(self: &Arc<Self>) -> SimFiles {
        SimFiles { disk: Arc::clone(self), life: self.lock().life }
    }

    /// Calls so far.
    pub fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// `fault` comes at call number `call`, counted from one since the disk was made.
    pub fn plan(&self, call: u64, fault: Fault) {
        self.lock().faults.insert(call, fault);
    }

    /// The process is killed now.
    pub fn kill(&self) {
        self.lock().life += 1;
    }

    /// The host loses power now.
    pub fn cut(&self) {
        self.lock().cut();
    }

    /// From now on there is no room, or there is again.
    pub fn fill(&self, full: bool) {
        self.lock().full = full;
    }
}

/// The files of one process on a simulated disk. Once it has died every call fails.
#[derive(Clone)]
pub struct SimFiles {
    disk: Arc<SimDisk>,
    life: u64,
}

impl SimFiles {
    fn call<T>(
        &self,
        kind: Call,
        run: impl FnOnce(&mut State, Option<Fault>) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut state = self.disk.lock();
        if state.life != self.life {
            return Err(dead());
        }
        state.calls += 1;
        let at = state.calls;
        let fault = state.faults.remove(&at);
        state.end(fault, true)?;
        let full = state.full || fault == Some(Fault::NoSpace);
        let result = match (kind, fault) {
            (Call::Grow, _) if full => Err(Errno::NOSPC.into()),
            (Call::Grow | Call::Change | Call::Write, Some(Fault::Broken)) => Err(Errno::IO.into()),
            _ => run(&mut state, fault),
        };
        state.end(fault, false)?;
        result
    }

    fn file(&self, inode: u64) -> Box<dyn StateFile> {
        Box::new(SimFile { files: self.clone(), inode })
    }
}

impl Files for SimFiles {
    fn open(&self, path: &Path) -> io::Result<Box<dyn StateFile>> {
        let inode = self.call(Call::Look, |state, _| match state.live.get(path) {
            Some(Entry::File(inode)) => Ok(*inode),
            Some(Entry::Folder) => Err(io::ErrorKind::IsADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        })?;
        Ok(self.file(inode))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StateFile>> {
        let inode = self.call(Call::Grow, |state, _| {
            let dir = state.folder_is_there(path)?;
            if let Some(Entry::File(inode)) = state.live.get(path).copied() {
                state.inode(inode)?.change(Change::Len(0));
                return Ok(inode);
            }
            let inode = state.next_inode;
            state.next_inode += 1;
            state.inodes.insert(inode, Inode::default());
            state.rename(NameChange::Put(path.to_owned(), Entry::File(inode)), &dir);
            Ok(inode)
        })?;
        Ok(self.file(inode))
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.call(Call::Look, |state, _| Ok(state.live.contains_key(path)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call(Call::Change, |state, _| {
            let dir = state.folder_is_there(from)?;
            if !state.live.contains_key(from) {
                return Err(io::ErrorKind::NotFound.into());
            }
            state.rename(NameChange::Move(from.to_owned(), to.to_owned()), &dir);
            Ok(())
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.call(Call::Change, |state, _| {
            let dir = state.folder_is_there(path)?;
            let Some(Entry::File(_)) = state.live.get(path) else {
                return Err(io::ErrorKind::NotFound.into());
            };
            state.rename(NameChange::Take(path.to_owned()), &dir);
            Ok(())
        })
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.call(Call::Grow, |state, _| {
            let dir = state.folder_is_there(path)?;
            if state.live.get(path) != Some(&Entry::Folder) {
                state.rename(NameChange::Put(path.to_owned(), Entry::Folder), &dir);
            }
            Ok(())
        })
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.call(Call::Change, |state, _| {
            let dir = state.folder_is_there(path)?;
            if state.live.keys().any(|name| name.parent() == Some(path)) {
                return Err(io::ErrorKind::DirectoryNotEmpty.into());
            }
            if state.live.get(path) != Some(&Entry::Folder) {
                return Err(io::ErrorKind::NotFound.into());
            }
            state.rename(NameChange::Take(path.to_owned()), &dir);
            Ok(())
        })
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        self.call(Call::Look, |state, _| {
            let inside = state.live.keys().filter(|path| path.parent() == Some(dir));
            Ok(inside.cloned().collect())
        })
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.call(Call::Sync, |state, fault| {
            if fault == Some(Fault::Broken) {
                return Err(Errno::IO.into());
            }
            state.sync_dir(dir);
            Ok(())
        })
    }

    fn boot(&self) -> io::Result<[u8; BOOT_LEN]> {
        let boot = self.call(Call::Look, |state, _| Ok(state.boot))?;
        let mut id = [b'0'; BOOT_LEN];
        id[..8].copy_from_slice(&boot.to_le_bytes());
        Ok(id)
    }
}

struct SimFile {
    files: SimFiles,
    inode: u64,
}

impl StateFile for SimFile {
    fn len(&self) -> io::Result<u64> {
        self.files.call(Call::Look, |state, _| Ok(state.inode(self.inode)?.live.len() as u64))
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        self.files.call(Call::Look, |state, _| Ok(state.inode(self.inode)?.live.clone()))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let at = offset as usize;
        self.files.call(Call::Write, |state, fault| {
            let fits = match (state.full, fault) {
                // Room that was reserved is there, and some of what was not may be.
                (true, _) => state.inode(self.inode)?.room.saturating_sub(at),
                (_, Some(Fault::NoSpace)) => {
                    let room = state.inode(self.inode)?.room.saturating_sub(at);
                    room.max(state.random.below(bytes.len() as u64 + 1) as usize)
                }
                _ => bytes.len(),
            };
            let written = bytes[..fits.min(bytes.len())].to_vec();
            let whole = written.len() == bytes.len();
            state.inode(self.inode)?.change(Change::Write { at, bytes: written });
            if whole { Ok(()) } else { Err(Errno::NOSPC.into()) }
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.files.call(Call::Change, |state, _| {
            let inode = state.inode(self.inode)?;
            let room = inode.room;
            inode.change(Change::Len(len as usize));
            // A hole takes no room.
            inode.room = room;
            Ok(())
        })
    }

    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        self.files.call(Call::Grow, |state, _| {
            let inode = state.inode(self.inode)?;
            inode.room = inode.room.max((offset + len) as usize);
            Ok(())
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.files.call(Call::Sync, |state, fault| {
            let inode = state.inode(self.inode)?;
            if fault == Some(Fault::Broken) {
                inode.lose();
                return Err(Errno::IO.into());
            }
            inode.sync();
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{read, read_settled, replace};

    const DIR: &str = "/state";

    fn disk(seed: u64) -> Arc<SimDisk> {
        SimDisk::new(seed, &[Path::new("/"), Path::new(DIR)])
    }

    #[test]
    fn what_is_not_synced_survives_the_process_and_perhaps_the_host() {
        let path = Path::new("/state/a");
        let mut left = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let disk = disk(seed);
            let files = disk.files();
            let file = files.create(path).unwrap();
            file.write_at(&[1; 1024], 0).unwrap();
            file.sync().unwrap();
            files.sync_dir(Path::new(DIR)).unwrap();
            file.write_at(&[2; 1024], 0).unwrap();
            disk.kill();
            assert!(file.read().is_err(), "a dead process reads nothing");
            assert_eq!(read(&disk.files(), path).unwrap(), [2; 1024]);
            disk.cut();
            let now = read(&disk.files(), path).unwrap();
            left.insert((now[0], now[600]));
        }
        assert_eq!(left.len(), 4, "either sector may be old or new: {left:?}");
    }

    #[test]
    fn a_name_is_durable_when_its_folder_was_synced() {
        let seen = (0..100).map(|seed| {
            let disk = disk(seed);
            let files = disk.files();
            let file = files.create(Path::new("/state/a")).unwrap();
            file.write_at(b"x", 0).unwrap();
            file.sync().unwrap();
            disk.cut();
            disk.files().exists(Path::new("/state/a")).unwrap()
        });
        let kept = seen.filter(|&there| there).count();
        assert!((1..100).contains(&kept), "{kept}");
    }

    #[test]
    fn what_a_failed_sync_lost_is_never_durable() {
        let mut kept = 0;
        for seed in 0..100 {
            let disk = disk(seed);
            let files = disk.files();
            let file = replace(&files, Path::new("/state/a"), &[1; 8]).unwrap();
            file.write_at(&[2; 8], 0).unwrap();
            disk.plan(disk.calls() + 1, Fault::Broken);
            assert!(file.sync().is_err());
            file.sync().unwrap();
            disk.cut();
            kept += u32::from(read(&disk.files(), Path::new("/state/a")).unwrap() == [2; 8]);
        }
        assert!((1..100).contains(&kept), "{kept}");
    }

    #[test]
    fn on_a_full_disk_only_reserved_room_can_be_written() {
        let disk = disk(1);
        let files = disk.files();
        let file = files.create(Path::new("/state/a")).unwrap();
        file.reserve(0, 100).unwrap();
        disk.fill(true);
        file.write_at(&[1; 60], 0).unwrap();
        assert!(file.write_at(&[2; 60], 60).is_err());
        assert_eq!(file.len().unwrap(), 100, "the part for which there was room");
        assert!(files.create(Path::new("/state/b")).is_err());
        assert!(file.reserve(100, 1).is_err());
    }

    /// Whatever happens at whichever call, and once more when it is done again: the old value or the
    /// new one is there, the new one if the call said so, and what a process has seen is not undone.
    #[test]
    fn a_value_is_replaced_or_not_whatever_happens_twice() {
        let path = Path::new("/state/a");
        let count = {
            let disk = disk(0);
            replace(&disk.files(), path, b"old").unwrap();
            let before = disk.calls();
            replace(&disk.files(), path, b"new").unwrap();
            disk.calls() - before
        };
        let mut runs = 0;
        for (first, second) in (1..=count).flat_map(|a| (1..=count).map(move |b| (a, b))) {
            for (one, two) in Fault::ALL.iter().flat_map(|&a| Fault::ALL.map(|b| (a, b))) {
                let disk = disk(first * 100 + second);
                replace(&disk.files(), path, b"old").unwrap();
                let mut said = b"old".to_vec();
                for (at, fault, value) in [(first, one, b"new"), (second, two, b"re2")] {
                    disk.plan(disk.calls() + at, fault);
                    let done = replace(&disk.files(), path, value).is_ok();
                    // The next process believes what it sees only when that outlives the host.
                    let found = read_settled(&disk.files(), path).unwrap();
                    assert!(found == said || found == value, "{first} {one:?} {second} {two:?}");
                    assert!(!done || found == value);
                    said = found;
                }
                disk.cut();
                assert_eq!(read(&disk.files(), path).unwrap(), said);
                runs += 1;
            }
        }
        println!("{runs} pairs of faults");
    }
}
