//! A disk that dies as a test says: any call may be the last one of the process or of the host, may
//! meet a full disk or an error.
//!
//! It knows three states of everything: what is *live* (the page cache: a process that is killed
//! leaves it as it is), what is *durable*, and what a power cut may make of the difference: of each
//! write since the last sync any sectors, of each folder's changes of names any first part.

mod inode;
mod looks;
mod mount;
mod names;
mod state;
#[cfg(test)]
mod tests;

use super::{BOOT_LEN, Device, Files, Kind, Look, StateFile};
use inode::Change;
use looks::At;
pub use mount::Mount;
use mount::Mounted;
use names::{Entry, Names};
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use state::{Call, MODE, NameChange, State, dead};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// A call that only looks fails, this once.
    Unread,
    /// What a call looks at cannot be read any more, nor seen whether it is there, until
    /// [`SimDisk::mend`].
    Unreadable,
}

impl Fault {
    /// Those of calls that change something.
    pub const ALL: [Self; 6] = [
        Self::KillBefore,
        Self::KillAfter,
        Self::CutBefore,
        Self::CutAfter,
        Self::NoSpace,
        Self::Broken,
    ];

    /// Those of calls that only look.
    pub const LOOKS: [Self; 2] = [Self::Unread, Self::Unreadable];

    /// Whether it comes at a call that only looks.
    pub const fn is_of_looks(self) -> bool {
        matches!(self, Self::Unread | Self::Unreadable)
    }

    /// Whether the process does not live on.
    pub const fn ends(self) -> bool {
        matches!(self, Self::KillBefore | Self::KillAfter | Self::CutBefore | Self::CutAfter)
    }
}

/// A simulated disk; it outlives the processes that use it.
pub struct SimDisk(Mutex<State>);

impl SimDisk {
    /// An empty disk with these folders, durably. What power cuts leave follows from `seed`.
    pub fn new(seed: u64, folders: &[&Path]) -> Arc<Self> {
        let names = Names::of_folders(folders.iter().copied());
        Arc::new(Self(Mutex::new(State::new(names, seed))))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// What the process that is alive now sees of it: the first one, or the one that is started after
    /// the last has died.
    pub fn files(self: &Arc<Self>) -> SimFiles {
        let (life, unwinds) = (self.lock().life, Arc::default());
        SimFiles { disk: Arc::clone(self), life, unwinds }
    }

    /// Calls so far that may have changed something. Those that only look are not counted: what dies at one
    /// of them dies before the next that changes something.
    pub fn calls(&self) -> u64 {
        self.lock().calls
    }

    /// Calls so far that only look at something.
    pub fn looks(&self) -> u64 {
        self.lock().looks.count()
    }

    /// `fault` comes at call number `call`, counted from one since the disk was made: of those that may
    /// change something, or of those that only look if it [is one of these](Fault::is_of_looks).
    pub fn plan(&self, call: u64, fault: Fault) {
        let mut state = self.lock();
        match fault.is_of_looks() {
            true => state.looks.plan(call, fault),
            false => drop(state.faults.insert(call, fault)),
        }
    }

    /// What could not be read can be read again.
    pub fn mend(&self) {
        self.lock().looks.mend();
    }

    /// How many syncs of files have failed.
    pub fn failed_sync_count(&self) -> u64 {
        self.lock().failed_syncs
    }

    /// Syncs that have failed, of the files whose path is `wanted`: the number of each file, and the
    /// sectors that each of them has lost.
    pub fn failed_syncs(&self, wanted: impl Fn(&Path) -> bool) -> Vec<(u64, Vec<Vec<u64>>)> {
        let state = self.lock();
        let files = state.live.iter().filter(|(path, _)| wanted(path));
        let failed = files.filter_map(|(_, entry)| match entry {
            Entry::File(number) => {
                let failed = &state.inodes.get(&number)?.failed_syncs;
                (!failed.is_empty()).then(|| (number, failed.clone()))
            }
            Entry::Folder => None,
        });
        failed.collect()
    }

    /// Planned faults that have happened.
    pub fn met(&self) -> u64 {
        let state = self.lock();
        state.met + state.looks.met()
    }

    /// How often the host has lost power.
    pub fn cuts(&self) -> u64 {
        self.lock().boot
    }

    /// What was planned and has not happened does not happen, and what could not be read can be.
    pub fn plan_nothing(&self) {
        let mut state = self.lock();
        state.faults.clear();
        state.looks.clear();
    }

    /// The process is killed now.
    pub fn kill(&self) {
        self.lock().life += 1;
    }

    /// The host loses power now.
    pub fn cut(&self) {
        self.lock().cut();
    }

    /// The device of the file system at `folder` fails while no process runs, and the file system is mounted anew: what
    /// was not synced of its files is lost, and the host goes on.
    pub fn remount(&self, folder: &Path) {
        self.lock().remount(folder);
    }

    /// The file system of `folder` is mounted like that from now on; as it should be, without `how`. Nobody
    /// has a file of it open.
    pub fn mount(&self, folder: &Path, how: Option<Mount>) {
        self.lock().mounted = how.map(|how| Mounted { folder: folder.to_owned(), how });
    }

    /// What is at `path`, where nobody made a file, is a block device like that from now on.
    pub fn put_device(&self, path: &Path, device: Device) {
        self.lock().devices.insert(path.to_owned(), device);
    }

    /// Time passes.
    pub fn pass(&self, seconds: i64) {
        self.lock().clock.0 += seconds;
    }

    /// From now on there is no room, or there is again.
    pub fn fill(&self, full: bool) {
        self.lock().full = full;
    }
}

impl std::fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimDisk")
    }
}

