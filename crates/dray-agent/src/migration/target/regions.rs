//! Regions that the guest has written into since the handover, for a verification after a restart.

use crate::migration::intents::IntentFile;
use dray_image::IntentLog;
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The regions of one image. What cannot be written down now is written down later: a verification
/// is worth less than the guest's write.
pub struct WrittenRegions {
    file: IntentFile,
    owed: Mutex<BTreeSet<u64>>,
}

impl WrittenRegions {
    /// Those in `file`.
    pub fn new(file: IntentFile) -> Self {
        Self { file, owed: Mutex::default() }
    }

    fn owed(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries again what could not be written down; whether something is left.
    pub fn try_again(&self) -> bool {
        let mut owed = self.owed();
        owed.retain(|&region| self.file.open_region(region).is_err());
        !owed.is_empty()
    }
}

impl IntentLog for WrittenRegions {
    fn open_region(&self, region: u64) -> dray_image::Result<()> {
        if self.file.open_region(region).is_err() {
            self.owed().insert(region);
        }
        Ok(())
    }
}
