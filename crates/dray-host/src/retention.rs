//! Removes replicas by the operator's limits on number, age and free space.
//!
//! A replica costs its disk space and saves the next migration back here. Nothing goes unless a
//! limit says so, and never one that a migration still needs.

use crate::folder::intent::SourceIntent;
use crate::folder::log::Folder;
use crate::migration::revive::written;
use crate::pool::Pool;
use crate::record::{CopyState, NameKind};
use crate::registry::{Entry, Registry};
use dray_types::{ByteSize, ImageId, MigrationId};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// How often is to be looked.
pub const INTERVAL: Duration = Duration::from_secs(60);

/// The operator's limits; none of them by default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Retention {
    /// Replicas of one image that stay, the newest ones.
    pub keep: Option<u64>,
    /// A replica that was left behind longer ago goes.
    pub max_age: Option<Duration>,
    /// While less is free in a pool, its oldest replicas go.
    pub min_free: Option<ByteSize>,
}

/// A replica that may go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Known {
    image: ImageId,
    since_unix_ms: u64,
}

/// Places in `all` of the replicas that number and age let go, the reason beside each.
fn outdated(all: &[Known], limits: &Retention, now_unix_ms: u64) -> Vec<(usize, &'static str)> {
    let mut newest: Vec<usize> = (0..all.len()).collect();
    newest.sort_by_key(|&at| std::cmp::Reverse(all[at].since_unix_ms));
    let mut kept: BTreeMap<ImageId, u64> = BTreeMap::new();
    let mut go = Vec::new();
    for at in newest {
        let age = Duration::from_millis(now_unix_ms.saturating_sub(all[at].since_unix_ms));
        if limits.max_age.is_some_and(|most| age > most) {
            go.push((at, "replicas.max_age_hours"));
            continue;
        }
        let count = kept.entry(all[at].image).or_default();
        if limits.keep.is_some_and(|keep| *count >= keep) {
            go.push((at, "replicas.keep"));
        } else {
            *count += 1;
        }
    }
    go
}

/// The migration away of which the target has not heard the end, if it moved this image: without the copy here a
/// restart could not answer it.
///
/// # Errors
/// When it cannot be read which migrations there are.
pub fn needed_by(registry: &Registry, image: ImageId) -> io::Result<Option<MigrationId>> {
    let all = Folder::all_away(registry.store())?;
    let moves = |(_, intent): &(MigrationId, SourceIntent)| {
        written(intent.clone()).values().any(|id| *id == image)
    };
    Ok(all.into_iter().find(moves).map(|(migration, _)| migration))
}

/// The replicas that no migration needs, with what decides about them, the oldest first. One of
/// which it is not known since when it lies there is the operator's business, and so is one that may be the
/// only copy.
fn removable(registry: &Registry) -> Vec<(Known, Arc<Entry>)> {
    let known = |entry: Arc<Entry>| {
        let record = entry.record();
        let idle = record.state == CopyState::Replica && record.migration.is_none();
        let file = matches!(record.place, NameKind::Replica(_));
        let note = record.replica.as_ref().filter(|note| idle && file && !note.stays)?;
        Some((Known { image: record.id, since_unix_ms: note.since_unix_ms }, entry))
    };
    let mut all: Vec<_> = registry.all().into_iter().filter_map(known).collect();
    all.sort_by_key(|(known, _)| known.since_unix_ms);
    all
}

fn remove(registry: &Registry, entry: &Entry, limit: &str) -> bool {
    let record = entry.record();
    // A migration back may have taken it meanwhile.
    let needed = needed_by(registry, record.id);
    if record.state != CopyState::Replica
        || record.migration.is_some()
        || !matches!(needed, Ok(None))
    {
        return false;
    }
    let removed = registry.remove_replica(entry);
    match &removed {
        Ok(()) => tracing::info!(image = record.name, limit, "removed a replica"),
        Err(why) => tracing::warn!(image = record.name, %why, "cannot remove a replica"),
    }
    removed.is_ok()
}