/// How something looks that is no file.
const NO_FILE: Look = Look {
    kind: Kind::Other,
    len: 0,
    mode: MODE,
    inode: 0,
    birth: None,
    changed: (0, 0),
    touched: (0, 0),
};

/// What unwinds when a process dies: it does nothing more, whatever it was about to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Died;

/// The files of one process on a simulated disk. Once it has died every call fails, or, if that is
/// wanted, [unwinds](Self::unwinding).
#[derive(Clone, Debug)]
pub struct SimFiles {
    disk: Arc<SimDisk>,
    life: u64,
    unwinds: Arc<AtomicBool>,
}

impl SimFiles {
    /// While the flag is set the death of the process unwinds its thread with [`Died`], so that nothing
    /// else of it happens.
    pub fn unwinding(self, while_set: &Arc<AtomicBool>) -> Self {
        Self { unwinds: Arc::clone(while_set), ..self }
    }

    /// Whether the process is alive.
    pub fn is_alive(&self) -> bool {
        self.disk.lock().life == self.life
    }

    fn call<T>(
        &self,
        kind: Call,
        at: At<'_>,
        run: impl FnOnce(&mut State, Option<Fault>) -> io::Result<T>,
    ) -> io::Result<T> {
        self.unwound(self.try_call(kind, at, run))
    }

    /// A call that only looks at something.
    fn see<T>(&self, at: At<'_>, run: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        let mut state = self.disk.lock();
        let seen = match state.life == self.life {
            false => Err(dead()),
            true => state.see(at).and_then(|()| run(&mut state)),
        };
        drop(state);
        self.unwound(seen)
    }

    fn unwound<T>(&self, result: io::Result<T>) -> io::Result<T> {
        let unwinds = self.unwinds.load(Ordering::SeqCst) && !std::thread::panicking();
        if unwinds && !self.is_alive() {
            std::panic::resume_unwind(Box::new(Died));
        }
        result
    }

