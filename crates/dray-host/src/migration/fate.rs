//! The answer of a migration's source to a target that has no session with it, from the source's
//! durable records. This answer alone may make a target drop a promise, so every uncertain case is
//! [`HandedOver`](Fate::HandedOver) or an error.

use crate::folder::intent::SourceIntent;
use crate::folder::log::{Folder, SOURCE_INTENT, SOURCE_JOURNAL};
use crate::folder::standing;
use crate::record::{CopyState, ImageRecord};
use crate::registry::Registry;
use crate::store::Store;
use dray_engine::SourceRecord;
use dray_types::{ImageId, MigrationId};
use dray_wire::request::Fate;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::io;

/// Migrations for which a target is being asked for room: nothing is durable of them here yet.
#[derive(Default)]
pub struct Preparing(Mutex<BTreeSet<MigrationId>>);

/// One of them, for as long as this is there.
pub struct Prepares<'a>(&'a Preparing, MigrationId);

impl Preparing {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<MigrationId>> {
        self.0.lock()
    }

    /// The migration is being prepared from now on.
    pub fn begin(&self, migration: MigrationId) -> Prepares<'_> {
        self.lock().insert(migration);
        Prepares(self, migration)
    }

    /// Whether it is.
    pub fn contains(&self, migration: MigrationId) -> bool {
        self.lock().contains(&migration)
    }
}

impl Drop for Prepares<'_> {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

/// What becomes of `migration`, with these images that a guest may write, which `peer` asks about.
///
/// # Errors
/// When that cannot be read.
pub fn of(
    store: &Store,
    registry: &Registry,
    peer: &str,
    migration: MigrationId,
    images: &[ImageId],
) -> io::Result<Fate> {
    let folder = Folder::of(store, migration);
    if let Some(intent) = folder.cancelled::<SourceIntent>()? {
        if intent.peer != peer {
            return Ok(Fate::HandedOver);
        }
        // It does not hear it before no power cut undoes it.
        folder.settle_cancelled()?;
        return Ok(Fate::Never);
    }
    let at = folder.file(SOURCE_INTENT);
    if at.exists()? {
        let intent: SourceIntent = at.peek()?;
        let records = standing::read(&folder.file(SOURCE_JOURNAL))?;
        return Ok(if intent.peer == peer {
            of_records(&intent, &records)
        } else {
            Fate::HandedOver
        });
    }
    // What is void was handed over, and a folder without an intent is being made or removed.
    if folder.is_there()? || registry.claimed_from(migration).is_some() {
        return Ok(Fate::HandedOver);
    }
    let served = served(registry);
    let owned = !images.is_empty() && images.iter().all(|id| served.contains(id));
    Ok(Fate::Unknown { owned })
}

/// Whether a target that owns nothing of a migration drops it when its source says this. It has `begun` once the
/// source has said how far it is.
pub fn is_unwanted(told: Fate, begun: bool) -> bool {
    match told {
        Fate::Never => true,
        Fate::Unknown { owned } => owned || !begun,
        // Of several images that were handed back one may have been claimed, and another be lost there.
        Fate::Live | Fate::HandedOver | Fate::Abandoned | Fate::Claimed => false,
    }
}

/// As the source's intent and journal say; a loop may be writing to that.
fn of_records(intent: &SourceIntent, records: &[SourceRecord]) -> Fate {
    if intent.options.is_none() {
        // What is prepared again may begin, whatever became of an earlier try.
        return Fate::Live;
    }
    records.iter().fold(Fate::Live, |fate, record| match record {
        SourceRecord::Abandoned => Fate::Abandoned,
        SourceRecord::HandedOver(_) | SourceRecord::Done => Fate::HandedOver,
        // The target that gave it back is told by whoever sees to the guest.
        SourceRecord::TakenBack { .. } | SourceRecord::Resumed | SourceRecord::Begun => Fate::Live,
        _ => fate,
    })
}

