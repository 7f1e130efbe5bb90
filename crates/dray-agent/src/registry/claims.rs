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
    /// Whether it was claimed and its file has not got its name yet, or a device is still marked.
    pub fn is_unnamed_claim(&self) -> bool {
        self.state == CopyState::Owner && self.claim.is_some_and(|claim| !claim.named)
    }

    /// Whether it stays this host's, and complete, whatever becomes of its migration: the base images of
    /// a disk that has left, and files that lay at a target before.
    pub fn outlives_migration(&self) -> bool {
        self.read_only && self.state == CopyState::Owner && self.place == Place::Named
    }

    /// Whether it takes part in a migration that decides what may be done with it (I8).
    pub fn is_unfinished(&self) -> bool {
        self.migration.is_some() && !self.outlives_migration()
    }
}

impl Registry {
    /// This host owns the image from here on, under another id and a higher epoch, whoever had it.
    ///
    /// # Errors
    /// What the store reports: then it is not claimed, unless only its line could not be begun.
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
        // It is claimed: a name that cannot be given now is given at the next start.
        self.finish_claim_of(entry);
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
        if !record.is_unnamed_claim() {
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

    /// An image that was claimed before a crash gets its name.
    pub(super) fn finish_claim_of(&self, entry: &Entry) {
        if !entry.record().is_unnamed_claim() {
            return;
        }
        if let Err(why) = self.finish_claim(entry) {
            let name = entry.record().name;
            tracing::error!(image = name, %why, "a claimed image does not get its name");
        }
        entry.take_locks();
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
            let record = entry.record();
            let void = |migration| Folder::of(&self.store, migration).is_void();
            if self.is_void(&record) {
                self.close_void(&entry);
            } else if record.migration.is_some_and(void) {
                self.let_stay(&entry);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::flat::{ChainLayer, FlatRecord};
    use crate::store::Store;
    use dray_image::Image;
    use dray_types::BLOCK_SIZE;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    const LEN: u64 = 16 * BLOCK_SIZE;
    const NAME: &str = "disk";
    const MIGRATION: MigrationId = MigrationId(5);

    /// The images of a host after a start of its agent.
    fn start(dir: &Path) -> Arc<Registry> {
        let text =
            format!("[agent]\nname = 'a'\nstate_dir = '{0}'\n[tls]\ndir = '{0}'\n", dir.display());
        let config = Config::parse(&text, Path::new("dray.toml")).unwrap();
        Registry::load(Store::open(dir).unwrap(), Arc::new(config)).unwrap()
    }

    fn add(registry: &Registry, record: ImageRecord) -> Arc<Entry> {
        let file = registry.open_file(&record).unwrap();
        registry.add(record, Arc::new(file)).unwrap()
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
        registry.retire(entry, Epoch(2)).unwrap();
        let folder = Folder::create(&registry.store, MIGRATION).unwrap();
        store::replace_json(&folder.file("source.json"), &1).unwrap();
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
        let layer =
            ChainLayer { path: path.clone(), format: "qcow2".into(), protocol: "file".into() };
        let record = ImageRecord {
            place: Place::Chain,
            flat: Some(FlatRecord { layers: vec![layer], turn: None, overlay: None }),
            ..ImageRecord::owned(NAME.into(), ImageId(7), path.clone(), LEN)
        };
        let entry = add(&registry, record);
        entry.disk.write_at(&[7; 4096], 0, false).unwrap();
        entry.disk.flush().unwrap();
        let folder = hand_over(&registry, &entry);
        folder.set_void().unwrap();
        registry.claim(&entry, ImageId(9), Epoch(4)).unwrap();
        drop((entry, registry));
        for _ in 0..2 {
            let registry = start(dir.path());
            is_claimed(&registry);
            let record = registry.get(NAME).unwrap().record();
            assert_eq!((record.place, record.overlay_id()), (Place::Chain, ImageId(7)));
            assert!(names.chain().exists() && !path.exists());
        }
    }

    #[test]
    fn a_claim_that_was_recorded_gets_its_name_at_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let registry = start(dir.path());
        let entry = image(&registry, dir.path());
        hand_over(&registry, &entry);
        let claim = Claim { migration: Some(MIGRATION), named: false };
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
        assert_eq!(start(dir.path()).claimed_from(MIGRATION), Some((NAME.to_owned(), Epoch(4))));
    }

    #[test]
    fn what_lost_its_migration_is_kept_and_closed() {
        let dir = tempfile::tempdir().unwrap();
        let registry = start(dir.path());
        let entry = image(&registry, dir.path());
        let folder = hand_over(&registry, &entry);
        assert!(!registry.is_void(&entry.record()));
        folder.set_void().unwrap();
        drop((entry, registry));
        let registry = start(dir.path());
        registry.close_voids();
        let entry = registry.get(NAME).unwrap();
        assert!(registry.is_void(&entry.record()) && entry.disk.is_shut());
        assert!(registry.remove_replica(&entry).is_err());
        assert!(folder.is_void(), "it may be needed by the claim");
        registry.claim(&entry, ImageId(9), Epoch(4)).unwrap();
        registry.close_voids();
        assert!(!folder.is_void() && !registry.is_void(&entry.record()));
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
        registry.claim(&entry, ImageId(9), Epoch(4)).unwrap();
        assert!(!is_bound(7) && !is_bound(9));
        assert!(registry.is_free_for(&entry, MIGRATION, ImageId(9)));
        assert!(!registry.is_free_for(&entry, MIGRATION, ImageId(7)));
    }
}