    fn try_call<T>(
        &self,
        kind: Call,
        at: At<'_>,
        run: impl FnOnce(&mut State, Option<Fault>) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut state = self.disk.lock();
        if state.life != self.life {
            return Err(dead());
        }
        let fault = state.next_call();
        state.end(fault, true)?;
        let full = state.full || fault == Some(Fault::NoSpace);
        let refused = match (kind, at) {
            (Call::Sync, At::Path(folder)) => state.refuse_look(folder),
            _ => state.refuse_change(at),
        };
        let result = refused.and_then(|()| match (kind, fault) {
            (Call::Grow, _) if full => Err(Errno::NOSPC.into()),
            (Call::Grow | Call::Change | Call::Write, Some(Fault::Broken)) => Err(Errno::IO.into()),
            _ => run(&mut state, fault),
        });
        state.end(fault, false)?;
        result
    }

    fn file(&self, inode: u64) -> Box<dyn StateFile> {
        Box::new(SimFile { files: self.clone(), inode })
    }
}

impl Files for SimFiles {
    fn open(&self, path: &Path) -> io::Result<Box<dyn StateFile>> {
        let inode = self.see(At::Path(path), |state| match state.live.get(path) {
            Some(Entry::File(inode)) => {
                state.refuse_change(At::Path(path))?;
                state.opened(inode);
                Ok(inode)
            }
            Some(Entry::Folder) => Err(io::ErrorKind::IsADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        })?;
        Ok(self.file(inode))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StateFile>> {
        let inode = self.call(Call::Grow, At::Path(path), |state, _| {
            let dir = state.folder_is_there(path)?;
            if let Some(Entry::File(inode)) = state.live.get(path) {
                let now = state.now();
                state.inode(inode)?.change(Change::Len(0), now);
                return Ok(inode);
            }
            Ok(state.make(path, &dir, MODE))
        })?;
        Ok(self.file(inode))
    }

    fn create_closed(&self, path: &Path) -> io::Result<Box<dyn StateFile>> {
        let inode = self.call(Call::Grow, At::Path(path), |state, _| {
            let dir = state.folder_is_there(path)?;
            if state.live.has(path) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            Ok(state.make(path, &dir, 0))
        })?;
        Ok(self.file(inode))
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.see(At::Path(path), |state| Ok(state.live.has(path)))
    }

    fn look(&self, path: &Path) -> io::Result<Look> {
        self.see(At::Path(path), |state| match state.live.get(path) {
            Some(Entry::File(number)) => {
                let inode = state.inode(number)?;
                let (kind, len, mode) = (Kind::File, inode.live.len() as u64, inode.mode);
                let (changed, touched) = (inode.changed, inode.touched);
                // Each is made at a time of its own.
                let (inode, birth) = (inode.shown, Some((number as i64, 0)));
                Ok(Look { kind, len, mode, inode, birth, changed, touched })
            }
            Some(Entry::Folder) => Ok(Look { kind: Kind::Folder, ..NO_FILE }),
            None if state.devices.contains_key(path) => Ok(Look { kind: Kind::Other, ..NO_FILE }),
            None => Err(io::ErrorKind::NotFound.into()),
        })
    }

    fn link(&self, _path: &Path) -> Option<PathBuf> {
        None
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call(Call::Change, At::Path(from), |state, _| state.move_name(from, to))
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.call(Call::Change, At::Path(from), |state, _| match state.live.has(to) {
            true => Err(io::ErrorKind::AlreadyExists.into()),
            false => state.move_name(from, to),
        })
    }

    fn set_mode(&self, path: &Path, mode: u32) -> io::Result<()> {
        self.call(Call::Change, At::Path(path), |state, _| match state.live.get(path) {
            Some(Entry::File(number)) => {
                let now = state.now();
                let inode = state.inode(number)?;
                (inode.mode, inode.touched) = (mode, now);
                Ok(())
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.call(Call::Change, At::Path(path), |state, _| {
            let dir = state.folder_is_there(path)?;
            let Some(Entry::File(number)) = state.live.get(path) else {
                return Err(io::ErrorKind::NotFound.into());
            };
            state.removed(number);
            state.rename(NameChange::Take(path.to_owned()), &dir);
            Ok(())
        })
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.call(Call::Grow, At::Path(path), |state, _| {
            let dir = state.folder_is_there(path)?;
            if state.live.get(path) != Some(Entry::Folder) {
                state.rename(NameChange::Put(path.to_owned(), Entry::Folder), &dir);
            }
            Ok(())
        })
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.call(Call::Change, At::Path(path), |state, _| {
            let dir = state.folder_is_there(path)?;
            if state.live.inside(path).next().is_some() {
                return Err(io::ErrorKind::DirectoryNotEmpty.into());
            }
            if state.live.get(path) != Some(Entry::Folder) {
                return Err(io::ErrorKind::NotFound.into());
            }
            state.pending.remove(path);
            state.rename(NameChange::Take(path.to_owned()), &dir);
            Ok(())
        })
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        self.see(At::Path(dir), |state| Ok(state.live.inside(dir).collect()))
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.call(Call::Sync, At::Path(dir), |state, fault| {
            if fault == Some(Fault::Broken) {
                return Err(Errno::IO.into());
            }
            state.sync_dir(dir);
            Ok(())
        })
    }

    fn boot(&self) -> io::Result<[u8; BOOT_LEN]> {
        let boot = self.see(At::Host, |state| Ok(state.boot))?;
        let mut id = [b'0'; BOOT_LEN];
        id[..8].copy_from_slice(&boot.to_le_bytes());
        Ok(id)
    }

    fn instance(&self, folder: &Path) -> io::Result<Option<u64>> {
        Ok(Some(self.disk.lock().instance(folder)))
    }

    fn device(&self, path: &Path) -> io::Result<Device> {
        self.see(At::Path(path), |state| match (state.devices.get(path), state.live.has(path)) {
            (Some(device), _) => Ok(*device),
            (None, true) => Err(io::ErrorKind::Unsupported.into()),
            (None, false) => Err(io::ErrorKind::NotFound.into()),
        })
    }
}

#[derive(Debug)]
struct SimFile {
    files: SimFiles,
    inode: u64,
}

impl StateFile for SimFile {
    fn len(&self) -> io::Result<u64> {
        self.files.see(At::Host, |state| Ok(state.inode(self.inode)?.live.len() as u64))
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        self.files.see(At::Inode(self.inode), |state| Ok(state.inode(self.inode)?.live.clone()))
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.files.see(At::Inode(self.inode), |state| {
            let held = state.inode(self.inode)?.live.get(offset as usize..).unwrap_or_default();
            let len = held.len().min(buf.len());
            buf[..len].copy_from_slice(&held[..len]);
            Ok(len)
        })
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let at = offset as usize;
        self.files.call(Call::Write, At::Inode(self.inode), |state, fault| {
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
            let now = state.now();
            state.inode(self.inode)?.change(Change::Write { at, bytes: written }, now);
            if whole { Ok(()) } else { Err(Errno::NOSPC.into()) }
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.files.call(Call::Change, At::Inode(self.inode), |state, _| {
            let now = state.now();
            state.inode(self.inode)?.set_len(len as usize, now);
            Ok(())
        })
    }

    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        self.files.call(Call::Grow, At::Inode(self.inode), |state, _| {
            let inode = state.inode(self.inode)?;
            inode.room = inode.room.max((offset + len) as usize);
            Ok(())
        })
    }

    fn sync(&self) -> io::Result<()> {
        self.files.call(Call::Sync, At::Inode(self.inode), |state, fault| {
            if fault == Some(Fault::Broken) {
                state.fail_sync(self.inode)?;
                return Err(Errno::IO.into());
            }
            state.inode(self.inode)?.sync();
            Ok(())
        })
    }

    fn touch(&self, not_before: (i64, i64)) -> io::Result<(i64, i64)> {
        self.files.call(Call::Change, At::Inode(self.inode), |state, _| {
            let now = state.now();
            let inode = state.inode(self.inode)?;
            inode.touched = now;
            inode.changed = now.max(not_before);
            Ok(inode.changed)
        })
    }
}
