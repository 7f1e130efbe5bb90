//! Images that were claimed, and those that lost their migration to the claim of another image.
//!
//! A claim is one record: before it the image is not claimed, after it it is, and the names follow, also
//! after a crash. The migration is void by then ([`Folder::set_void`]). Its other images stay as they
//! are, and nobody vouches for them until each is claimed itself (I8).

use super::lines::begin_line;
use super::{Entry, Reason, Registry};
use crate::abort;
use crate::folder::intent;
use crate::folder::log::{Folder, present_name};
use crate::folder::lost;
use crate::folder::present::PresentFile;
use crate::folder::standing::{self, Standing};
use crate::record::{Claim, CopyState, ImageRecord, Lost, NameKind};
use dray_types::{BlockRange, Epoch, ImageId, MigrationId};
use std::io;

impl ImageRecord {
    /// Whether it was claimed and its file has not got its name yet, or a device is still marked.
    pub(crate) fn is_unnamed_claim(&self) -> bool {
        self.state == CopyState::Owner && self.claim.as_ref().is_some_and(|claim| !claim.named)
    }

    /// Whether it stays this host's, and complete, whatever becomes of its migration: the base images of
    /// a disk that has left, and files that lay at a target before.
    pub(crate) fn outlives_migration(&self) -> bool {
        self.read_only && self.state == CopyState::Owner && self.place == NameKind::Named
    }

    /// Whether it takes part in a migration that decides what may be done with it (I8).
    pub fn is_unfinished(&self) -> bool {
        self.migration.is_some() && !self.outlives_migration()
    }
}

/// An image that was claimed from a migration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Claimed {
    /// Its name.
    pub name: String,
    /// The epoch it has since.
    pub epoch: Epoch,
    /// The host at the other end of the migration, if that is known.
    pub peer: Option<String>,
}

impl Registry {
    /// This host owns the image from here on, under another id and a higher epoch, whoever had it.
    ///
    /// # Errors
    /// That somebody else has locked its file, or what the store reports: then it is not claimed, unless only
    /// its line could not be begun.
    pub(crate) fn claim(
        &self,
        entry: &Entry,
        (id, epoch): (ImageId, Epoch),
        writes_may_be_lost: bool,
        lost: Lost,
    ) -> io::Result<()> {
        entry.take_owners_locks().map_err(io::Error::other)?;
        abort::step("Claim-Record");
        let record = entry.record();
        let place = self.place_of(&record)?;
        let migration = record.migration;
        let ended = self.ended_vm(&record).is_some();
        let peer = migration.and_then(|of| intent::peer(&Folder::of(&self.store, of)));
        self.update(entry, |record| {
            record.place = place;
            let overlay = record.overlay_id();
            if let Some(flat) = &mut record.flat {
                flat.overlay = Some(overlay);
            }
            let named = false;
            record.claim = Some(Claim { migration, peer, named, epoch, writes_may_be_lost, lost });
            record.state = CopyState::Owner;
            (record.id, record.epoch) = (id, epoch);
            (record.migration, record.replica, record.owner) = (None, None, None);
            // The image stays here, also when the VM that it was adopted from does not.
            record.adopted = record.adopted.take().filter(|_| !ended);
        })?;
        // It is claimed: a name that cannot be given now is given at the next start.
        self.finish_claim_of(entry);
        if entry.line().is_none() { begin_line(&self.store, entry) } else { Ok(()) }
    }

    /// Names that another file has already cannot be given to a claimed one.
    ///
    /// # Errors
    /// That it is so.
    pub(crate) fn check_name(&self, record: &ImageRecord) -> io::Result<()> {
        let hidden = matches!(self.place_of(record)?, NameKind::Partial | NameKind::Replica(_));
        if !hidden || record.device || record.flat.is_some() || !self.at(&record.path).exists()? {
            return Ok(());
        }
        let why = format!("{} exists already; move it away", record.path.display());
        Err(io::Error::other(why))
    }

