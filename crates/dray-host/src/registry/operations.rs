//! One image takes part in one operation at a time: in a migration, which its record names, or in a
//! command that looks at the record and then acts on it.
//!
//! Both are taken under one lock, so that of two who want an image at the same time one gets it. The lock
//! is never held while a guest waits, nor across an await, nor while a pool is looked at, whose file system
//! may hang: what is held for longer is an [`Operation`].

use super::{Entry, Objection, Registry};
use crate::folder::intent::Wanted;
use crate::record::{CopyState, ImageRecord};
use dray_types::{Epoch, MigrationId};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

/// What is under way with images that takes no part in a migration: the command, by image.
#[derive(Default)]
pub(super) struct Operations(Mutex<BTreeMap<String, &'static str>>);

impl Operations {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, &'static str>> {
        self.0.lock()
    }
}

/// Nobody else does anything with the image until this is dropped.
pub struct Operation {
    operations: Arc<Operations>,
    name: String,
}

impl Drop for Operation {
    fn drop(&mut self) {
        self.operations.lock().remove(&self.name);
    }
}

/// Why an image does not take part in something.
#[derive(Debug)]
pub enum NotTaken {
    /// It stands against it.
    Refused {
        /// What.
        why: String,
        /// What can be done about it.
        hint: String,
    },
    /// It cannot be written down.
    Failed(io::Error),
}

fn refused(why: String, hint: impl Into<String>) -> NotTaken {
    NotTaken::Refused { why, hint: hint.into() }
}

fn busy(name: &str, by: &str) -> NotTaken {
    let why = format!("image '{name}' is busy: another `dray {by}` is under way");
    refused(why, "try again when that has ended")
}

fn in_migration(name: &str, migration: MigrationId) -> NotTaken {
    refused(
        format!("image '{name}' takes part in migration {migration}"),
        "wait until that has ended, or `dray cancel` it; if its other host is gone for good, see \
         `dray claim`",
    )
}

impl Wanted {
    /// Whether `record` is still what the plan of `migration`, which was made in `epoch`, says.
    fn check(
        &self,
        record: &ImageRecord,
        migration: MigrationId,
        epoch: Epoch,
    ) -> Result<(), NotTaken> {
        let name = &self.name;
        let again = "`dray cancel` what was prepared, if it was, and `dray migrate` again";
        if let Some(other) = record.migration.filter(|other| *other != migration) {
            return Err(in_migration(name, other));
        }
        if record.state != CopyState::Owner {
            let why = format!("this host does not own image '{name}' any more");
            return Err(refused(why, "migrate it from the host that does"));
        }
        if self.read_only {
            return Ok(());
        }
        if record.id != self.id {
            return Err(refused(format!("image '{name}' is another one by now"), again));
        }
        if record.epoch > epoch {
            let why = format!(
                "image '{name}' has been away: its epoch is {}, and the migration is of epoch {}",
                record.epoch.0, epoch.0
            );
            return Err(refused(why, again));
        }
        // A file under a format driver may have been planned with more room than it has.
        if record.len > self.len {
            let why = format!(
                "image '{name}' has grown: it has {} bytes, and the target has made room for {}",
                record.len, self.len
            );
            return Err(refused(why, again));
        }
        Ok(())
    }
}

impl Registry {
    /// Nobody else does anything with an image until the answer is dropped, whether it is here by now or
    /// not. Its record is looked at after this.
    ///
    /// # Errors
    /// What is under way with it.
    pub fn operate(&self, name: &str, command: &'static str) -> Result<Operation, NotTaken> {
        self.begin(name, command, |_| false)
    }

    /// The same, whatever migration it takes part in: a claim takes it from that.
    ///
    /// # Errors
    /// What else is under way with it.
    pub fn operate_anyway(&self, name: &str, command: &'static str) -> Result<Operation, NotTaken> {
        self.begin(name, command, |_| true)
    }

    /// The same for what a migration has to do with one of its own images.
    ///
    /// # Errors
    /// What else is under way with it.
    pub fn operate_for(
        &self,
        name: &str,
        command: &'static str,
        migration: MigrationId,
    ) -> Result<Operation, NotTaken> {
        self.begin(name, command, |bound| bound == migration)
    }

    fn begin(
        &self,
        name: &str,
        command: &'static str,
        may: impl FnOnce(MigrationId) -> bool,
    ) -> Result<Operation, NotTaken> {
        let mut operations = self.operations.lock();
        if let Some(by) = operations.get(name) {
            return Err(busy(name, by));
        }
        let bound = self.get(name).and_then(|entry| entry.record().migration);
        if let Some(bound) = bound.filter(|bound| !may(*bound)) {
            return Err(in_migration(name, bound));
        }
        operations.insert(name.to_owned(), command);
        Ok(Operation { operations: Arc::clone(&self.operations), name: name.to_owned() })
    }

