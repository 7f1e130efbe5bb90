//! Files that content is in, by number: images of the registry, and other files of the pools.

use super::store::Scanned;
use crate::registry::Registry;
use dray_image::{FileImage, FileOptions};
use dray_types::ImageId;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Open files outside the registry at most.
const MOST_OPEN: usize = 64;

/// Something that content can be read from.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum FileRef {
    /// An image of this host, whatever its file is called just now.
    Image {
        /// Its name.
        name: String,
        /// Its id: another image under the same name is something else.
        id: ImageId,
    },
    /// Another file of a pool.
    Plain {
        /// Where it is.
        path: PathBuf,
    },
}

#[derive(Default)]
struct Known {
    numbers: HashMap<FileRef, u32>,
    refs: HashMap<u32, FileRef>,
    next: u32,
    open: HashMap<u32, Arc<FileImage>>,
    scanned: HashMap<u32, Scanned>,
}

/// All of them.
pub(super) struct Files {
    registry: Arc<Registry>,
    known: Mutex<Known>,
}

impl Files {
    /// The files that an earlier process knew, and those that come.
    pub(super) fn new(registry: Arc<Registry>, scanned: Vec<(u32, Scanned)>) -> Self {
        let mut known = Known::default();
        for (number, file) in scanned {
            known.next = known.next.max(number.saturating_add(1));
            known.numbers.insert(file.file.clone(), number);
            known.refs.insert(number, file.file.clone());
            known.scanned.insert(number, file);
        }
        Self { registry, known: Mutex::new(known) }
    }

    pub(super) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Files that the background has read or begun to read.
    pub(super) fn scanned(&self) -> Vec<(u32, Scanned)> {
        self.known().scanned.iter().map(|(number, file)| (*number, file.clone())).collect()
    }

    pub(super) fn scanned_of(&self, number: u32) -> Option<Scanned> {
        self.known().scanned.get(&number).cloned()
    }

    pub(super) fn set_scanned(&self, number: u32, file: Scanned) {
        self.known().scanned.insert(number, file);
    }

    /// They are not there any more; their numbers are not used again.
    pub(super) fn forget(&self, gone: &HashSet<u32>) {
        let mut known = self.known();
        for number in gone {
            known.scanned.remove(number);
            known.open.remove(number);
            if let Some(file) = known.refs.remove(number) {
                known.numbers.remove(&file);
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a file; it keeps it.
    pub(super) fn number(&self, file: &FileRef) -> u32 {
        let mut known = self.known();
        if let Some(&number) = known.numbers.get(file) {
            return number;
        }
        let number = known.next;
        known.next += 1;
        known.numbers.insert(file.clone(), number);
        known.refs.insert(number, file.clone());
        number
    }

    /// The file with this number and where it lies; none when it is not there any more.
    pub(super) fn open(&self, number: u32) -> Option<(Arc<FileImage>, PathBuf)> {
        let file = self.known().refs.get(&number)?.clone();
        match file {
            FileRef::Image { name, id } => {
                let entry = self.registry.get(&name)?;
                let record = entry.record();
                (record.id == id).then(|| (Arc::clone(&entry.file), record.path))
            }
            FileRef::Plain { path } => Some((self.plain(number, &path)?, path)),
        }
    }

    fn plain(&self, number: u32, path: &std::path::Path) -> Option<Arc<FileImage>> {
        let mut known = self.known();
        if let Some(file) = known.open.get(&number) {
            return Some(Arc::clone(file));
        }
        if !path.symlink_metadata().is_ok_and(|meta| meta.is_file()) {
            return None;
        }
        let file = Arc::new(FileImage::open(path, FileOptions::default()).ok()?);
        if known.open.len() >= MOST_OPEN {
            known.open.clear();
        }
        known.open.insert(number, Arc::clone(&file));
        Some(file)
    }
}