    /// The file of a claimed image gets its name, a device loses its mark. Can be repeated.
    fn finish_claim(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        if !record.is_unnamed_claim() {
            return Ok(());
        }
        abort::step("Claim-Name");
        if record.device {
            self.mark(&record.path).clear().map_err(io::Error::other)?;
        } else {
            let names = self.names(&record)?;
            let named = match (record.place, &entry.flat) {
                (NameKind::Partial, _) => names.finish_partial(record.mode),
                (NameKind::Replica(epoch), Some(_)) => names.restore_chain(epoch),
                (NameKind::Replica(epoch), None) => names.restore_replica(epoch, record.mode),
                (NameKind::Named | NameKind::Chain, _) => Ok(()),
            };
            named.map_err(io::Error::other)?;
            if let Some(flat) = &entry.flat {
                flat.chain.moved(&names.chain());
            }
        }
        abort::step("Claim-Named");
        self.update(entry, |record| {
            record.place = if record.flat.is_some() { NameKind::Chain } else { NameKind::Named };
            record.claim = record.claim.take().map(|claim| Claim { named: true, ..claim });
        })
    }

    /// An image that was claimed before a crash gets its name.
    pub(super) fn finish_claim_of(&self, entry: &Entry) {
        if !entry.record().is_unnamed_claim() {
            return;
        }
        if let Err(why) = self.finish_claim(entry) {
            let name = entry.record().name;
            tracing::error!(image = name, %why, "a claimed image does not get its name");
        }
    }

    /// An image that was claimed from this migration.
    pub fn claimed_from(&self, migration: MigrationId) -> Option<Claimed> {
        self.all().into_iter().map(|entry| entry.record()).find_map(|record| {
            let claim = record.claim.filter(|claim| claim.migration == Some(migration))?;
            Some(Claimed { name: record.name, epoch: record.epoch, peer: claim.peer })
        })
    }

    /// Whether an image has lost its migration to the claim of another one.
    ///
    /// # Errors
    /// When that cannot be told.
    pub fn is_void(&self, record: &ImageRecord) -> io::Result<bool> {
        Ok(self.has_void_migration(record)? && !record.outlives_migration())
    }

    fn has_void_migration(&self, record: &ImageRecord) -> io::Result<bool> {
        let folder = record.migration.map(|migration| Folder::of(&self.store, migration));
        folder.map_or(Ok(false), |folder| folder.is_void())
    }

    /// An image whose migration is void: who is attached waits, who comes is refused, until it is
    /// claimed.
    pub(crate) fn close_void(&self, entry: &Entry) {
        let name = entry.record().name;
        let why = "its migration ended when another image of it was claimed";
        self.close(&name, Reason::lasting(why, format!("`dray claim {name}` it as well")));
    }

    /// Lets an image of a void migration go as if that had ended, if this host owns it and durably has all
    /// of it: nobody else can own it (I1), and nobody could give it more. Whether it is such a one;
    /// `served`: its disk knows what is missing.
    pub(crate) fn keep_whole(&self, entry: &Entry, served: bool) -> bool {
        let kept = self.is_whole(entry, served).and_then(|whole| {
            if whole {
                self.leave_void(entry)?;
            }
            Ok(whole)
        });
        kept.unwrap_or_else(|why| {
            let name = entry.record().name;
            tracing::warn!(image = name, %why, "cannot be let go by a migration that is void");
            false
        })
    }

    fn is_whole(&self, entry: &Entry, served: bool) -> io::Result<bool> {
        let record = entry.record();
        let ours = record.state == CopyState::Owner && !self.released.knows(record.id);
        let Some(migration) = record.migration.filter(|_| ours && record.swap.is_none()) else {
            return Ok(false);
        };
        let folder = Folder::of(&self.store, migration);
        match standing::look(&folder, &record)? {
            Some(Standing::Complete(_)) => Ok(true),
            // What was lost has become zeros: whoever claims it is to hear of that.
            Some(Standing::Owned(part)) if !lost::noted(&folder, part.index)?.is_empty() => {
                Ok(false)
            }
            // Looked at first: what a guest overwrites after that is not missing, and may not be durable.
            Some(Standing::Owned(_)) if served && entry.disk.missing_count() == 0 => {
                entry.disk.checkpoint().map_err(io::Error::other)?;
                Ok(true)
            }
            Some(Standing::Owned(_)) if served => Ok(false),
            Some(Standing::Owned(part)) => {
                let path = folder.file(&present_name(part.index));
                let present =
                    PresentFile::open(&path, &record.path, BlockRange::whole(record.len).len)?;
                let mut missing = part.handover.missing;
                missing.subtract(&present.all());
                // What is only noted is not durable.
                Ok(present.has_begun() && missing.is_empty() && present.noted().is_empty())
            }
            _ => Ok(false),
        }
    }

