//! Images that were claimed, and those that lost their migration to the claim of another image.
//!
//! A claim is one record: before it the image is not claimed, after it it is, and the names follow, also
//! after a crash. The migration is void by then ([`Folder::set_void`]). Its other images stay as they
//! are, and nobody vouches for them until each is claimed itself (I8).

use super::lines::begin_line;
use super::record::{Claim, CopyState, ImageRecord, Place};
use super::{Entry, Reason, Registry};
use crate::migration::abort;
use crate::migration::log::Folder;
use crate::store;
use dray_image::ImageNames;
use dray_types::{Epoch, ImageId, MigrationId};
use std::io;

impl ImageRecord {
    /// Whether it stays this host's, and complete, whatever becomes of its migration: the base images of
    /// a disk that has left, and files that lay at a target before.
    pub fn outlives_migration(&self) -> bool {
        self.read_only && self.state == CopyState::Owner && self.place == Place::Named
    }
}

impl Registry {
    /// This host owns the image from here on, under another id and a higher epoch, whoever had it.
    ///
    /// # Errors
    /// What the store reports: then it is not claimed; or the file system of the new name: then it is,
    /// and a restart tries again.
    pub fn claim(&self, entry: &Entry, id: ImageId, epoch: Epoch) -> io::Result<()> {
        abort::step("Claim-Record");
        self.update(entry, |record| {
            let overlay = record.overlay_id();
            if let Some(flat) = &mut record.flat {
                flat.overlay = Some(overlay);
            }
            record.claim = Some(Claim { migration: record.migration, named: false });
            record.state = CopyState::Owner;
            (record.id, record.epoch) = (id, epoch);
            (record.migration, record.replica) = (None, None);
        })?;
        self.finish_claim(entry)?;
        if entry.line().is_none() { begin_line(&self.store, entry) } else { Ok(()) }
    }

    /// Names that another file has already cannot be given to a claimed one.
    ///
    /// # Errors
    /// That it is so.
    pub fn check_name(&self, record: &ImageRecord) -> io::Result<()> {
        let hidden = matches!(record.place, Place::Partial | Place::Replica(_));
        if !hidden || record.device || record.flat.is_some() || !record.path.exists() {
            return Ok(());
        }
        let why = format!("{} exists already; move it away", record.path.display());
        Err(io::Error::other(why))
    }

    /// The file of a claimed image gets its name, a device loses its mark. Can be repeated.
    fn finish_claim(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        let unnamed = record.claim.is_some_and(|claim| !claim.named);
        if !unnamed || record.state != CopyState::Owner {
            return Ok(());
        }
        abort::step("Claim-Name");
        if record.device {
            self.mark(&record.path).clear().map_err(io::Error::other)?;
        } else {
            let names = ImageNames::of(&record.path).map_err(io::Error::other)?;
            let named = match (record.place, &entry.flat) {
                (Place::Partial, _) => names.finish_partial(record.mode),
                (Place::Replica(epoch), Some(_)) => names.restore_chain(epoch),
                (Place::Replica(epoch), None) => names.restore_replica(epoch, record.mode),
                (Place::Named | Place::Chain, _) => Ok(()),
            };
            named.map_err(io::Error::other)?;
            if let Some(flat) = &entry.flat {
                flat.chain.moved(&names.chain());
            }
        }
        abort::step("Claim-Named");
        self.update(entry, |record| {
            record.place = if record.flat.is_some() { Place::Chain } else { Place::Named };
            record.claim = record.claim.map(|claim| Claim { named: true, ..claim });
        })
    }

    /// Images that were claimed before a crash get their names.
    pub(super) fn finish_claims(&self) {
        for entry in self.all() {
            if let Err(why) = self.finish_claim(&entry) {
                let name = entry.record().name;
                tracing::error!(image = name, %why, "a claimed image does not get its name");
            }
            entry.take_locks();
        }
    }

    /// Whether an image is not the one any more that a migration of `epoch` means by `id`: it was
    /// claimed since, and a voice from before says nothing about it (I1).
    pub fn was_claimed_since(&self, entry: &Entry, id: ImageId, epoch: Epoch) -> bool {
        let record = entry.record();
        let another = record.claim.is_some() && record.id != id;
        if another || record.epoch > epoch {
            let (name, now) = (record.name, record.epoch.0);
            tracing::warn!(image = name, epoch = epoch.0, now, "was claimed: it is left alone");
            return true;
        }
        false
    }

    /// The image that was claimed from this migration, and its epoch.
    pub fn claimed_from(&self, migration: MigrationId) -> Option<(String, Epoch)> {
        let from = |record: &ImageRecord| record.claim.and_then(|claim| claim.migration);
        let mut records = self.all().into_iter().map(|entry| entry.record());
        let claimed = records.find(|record| from(record) == Some(migration))?;
        Some((claimed.name, claimed.epoch))
    }

    /// Whether an image has lost its migration to the claim of another one.
    pub fn is_void(&self, record: &ImageRecord) -> bool {
        let void = |migration| Folder::of(&self.store, migration).is_void();
        record.migration.is_some_and(void) && !record.outlives_migration()
    }

    /// An image whose migration is void: who is attached waits, who comes is refused, until it is
    /// claimed.
    pub fn close_void(&self, entry: &Entry) {
        let name = entry.record().name;
        let why = "its migration ended when another image of it was claimed";
        self.close(&name, Reason::lasting(why, format!("`dray claim {name}` it as well")));
    }

    /// Closes what has lost its migration, and removes what void migrations left that nobody can claim
    /// any more.
    pub fn close_voids(&self) {
        for entry in self.all() {
            if self.is_void(&entry.record()) {
                self.close_void(&entry);
            }
        }
        let removed = Folder::voids(&self.store)
            .and_then(|voids| voids.iter().try_for_each(|folder| self.remove_void(folder)));
        if let Err(why) = removed {
            tracing::warn!(%why, "cannot remove what a void migration left");
        }
    }

    /// Removes the folder of a void migration unless an image needs what it says.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn remove_void(&self, folder: &Folder) -> io::Result<()> {
        // The records themselves: the file of an image may not be there just now.
        for path in store::entries(&self.store.images(), ".json")? {
            match store::read_json::<ImageRecord>(&path) {
                Ok(record) if record.migration.is_none_or(|of| !folder.is_of(of)) => {}
                Ok(record) if record.outlives_migration() => {}
                // What cannot be read may need it.
                _ => return Ok(()),
            }
        }
        folder.remove()
    }
}
