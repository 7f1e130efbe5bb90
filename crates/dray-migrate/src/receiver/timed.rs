//! What is recorded of the blocks that an image has, and since when its file has them: a file that was changed before
//! that is an older one, and has not these blocks.

use dray_host::folder::present::PresentFile;
use dray_host::registry::{Entry, Registry};
use dray_image::{PresentLog, Result};
use dray_types::{BlockRange, BlockSet};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// The record of the blocks of an image that comes, and the time of its file.
pub(super) struct TimedLog {
    present: Arc<PresentFile>,
    /// Both have the disk that has this.
    registry: Weak<Registry>,
    entry: Weak<Entry>,
    /// When the file was changed, before the sync under way.
    at: Mutex<Option<(i64, i64)>>,
}

impl TimedLog {
    /// The record of `entry`.
    pub(super) fn new(
        present: &Arc<PresentFile>,
        registry: &Arc<Registry>,
        entry: &Arc<Entry>,
    ) -> Self {
        let (registry, entry) = (Arc::downgrade(registry), Arc::downgrade(entry));
        Self { present: Arc::clone(present), registry, entry, at: Mutex::default() }
    }

    /// The image, as long as its agent goes on.
    fn image(&self) -> Option<(Arc<Registry>, Arc<Entry>)> {
        Some((self.registry.upgrade()?, self.entry.upgrade()?))
    }
}

impl PresentLog for TimedLog {
    fn before_sync(&self) {
        *self.at.lock() = self.image().and_then(|(registry, entry)| registry.time_of(&entry));
    }

    fn record(&self, present: &BlockSet) -> Result<()> {
        if let Some((registry, entry)) = self.image() {
            registry.keep_time(&entry, self.at.lock().take());
        }
        self.present.record(present)
    }

    fn note(&self, run: BlockRange) -> Result<()> {
        self.present.note(run)
    }

    fn forget_notes(&self) -> Result<()> {
        self.present.forget_notes()
    }
}
