//! The durable record of blocks that arrived or were overwritten since this host became the owner.

use dray_image::PresentLog;
use dray_image::journal::Journal;
use dray_types::BlockSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// One image's record: a journal of encoded sets.
pub struct PresentFile {
    inner: Mutex<(Journal, BlockSet)>,
    new: bool,
}

impl PresentFile {
    /// Opens or makes the record at `path`.
    ///
    /// # Errors
    /// What the file system reports, or that the record is damaged.
    pub fn open(path: &Path) -> io::Result<Arc<Self>> {
        let (journal, records) = Journal::open(path).map_err(io::Error::other)?;
        let mut all = BlockSet::new();
        for record in &records {
            all.union_with(&BlockSet::decode(record).map_err(io::Error::other)?);
        }
        Ok(Arc::new(Self { inner: Mutex::new((journal, all)), new: records.is_empty() }))
    }

    /// True when no record was there when it was opened.
    pub fn is_new(&self) -> bool {
        self.new
    }

    /// Every block recorded.
    pub fn all(&self) -> BlockSet {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }
}

impl PresentLog for PresentFile {
    fn record(&self, present: &BlockSet) -> dray_image::Result<()> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.0.append(&present.encode())?;
        inner.1.union_with(present);
        Ok(())
    }
}