    /// The command that is under way with an image.
    pub fn operation(&self, name: &str) -> Option<&'static str> {
        self.operations.lock().get(name).copied()
    }

    /// Whether [`take`](Self::take) would take the images now.
    ///
    /// # Errors
    /// What stands against it.
    pub fn may_take(
        &self,
        migration: MigrationId,
        epoch: Epoch,
        wanted: &[Wanted],
    ) -> Result<(), NotTaken> {
        let entries = self.to_take(&self.operations.lock(), migration, epoch, wanted)?;
        self.check_files(epoch, wanted, &entries)
    }

    /// The images take part in the migration from here on, durably, all or none: each is owned here, takes
    /// part in nothing else, and is what a plan that was made in `epoch` says.
    ///
    /// # Errors
    /// What stands against it.
    pub fn take(
        &self,
        migration: MigrationId,
        epoch: Epoch,
        wanted: &[Wanted],
    ) -> Result<(), NotTaken> {
        self.may_take(migration, epoch, wanted)?;
        let operations = self.operations.lock();
        // As their records say it now.
        let entries = self.to_take(&operations, migration, epoch, wanted)?;
        let bind =
            |entry: &Arc<Entry>| self.update(entry, |record| record.migration = Some(migration));
        entries.iter().try_for_each(bind).map_err(|why| {
            self.let_go(migration, &entries);
            NotTaken::Failed(why)
        })
    }

    /// The images that [`take`](Self::take) would take, as far as their records and what is under way tell.
    fn to_take(
        &self,
        operations: &BTreeMap<String, &'static str>,
        migration: MigrationId,
        epoch: Epoch,
        wanted: &[Wanted],
    ) -> Result<Vec<Arc<Entry>>, NotTaken> {
        let mut entries = Vec::new();
        for image in wanted {
            if let Some(by) = operations.get(&image.name) {
                return Err(busy(&image.name, by));
            }
            let entry = match self.get(&image.name) {
                Some(entry) if !image.read_only || entry.record().path == image.path => entry,
                // A base image that QEMU has as a file of its own is not registered.
                _ if image.read_only => continue,
                _ => {
                    let why = format!("image '{}' is not on this host any more", image.name);
                    return Err(refused(why, "`dray images` lists the images"));
                }
            };
            image.check(&entry.record(), migration, epoch)?;
            entries.push(entry);
        }
        Ok(entries)
    }

    /// Whether the files of the images that are `wanted`, among `entries`, stand against it.
    fn check_files(
        &self,
        epoch: Epoch,
        wanted: &[Wanted],
        entries: &[Arc<Entry>],
    ) -> Result<(), NotTaken> {
        for entry in entries {
            let record = entry.record();
            if wanted.iter().any(|image| image.name == record.name && !image.read_only) {
                self.check_answered_for(entry)?;
            }
            self.check_name_to_leave_under(&record, epoch)?;
        }
        Ok(())
    }

    /// Refuses an image that dray cannot answer for now: what it knows of it may not be what is in it.
    ///
    /// # Errors
    /// Why, and what settles it.
    pub fn check_answered_for(&self, entry: &Entry) -> Result<(), NotTaken> {
        match self.objection(entry) {
            Some(Objection { why, hint }) => {
                self.distrust(entry);
                Err(refused(why, hint))
            }
            None => Ok(()),
        }
    }

    /// After the handover the copy here must lose the image's name (I1): what has the name that it gets then
    /// stands against it now.
    fn check_name_to_leave_under(
        &self,
        record: &ImageRecord,
        epoch: Epoch,
    ) -> Result<(), NotTaken> {
        if record.device || record.in_place.is_some() || record.read_only {
            return Ok(());
        }
        let name = self.names(record).map_err(NotTaken::Failed)?.replica(epoch.next());
        match self.at(&name).exists().map_err(NotTaken::Failed)? {
            false => Ok(()),
            true => Err(refused(
                format!(
                    "image '{}' is to leave its copy here as {}, and there is such a file",
                    record.name,
                    name.display()
                ),
                "it is of an earlier image of that name: move it away, or remove it",
            )),
        }
    }

    /// The images take part in the migration no more. If that cannot be written, a restart finds out.
    fn let_go(&self, migration: MigrationId, entries: &[Arc<Entry>]) {
        for entry in entries.iter().filter(|entry| entry.record().migration == Some(migration)) {
            if let Err(why) = self.update(entry, |record| record.migration = None) {
                tracing::error!(%why, "cannot let go of an image");
            }
        }
    }

    /// What [`take`](Self::take) has bound to a migration that does not begin is free again.
    pub fn untake(&self, migration: MigrationId, wanted: &[Wanted]) {
        let entries: Vec<_> = wanted.iter().filter_map(|image| self.get(&image.name)).collect();
        self.let_go(migration, &entries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::surroundings::tests::Plain;
    use crate::store::Store;
    use dray_types::ImageId;

    const LEN: u64 = 4096;

    struct Host {
        dir: tempfile::TempDir,
        registry: Arc<Registry>,
    }

    impl Host {
        fn with(names: &[&str]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::open(dir.path()).unwrap();
            let registry = Registry::load(store, Arc::new(Plain)).unwrap();
            for name in names {
                let path = dir.path().join(name);
                std::fs::write(&path, [0; LEN as usize]).unwrap();
                let record = ImageRecord::owned((*name).to_owned(), ImageId(1), path, LEN);
                let file = registry.open_file(&record).unwrap();
                registry.add(record, file).unwrap();
            }
            Self { dir, registry }
        }

        fn wanted(&self, names: &[&str]) -> Vec<Wanted> {
            let wanted = |name: &&str| Wanted {
                name: (*name).to_owned(),
                path: self.dir.path().join(name),
                id: ImageId(1),
                len: LEN,
                read_only: false,
            };
            names.iter().map(wanted).collect()
        }

        fn take(&self, migration: u128, names: &[&str]) -> Result<(), String> {
            let wanted = self.wanted(names);
            self.registry.take(MigrationId(migration), Epoch(1), &wanted).map_err(said)
        }

        fn bound(&self, name: &str) -> Option<MigrationId> {
            self.registry.get(name).unwrap().record().migration
        }

        fn change(&self, change: impl FnOnce(&mut ImageRecord)) {
            self.registry.update(&self.registry.get("a").unwrap(), change).unwrap();
        }
    }

    fn said(why: NotTaken) -> String {
        match why {
            NotTaken::Refused { why, .. } => why,
            NotTaken::Failed(why) => why.to_string(),
        }
    }

    #[test]
    fn an_image_takes_part_in_one_migration_and_all_of_its_images_do_or_none() {
        let host = Host::with(&["a", "b"]);
        host.take(1, &["b"]).unwrap();
        let why = host.take(2, &["a", "b"]).unwrap_err();
        assert!(why.contains("takes part in migration"), "{why}");
        assert_eq!((host.bound("a"), host.bound("b")), (None, Some(MigrationId(1))));
        // Again after a crash, by the same one.
        host.take(1, &["b"]).unwrap();
        host.registry.untake(MigrationId(2), &host.wanted(&["a", "b"]));
        assert_eq!(host.bound("b"), Some(MigrationId(1)));
        host.registry.untake(MigrationId(1), &host.wanted(&["b"]));
        host.take(2, &["a", "b"]).unwrap();
        assert!(host.take(3, &["c"]).unwrap_err().contains("not on this host"));
    }

    #[test]
    fn of_many_migrations_that_begin_at_once_one_gets_the_image() {
        let host = Host::with(&["a", "b"]);
        for _ in 0..20 {
            let taken: Vec<_> = std::thread::scope(|scope| {
                let take = |nth: u128| match nth % 2 {
                    0 => host.take(nth, &["a", "b"]),
                    _ => host.take(nth, &["b", "a"]),
                };
                let takes: Vec<_> = (1..5).map(|nth| scope.spawn(move || take(nth))).collect();
                takes.into_iter().map(|take| take.join().unwrap()).collect()
            });
            assert_eq!(taken.iter().filter(|taken| taken.is_ok()).count(), 1, "{taken:?}");
            assert!(host.bound("a") == host.bound("b") && host.bound("a").is_some());
            host.registry.untake(host.bound("a").unwrap(), &host.wanted(&["a", "b"]));
        }
    }

    #[test]
    fn an_image_that_is_not_what_was_planned_is_not_taken() {
        type Change = fn(&mut ImageRecord);
        let changes: [(Change, &str); 4] = [
            (|record| record.state = CopyState::Replica, "does not own"),
            (|record| record.id = ImageId(2), "another one"),
            (|record| record.epoch = Epoch(2), "has been away"),
            (|record| record.len += 512, "has grown"),
        ];
        for (change, said) in changes {
            let host = Host::with(&["a"]);
            host.change(change);
            let why = host.take(1, &["a"]).unwrap_err();
            assert!(why.contains(said), "{why}");
            assert_eq!(host.bound("a"), None);
        }
    }

    #[test]
    fn an_image_whose_copy_could_not_get_its_name_after_the_handover_is_not_taken() {
        let host = Host::with(&["a"]);
        let orphan = host.dir.path().join(".a.dray-replica-2");
        std::fs::write(&orphan, [1]).unwrap();
        let why = host.take(1, &["a"]).unwrap_err();
        assert!(why.contains(".a.dray-replica-2"), "{why}");
        std::fs::remove_file(&orphan).unwrap();
        host.take(1, &["a"]).unwrap();
    }

    #[test]
    fn a_command_and_a_migration_exclude_each_other() {
        let host = Host::with(&["a"]);
        let operation = host.registry.operate("a", "resize").unwrap();
        assert!(host.take(1, &["a"]).unwrap_err().contains("another `dray resize`"));
        let other = host.registry.operate("a", "release").map(drop).map_err(said);
        assert!(other.unwrap_err().contains("is busy"));
        assert_eq!(host.registry.operation("a"), Some("resize"));
        drop(operation);
        host.take(1, &["a"]).unwrap();
        let other = host.registry.operate("a", "resize").map(drop).map_err(said);
        assert!(other.unwrap_err().contains("takes part"));
        let own = host.registry.operate_for("a", "release", MigrationId(1));
        assert!(own.is_ok());
        drop(own);
        assert!(host.registry.operate_anyway("a", "claim").is_ok());
    }
}