/// The images that are this host's, outside any migration, and are served.
fn served(registry: &Registry) -> BTreeSet<ImageId> {
    let records = registry.all().into_iter().map(|entry| entry.record());
    let is_served = |record: &ImageRecord| {
        let own = record.state == CopyState::Owner && record.migration.is_none();
        own && registry.closed(&record.name).is_none()
    };
    records.filter(is_served).map(|record| record.id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::intent::SourceImage;
    use crate::folder::intent::tests::options_of_a_test;
    use crate::folder::log::{End, Log};
    use crate::registry::surroundings::tests::Plain;
    use dray_types::{Attempt, Epoch};
    use dray_wire::{HandedOver, ImageOffer, MapHash};
    use std::sync::Arc;

    const MIGRATION: MigrationId = MigrationId(7);
    const IMAGE: ImageId = ImageId(3);

    struct Host {
        dir: tempfile::TempDir,
        store: Store,
        registry: Arc<Registry>,
    }

    fn host() -> Host {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let registry = Registry::load(store.clone(), Arc::new(Plain)).unwrap();
        Host { dir, store, registry }
    }

    impl Host {
        fn fate(&self, peer: &str) -> Fate {
            of(&self.store, &self.registry, peer, MIGRATION, &[IMAGE]).unwrap()
        }

        fn own(&self, id: ImageId) {
            let path = self.dir.path().join(format!("image-{}", id.0));
            std::fs::write(&path, [0; 8192]).unwrap();
            let record = ImageRecord::owned(format!("image-{}", id.0), id, path, 8192);
            let file = self.registry.open_file(&record).unwrap();
            self.registry.add(record, file).unwrap();
        }

        fn intend(&self, begun: bool) -> Folder {
            let offer = ImageOffer { id: IMAGE, name: "x".into(), len: 8192, read_only: false };
            let intent = SourceIntent {
                migration: MIGRATION,
                peer: "b".into(),
                images: vec![SourceImage::new("x".into(), offer, "x".into(), None)],
                owner: None,
                vm: None,
                options: begun.then(options_of_a_test),
                epoch: Epoch(1),
                started_unix_ms: 0,
                adopted: Vec::new(),
            };
            Folder::begin(&self.store, MIGRATION, End::Source, &intent).unwrap()
        }
    }

    /// After a restart its loop opens it, to answer a target that has not heard that all is over.
    #[test]
    fn a_copy_is_needed_until_its_target_has_heard_the_end() {
        let host = host();
        let needed = || crate::retention::needed_by(&host.registry, IMAGE).unwrap();
        assert_eq!(needed(), None);
        drop(host.intend(false));
        assert_eq!(needed(), None, "what was only prepared has moved nothing");
        let folder = host.intend(true);
        assert_eq!(needed(), Some(MIGRATION));
        assert_eq!(crate::retention::needed_by(&host.registry, ImageId(4)).unwrap(), None);
        folder.file(SOURCE_INTENT).remove().unwrap();
        assert_eq!(needed(), None);
    }

    #[test]
    fn the_journal_decides_what_may_still_be_handed_over() {
        let host = host();
        let folder = host.intend(true);
        let mut log = Log::open(&folder.file(SOURCE_JOURNAL)).unwrap().0;
        assert_eq!(host.fate("b"), Fate::Live);
        let handed_over =
            HandedOver { epoch: Epoch(2), attempt: Attempt(2), map_hash: MapHash::of(&[]) };
        let after = [
            (SourceRecord::Begun, Fate::Live),
            (SourceRecord::Attempt { attempt: Attempt(1) }, Fate::Live),
            (SourceRecord::Void { attempt: Attempt(1) }, Fate::Live),
            (SourceRecord::Abandoned, Fate::Abandoned),
            (SourceRecord::Resumed, Fate::Live),
            (SourceRecord::Attempt { attempt: Attempt(2) }, Fate::Live),
            (SourceRecord::HandedOver(handed_over), Fate::HandedOver),
            (SourceRecord::TakenBack { epoch: Epoch(3) }, Fate::Live),
        ];
        for (record, fate) in after {
            log.append(std::slice::from_ref(&record)).unwrap();
            assert_eq!(host.fate("b"), fate, "{record:?}");
            assert_eq!(host.fate("c"), Fate::HandedOver, "another host learns nothing");
        }
        drop(host.intend(false));
        assert_eq!(host.fate("b"), Fate::Live, "prepared again");
        folder.set_void().unwrap();
        assert_eq!(host.fate("b"), Fate::HandedOver, "claimed");
    }

    #[test]
    fn what_was_cancelled_never_begins_and_only_its_target_is_told() {
        let host = host();
        let folder = host.intend(false);
        folder.set_cancelled().unwrap();
        assert_eq!(host.fate("b"), Fate::Never);
        assert_eq!(host.fate("c"), Fate::HandedOver);
        folder.remove(End::Source).unwrap();
        assert_eq!(host.fate("b"), Fate::Unknown { owned: false });
    }

    #[test]
    fn an_intent_that_cannot_be_read_decides_nothing() {
        let host = host();
        let folder = host.intend(true);
        std::fs::write(folder.path().join(SOURCE_INTENT), "{").unwrap();
        assert!(of(&host.store, &host.registry, "b", MIGRATION, &[IMAGE]).is_err());
        std::fs::remove_file(folder.path().join(SOURCE_INTENT)).unwrap();
        assert_eq!(host.fate("b"), Fate::HandedOver, "half a folder");
    }

    #[test]
    fn what_is_not_known_was_not_handed_over_only_where_the_image_is_served() {
        let host = host();
        assert_eq!(host.fate("b"), Fate::Unknown { owned: false });
        host.own(ImageId(4));
        assert_eq!(host.fate("b"), Fate::Unknown { owned: false }, "another image");
        host.own(IMAGE);
        assert_eq!(host.fate("b"), Fate::Unknown { owned: true });
        let entry = host.registry.get("image-3").unwrap();
        let bind = |to| host.registry.update(&entry, |record| record.migration = to).unwrap();
        bind(Some(MigrationId(8)));
        assert_eq!(host.fate("b"), Fate::Unknown { owned: false }, "it takes part in another");
        bind(None);
        let reason = crate::registry::Reason::lasting("a test", "nothing");
        host.registry.close("image-3", reason);
        assert_eq!(host.fate("b"), Fate::Unknown { owned: false }, "nobody vouches for it");
        let none = of(&host.store, &host.registry, "b", MIGRATION, &[]).unwrap();
        assert_eq!(none, Fate::Unknown { owned: false });
    }

    #[test]
    fn a_migration_is_being_prepared_until_its_guard_goes() {
        let preparing = Preparing::default();
        let guard = preparing.begin(MIGRATION);
        assert!(preparing.contains(MIGRATION));
        drop(guard);
        assert!(!preparing.contains(MIGRATION));
    }
}
