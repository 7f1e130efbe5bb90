//! What an image is called while it comes, while it is here and after it has left (I1): the names
//! of files, the markers of devices, and the records that follow them.

use super::identity::{has_arrived, is_other_file};
use super::lines::begin_line;
use super::{Entry, Registry, is_device};
use crate::lineage::{ReplicaNote, file_at, stamp_of};
use crate::owner::Owner;
use crate::record::{CopyState, ImageRecord, NameKind};
use dray_image::{DeviceMark, DeviceState, FileId};
use dray_types::{Ancestor, Epoch, ImageId, MigrationId};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl Registry {
    /// The copy left behind by a handover loses the image's name, so that nothing opens it by
    /// accident (I1); a block device is marked and made read-only. It is left behind at `unix_ms`,
    /// milliseconds since 1970. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn retire(&self, entry: &Entry, epoch: Epoch, unix_ms: u64) -> io::Result<()> {
        let record = entry.record();
        if record.device {
            self.mark(&record.path).set(DeviceState::Replica(epoch)).map_err(io::Error::other)?;
        } else if record.place != NameKind::Replica(epoch) {
            let names = self.names(&record)?;
            let named = match &entry.flat {
                Some(_) => names.retire_chain(epoch),
                None => {
                    self.check_file(entry, [names.image(), names.replica(epoch)])?;
                    names.make_replica(epoch)
                }
            };
            named.map_err(io::Error::other)?;
        }
        if let Some(flat) = &entry.flat {
            let names = self.names(&record)?;
            flat.chain.moved(&names.replica(epoch));
        }
        let note = self.note_of(entry, epoch, unix_ms)?;
        self.update(entry, |record| {
            record.state = CopyState::Replica;
            if !record.device {
                record.place = NameKind::Replica(epoch);
            }
            record.epoch = epoch;
            record.replica = note;
        })
    }

    /// Refuses to take another file for the image's: the first of these that is there, before and after a
    /// rename, must be the one that is open.
    fn check_file(&self, entry: &Entry, places: [PathBuf; 2]) -> io::Result<()> {
        let Some(image) = entry.file.as_file() else { return Ok(()) };
        let open = FileId::of(&image.file().metadata()?);
        for place in places {
            match std::fs::symlink_metadata(&place) {
                Ok(found) if FileId::of(&found) == open => return Ok(()),
                Ok(_) => {
                    let (shown, name) = (place.display(), entry.record().name);
                    let why = format!(
                        "{shown} is another file than that of image '{name}': move it away, and put the \
                         image's file back where it was"
                    );
                    return Err(io::Error::other(why));
                }
                Err(why) if why.kind() == io::ErrorKind::NotFound => {}
                Err(why) => return Err(why),
            }
        }
        Ok(())
    }

    /// What the copy left behind in `epoch` holds: the generation that was open. The file is at rest;
    /// what was noted before a restart stays, whatever the file looks like by now.
    fn note_of(
        &self,
        entry: &Entry,
        epoch: Epoch,
        unix_ms: u64,
    ) -> io::Result<Option<ReplicaNote>> {
        let record = entry.record();
        if record.state == CopyState::Replica || is_device(&record.path) {
            return Ok(record.replica);
        }
        let generation = match (entry.line(), &entry.flat) {
            (Some(line), _) => line.lineage().open(),
            // One that no line knows: for its age only, nothing can begin with it.
            (None, Some(_)) => Ancestor { id: crate::lineage::random_generation()?, number: 0 },
            (None, None) => return Ok(None),
        };
        let names = self.names(&record)?;
        Ok(Some(ReplicaNote {
            generation,
            stamp: stamp_of(&self.at(&names.replica(epoch)))?,
            since_unix_ms: unix_ms,
            stays: false,
            distrusted: Vec::new(),
            unproved: false,
            lost: entry.file.lost_writes(),
        }))
    }

    /// Undoes [`retire`](Self::retire): this host owns the image again. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn restore(&self, entry: &Entry, epoch: Epoch) -> io::Result<()> {
        let record = entry.record();
        if record.device {
            self.mark(&record.path).clear().map_err(io::Error::other)?;
        } else if let NameKind::Replica(replica) = self.place_of(&record)? {
            let names = self.names(&record)?;
            let named = match &entry.flat {
                Some(_) => names.restore_chain(replica),
                None => names.restore_replica(replica, record.mode),
            };
            named.map_err(io::Error::other)?;
            if let Some(flat) = &entry.flat {
                flat.chain.moved(&names.chain());
            }
        }
        self.update(entry, |record| {
            record.state = CopyState::Owner;
            record.place = if record.flat.is_some() { NameKind::Chain } else { NameKind::Named };
            record.epoch = epoch;
            record.replica = None;
        })?;
        // After a restart there is none yet: what was open then is not trusted.
        if entry.line().is_none() { begin_line(&self.store, entry) } else { Ok(()) }
    }

    /// Where the file of an image is: it may have a replica's name of which its record does not tell.
    ///
    /// # Errors
    /// When that cannot be seen.
    pub(super) fn place_of(&self, record: &ImageRecord) -> io::Result<NameKind> {
        if record.device {
            return Ok(record.place);
        }
        let names = self.names(record)?;
        let recorded = match record.place {
            NameKind::Named => names.image(),
            NameKind::Partial => names.partial(),
            NameKind::Replica(epoch) => names.replica(epoch),
            NameKind::Chain => names.chain(),
        };
        if self.at(&recorded).exists()? {
            return Ok(record.place);
        }
        for place in record.other_places() {
            let NameKind::Replica(epoch) = place else { continue };
            if self.at(&names.replica(epoch)).exists()? {
                return Ok(place);
            }
        }
        // Its file got its name, and the record that says so could not be written.
        if record.place == NameKind::Partial && has_arrived(record, &self.at(&record.path)) {
            return Ok(NameKind::Named);
        }
        Ok(record.place)
    }

    /// A crash may have left the file of an image that returns under the replica's name that it had before:
    /// it gets the one that its record tells, under which its migration goes on, or is undone. Only agents have written
    /// to it if it `is_left`.
    ///
    /// # Errors
    /// What the file system reports.
    pub(super) fn settle_return(&self, record: &ImageRecord, is_left: bool) -> io::Result<()> {
        if !record.returns() {
            return Ok(());
        }
        match self.place_of(record)? {
            NameKind::Replica(epoch) => {
                if is_left {
                    self.touch_heartbeat(record)?;
                }
                self.names(record)?.begin_return(epoch).map_err(io::Error::other)
            }
            _ => Ok(()),
        }
    }

    /// The marker of the block device at `path`.
    pub fn mark(&self, path: &Path) -> DeviceMark {
        DeviceMark::of(self.store.images().path(), path)
    }

    /// An image that was on its way is complete: its file gets its name, a device loses its marker.
    /// Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn finish_partial(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        let mode = record.named_mode();
        if record.place == NameKind::Partial {
            if record.device {
                self.mark(&record.path).clear().map_err(io::Error::other)?;
            } else {
                let names = self.names(&record)?;
                self.check_file(entry, [names.partial(), names.image()])?;
                record.owner.into_iter().for_each(|owner| self.give(entry, owner));
                names.finish_partial(mode).map_err(io::Error::other)?;
            }
        }
        self.update(entry, |record| {
            (record.mode, record.owner) = (mode, None);
            record.place = NameKind::Named;
            record.state = CopyState::Owner;
            // Nothing else tells which file it is of one that nobody writes: it has no line.
            record.arriving = record.arriving.filter(|_| record.read_only);
        })?;
        // A line that could not be begun when the guest came: what it wrote since is in no set.
        if entry.line().is_none() { self.end_line(entry) } else { Ok(()) }
    }

    /// Makes the file of an image that comes, and knows it from now on. What a dead agent has
    /// [left](super::leftover) there is not in the way.
    ///
    /// # Errors
    /// What the file system or the store reports; nothing is left then.
    pub fn make_partial(&self, record: ImageRecord) -> io::Result<Arc<Entry>> {
        let names = self.names(&record)?;
        let _making = self.hold_new_files();
        self.remove_leftover(&record)?;
        names.create_partial(0).map_err(io::Error::other)?;
        let record = ImageRecord { arriving: file_at(&self.at(&names.partial())), ..record };
        let opened = self.open_file(&record).map_err(io::Error::other);
        let added = opened.and_then(|file| self.add(record, file));
        if added.is_err() {
            names.remove_partial().map_err(io::Error::other)?;
        }
        added
    }

    /// The file of an image that comes is given to `owner` when it gets its name, and not before: whoever owns a file
    /// may let himself in.
    ///
    /// # Errors
    /// That its file system knows no owners, or what the store reports.
    pub fn promise_to(&self, entry: &Entry, owner: Owner) -> io::Result<()> {
        owner.check_below(&entry.record().path)?;
        self.update(entry, |record| record.owner = Some(owner))
    }

    /// The open file, whatever its name leads to, is given to whom it was promised.
    fn give(&self, entry: &Entry, owner: Owner) {
        let Some(file) = entry.file.as_file() else { return };
        if let Err(why) = owner.give(file.file()) {
            // It has all blocks, and who needs it has to be helped by hand.
            let Owner { user, group, .. } = owner;
            tracing::warn!(image = entry.record().name, user, group, %why, "cannot give a file away");
        }
    }

    /// Deletes an incomplete image and forgets it. A block device stays, with contents that nobody
    /// may rely on. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn remove_partial(&self, entry: &Entry) -> io::Result<()> {
        let record = entry.record();
        entry.drop_locks();
        if record.in_place.is_some() {
            // It was here before, and others may use it.
        } else if record.device {
            self.mark(&record.path).clear().map_err(io::Error::other)?;
        } else {
            let names = self.names(&record)?;
            names.remove_partial().map_err(io::Error::other)?;
        }
        self.forget(&record.name)
    }

    /// The image on this device, whatever path it is known by.
    pub fn on_device(&self, device: &File) -> Option<Arc<Entry>> {
        let number = device.metadata().ok()?.rdev();
        let same = |entry: &Arc<Entry>| {
            let meta = entry.file.as_file().and_then(|image| image.file().metadata().ok());
            meta.is_some_and(|meta| meta.file_type().is_block_device() && meta.rdev() == number)
        };
        self.all().into_iter().find(same)
    }

    /// What the markers say of this device, and where the marker is.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn marked(&self, device: &File) -> dray_image::Result<Option<(DeviceMark, DeviceState)>> {
        let Some(mark) = DeviceMark::find(self.store.images().path(), device)? else {
            return Ok(None);
        };
        Ok(mark.get()?.map(|state| (mark, state)))
    }

    /// Deletes the copy that a migration left behind when `epoch` began, if that is what the entry still
    /// is: a later image may have the name, or the copy may belong to a later migration. Can be repeated.
    ///
    /// # Errors
    /// As [`remove_replica`](Self::remove_replica).
    pub fn remove_left(
        &self,
        entry: &Arc<Entry>,
        migration: MigrationId,
        id: ImageId,
        epoch: Epoch,
    ) -> io::Result<()> {
        let record = entry.record();
        let left = record.state == CopyState::Replica && record.epoch == epoch;
        if left && self.is_free_for(entry, migration, id) {
            self.remove_replica(entry)?;
        }
        Ok(())
    }

    /// Deletes the file of a replica and forgets it. A block device is only forgotten: it stays
    /// marked and read-only. So is a replica in whose place another file lies, which is not dray's.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn remove_replica(&self, entry: &Entry) -> io::Result<()> {
        let _taking = self.taking.lock();
        let record = entry.record();
        if record.state != CopyState::Replica || !self.is_current(entry) {
            return Err(io::Error::other("it is not a replica any more"));
        }
        if record.migration.is_some() {
            return Err(io::Error::other("it may be the only copy: its migration is not over"));
        }
        if let NameKind::Replica(epoch) = record.place
            && !is_other_file(&self.store, &record)
        {
            let names = self.names(&record)?;
            if let Some(flat) = &entry.flat {
                flat.chain.close();
                names.remove_overlay(record.overlay_id()).map_err(io::Error::other)?;
            }
            names.remove_replica(epoch).map_err(io::Error::other)?;
        }
        self.forget(&record.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::log::{End, Folder, TARGET_INTENT};
    use crate::record::Lost;
    use crate::registry::surroundings::tests::Plain;
    use crate::replicas::{undo_prepared, undo_unbegun};
    use crate::store::Store;
    use dray_image::{Image, Loss, LossLog, Past};
    use dray_types::BLOCK_SIZE;
    use std::time::Duration;

    const LEN: u64 = 16 * BLOCK_SIZE;
    const NAME: &str = "disk";
    const AWAY: MigrationId = MigrationId(5);
    const BACK: MigrationId = MigrationId(6);

    fn store(dir: &Path) -> Store {
        Store::open(dir).unwrap()
    }

    /// The images of a host after a start of its agent.
    fn start(dir: &Path) -> Arc<Registry> {
        Registry::load(store(dir), Arc::new(Plain)).unwrap()
    }

    fn first_block(registry: &Registry) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        registry.get(NAME).unwrap().file.read_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// An image with its first block written, which takes part in a migration away.
    fn leaving(dir: &Path) -> (Arc<Registry>, Arc<Entry>) {
        let registry = start(dir);
        let path = dir.join(NAME);
        File::create(&path).unwrap().set_len(LEN).unwrap();
        let record = ImageRecord::owned(NAME.into(), ImageId(7), path, LEN);
        let file = registry.open_file(&record).unwrap();
        let entry = registry.add(record, file).unwrap();
        entry.disk.write_at(&[7; 4096], 0, false).unwrap();
        registry.update(&entry, |record| record.migration = Some(AWAY)).unwrap();
        entry.disk.park(entry.disk.quiesce(Duration::ZERO).unwrap());
        (registry, entry)
    }

    /// It has left, and only its replica is here.
    fn left(dir: &Path) -> (Arc<Registry>, Arc<Entry>) {
        let (registry, entry) = leaving(dir);
        registry.retire(&entry, Epoch(2), 0).unwrap();
        registry.update(&entry, |record| record.migration = None).unwrap();
        (registry, entry)
    }

    #[test]
    fn an_image_whose_retirement_was_not_recorded_gets_its_name_back() {
        let dir = tempfile::tempdir().unwrap();
        let (registry, entry) = leaving(dir.path());
        let names = registry.names(&entry.record()).unwrap();
        names.make_replica(Epoch(2)).unwrap();
        drop((entry, registry));
        let registry = start(dir.path());
        registry.restore(&registry.get(NAME).unwrap(), Epoch(3)).unwrap();
        let entry = registry.get(NAME).unwrap();
        registry.update(&entry, |record| record.migration = None).unwrap();
        drop((entry, registry));
        assert!(names.found().unwrap().image, "it has a name that its record does not tell");
        let registry = start(dir.path());
        assert_eq!(registry.get(NAME).unwrap().record().place, NameKind::Named);
        assert_eq!(first_block(&registry), [7; 4096]);
    }

    /// A crash comes between the two steps of a return, or of its undoing: afterwards the file has the name
    /// that its record tells, whether its migration goes on or is undone.
    #[test]
    fn an_image_that_returns_has_the_name_that_its_record_tells() {
        for goes_on in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let (registry, entry) = left(dir.path());
            let names = registry.names(&entry.record()).unwrap();
            registry.begin_return(&entry, BACK).unwrap();
            names.end_return(Epoch(2)).unwrap();
            drop((entry, registry));
            if goes_on {
                Folder::begin(&store(dir.path()), BACK, End::Target, &1).unwrap();
            }
            let registry = start(dir.path());
            undo_unbegun(&registry, &store(dir.path()), TARGET_INTENT).unwrap();
            let entry = registry.get(NAME).unwrap();
            let found = names.found().unwrap();
            assert_eq!((found.partial, found.replicas.is_empty()), (goes_on, goes_on));
            if goes_on {
                registry.update(&entry, |record| record.epoch = Epoch(3)).unwrap();
                registry.finish_partial(&entry).unwrap();
            }
            drop((entry, registry));
            assert_eq!(first_block(&start(dir.path())), [7; 4096]);
        }
    }

    struct NoLog;

    impl LossLog for NoLog {
        fn lost(&self, _: &Loss) -> dray_image::Result<()> {
            Ok(())
        }

        fn settled(&self, _: &str) -> dray_image::Result<()> {
            Ok(())
        }

        fn begun_anew(&self) -> dray_image::Result<()> {
            Ok(())
        }
    }

    fn lose_writes(entry: &Entry) {
        let past = Past { owed: None, lost: Some("the pool is full".to_owned()) };
        entry.file.keep_losses(Arc::new(NoLog), &past);
    }

    /// What is read of it may be in memory only. It was lost while the image was here, or by a migration back.
    #[test]
    fn a_copy_whose_file_has_lost_writes_is_no_base() {
        for by_return in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let (registry, entry) = if by_return { left(dir.path()) } else { leaving(dir.path()) };
            if by_return {
                let entry = registry.begin_return(&entry, BACK).unwrap();
                lose_writes(&entry);
                registry.end_return(&entry, &[]).unwrap();
            } else {
                lose_writes(&entry);
                registry.retire(&entry, Epoch(2), 0).unwrap();
                registry.update(&entry, |record| record.migration = None).unwrap();
            }
            drop((entry, registry));
            let registry = start(dir.path());
            let entry = registry.get(NAME).unwrap();
            let why = registry.begin_return(&entry, BACK).map(drop).unwrap_err().to_string();
            assert!(why.contains("lost: the pool is full"), "{why}");
            assert_eq!(entry.record().state, CopyState::Replica, "it is kept");
        }
    }

    #[test]
    fn a_claimed_image_that_was_about_to_return_gets_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let (registry, entry) = left(dir.path());
        let entry = registry.begin_return(&entry, BACK).unwrap();
        registry.names(&entry.record()).unwrap().end_return(Epoch(2)).unwrap();
        registry.claim(&entry, (ImageId(9), Epoch(4)), true, Lost::default()).unwrap();
        let record = entry.record();
        assert_eq!(
            (record.place, record.claim.map(|claim| claim.named)),
            (NameKind::Named, Some(true))
        );
        drop((entry, registry));
        assert_eq!(first_block(&start(dir.path())), [7; 4096]);
    }

    /// An operator may have moved the wrong one of two files.
    #[test]
    fn another_file_is_not_taken_for_the_copy_that_is_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let registry = start(dir.path());
        let path = dir.path().join("disk");
        std::fs::write(&path, [7; 4096]).unwrap();
        let record = ImageRecord::owned("disk".to_owned(), ImageId(1), path.clone(), 4096);
        let file = registry.open_file(&record).unwrap();
        let entry = registry.add(record, file).unwrap();
        let (orphan, aside) = (dir.path().join(".disk.dray-replica-2"), dir.path().join("aside"));
        std::fs::write(&orphan, [9; 4096]).unwrap();
        std::fs::rename(&path, &aside).unwrap();
        let why = registry.retire(&entry, Epoch(2), 0).unwrap_err().to_string();
        assert!(why.contains("another file"), "{why}");
        assert_eq!(entry.record().state, CopyState::Owner);
        std::fs::remove_file(&orphan).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        registry.retire(&entry, Epoch(2), 0).unwrap();
        registry.retire(&entry, Epoch(2), 0).unwrap();
        assert_eq!(std::fs::read(&orphan).unwrap(), [7; 4096]);
    }

    /// Another image may have the name by now.
    #[test]
    fn a_replica_without_its_file_does_not_open_another_image() {
        let dir = tempfile::tempdir().unwrap();
        let (registry, entry) = left(dir.path());
        let names = registry.names(&entry.record()).unwrap();
        drop((entry, registry));
        names.remove_replica(Epoch(2)).unwrap();
        std::fs::write(names.image(), vec![8; LEN as usize]).unwrap();
        let registry = start(dir.path());
        assert!(registry.get(NAME).is_none() && registry.closed(NAME).is_some());
    }

    /// A restart that finds the intent goes on with the images: they are as it says.
    #[test]
    fn what_was_prepared_is_taken_back_after_its_intent() {
        let dir = tempfile::tempdir().unwrap();
        let (registry, entry) = left(dir.path());
        let entry = registry.begin_return(&entry, BACK).unwrap();
        let folder = Folder::begin(&store(dir.path()), BACK, End::Target, &1).unwrap();
        // An intent that cannot be removed.
        let intent = folder.file(TARGET_INTENT);
        intent.remove().unwrap();
        std::fs::create_dir(intent.path()).unwrap();
        let names = [NAME.to_owned()];
        undo_prepared(&registry, &folder, &names).unwrap_err();
        assert_eq!(entry.record().place, NameKind::Partial);
        assert!(registry.names(&entry.record()).unwrap().found().unwrap().partial);
        std::fs::remove_dir(intent.path()).unwrap();
        // One of another migration stays.
        undo_prepared(&registry, &Folder::create(&store(dir.path()), AWAY).unwrap(), &names)
            .unwrap();
        assert_eq!(entry.record().place, NameKind::Partial);
        undo_prepared(&registry, &folder, &names).unwrap();
        assert_eq!(registry.get(NAME).unwrap().record().place, NameKind::Replica(Epoch(2)));
        assert!(!folder.is_there().unwrap());
    }

    /// An image of the same name may have come since, or the copy may have gone on to another migration.
    #[test]
    fn a_replica_that_is_removed_late_is_the_one_that_was_left() {
        let dir = tempfile::tempdir().unwrap();
        let (registry, old) = left(dir.path());
        let names = registry.names(&old.record()).unwrap();
        let remove = |entry, epoch| registry.remove_left(entry, AWAY, ImageId(7), Epoch(epoch));
        // It returns, and the return comes to nothing.
        let back = registry.begin_return(&old, BACK).unwrap();
        remove(&old, 2).unwrap();
        registry.remove_replica(&old).unwrap_err();
        assert!(registry.get(NAME).is_some() && names.found().unwrap().partial);
        registry.end_return(&back, &[]).unwrap();
        registry.begin_return(&old, BACK).map(drop).unwrap_err();
        registry.set_aside(&old).unwrap_err();
        // A later image has the name.
        let replica = registry.get(NAME).unwrap();
        registry.set_aside(&replica).unwrap();
        std::fs::write(dir.path().join(NAME), [1]).unwrap();
        let path = dir.path().join(NAME);
        let record = ImageRecord::owned(NAME.into(), ImageId(7), path, 512);
        let later = registry.add(record.clone(), registry.open_file(&record).unwrap()).unwrap();
        remove(&replica, 2).unwrap();
        registry.remove_replica(&replica).unwrap_err();
        assert!(registry.get(NAME).is_some(), "it is another image");
        assert_eq!(names.found().unwrap().replicas, [Epoch(2)]);
        // What a later migration leaves behind is of another epoch.
        registry.update(&later, |record| record.migration = Some(BACK)).unwrap();
        registry.retire(&later, Epoch(4), 0).unwrap();
        registry.update(&later, |record| record.migration = None).unwrap();
        remove(&later, 2).unwrap();
        assert!(registry.get(NAME).is_some());
        remove(&later, 4).unwrap();
        remove(&later, 4).unwrap();
        assert!(registry.get(NAME).is_none());
    }
}
