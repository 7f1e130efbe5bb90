//! What a simulated agent does when a peer asks for room.

use super::host::SimAgent;
use dray_engine::lineage::fits;
use dray_host::folder::intent::{TargetImageIntent, TargetIntent};
use dray_host::folder::log::{End, Folder, TARGET_INTENT};
use dray_host::lineage::{ReplicaNote, stamp_of};
use dray_host::migration::revive::Launch;
use dray_host::record::{CopyState, ImageRecord};
use dray_host::registry::Entry;
use dray_host::replicas::undo_prepared;
use dray_types::{Ancestor, MigrationId};
use dray_wire::request::Base;
use std::io;

impl SimAgent {
    /// Makes room for a migration to here, as the answer to a peer's `prepare` does. What each image
    /// begins with.
    pub fn prepare_target(
        &self,
        mut intent: TargetIntent,
        ancestors: &[Vec<Ancestor>],
    ) -> io::Result<Vec<Base>> {
        let id = intent.migration;
        if let Some(here) = self.here().as_ref().filter(|here| here.slot.board.migration == id) {
            let same = here.slot.intent();
            return Ok(same.images.iter().map(TargetImageIntent::base).collect());
        }
        let folder = Folder::of(&self.store, id);
        if folder.holds(End::Source)? {
            return Err(io::Error::other("a migration away from that host has this id"));
        }
        if folder.file(TARGET_INTENT).exists()? || folder.is_void()? {
            return Err(io::Error::other("its folder cannot be read"));
        }
        let mut images = intent.images.iter_mut().zip(ancestors);
        let made = images.try_for_each(|(image, ancestors)| self.make_room(id, image, ancestors));
        let bases = intent.images.iter().map(TargetImageIntent::base).collect();
        let begun = made.and_then(|()| {
            Folder::begin(&self.store, id, End::Target, &intent)?;
            self.target(intent.clone())
        });
        if let Err(why) = begun {
            *self.here() = None;
            let names = intent.images.iter().map(|image| image.offer.name.clone());
            undo_prepared(&self.registry, &folder, &names.collect::<Vec<_>>())?;
            return Err(why);
        }
        Ok(bases)
    }

    fn make_room(
        &self,
        migration: MigrationId,
        image: &mut TargetImageIntent,
        ancestors: &[Ancestor],
    ) -> io::Result<()> {
        if let Some(entry) = self.registry.get(&image.offer.name) {
            let record = entry.record();
            if record.state != CopyState::Replica || record.migration.is_some() {
                return Err(io::Error::other("the migration that it left with is not over"));
            }
            match self.usable(&entry, ancestors) {
                Some(note) => {
                    image.replica = Some(note);
                    return self.registry.begin_return(&entry, migration).map(drop);
                }
                None => drop(self.registry.set_aside(&entry)?),
            }
        }
        let record = ImageRecord::coming(&image.offer, image.path.clone(), migration);
        self.registry.make_partial(record).map(drop)
    }

    /// What a replica holds, if an image with these generations can begin with it.
    fn usable(&self, entry: &Entry, ancestors: &[Ancestor]) -> Option<ReplicaNote> {
        let record = entry.record();
        let note = record.replica.as_ref()?;
        fits(ancestors, note.generation).ok()?;
        note.check_kept().ok()?;
        let path = self.registry.at(&record.current_path().ok()?);
        note.as_found(&stamp_of(&path).ok()?).ok()
    }
}
