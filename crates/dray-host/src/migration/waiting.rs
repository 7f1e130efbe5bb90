//! Migrations that a restart has found and could not bring back yet, and what becomes of those to here that
//! nobody wants any more.

use super::fate;
use super::intent::TargetIntent;
use super::log::{End, Folder, Log, TARGET_INTENT, TARGET_JOURNAL};
use super::revive::read_intent;
use super::standing;
use crate::registry::Registry;
use dray_engine::TargetRecord;
use dray_types::{ImageId, MigrationId};
use dray_wire::request::Fate;
use parking_lot::{Mutex, MutexGuard};
use std::io;

/// A migration that could not be brought back yet.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub folder: Folder,
    pub end: End,
    /// Why, as it was last told in the log.
    pub why: String,
}

/// The migrations that could not be brought back yet.
#[derive(Default)]
pub struct Unrevived(Mutex<Vec<Waiting>>);

/// A migration to here that waits, and that has promised nothing: its source says whether it is still wanted.
#[derive(Clone, Debug)]
pub struct Unpromised {
    /// Which one.
    pub migration: MigrationId,
    /// Its source.
    pub peer: String,
    /// The images that a guest may write.
    pub images: Vec<ImageId>,
    /// Its source has said how far it is; it was only prepared until then.
    begun: bool,
    /// A file in which an image was to come is lost.
    lost: bool,
}

impl Unpromised {
    /// Whether nobody wants it any more, by what its source says. What was kept for another try is of no use once
    /// a part of it is lost.
    pub fn is_unwanted(&self, told: Fate) -> bool {
        fate::is_unwanted(told, self.begun) || self.lost && told == Fate::Abandoned
    }
}

impl Unrevived {
    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.0.lock()
    }

    /// The migrations to here that wait.
    pub fn here(&self) -> Vec<MigrationId> {
        let waiting = self.lock();
        let here = waiting.iter().filter(|one| one.end == End::Target);
        here.filter_map(|one| one.folder.migration()).collect()
    }

    /// A migration to here that waits, if it has promised nothing.
    ///
    /// # Errors
    /// When its intent or its journal cannot be read.
    pub fn unpromised(
        &self,
        registry: &Registry,
        migration: MigrationId,
    ) -> io::Result<Option<Unpromised>> {
        match self.find(migration) {
            Some(folder) => look(registry, &folder),
            None => Ok(None),
        }
    }

    fn find(&self, migration: MigrationId) -> Option<Folder> {
        let waiting = self.lock();
        let mut here = waiting.iter().filter(|one| one.end == End::Target);
        here.find(|one| one.folder.is_of(migration)).map(|one| one.folder.clone())
    }

    /// A migration to here that waits, and has promised nothing, is given up, durably: when it is brought back, it
    /// ends. Whether it is.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn give_up(&self, registry: &Registry, migration: MigrationId) -> io::Result<bool> {
        // Held, so that its loop is not started meanwhile.
        let waiting = self.lock();
        let mut here = waiting.iter().filter(|one| one.end == End::Target);
        let Some(one) = here.find(|one| one.folder.is_of(migration)) else { return Ok(false) };
        if look(registry, &one.folder)?.is_none() {
            return Ok(false);
        }
        let (mut log, _) = Log::open(&one.folder.file(TARGET_JOURNAL))?;
        log.append(&[TargetRecord::Discarded]).map(|()| true)
    }
}

/// What is to be asked about the migration to here in this folder; nothing once it has promised, or is over.
fn look(registry: &Registry, folder: &Folder) -> io::Result<Option<Unpromised>> {
    if folder.lacks_intent()? {
        return Ok(None);
    }
    let intent: TargetIntent = read_intent(folder, TARGET_INTENT)?;
    let records = standing::read(&folder.file(TARGET_JOURNAL))?;
    if !standing::has_promised_nothing(&records) {
        return Ok(None);
    }
    let images = intent.images.iter().filter(|image| !image.offer.read_only);
    let images = images.map(|image| image.offer.id).collect();
    let ours = registry.all_records().into_iter();
    let mut ours = ours.filter(|record| record.migration == Some(intent.migration));
    Ok(Some(Unpromised {
        migration: intent.migration,
        peer: intent.peer,
        images,
        begun: records.contains(&TargetRecord::Touched),
        lost: ours.any(|record| registry.has_lost_arriving(&record)),
    }))
}
