//! Files that content is in, by number: images of the registry, and other files of the pools.

use super::store::Scanned;
use dray_host::registry::Registry;
use dray_image::{FileImage, FileOptions, ImageFile};
use dray_types::ImageId;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::fstat;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

/// Numbers from here on are never in the store.
const FIRST_LOOSE: u32 = 1 << 31;
/// Open files outside the registry at most.
const MOST_OPEN: usize = 64;

/// Something that content can be read from.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum FileRef {
    /// An image of this host, whatever its file is called just now.
    Image {
        /// Name of the image.
        name: String,
        /// Its id: another image under the same name is something else.
        id: ImageId,
    },
    /// Another file of a pool.
    Plain {
        /// Path of the file.
        path: PathBuf,
    },
}

/// A file that can be read, and what is known of it.
pub(super) struct Found {
    /// What it is.
    pub(super) is: FileRef,
    /// Its content.
    pub(super) file: Arc<dyn ImageFile>,
    /// Where it lies.
    pub(super) path: PathBuf,
    /// Nobody writes to it: a base image.
    pub(super) read_only: bool,
}

/// A file that is kept open for whoever asks next.
struct Open {
    file: Arc<FileImage>,
    /// Somebody has asked for it since the last look.
    used: bool,
}

#[derive(Default)]
struct Known {
    numbers: HashMap<FileRef, u32>,
    refs: HashMap<u32, FileRef>,
    next: u32,
    open: HashMap<u32, Open>,
    scanned: HashMap<u32, Scanned>,
}

/// All files that the index knows.
pub(super) struct Files {
    registry: Arc<Registry>,
    known: Mutex<Known>,
}

impl Files {
    /// None yet. Until it is known which numbers the store has given, new ones are above all of these.
    pub(super) fn new(registry: Arc<Registry>) -> Self {
        let known = Known { next: FIRST_LOOSE, ..Known::default() };
        Self { registry, known: Mutex::new(known) }
    }

    /// The files that an earlier process knew, by the numbers that the store has for them. What was given
    /// a number before goes on to be found under it, and has one of the store's from now on.
    pub(super) fn load(&self, scanned: Vec<(u32, Scanned)>) {
        let mut known = self.known();
        let loose = std::mem::take(&mut known.numbers);
        known.next = 0;
        for (number, file) in scanned.into_iter().filter(|(number, _)| *number < FIRST_LOOSE) {
            known.next = known.next.max(number + 1);
            known.numbers.insert(file.file.clone(), number);
            known.refs.insert(number, file.file.clone());
            known.scanned.insert(number, file);
        }
        drop(known);
        for file in loose.keys() {
            self.number(file);
        }
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
        self.known.lock()
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

    /// The file with this number; none when it is not there any more.
    pub(super) fn open(&self, number: u32) -> Option<Found> {
        let is = self.known().refs.get(&number)?.clone();
        match &is {
            FileRef::Image { name, id } => {
                let entry = self.registry.get(name)?;
                let record = entry.record();
                let (file, path, read_only) =
                    (Arc::clone(&entry.file), record.path, record.read_only);
                (record.id == *id).then_some(Found { is, file, path, read_only })
            }
            FileRef::Plain { path } => {
                let (file, path) = (self.plain(number, path)?, path.clone());
                Some(Found { is, file, path, read_only: false })
            }
        }
    }

    /// Where a file lies; none when it is not there any more.
    pub(super) fn path_of(&self, file: &FileRef) -> Option<PathBuf> {
        match file {
            FileRef::Image { name, .. } => Some(self.registry.get(name)?.record().path),
            FileRef::Plain { path } => Some(path.clone()),
        }
    }

    fn plain(&self, number: u32, path: &std::path::Path) -> Option<Arc<FileImage>> {
        let mut known = self.known();
        if let Some(open) = known.open.get_mut(&number) {
            open.used = true;
            return Some(Arc::clone(&open.file));
        }
        if !path.symlink_metadata().is_ok_and(|meta| meta.is_file()) {
            return None;
        }
        let file = Arc::new(FileImage::open(path, FileOptions::default()).ok()?);
        if known.open.len() >= MOST_OPEN {
            known.open.clear();
        }
        known.open.insert(number, Open { file: Arc::clone(&file), used: true });
        Some(file)
    }

    /// Closes what nobody has asked for since the last look, and what has been deleted: it would take
    /// up room for as long as it is open.
    pub(super) fn close_idle(&self) {
        let named = |file: &FileImage| fstat(file.file()).is_ok_and(|stat| stat.st_nlink > 0);
        self.known().open.retain(|_, open| std::mem::take(&mut open.used) && named(&open.file));
    }
}