/// Applies the limits once, at `unix_ms`, milliseconds since 1970.
pub fn sweep(registry: &Registry, limits: &Retention, pools: &[Pool], unix_ms: u64) {
    let all = removable(registry);
    let known: Vec<Known> = all.iter().map(|(known, _)| *known).collect();
    for (at, limit) in outdated(&known, limits, unix_ms) {
        remove(registry, &all[at].1, limit);
    }
    let Some(least) = limits.min_free else { return };
    for pool in pools {
        for (_, entry) in removable(registry) {
            let free = rustix::fs::statvfs(&pool.path).map(|stat| stat.f_bavail * stat.f_frsize);
            if free.is_err() || free.is_ok_and(|free| free >= least.0) {
                break;
            }
            if entry.record().current_path().is_ok_and(|path| pool.contains(&path)) {
                remove(registry, &entry, "replicas.min_free");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::ImageRecord;
    use crate::registry::surroundings::tests::Plain;
    use crate::store::Store;
    use dray_types::Epoch;

    const HOUR: u64 = 3_600_000;

    /// A host with the replica of an image that left it, and of which no migration is open.
    fn with_replica(dir: &std::path::Path) -> (Arc<Registry>, Arc<Entry>) {
        let registry = Registry::load(Store::open(dir).unwrap(), Arc::new(Plain)).unwrap();
        let path = dir.join("disk");
        std::fs::write(&path, [0; 8192]).unwrap();
        let record = ImageRecord::owned("disk".into(), ImageId(7), path, 8192);
        let file = registry.open_file(&record).unwrap();
        let entry = registry.add(record, file).unwrap();
        registry.update(&entry, |record| record.migration = Some(MigrationId(5))).unwrap();
        entry.disk.park(entry.disk.quiesce(Duration::ZERO).unwrap());
        registry.retire(&entry, Epoch(2), 0).unwrap();
        registry.update(&entry, |record| record.migration = None).unwrap();
        (registry, entry)
    }

    #[test]
    fn no_limit_removes_what_may_be_the_only_copy() {
        let limits = Retention { keep: Some(0), ..Retention::default() };
        for stays in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let (registry, entry) = with_replica(dir.path());
            let keep = |record: &mut ImageRecord| {
                record.replica.iter_mut().for_each(|note| note.stays = stays);
            };
            registry.update(&entry, keep).unwrap();
            drop((entry, registry));
            let store = Store::open(dir.path()).unwrap();
            let registry = Registry::load(store, Arc::new(Plain)).unwrap();
            sweep(&registry, &limits, &[], HOUR);
            assert_eq!(registry.get("disk").is_some(), stays);
        }
    }

    fn known(image: u128, hours: u64) -> Known {
        Known { image: ImageId(image), since_unix_ms: hours * HOUR }
    }

    #[test]
    fn the_newest_of_each_image_stay() {
        let all = [known(1, 3), known(1, 9), known(2, 1), known(1, 5)];
        let limits = Retention { keep: Some(2), ..Retention::default() };
        let gone = |limits: &Retention, now| -> Vec<usize> {
            let mut gone: Vec<_> = outdated(&all, limits, now).iter().map(|(at, _)| *at).collect();
            gone.sort_unstable();
            gone
        };
        assert_eq!(gone(&limits, 10 * HOUR), [0]);
        let limits = Retention { keep: Some(0), ..Retention::default() };
        assert_eq!(gone(&limits, 10 * HOUR), [0, 1, 2, 3]);
        let age = Some(Duration::from_secs(5 * 3600));
        let limits = Retention { max_age: age, ..Retention::default() };
        assert_eq!(gone(&limits, 10 * HOUR), [0, 2]);
        let limits = Retention { max_age: age, keep: Some(1), ..Retention::default() };
        assert_eq!(gone(&limits, 10 * HOUR), [0, 2, 3]);
        assert!(gone(&Retention::default(), 1000 * HOUR).is_empty());
        assert_eq!(gone(&limits, 0), [0, 3], "a clock that went back makes nothing old");
    }
}
