//! Bringing back, after a restart, the migrations that were under way.
//!
//! An intent is read and never written here, and nothing is opened because something failed: the
//! images of a migration that cannot be brought back stay closed (I8), the others are served, and it
//! is tried again until the cause is gone.

use super::waiting::{Unrevived, Waiting};
use crate::folder::intent::{self, SourceIntent, TargetIntent, check_lens};
use crate::folder::log::{End, Folder, SOURCE_INTENT, SOURCE_JOURNAL, TARGET_INTENT};
use crate::folder::standing;
use crate::record::{CopyState, ImageRecord};
use crate::registry::{Reason, Registry, left};
use crate::store::Store;
use dray_engine::SourceRecord;
use dray_types::{ImageId, MigrationId};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

/// Starts the loops of migrations that a restart has found.
pub trait Launch {
    /// A migration away, as it goes on when all images are decided.
    type Source;

    /// Starts the loop of a migration away.
    ///
    /// # Errors
    /// When its journal or images cannot be opened.
    fn source(&self, intent: SourceIntent) -> io::Result<Self::Source>;

    /// Starts the loop of a migration to here.
    ///
    /// # Errors
    /// When its journal or images cannot be opened.
    fn target(&self, intent: TargetIntent) -> io::Result<()>;

    /// Takes up what was being read from backups. It comes after the migrations to here and before those
    /// away.
    fn seeds(&self);
}

/// Whether a migration to here, of which no loop runs, may still be brought back: then its source must not
/// hear that it is unknown.
pub fn may_come_back(store: &Store, migration: MigrationId) -> bool {
    let folder = Folder::of(store, migration);
    folder.file(TARGET_INTENT).exists().unwrap_or(true) || folder.lacks_intent().unwrap_or(true)
}

/// Brings back what a restart has found.
pub struct Revival<'a, L> {
    /// The state directory.
    pub store: &'a Store,
    /// The images of this host.
    pub registry: &'a Arc<Registry>,
    /// What could not be brought back yet.
    pub unrevived: &'a Unrevived,
    /// Who starts the loops.
    pub launch: &'a L,
}

