//! The file of an image that comes, and that another program may have changed while no agent had it open.
//!
//! No guest has written to it here, and its source still has every block: the target forgets what it had received,
//! durably, and receives all of it again. After a promise Backfill fetches it, and what lies in the file stays for a
//! claim. Before one the file is made zeros: the source may take blocks that it never sent for zeros.

use super::intent::{TargetImageIntent, TargetIntent};
use super::log::{Folder, Log, TARGET_INTENT, TARGET_JOURNAL};
use super::standing::{self, Standing};
use crate::record::ImageRecord;
use dray_engine::TargetRecord;
use dray_files::StatePath;
use dray_types::ImageIndex;
use std::io;

/// What can be done about such a file.
pub(crate) struct Doubt {
    journal: StatePath,
    image: ImageIndex,
    /// This host has promised to serve the image.
    pub promised: bool,
}

impl Doubt {
    /// Of the image of `record`, which the migration of this folder brings. None when a guest may have written to it, or
    /// when its source would not send all of it.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub(crate) fn of(folder: &Folder, record: &ImageRecord) -> io::Result<Option<Self>> {
        let (at, journal) = (folder.intent_file(TARGET_INTENT)?, folder.file(TARGET_JOURNAL));
        // Who puts a lost one back must find the file as it was.
        if !at.exists()? || !journal.exists()? {
            return Ok(None);
        }
        let intent: TargetIntent = at.peek()?;
        let is_it = |image: &TargetImageIntent| {
            image.name_here() == record.name && image.offer.id == record.id
        };
        let Some(index) = intent.images.iter().position(is_it) else { return Ok(None) };
        let promised = match standing::at_target(&standing::read(&journal)?, index) {
            Standing::Promised(_) => true,
            // A source does not send what a copy that returns has in common with it.
            Standing::Incoming if record.replica.is_none() && !folder.is_void()? => false,
            _ => return Ok(None),
        };
        Ok(Some(Self { journal, image: ImageIndex(index as u16), promised }))
    }

    /// Nothing of the file counts as received, durably. Can be repeated.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn record(&self) -> io::Result<()> {
        let (mut log, records) = Log::open(&self.journal)?;
        if is_recorded(&records, self.image) {
            return Ok(());
        }
        log.append(&[TargetRecord::Distrusted { image: self.image }])
    }
}

/// Whether the last that these records say of the image's file is that.
fn is_recorded(records: &[TargetRecord], of: ImageIndex) -> bool {
    let says = |record: &TargetRecord| match record {
        TargetRecord::Distrusted { image } => (*image == of).then_some(true),
        TargetRecord::Received { image, .. } => (*image == of).then_some(false),
        TargetRecord::Prepared { .. } | TargetRecord::Void { .. } => Some(false),
        _ => None,
    };
    records.iter().rev().find_map(says).unwrap_or(false)
}