    fn leave_void(&self, entry: &Entry) -> io::Result<()> {
        self.finish_partial(entry)?;
        self.hold(entry);
        entry.disk.stop_tracking();
        abort::step("Claim-Leave");
        self.update(entry, |record| record.migration = None)?;
        self.vouch(&entry.record().name);
        Ok(())
    }

    /// Closes what has lost its migration, and removes what void migrations left that nobody can claim
    /// any more.
    pub(crate) fn close_voids(&self) {
        for entry in self.all() {
            let record = entry.record();
            match self.has_void_migration(&record) {
                Ok(true) if record.outlives_migration() => self.let_stay(&entry),
                Ok(true) if self.keep_whole(&entry, false) => {}
                Ok(true) => self.close_void(&entry),
                Ok(false) => {}
                // It stays closed, as it was read.
                Err(why) => {
                    tracing::error!(image = record.name, %why, "cannot look at its migration")
                }
            }
        }
        let removed = Folder::voids(&self.store)
            .and_then(|voids| voids.iter().try_for_each(|folder| self.remove_void(folder)));
        if let Err(why) = removed {
            tracing::warn!(%why, "cannot remove what a void migration left");
        }
    }

    /// An image that is this host's whatever became of the migration is served.
    fn let_stay(&self, entry: &Entry) {
        let name = entry.record().name;
        if let Err(why) = self.update(entry, |record| record.migration = None) {
            tracing::warn!(image = name, %why, "cannot forget a void migration: tried at each start");
        }
        self.vouch(&name);
    }

