//! The names on a simulated disk. They are compared as bytes, which is much quicker than path by path: a
//! simulation looks at names more often than at anything else.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What a name stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    Folder,
    File(u64),
}

/// What has one.
#[derive(Clone, Default)]
pub(super) struct Names(BTreeMap<OsString, Entry>);

/// What is left of a name below a folder.
fn below<'a>(name: &'a OsStr, folder: &Path) -> Option<&'a [u8]> {
    let rest = name.as_bytes().strip_prefix(folder.as_os_str().as_bytes())?;
    match folder.as_os_str().as_bytes() {
        b"/" => Some(rest),
        _ => rest.strip_prefix(b"/"),
    }
}

impl Names {
    /// These folders, and nothing in them.
    pub(super) fn of_folders<'a>(folders: impl IntoIterator<Item = &'a Path>) -> Self {
        let entry = |folder: &Path| (folder.as_os_str().to_owned(), Entry::Folder);
        Self(folders.into_iter().map(entry).collect())
    }

    pub(super) fn get(&self, path: &Path) -> Option<Entry> {
        self.0.get(path.as_os_str()).copied()
    }

    pub(super) fn has(&self, path: &Path) -> bool {
        self.get(path).is_some()
    }

    pub(super) fn put(&mut self, path: &Path, entry: Entry) {
        self.0.insert(path.as_os_str().to_owned(), entry);
    }

    /// Takes one name away, whatever is below it.
    pub(super) fn take(&mut self, path: &Path) -> Option<Entry> {
        self.0.remove(path.as_os_str())
    }

    /// Takes a name away, and everything below it.
    pub(super) fn take_all(&mut self, path: &Path) {
        if !matches!(self.take(path), Some(Entry::File(_))) {
            self.0.retain(|name, _| below(name, path).is_none());
        }
    }

    /// Everything that has a name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Path, Entry)> {
        self.0.iter().map(|(name, entry)| (Path::new(name), *entry))
    }

    /// What is directly in a folder.
    pub(super) fn inside(&self, folder: &Path) -> impl Iterator<Item = PathBuf> {
        let direct = |name: &&OsString| {
            below(name, folder).is_some_and(|rest| !rest.is_empty() && !rest.contains(&b'/'))
        };
        self.0.keys().filter(direct).map(PathBuf::from)
    }
}
