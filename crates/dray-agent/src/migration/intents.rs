//! Write intents: which 64 MiB regions were written into while a migration tracked them. After an
//! unclean stop the tracker's memory is gone, and these regions are not trusted.

use dray_image::journal::Journal;
use dray_image::{INTENT_REGION_BYTES, IntentLog};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Blocks of one region.
const REGION_BLOCKS: u64 = INTENT_REGION_BYTES / BLOCK_SIZE;

/// The durable list of open regions of all images of a migration.
pub struct Intents {
    path: PathBuf,
    inner: Mutex<(Journal, Vec<(u16, u64)>)>,
    /// How many regions were open when the list was opened: those of an earlier process.
    inherited: usize,
}

impl Intents {
    /// Opens or makes the list at `path`.
    ///
    /// # Errors
    /// What the file system reports, or that the list is damaged.
    pub fn open(path: &Path) -> io::Result<Arc<Self>> {
        let (journal, records) = Journal::open(path).map_err(io::Error::other)?;
        let known: Vec<_> = records.iter().filter_map(|record| decode(record)).collect();
        let inherited = known.len();
        Ok(Arc::new(Self { path: path.to_owned(), inner: Mutex::new((journal, known)), inherited }))
    }

    /// The list at `path`, shared with whoever still writes to it: a disk goes on tracking after its
    /// migration was abandoned, and two writers of one list would overwrite each other.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn shared(path: &Path) -> io::Result<Arc<Self>> {
        static OPEN: Mutex<BTreeMap<PathBuf, Weak<Intents>>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, list| list.strong_count() > 0);
        if let Some(list) = open.get(path).and_then(Weak::upgrade) {
            return Ok(list);
        }
        let list = Self::open(path)?;
        open.insert(path.to_owned(), Arc::downgrade(&list));
        Ok(list)
    }

    /// Per image, the blocks of regions that an earlier process left open.
    pub fn inherited_regions(&self, images: usize) -> Vec<BlockSet> {
        let mut sets = vec![BlockSet::new(); images];
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        for &(image, region) in &inner.1[..self.inherited] {
            if let Some(set) = sets.get_mut(usize::from(image)) {
                set.insert(BlockRange::new(region * REGION_BLOCKS, REGION_BLOCKS));
            }
        }
        sets
    }

    /// The regions of an image that are open, whoever opened them.
    pub fn regions(&self, image: usize) -> Vec<u64> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let of_image = inner.1.iter().filter(|&&(ix, _)| usize::from(ix) == image);
        of_image.map(|&(_, region)| region).collect()
    }

    fn add(&self, image: u16, region: u64) -> dray_image::Result<()> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.1.contains(&(image, region)) {
            return Ok(());
        }
        inner.0.append(&encode(image, region))?;
        inner.1.push((image, region));
        Ok(())
    }

    /// Nothing is tracked any more.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn close(&self) -> io::Result<()> {
        crate::store::remove(&self.path)
    }
}

fn encode(image: u16, region: u64) -> [u8; 10] {
    let mut record = [0; 10];
    record[..2].copy_from_slice(&image.to_le_bytes());
    record[2..].copy_from_slice(&region.to_le_bytes());
    record
}

fn decode(record: &[u8]) -> Option<(u16, u64)> {
    let (image, region) = record.split_at_checked(2)?;
    Some((u16::from_le_bytes(image.try_into().ok()?), u64::from_le_bytes(region.try_into().ok()?)))
}

/// One image's view of the list.
pub struct IntentFile {
    intents: Arc<Intents>,
    image: u16,
}

impl IntentFile {
    /// The view of image number `image`.
    pub fn new(intents: Arc<Intents>, image: usize) -> Self {
        Self { intents, image: image as u16 }
    }
}

impl IntentLog for IntentFile {
    fn open_region(&self, region: u64) -> dray_image::Result<()> {
        self.intents.add(self.image, region)
    }
}
