//! Copies whose removal a crash has broken off.
//!
//! The file of a copy is removed before its record, so that a record that is gone never leaves a file
//! behind. A crash between the two leaves a record without a file: it cannot be opened, and without what is
//! here its migration would wait for a file that never comes back.

use super::Registry;
use super::identity::{found_at, is_other_file};
use crate::record::{CopyState, ImageRecord, NameKind};
use dray_types::{Epoch, ImageId};
use std::io;

impl Registry {
    /// Ends the removal of the copy that a migration left behind when `epoch` began, and which it is to remove:
    /// if a part of the copy is gone already, the rest goes, and it is forgotten. What is whole stays, and so does
    /// what cannot be looked at. Can be repeated.
    ///
    /// # Errors
    /// What the file system or the store reports.
    pub fn end_removal(&self, name: &str, id: ImageId, epoch: Epoch) -> io::Result<()> {
        let _opening = self.hold_files()?;
        let closed = self.closed(name).filter(|_| self.get(name).is_none());
        let Some(record) = closed.and_then(|closed| Some(closed.absent?.record)) else {
            return Ok(());
        };
        let is_left = record.has_left() && record.id == id && record.epoch == epoch;
        if !is_left || !self.was_being_removed(&record)? {
            return Ok(());
        }
        self.remove_rest(&record)?;
        self.forget_closed(name)?;
        tracing::info!(image = name, "a replica was being removed, and is now");
        Ok(())
    }

    /// Whether the folder of a copy is there, and the copy's file is not. Of a flattened disk the overlay is removed
    /// first.
    fn was_being_removed(&self, record: &ImageRecord) -> io::Result<bool> {
        let is_file = record.state == CopyState::Replica
            && matches!(record.place, NameKind::Replica(_))
            && !record.device;
        let Some(folder) = record.path.parent().filter(|_| is_file) else { return Ok(false) };
        // What is not mounted may come back.
        if !self.at(folder).exists()? || record.is_on_other_file_system() {
            return Ok(false);
        }
        let overlay = || self.at(&self.names(record)?.overlay(record.overlay_id())).exists();
        Ok(found_at(&self.store, record).is_none() || record.flat.is_some() && !overlay()?)
    }

    fn remove_rest(&self, record: &ImageRecord) -> io::Result<()> {
        let NameKind::Replica(epoch) = record.place else { return Ok(()) };
        if is_other_file(&self.store, record) {
            return Ok(());
        }
        let names = self.names(record)?;
        if record.flat.is_some() {
            names.remove_overlay(record.overlay_id()).map_err(io::Error::other)?;
        }
        names.remove_replica(epoch).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::surroundings::tests::Plain;
    use crate::store::Store;
    use dray_types::BLOCK_SIZE;
    use std::fs::File;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    const NAME: &str = "disk";
    const ID: ImageId = ImageId(7);
    const OVER: Epoch = Epoch(2);

    /// A host that an image has left, of which the copy is here.
    struct Host(tempfile::TempDir);

    impl Host {
        fn new() -> Self {
            let host = Self(tempfile::tempdir().unwrap());
            std::fs::create_dir(host.pool()).unwrap();
            let registry = host.start();
            let path = host.pool().join(NAME);
            File::create(&path).unwrap().set_len(16 * BLOCK_SIZE).unwrap();
            let record = ImageRecord::owned(NAME.into(), ID, path, 16 * BLOCK_SIZE);
            let entry = registry.add(record.clone(), registry.open_file(&record).unwrap()).unwrap();
            entry.disk.park_now();
            registry.retire(&entry, OVER, 0).unwrap();
            host
        }

        fn dir(&self) -> &Path {
            self.0.path()
        }

        fn pool(&self) -> PathBuf {
            self.dir().join("pool")
        }

        fn copy(&self) -> PathBuf {
            self.pool().join(".disk.dray-replica-2")
        }

        /// Its agent starts.
        fn start(&self) -> Arc<Registry> {
            let store = Store::open(&self.dir().join("state")).unwrap();
            Registry::load(store, Arc::new(Plain)).unwrap()
        }
    }

    /// The agent was killed between the removal of the file and that of the record.
    #[test]
    fn a_removal_that_was_broken_off_is_ended() {
        for (id, epoch, ends) in
            [(ID, OVER, true), (ImageId(8), OVER, false), (ID, Epoch(3), false)]
        {
            let host = Host::new();
            std::fs::remove_file(host.copy()).unwrap();
            let registry = host.start();
            assert!(registry.closed(NAME).is_some());
            registry.end_removal(NAME, id, epoch).unwrap();
            assert_eq!(registry.closed(NAME).is_none(), ends);
            registry.end_removal(NAME, id, epoch).unwrap();
            assert_eq!(host.start().all_records().is_empty(), ends);
        }
    }

    #[test]
    fn a_copy_that_is_there_stays() {
        let host = Host::new();
        let registry = host.start();
        registry.end_removal(NAME, ID, OVER).unwrap();
        assert!(registry.get(NAME).is_some() && host.copy().exists());
    }

    /// It comes back with all that is in it.
    #[test]
    fn a_copy_whose_folder_is_away_stays() {
        let host = Host::new();
        let away = host.dir().join("away");
        std::fs::rename(host.pool(), &away).unwrap();
        let registry = host.start();
        registry.end_removal(NAME, ID, OVER).unwrap();
        assert!(registry.closed(NAME).is_some());
        std::fs::rename(away, host.pool()).unwrap();
        assert_eq!(registry.open_absent(), [NAME]);
    }

    #[test]
    fn a_copy_that_its_migration_still_needs_stays() {
        let host = Host::new();
        let registry = host.start();
        let entry = registry.get(NAME).unwrap();
        let bind = |record: &mut ImageRecord| record.migration = Some(dray_types::MigrationId(5));
        registry.update(&entry, bind).unwrap();
        drop((entry, registry));
        std::fs::remove_file(host.copy()).unwrap();
        let registry = host.start();
        registry.end_removal(NAME, ID, OVER).unwrap();
        assert!(registry.closed(NAME).is_some());
    }
}