    /// Removes the folder of a void migration unless an image needs what it says.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn remove_void(&self, folder: &Folder) -> io::Result<()> {
        if self.may_need(folder)? { Ok(()) } else { folder.remove_void() }
    }

    /// Whether an image may need what the folder of a migration says: its record names that migration, or cannot
    /// be read.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn may_need(&self, folder: &Folder) -> io::Result<bool> {
        // The records themselves: the file of an image may not be there just now.
        let records = self.store.images().entries(".json")?;
        Ok(records.iter().any(|path| match path.peek::<ImageRecord>() {
            Ok(record) => {
                record.migration.is_some_and(|of| folder.is_of(of)) && !record.outlives_migration()
            }
            Err(_) => true,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::chain::{ChainLayer, FlatRecord};
    use crate::registry::surroundings::tests::Plain;
    use crate::store::Store;
    use dray_image::{Image, ImageNames};
    use dray_types::BLOCK_SIZE;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    const LEN: u64 = 16 * BLOCK_SIZE;
    const NAME: &str = "disk";
    const MIGRATION: MigrationId = MigrationId(5);

    /// The images of a host after a start of its agent.
    fn start(dir: &Path) -> Arc<Registry> {
        Registry::load(Store::open(dir).unwrap(), Arc::new(Plain)).unwrap()
    }

    fn add(registry: &Registry, record: ImageRecord) -> Arc<Entry> {
        let file = registry.open_file(&record).unwrap();
        registry.add(record, file).unwrap()
    }

    /// An image that this host had in epoch 1, with its first block written.
    fn image(registry: &Registry, dir: &Path) -> Arc<Entry> {
        let path = dir.join(NAME);
        std::fs::File::create(&path).unwrap().set_len(LEN).unwrap();
        let entry = add(registry, ImageRecord::owned(NAME.into(), ImageId(7), path, LEN));
        entry.disk.write_at(&[7; 4096], 0, false).unwrap();
        entry
    }

    /// It is handed over in a migration that is not over.
    fn hand_over(registry: &Registry, entry: &Entry) -> Folder {
        registry.update(entry, |record| record.migration = Some(MIGRATION)).unwrap();
        entry.disk.park(entry.disk.quiesce(Duration::ZERO).unwrap());
        registry.retire(entry, Epoch(2), 0).unwrap();
        let folder = Folder::create(&registry.store, MIGRATION).unwrap();
        folder.file("source.json").put(&1).unwrap();
        folder
    }

    fn first_block(entry: &Entry) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        entry.disk.read_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn is_claimed(registry: &Registry) {
        let entry = registry.get(NAME).unwrap();
        let record = entry.record();
        assert_eq!(
            (record.state, record.id, record.epoch),
            (CopyState::Owner, ImageId(9), Epoch(4))
        );
        assert_eq!((record.migration, record.claim.map(|claim| claim.named)), (None, Some(true)));
        assert_eq!(first_block(&entry), [7; 4096]);
        assert!(!entry.disk.is_parked() && !entry.disk.is_shut());
    }

    #[test]
    fn a_flattened_image_keeps_its_overlay() {
        let dir = tempfile::tempdir().unwrap();
        let registry = start(dir.path());
        let path = dir.path().join(NAME);
        std::fs::write(&path, "a chain").unwrap();
        let names = ImageNames::of(&path).unwrap();
        names.freeze_chain().unwrap();
        names.create_overlay(ImageId(7), LEN).unwrap();
        let layer = ChainLayer {
            path: path.clone(),
            format: "qcow2".into(),
            protocol: "file".into(),
            seen: None,
        };
        let record = ImageRecord {
            place: NameKind::Chain,
            flat: Some(FlatRecord { layers: vec![layer], turn: None, overlay: None }),
            ..ImageRecord::owned(NAME.into(), ImageId(7), path.clone(), LEN)
        };
        let entry = add(&registry, record);
        entry.disk.write_at(&[7; 4096], 0, false).unwrap();
        entry.disk.flush().unwrap();
        let folder = hand_over(&registry, &entry);
        folder.set_void().unwrap();
        registry.claim(&entry, (ImageId(9), Epoch(4)), true, Lost::default()).unwrap();
        drop((entry, registry));
        for _ in 0..2 {
            let registry = start(dir.path());
            is_claimed(&registry);
            let record = registry.get(NAME).unwrap().record();
            assert_eq!((record.place, record.overlay_id()), (NameKind::Chain, ImageId(7)));
            assert!(names.chain().exists() && !path.exists());
        }
    }

    #[test]
    fn a_claim_that_was_recorded_gets_its_name_at_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let registry = start(dir.path());
        let entry = image(&registry, dir.path());
        hand_over(&registry, &entry);
        let claim = Claim {
            migration: Some(MIGRATION),
            peer: None,
            named: false,
            epoch: Epoch(4),
            writes_may_be_lost: true,
            lost: Lost::default(),
        };
        let decide = |record: &mut ImageRecord| {
            (record.id, record.epoch, record.migration) = (ImageId(9), Epoch(4), None);
            (record.state, record.claim) = (CopyState::Owner, Some(claim));
        };
        registry.update(&entry, decide).unwrap();
        drop((entry, registry));
        for _ in 0..2 {
            is_claimed(&start(dir.path()));
            assert!(dir.path().join(NAME).exists());
        }
        let claimed = Claimed { name: NAME.to_owned(), epoch: Epoch(4), peer: None };
        assert_eq!(start(dir.path()).claimed_from(MIGRATION), Some(claimed));
    }

    #[test]
    fn what_lost_its_migration_is_kept_and_closed() {
        let dir = tempfile::tempdir().unwrap();
        let registry = start(dir.path());
        let entry = image(&registry, dir.path());
        let folder = hand_over(&registry, &entry);
        assert!(!registry.is_void(&entry.record()).unwrap());
        folder.set_void().unwrap();
        drop((entry, registry));
        let registry = start(dir.path());
        registry.close_voids();
        let entry = registry.get(NAME).unwrap();
        assert!(registry.is_void(&entry.record()).unwrap() && entry.disk.is_shut());
        assert!(registry.remove_replica(&entry).is_err());
        assert!(folder.is_void().unwrap(), "it may be needed by the claim");
        registry.claim(&entry, (ImageId(9), Epoch(4)), true, Lost::default()).unwrap();
        registry.close_voids();
        assert!(!folder.is_void().unwrap() && !registry.is_void(&entry.record()).unwrap());
    }

    #[test]
    fn a_voice_from_before_a_claim_is_not_obeyed() {
        let dir = tempfile::tempdir().unwrap();
        let registry = start(dir.path());
        let entry = image(&registry, dir.path());
        hand_over(&registry, &entry);
        let is_bound = |id| registry.is_bound_to(&entry, MIGRATION, ImageId(id));
        assert!(is_bound(7) && !is_bound(9));
        assert!(!registry.is_free_for(&entry, MigrationId(MIGRATION.0 + 1), ImageId(7)));
        registry.claim(&entry, (ImageId(9), Epoch(4)), true, Lost::default()).unwrap();
        assert!(!is_bound(7) && !is_bound(9));
        assert!(registry.is_free_for(&entry, MIGRATION, ImageId(9)));
        assert!(!registry.is_free_for(&entry, MIGRATION, ImageId(7)));
    }
}
