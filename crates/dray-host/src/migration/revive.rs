//! Bringing back, after a restart, the migrations that were under way.
//!
//! An intent is read and never written here, and nothing is opened because something failed: the
//! images of a migration that cannot be brought back stay closed (I8), the others are served, and it
//! is tried again until the cause is gone.

use super::intent::{SourceIntent, TargetIntent, check_lens};
use super::log::{End, Folder, SOURCE_INTENT, SOURCE_JOURNAL, TARGET_INTENT};
use super::standing;
use crate::registry::{CopyState, ImageRecord, Reason, Registry};
use crate::store::Store;
use dray_engine::SourceRecord;
use dray_types::{ImageId, MigrationId};
use parking_lot::{Mutex, MutexGuard};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
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
    Folder::of(store, migration).file(TARGET_INTENT).exists().unwrap_or(true)
}

/// A migration that could not be brought back yet.
#[derive(Clone, Debug)]
struct Waiting {
    folder: Folder,
    end: End,
    /// Why, as it was last told in the log.
    why: String,
}

/// The migrations that could not be brought back yet.
#[derive(Default)]
pub struct Unrevived(Mutex<Vec<Waiting>>);

impl Unrevived {
    fn lock(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.0.lock()
    }
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
        told("remove folders of migrations that are over", Folder::sweep(self.store));
        self.revive_all(End::Target);
        let undone = crate::replicas::undo_unbegun(self.registry, self.store, TARGET_INTENT);
        told("undo migrations that never began", undone);
        self.launch.seeds();
        let revived = self.revive_all(End::Source);
        self.registry.close_voids();
        self.close_strays();
        revived
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
                Err(why) => {
                    let why = why.to_string();
                    tracing::error!(folder = %folder.path().display(), why,
                        "cannot bring back a migration: its images stay closed");
                    self.stay_closed(&folder, end, &why);
                    self.unrevived.lock().push(Waiting { folder, end, why });
                }
            }
        }
        revived
    }

    fn bring_back(&self, folder: &Folder, end: End) -> io::Result<Option<L::Source>> {
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

    /// Whether a migration that was abandoned will never be resumed: an image of it was let go since, and another
    /// one has its name.
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
            tracing::info!(image, %migration, "another image has this name now: its migration cannot be resumed");
        }
        Ok(replaced.is_some())
    }

    /// Closes the images of a migration that cannot be brought back. An intent that cannot be read
    /// names none: the images' own records do. One that was abandoned has none any more, and one that is done only
    /// those that are bound to it.
    fn stay_closed(&self, folder: &Folder, end: End, why: &str) {
        let records = records_away(folder).unwrap_or_default();
        if end == End::Source && is_abandoned(&records) {
            return;
        }
        let named = match end {
            // What is bound to it still is a copy. Of another one that has come back since it says nothing.
            End::Source if records.contains(&SourceRecord::Done) => Ok(BTreeMap::new()),
            End::Source => read_intent(folder, SOURCE_INTENT).map(written),
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
            self.registry.close(&name, Reason::passing(why, way_out(end, &name)));
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
            tracing::error!(image = name, %migration, "nothing is left of an image's migration");
            let why = format!("nothing is left here of its migration {migration}");
            let hint = format!("`dray claim {name}` if no other host has it");
            self.registry.close(&name, Reason::lasting(why, hint));
        }
    }

    /// Tries again what could not be brought back.
    pub fn try_again(&self) -> Vec<L::Source> {
        let waiting = std::mem::take(&mut *self.unrevived.lock());
        let mut revived = Vec::new();
        for mut one in waiting {
            if matches!(one.folder.file(one.end.intent()).exists(), Ok(false)) {
                // An operator has claimed its images.
                continue;
            }
            match self.bring_back(&one.folder, one.end) {
                Ok(found) => {
                    tracing::info!(folder = %one.folder.path().display(), "a migration goes on");
                    revived.extend(found);
                }
                Err(why) => {
                    let why = why.to_string();
                    self.stay_closed(&one.folder, one.end, &why);
                    if why != one.why {
                        tracing::error!(folder = %one.folder.path().display(), why,
                            "still cannot bring back a migration");
                        one.why = why;
                    }
                    self.unrevived.lock().push(one);
                }
            }
        }
        revived
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

/// What an operator can do about a migration that cannot be brought back.
fn way_out(end: End, name: &str) -> String {
    let other = match end {
        End::Source => format!("`dray claim {name}`"),
        End::Target => format!("`dray cancel` at its source, or `dray claim {name}` here"),
    };
    format!("mend that, and it goes on by itself; if it cannot be mended: {other}")
}

/// An intent belongs to the folder that it lies in, or it is another's.
fn read_intent<T: DeserializeOwned + NamesMigration>(folder: &Folder, name: &str) -> io::Result<T> {
    let path = folder.file(name);
    let intent: T = path.get()?;
    if folder.migration() == Some(intent.migration()) {
        intent.check()?;
        return Ok(intent);
    }
    let why = format!("{}: it is the intent of another migration", path.display());
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}

trait NamesMigration {
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
    use crate::flat::tests::Plain;
    use crate::migration::intent::SourceImage;
    use crate::migration::intent::tests::options_of_a_test;
    use crate::migration::log::Log;
    use dray_types::Epoch;
    use dray_wire::ImageOffer;

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

    /// Whether an image that is this host's, and takes part in no migration, is closed because of one away that has
    /// recorded `records` and cannot be brought back.
    fn is_closed(records: &[SourceRecord]) -> bool {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("state")).unwrap();
        let registry = Registry::load(store.clone(), Arc::new(Plain)).unwrap();
        let path = dir.path().join(IMAGE);
        std::fs::write(&path, [0; 8192]).unwrap();
        let record = ImageRecord::owned(IMAGE.into(), ImageId(3), path.clone(), 8192);
        registry.add(record.clone(), registry.open_file(&record).unwrap()).unwrap();
        let offer = ImageOffer { id: ImageId(3), name: IMAGE.into(), len: 8192, read_only: false };
        let intent = SourceIntent {
            migration: AWAY,
            peer: "hostb".into(),
            images: vec![SourceImage::new(IMAGE.into(), offer, path, None)],
            vm: None,
            options: Some(options_of_a_test()),
            epoch: Epoch(1),
            started_unix_ms: 0,
            adopted: Vec::new(),
        };
        let folder = Folder::begin(&store, AWAY, End::Source, &intent).unwrap();
        Log::open(&folder.file(SOURCE_JOURNAL)).unwrap().0.append(records).unwrap();
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
}
