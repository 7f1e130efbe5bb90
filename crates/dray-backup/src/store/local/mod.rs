//! A directory as a store.
//!
//! An object is written under a temporary name, synced, and renamed to its own unless that exists;
//! then its folder is synced, and those above. A crash leaves the object whole or not at all, and perhaps a file in
//! `.tmp`, which a later opening removes once it is a day old: no upload takes that long.
//!
//! Only regular files are objects. What is put away lies in `.deleted` as NAME.MILLISECONDS, the time of that,
//! until a sweep removes it.

use super::{Object, Put, Store, check_name};
use crate::error::{Error, Kind, Result};
use crate::world::{SystemWorld, random_id};
use rustix::fs::{CWD, OFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

#[cfg(test)]
mod tests;

const TEMPORARY: &str = ".tmp";
/// Where what is put away lies. No name of an object begins with a dot.
const PUT_AWAY: &str = ".deleted";
/// Age from which a temporary file is one that a crash left behind.
const LEFT_BEHIND: Duration = Duration::from_secs(24 * 3600);
/// So often a folder is made again that somebody else removes because it is empty.
const FOLDER_TRIES: u32 = 16;
/// Objects of one name that may be put away in the same millisecond.
const SAME_TIME: u128 = 1000;

/// A directory; every object is a file in it.
#[derive(Debug)]
pub struct LocalStore {
    root: PathBuf,
}

impl LocalStore {
    /// The store in `root`, which is created if it does not exist; leftovers of a crash go.
    ///
    /// # Errors
    /// `Unavailable`: the directory cannot be made or read.
    pub fn open(root: &Path) -> Result<Self> {
        let store = Self { root: root.to_path_buf() };
        let temporary = root.join(TEMPORARY);
        store
            .refuse_links(&temporary.join("x"))
            .and_then(|()| store.refuse_links(&root.join(PUT_AWAY).join("x")))
            .map_err(|e| failed("cannot use", root, e))?;
        make_folder(&temporary).map_err(|e| failed("cannot create", root, e))?;
        store.clean().map_err(|e| failed("cannot read", root, e))?;
        Ok(store)
    }

    fn clean(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.root.join(TEMPORARY))? {
            let entry = entry?;
            let Ok(meta) = entry.metadata() else { continue };
            if age(meta.modified()?) >= LEFT_BEHIND {
                absent_is_fine(fs::remove_file(entry.path()))?;
            }
        }
        Ok(())
    }

    fn path(&self, name: &str) -> Result<PathBuf> {
        check_name(name)?;
        let path = self.root.join(name);
        self.refuse_links(&path).map_err(|e| failed("cannot use", &path, e))?;
        Ok(path)
    }

    /// Refuses a path in which a symbolic link takes the place of a folder: it may lead to what is somebody else's.
    fn refuse_links(&self, path: &Path) -> io::Result<()> {
        let folders = path.ancestors().skip(1);
        for folder in
            folders.take_while(|folder| folder.starts_with(&self.root) && *folder != self.root)
        {
            match fs::symlink_metadata(folder) {
                Ok(meta) if meta.is_symlink() => {
                    let why = format!("{} is a symbolic link", folder.display());
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
                }
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes the name of a file durable, and those of the folders that lead to it. Also of folders that were there
    /// already: whoever has made one, another thread or a program that was killed, may not have synced the one above.
    fn sync_name(&self, file: &Path) -> io::Result<()> {
        let mut folders =
            file.ancestors().skip(1).take_while(|folder| folder.starts_with(&self.root));
        folders.try_for_each(|folder| absent_is_fine(sync_folder(Some(folder))))
    }

    fn write_temporary(&self, bytes: &[u8]) -> io::Result<PathBuf> {
        let id = random_id(&SystemWorld).map_err(io::Error::other)?;
        let path = self.root.join(TEMPORARY).join(format!("{id:032x}"));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        if let Err(e) = written {
            fs::remove_file(&path)?;
            return Err(e);
        }
        Ok(path)
    }

    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<Put> {
        let temporary = self.write_temporary(bytes)?;
        let placed = self.place(&temporary, path);
        if !matches!(placed, Ok(Put::Created)) {
            absent_is_fine(fs::remove_file(&temporary))?;
        }
        // Also when it existed: whoever created it may not have synced the folder yet.
        self.sync_name(path)?;
        placed
    }

    /// Renames a file to a name that is not taken, in a folder that is made if it is not there. Somebody may remove
    /// that folder, empty as it is, before the file is in it.
    fn place(&self, from: &Path, to: &Path) -> io::Result<Put> {
        let folder = to.parent().unwrap_or(&self.root);
        let mut tries = 0;
        loop {
            let placed = create_folders(folder).and_then(|()| rename_new(from, to));
            let lost = matches!(&placed, Err(e) if e.kind() == io::ErrorKind::NotFound);
            if !lost || tries == FOLDER_TRIES || regular(from)?.is_none() {
                return placed;
            }
            tries += 1;
        }
    }

    /// The length of an object, if it is there.
    ///
    /// # Errors
    /// `Unavailable`.
    pub fn length(&self, name: &str) -> Result<Option<u64>> {
        let path = self.path(name)?;
        let found = regular(&path).map_err(|e| failed("cannot read", &path, e))?;
        Ok(found.map(|meta| meta.len()))
    }

    /// Removes an object, durably: a backup that was removed must not be back, without its packs, after a power
    /// cut. Its length, if it was there.
    ///
    /// # Errors
    /// `Unavailable`. It may or may not be gone then.
    pub fn remove(&self, name: &str) -> Result<Option<u64>> {
        let path = self.path(name)?;
        let remove = || {
            let Some(meta) = regular(&path)? else { return Ok(None) };
            match fs::remove_file(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                removed => removed?,
            }
            absent_is_fine(sync_folder(path.parent())).map(|()| Some(meta.len()))
        };
        remove().map_err(|e| failed("cannot remove", &path, e))
    }

    /// Takes an object out of sight: it lies among what was put away until a [`sweep`](Self::sweep) removes it.
    /// False when it was not there.
    ///
    /// # Errors
    /// `Unavailable`. It may or may not be out of sight then.
    pub fn put_away(&self, name: &str) -> Result<bool> {
        let path = self.path(name)?;
        let put_away = || {
            if regular(&path)?.is_none() {
                return Ok(false);
            }
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let away = match self.move_away(name, &path, now.as_millis()) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
                away => away?,
            };
            // In this order: after a power cut it may be in both folders, but never in none.
            self.sync_name(&away)?;
            absent_is_fine(sync_folder(path.parent()))?;
            Ok(true)
        };
        put_away().map_err(|e| failed("cannot put away", &path, e))
    }

    /// Moves it to the first free name from the time `now`, in milliseconds: where it is then.
    fn move_away(&self, name: &str, from: &Path, now: u128) -> io::Result<PathBuf> {
        // Another one of this name may have been put away in the same millisecond, or before the clock was set back.
        for ms in (now..).take(SAME_TIME as usize) {
            let to = self.root.join(PUT_AWAY).join(format!("{name}.{ms}"));
            if self.place(from, &to)? == Put::Created {
                return Ok(to);
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Removes what was put away no later than `until`, and folders there that are empty. `kept` is told the length of
    /// each file that stays; those whose names say no time stay.
    ///
    /// # Errors
    /// `Unavailable`.
    pub fn sweep(&self, until: SystemTime, kept: &mut impl FnMut(u64)) -> Result<()> {
        let mut each = |path: &Path, meta: &Metadata| {
            if put_away_at(path).is_none_or(|at| at > until) {
                kept(meta.len());
                return Ok(());
            }
            absent_is_fine(fs::remove_file(path)).map_err(|e| failed("cannot remove", path, e))?;
            self.remove_empty(path.parent());
            Ok(())
        };
        walk(&self.root.join(PUT_AWAY), &mut each, &|folder| self.remove_empty(Some(folder)))
    }

    /// Removes the folders above an object that is gone, as far as they are empty.
    pub fn tidy(&self, name: &str) {
        if let Ok(path) = self.path(name) {
            self.remove_empty(path.parent());
        }
    }

    fn remove_empty(&self, mut folder: Option<&Path>) {
        while let Some(empty) = folder.filter(|folder| **folder != self.root)
            && fs::remove_dir(empty).is_ok()
        {
            folder = empty.parent();
        }
    }

    /// Every object whose name begins with `prefix`, as [`list`](Store::list), one by one, until `each` has had
    /// enough.
    ///
    /// # Errors
    /// `Unavailable`; what `each` says.
    pub fn for_each(
        &self,
        prefix: &str,
        each: &mut impl FnMut(Object) -> Result<()>,
    ) -> Result<()> {
        self.walk_objects(prefix, each, &|_| {})
    }

    /// Tells `each` the length of every object, and removes folders that are empty: a crash leaves such behind.
    ///
    /// # Errors
    /// `Unavailable`.
    pub fn measure(&self, each: &mut impl FnMut(u64)) -> Result<()> {
        let mut measure = |object: Object| {
            each(object.bytes);
            Ok(())
        };
        self.walk_objects("", &mut measure, &|folder| self.remove_empty(Some(folder)))
    }

    fn walk_objects(
        &self,
        prefix: &str,
        each: &mut impl FnMut(Object) -> Result<()>,
        empty: &impl Fn(&Path),
    ) -> Result<()> {
        let folder = match prefix.strip_suffix('/') {
            // The folder itself, too.
            Some(folder) => {
                self.path(&format!("{folder}/x"))?;
                self.path(folder)?
            }
            None if prefix.is_empty() => self.root.clone(),
            None => return Err(Error::invalid(format!("the prefix '{prefix}' ends in no /"))),
        };
        let mut each = |path: &Path, meta: &Metadata| {
            let relative = path.strip_prefix(&self.root).ok().and_then(Path::to_str);
            let Some(name) = relative.filter(|name| check_name(name).is_ok()) else {
                return Ok(());
            };
            let modified = meta.modified().map_err(|e| failed("cannot look at", path, e))?;
            each(Object { name: name.to_owned(), bytes: meta.len(), age: age(modified) })
        };
        walk(&folder, &mut each, empty)
    }
}

/// An object's file for reading. Whoever may write to the folder may have put something else there.
fn open(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    Ok(file)
}

impl Store for LocalStore {
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<Put> {
        let path = self.path(name)?;
        self.create(&path, bytes).map_err(|e| failed("cannot write", &path, e))
    }

    fn get(&self, name: &str, limit: usize) -> Result<Vec<u8>> {
        let path = self.path(name)?;
        let read = || {
            let mut bytes = Vec::new();
            open(&path)?.take(limit as u64 + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|e| failed("cannot read", &path, e))?;
        if bytes.len() > limit {
            return Err(Error::damaged(format!("{name} is longer than {limit} bytes")));
        }
        Ok(bytes)
    }

    fn get_range(&self, name: &str, offset: u64, len: usize) -> Result<Vec<u8>> {
        let path = self.path(name)?;
        let read = || {
            let mut bytes = vec![0; len];
            open(&path)?.read_exact_at(&mut bytes, offset)?;
            Ok(bytes)
        };
        read().map_err(|e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => {
                Error::damaged(format!("{name} ends before byte {}", offset + len as u64))
            }
            _ => failed("cannot read", &path, e),
        })
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>> {
        let mut found = Vec::new();
        self.for_each(prefix, &mut |object| {
            found.push(object);
            Ok(())
        })?;
        Ok(found)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.remove(name)?;
        self.tidy(name);
        Ok(())
    }

    fn exists(&self, name: &str) -> Result<bool> {
        Ok(self.length(name)?.is_some())
    }
}

/// Every regular file below `folder`, without those in folders that begin with a dot, and to `empty` each folder that
/// has nothing in it. What goes meanwhile is no error, be it a file or a folder.
fn walk(
    folder: &Path,
    each: &mut impl FnMut(&Path, &Metadata) -> Result<()>,
    empty: &impl Fn(&Path),
) -> Result<()> {
    let gone = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
    let entries = match fs::read_dir(folder) {
        Err(e) if gone(&e) => return Ok(()),
        entries => entries.map_err(|e| failed("cannot list", folder, e))?,
    };
    let mut is_empty = true;
    for entry in entries {
        is_empty = false;
        let entry = match entry {
            Err(e) if gone(&e) => return Ok(()),
            entry => entry.map_err(|e| failed("cannot list", folder, e))?,
        };
        let Ok(meta) = entry.metadata() else { continue };
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if meta.is_dir() && !hidden {
            walk(&entry.path(), each, empty)?;
        } else if meta.is_file() {
            each(&entry.path(), &meta)?;
        }
    }
    if is_empty {
        empty(folder);
    }
    Ok(())
}

/// Creates a folder and those above it that are not there.
fn create_folders(folder: &Path) -> io::Result<()> {
    let mut created = fs::create_dir(folder);
    if let (Err(e), Some(parent)) = (&created, folder.parent())
        && e.kind() == io::ErrorKind::NotFound
    {
        create_folders(parent)?;
        created = fs::create_dir(folder);
    }
    match created {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        created => created,
    }
}

/// Creates a folder and those above it, each durable in its parent.
fn make_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    if let Some(parent) = folder.parent() {
        make_folder(parent)?;
    }
    match fs::create_dir(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    sync_folder(folder.parent())
}

/// What the file is like, if there is one: neither a folder nor a link.
fn regular(path: &Path) -> io::Result<Option<Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(meta) => Ok(meta.is_file().then_some(meta)),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// When a file was put away, as its name says.
fn put_away_at(path: &Path) -> Option<SystemTime> {
    let ms = path.file_name()?.to_str()?.rsplit_once('.')?.1.parse().ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms))
}

/// Renames unless `to` exists. Where the file system cannot, a hard link does the same.
fn rename_new(from: &Path, to: &Path) -> io::Result<Put> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(Put::Created),
        Err(Errno::EXIST) => Ok(Put::Existed),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => match fs::hard_link(from, to) {
            Ok(()) => fs::remove_file(from).map(|()| Put::Created),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(Put::Existed),
            Err(e) => Err(e),
        },
        Err(e) => Err(e.into()),
    }
}

fn sync_folder(folder: Option<&Path>) -> io::Result<()> {
    #[cfg(test)]
    tests::SYNCED.with_borrow_mut(|synced| synced.extend(folder.map(Path::to_owned)));
    match folder {
        Some(folder) if folder.as_os_str().is_empty() => File::open(".")?.sync_all(),
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

fn absent_is_fine(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn age(modified: SystemTime) -> Duration {
    SystemTime::now().duration_since(modified).unwrap_or_default()
}

fn failed(what: &str, path: &Path, e: io::Error) -> Error {
    let text = format!("{what} {}", path.display());
    match e.kind() {
        io::ErrorKind::NotFound => Error::new(Kind::NotFound, format!("{text}: it does not exist")),
        _ => Error::unavailable(text, e),
    }
}