impl<L: Launch> Revival<'_, L> {
    /// Brings back every migration of the state directory: disks are parked, exposed or closed as
    /// their journals say, before anyone can reach them.
    pub fn begin(&self) -> Vec<L::Source> {
        let told = |what: &str, done: io::Result<()>| {
            if let Err(why) = done {
                tracing::error!(%why, "cannot {what}");
            }
        };
        let swept = Folder::sweep(self.store, |folder| self.registry.may_need(folder));
        told("remove folders of migrations that are over", swept);
        told("look for migrations without an intent", self.await_intents());
        self.revive_all(End::Target);
        let undone = crate::replicas::undo_unbegun(self.registry, self.store, TARGET_INTENT);
        told("undo migrations that never began", undone);
        self.launch.seeds();
        let revived = self.revive_all(End::Source);
        self.registry.close_voids();
        self.close_strays();
        revived
    }

    /// An image's record names a migration that began, and whose intent is not there: it is waited for, and nothing
    /// else of the migration is touched.
    fn await_intents(&self) -> io::Result<()> {
        for folder in Folder::all_without_intent(self.store)? {
            let end = folder.end_without_intent();
            self.cannot_bring_back(folder, end, &io::ErrorKind::NotFound.into());
        }
        Ok(())
    }

    /// The images of a migration stay closed until it can be brought back.
    fn cannot_bring_back(&self, folder: Folder, end: End, why: &io::Error) {
        let why = why_not(&folder, end, why);
        tracing::error!(folder = %folder.path().display(), why,
            "cannot bring back a migration: its images stay closed");
        self.stay_closed(&folder, end, &why);
        self.unrevived.lock().push(Waiting { folder, end, why });
    }

    fn revive_all(&self, end: End) -> Vec<L::Source> {
        let folders = Folder::all(self.store, end.intent()).unwrap_or_else(|why| {
            tracing::error!(%why, "cannot list the migrations");
            Vec::new()
        });
        let mut revived = Vec::new();
        for folder in folders {
            match self.bring_back(&folder, end) {
                Ok(found) => revived.extend(found),
                Err(why) => self.cannot_bring_back(folder, end, &why),
            }
        }
        revived
    }

    fn bring_back(&self, folder: &Folder, end: End) -> io::Result<Option<L::Source>> {
        if self.was_claimed_from(folder) {
            folder.set_void()?;
            self.registry.close_voids();
            return Ok(None);
        }
        match end {
            End::Source => {
                let intent = read_intent(folder, SOURCE_INTENT)?;
                match self.cannot_resume(folder, &intent)? {
                    true => folder.set_cancelled().map(|()| None),
                    false => self.launch.source(intent).map(Some),
                }
            }
            End::Target => self.launch.target(read_intent(folder, TARGET_INTENT)?).map(|()| None),
        }
    }

    /// Whether an image was claimed from the migration while it had no intent, which would have been made void by
    /// that.
    fn was_claimed_from(&self, folder: &Folder) -> bool {
        folder.migration().is_some_and(|migration| self.registry.claimed_from(migration).is_some())
    }

    /// Whether a migration that was abandoned will never be resumed: an image of it was let go since, and another
    /// one has its name, or it is not on this host any more.
    fn cannot_resume(&self, folder: &Folder, intent: &SourceIntent) -> io::Result<bool> {
        if !is_abandoned(&records_away(folder)?) {
            return Ok(false);
        }
        let moved = written(intent.clone());
        let replaced = self
            .registry
            .all_records()
            .into_iter()
            .find(|record| moved.get(&record.name).is_some_and(|id| *id != record.id));
        if let Some(record) = &replaced {
            let (image, migration) = (&record.name, intent.migration);
            tracing::info!(image, %migration, "another image has the name of one of its images \
                                               now: the migration cannot be resumed");
        }
        Ok(replaced.is_some() || self.is_one_gone(intent)?)
    }

    /// Whether an image of this migration that a guest may write has neither a record here nor a file.
    fn is_one_gone(&self, intent: &SourceIntent) -> io::Result<bool> {
        let known: BTreeSet<_> = self.registry.all_records().iter().map(|it| it.id).collect();
        let written = intent.images.iter().filter(|image| !image.offer.read_only);
        for image in written.filter(|image| !known.contains(&image.offer.id)) {
            if !self.registry.at(&image.path).exists()? {
                tracing::info!(image = image.name, migration = %intent.migration,
                    "it is not on this host any more: the migration cannot be resumed");
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Closes the images of a migration that cannot be brought back. An intent that cannot be read
    /// names none: the images' own records do. One that was abandoned has none any more, and one that is done only
    /// those that are bound to it.
    fn stay_closed(&self, folder: &Folder, end: End, why: &str) {
        let records = records_away(folder).unwrap_or_default();
        let lacks_intent = folder.lacks_intent().unwrap_or(false);
        if end == End::Source && is_abandoned(&records) && !lacks_intent {
            return;
        }
        let named = match end {
            End::Source => named_away(folder, &records),
            End::Target => read_intent(folder, TARGET_INTENT).map(|intent: TargetIntent| {
                let ids = intent
                    .images
                    .iter()
                    .map(|image| (image.name_here().to_owned(), image.offer.id));
                ids.filter(|(name, _)| !self.is_let_go(name)).collect()
            }),
        };
        let named: BTreeMap<String, ImageId> = named.unwrap_or_default();
        let migration = folder.migration();
        // What was removed here since is no image any more, and what has its name now is another one.
        let is_its = |record: &ImageRecord| {
            named.get(&record.name) == Some(&record.id)
                || record.migration == migration && !record.outlives_migration()
        };
        for record in self.registry.all_records().into_iter().filter(is_its) {
            let name = record.name;
            let shown = migration.map_or_else(|| "?".to_owned(), |id| id.to_string());
            let why = format!("its migration {shown} cannot be brought back: {why}");
            self.registry
                .close(&name, Reason::passing(why, way_out(self.registry, folder, end, &name)));
        }
    }

    /// Whether an image that came belongs to this host, and to no migration any more.
    fn is_let_go(&self, name: &str) -> bool {
        let record = self.registry.get(name).map(|entry| entry.record());
        record.is_some_and(|record| record.state == CopyState::Owner && record.migration.is_none())
    }

    /// An image whose record names a migration of which nothing is left: nobody knows how that ended.
    fn close_strays(&self) {
        for record in self.registry.all_records() {
            let Some(migration) = record.migration else { continue };
            let folder = Folder::of(self.store, migration);
            // What cannot be told is not opened either: its record keeps it closed.
            let there =
                folder.is_there().unwrap_or(true) && !folder.is_cancelled().unwrap_or(false);
            let known = there || record.outlives_migration();
            if known || record.state == CopyState::Replica {
                continue;
            }
            let name = record.name;
            tracing::error!(image = name, %migration,
                "the records of an image's migration are lost");
            let why = format!("the records of its migration {migration} are lost");
            let hint = format!("`dray claim {name}` if no other host owns it");
            self.registry.close(&name, Reason::lasting(why, hint));
        }
    }

    /// Whether the folder's intent may still come back for an image.
    fn waits_for_intent(&self, folder: &Folder) -> bool {
        let lacks_it = folder.lacks_intent().unwrap_or(true);
        lacks_it && self.registry.may_need(folder).unwrap_or(true)
    }

    /// Tries again what could not be brought back.
    pub fn try_again(&self) -> Vec<L::Source> {
        let _trying = self.unrevived.begin_tries();
        let waiting = self.unrevived.lock().clone();
        let mut revived = Vec::new();
        for one in waiting {
            if matches!(one.folder.file(one.end.intent()).exists(), Ok(false))
                && !self.waits_for_intent(&one.folder)
            {
                // An operator has claimed its images.
                self.unrevived.remove(&one);
                continue;
            }
            match self.bring_back(&one.folder, one.end) {
                Ok(found) => {
                    tracing::info!(folder = %one.folder.path().display(), "a migration continues");
                    self.unrevived.remove(&one);
                    revived.extend(found);
                }
                Err(why) => self.still_cannot_bring_back(&one, &why),
            }
        }
        revived
    }

    /// It waits on, and its images stay closed.
    fn still_cannot_bring_back(&self, one: &Waiting, why: &io::Error) {
        let why = why_not(&one.folder, one.end, why);
        self.stay_closed(&one.folder, one.end, &why);
        if why != one.why {
            tracing::error!(folder = %one.folder.path().display(), why,
                "still cannot bring back a migration");
            self.unrevived.tell(one, why);
        }
    }
}

/// Why a migration could not be brought back.
fn why_not(folder: &Folder, end: End, why: &io::Error) -> String {
    match folder.lacks_intent() {
        Ok(true) => format!("{} is missing", folder.file(end.intent()).display()),
        _ => why.to_string(),
    }
}

/// The images that a migration away moves, and that a guest may write. What was only prepared moves none.
pub(crate) fn written(intent: SourceIntent) -> BTreeMap<String, ImageId> {
    let begun = intent.options.is_some();
    let images = intent.images.into_iter().filter(|image| begun && !image.offer.read_only);
    images.map(|image| (image.name, image.offer.id)).collect()
}

/// What the journal of a migration away says; nothing of one to here.
fn records_away(folder: &Folder) -> io::Result<Vec<SourceRecord>> {
    standing::read(&folder.file(SOURCE_JOURNAL))
}

/// Whether the last that a migration away has recorded is that it was abandoned: its images are this host's, and take
/// no part in it.
fn is_abandoned(records: &[SourceRecord]) -> bool {
    records.iter().fold(false, |abandoned, record| match record {
        SourceRecord::Abandoned => true,
        SourceRecord::Resumed => false,
        _ => abandoned,
    })
}

/// The images that a migration away with these records still has to do with, as far as its intent tells.
///
/// # Errors
/// When that cannot be read.
pub(super) fn named_away(
    folder: &Folder,
    records: &[SourceRecord],
) -> io::Result<BTreeMap<String, ImageId>> {
    // What is bound to it still is a copy. Of another one that has come back since it says nothing.
    if records.contains(&SourceRecord::Done) {
        return Ok(BTreeMap::new());
    }
    read_intent(folder, SOURCE_INTENT).map(written)
}

/// The name of an image that takes part in the migration of this folder, for what an operator is to be told.
pub(super) fn image_of(registry: &Registry, folder: &Folder) -> String {
    let mut records = registry.all_records().into_iter();
    let bound = records.find(|record| record.migration == folder.migration());
    bound.map_or_else(|| "IMAGE".to_owned(), |record| record.name)
}

/// Whether this host has served an image of the migration by its record: its journal said so before.
pub(super) fn has_served(registry: &Registry, migration: MigrationId) -> bool {
    let ours = |record: &ImageRecord| record.migration == Some(migration) && !record.read_only;
    registry.all_records().iter().any(|record| ours(record) && record.state == CopyState::Owner)
}

/// What an operator can do about a migration that cannot be brought back.
pub(super) fn way_out(registry: &Registry, folder: &Folder, end: End, name: &str) -> String {
    let lacks_intent = folder.lacks_intent().unwrap_or(false);
    let over = standing::is_handed_over(folder).unwrap_or(false);
    let away = folder.migration().filter(|_| end == End::Source && over);
    let other = match (end, away) {
        (_, Some(migration)) => left::way_out(intent::peer(folder).as_deref(), name, migration),
        (End::Source, None) => format!("`dray claim {name}`"),
        // What is here cannot be told from what is not.
        (End::Target, None) if lacks_intent => format!("`dray claim {name}` at its source"),
        (End::Target, None) => match (standing::promised_nothing(folder), folder.migration()) {
            // Its journal is lost. What its guest has written since the handover is in nothing else than the file.
            (Ok(true), Some(migration)) if has_served(registry, migration) => {
                let peer = intent::peer(folder);
                let peer = peer.as_deref().unwrap_or("its source");
                format!(
                    "`dray claim {name} --source-is-fenced --accept-loss` at {peer} brings it back as it was \
                     at the handover, and then `dray cancel {migration}` here removes what this host has"
                )
            }
            // There is nothing to be claimed.
            (Ok(true), Some(migration)) => format!(
                "`dray cancel --discard` at its source, or `dray cancel {migration}` on this host \
                 if the source is lost"
            ),
            _ => {
                let peer = intent::peer(folder);
                let peer = peer.as_deref().unwrap_or("its source");
                match standing::has_everything(folder).unwrap_or(false) {
                    true => left::from_before(peer, name),
                    false => left::way_back(peer, name),
                }
            }
        },
    };
    let (mend, lost) = match lacks_intent {
        true => ("put that file back", "is lost"),
        false => ("remove the cause", "cannot be removed"),
    };
    format!("{mend}, and the migration continues by itself; if it {lost}: {other}")
}

/// An intent belongs to the folder that it lies in, or it is another's.
pub(super) fn read_intent<T: DeserializeOwned + NamesMigration>(
    folder: &Folder,
    name: &str,
) -> io::Result<T> {
    let path = folder.file(name);
    let intent: T = path.get()?;
    if folder.migration() == Some(intent.migration()) {
        intent.check()?;
        return Ok(intent);
    }
    let why = format!("{}: it is the intent of another migration", path.display());
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

pub(super) trait NamesMigration {
    fn migration(&self) -> MigrationId;
    fn check(&self) -> io::Result<()>;
}

impl NamesMigration for SourceIntent {
    fn migration(&self) -> MigrationId {
        self.migration
    }

    fn check(&self) -> io::Result<()> {
        check_lens(self.images.iter().map(|image| image.offer.len))
    }
}

impl NamesMigration for TargetIntent {
    fn migration(&self) -> MigrationId {
        self.migration
    }

    fn check(&self) -> io::Result<()> {
        check_lens(self.images.iter().map(|image| image.offer.len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::intent::SourceImage;
    use crate::folder::intent::tests::options_of_a_test;
    use crate::folder::log::Log;
    use crate::record::Lost;
    use crate::registry::surroundings::tests::Plain;
    use dray_types::Epoch;
    use dray_wire::ImageOffer;
    use parking_lot::Mutex;
    use std::path::Path;

    const AWAY: MigrationId = MigrationId(7);
    const IMAGE: &str = "disk";

    /// No loop starts.
    struct Never;

    impl Launch for Never {
        type Source = ();

        fn source(&self, _intent: SourceIntent) -> io::Result<()> {
            Err(io::Error::other("another image of it is not there"))
        }

        fn target(&self, _intent: TargetIntent) -> io::Result<()> {
            Ok(())
        }

        fn seeds(&self) {}
    }

    /// An image that is this host's, and takes part in no migration, and the folder of one away that knows it.
    fn with_image(dir: &Path, records: &[SourceRecord]) -> (Store, Arc<Registry>, Folder) {
        let store = Store::open(&dir.join("state")).unwrap();
        let registry = Registry::load(store.clone(), Arc::new(Plain)).unwrap();
        let path = dir.join(IMAGE);
        std::fs::write(&path, [0; 8192]).unwrap();
        let record = ImageRecord::owned(IMAGE.into(), ImageId(3), path.clone(), 8192);
        registry.add(record.clone(), registry.open_file(&record).unwrap()).unwrap();
        let offer = ImageOffer { id: ImageId(3), name: IMAGE.into(), len: 8192, read_only: false };
        let intent = SourceIntent {
            migration: AWAY,
            peer: "hostb".into(),
            images: vec![SourceImage::new(IMAGE.into(), offer, path, None)],
            owner: None,
            vm: None,
            options: Some(options_of_a_test()),
            epoch: Epoch(1),
            started_unix_ms: 0,
            adopted: Vec::new(),
        };
        let folder = Folder::begin(&store, AWAY, End::Source, &intent).unwrap();
        Log::open(&folder.file(SOURCE_JOURNAL)).unwrap().0.append(records).unwrap();
        (store, registry, folder)
    }

    /// Whether an image that is this host's, and takes part in no migration, is closed because of one away that has
    /// recorded `records` and cannot be brought back.
    fn is_closed(records: &[SourceRecord]) -> bool {
        let dir = tempfile::tempdir().unwrap();
        let (store, registry, _) = with_image(dir.path(), records);
        let unrevived = Unrevived::default();
        let revival =
            Revival { store: &store, registry: &registry, unrevived: &unrevived, launch: &Never };
        assert!(revival.begin().is_empty());
        registry.closed(IMAGE).is_some()
    }

    /// It may have been handed over, unless the journal says that this came to nothing; when that was done, the
    /// image has come back since, by its record.
    #[test]
    fn an_image_is_closed_by_name_while_its_migration_may_have_it() {
        use SourceRecord::{Abandoned, Begun, Done, Resumed};
        assert!(is_closed(&[Begun]));
        assert!(!is_closed(&[Begun, Abandoned]));
        assert!(is_closed(&[Begun, Abandoned, Resumed]));
        assert!(!is_closed(&[Begun, Done]));
    }

    /// A source whose image takes part in a migration that has begun, and whose intent is elsewhere; with what a
    /// restart of its agent finds.
    fn without_intent(dir: &Path) -> (Store, Arc<Registry>, Folder) {
        let (store, registry, folder) = with_image(dir, &[SourceRecord::Begun]);
        let entry = registry.get(IMAGE).unwrap();
        registry.update(&entry, |record| record.migration = Some(AWAY)).unwrap();
        std::fs::rename(folder.file(SOURCE_INTENT).path(), dir.join("away")).unwrap();
        drop((entry, registry));
        let registry = Registry::load(store.clone(), Arc::new(Plain)).unwrap();
        (store, registry, folder)
    }

    /// Starts what goes on, and tells of it.
    #[derive(Default)]
    struct Always(Mutex<Vec<MigrationId>>);

    impl Launch for Always {
        type Source = ();

        fn source(&self, intent: SourceIntent) -> io::Result<()> {
            self.0.lock().push(intent.migration);
            Ok(())
        }

        fn target(&self, _intent: TargetIntent) -> io::Result<()> {
            Ok(())
        }

        fn seeds(&self) {}
    }

    /// A folder that lost the file which names its migration is not one that was being removed.
    #[test]
    fn a_migration_that_an_image_still_names_waits_for_its_intent() {
        let dir = tempfile::tempdir().unwrap();
        let (store, registry, folder) = without_intent(dir.path());
        let (unrevived, launch) = (Unrevived::default(), Always::default());
        let revival =
            Revival { store: &store, registry: &registry, unrevived: &unrevived, launch: &launch };
        for _ in 0..2 {
            assert!(revival.begin().is_empty());
            assert!(folder.file(SOURCE_JOURNAL).exists().unwrap(), "nothing of it was removed");
            assert!(may_come_back(&store, AWAY), "its other end does not hear that it is unknown");
            let reason = registry.closed(IMAGE).unwrap().reason;
            let said = format!("{}: {}", reason.why, reason.hint);
            assert!(said.contains(SOURCE_INTENT) && said.contains("put that file back"), "{said}");
        }
        unrevived.lock().truncate(1);
        assert!(revival.try_again().is_empty() && registry.closed(IMAGE).is_some());
        std::fs::rename(dir.path().join("away"), folder.file(SOURCE_INTENT).path()).unwrap();
        assert_eq!(revival.try_again().len(), 1);
        assert_eq!(*launch.0.lock(), [AWAY]);
        assert!(unrevived.lock().is_empty());
    }

    /// Its record may be the one that names the migration.
    #[test]
    fn an_image_whose_record_cannot_be_read_keeps_every_folder() {
        let dir = tempfile::tempdir().unwrap();
        let (store, registry, folder) = without_intent(dir.path());
        let record = store.images().join(format!("{IMAGE}.json"));
        let named = std::fs::read(record.path()).unwrap();
        std::fs::write(record.path(), "x").unwrap();
        let (unrevived, launch) = (Unrevived::default(), Never);
        let revival =
            Revival { store: &store, registry: &registry, unrevived: &unrevived, launch: &launch };
        assert!(revival.begin().is_empty());
        assert!(folder.is_there().unwrap());
        std::fs::write(record.path(), named).unwrap();
        // Nothing names it any more.
        let entry = registry.get(IMAGE).unwrap();
        registry.update(&entry, |record| record.migration = None).unwrap();
        assert!(revival.begin().is_empty());
        assert!(!folder.is_there().unwrap());
        assert!(revival.try_again().is_empty() && unrevived.lock().is_empty());
    }

    /// The operator has the images back, and the migration would have been made void.
    #[test]
    fn a_migration_whose_image_was_claimed_without_its_intent_does_not_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let (store, registry, folder) = without_intent(dir.path());
        let entry = registry.get(IMAGE).unwrap();
        registry.claim(&entry, (ImageId(9), Epoch(2)), true, Lost::default()).unwrap();
        registry.vouch(IMAGE);
        std::fs::rename(dir.path().join("away"), folder.file(SOURCE_INTENT).path()).unwrap();
        let (unrevived, launch) = (Unrevived::default(), Always::default());
        let revival =
            Revival { store: &store, registry: &registry, unrevived: &unrevived, launch: &launch };
        assert!(revival.begin().is_empty() && launch.0.lock().is_empty());
        assert!(registry.closed(IMAGE).is_none() && !folder.is_there().unwrap());
    }
}
