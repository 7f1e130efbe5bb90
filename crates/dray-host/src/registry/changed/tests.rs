//! What becomes of a copy that another program changes while its source's agent is off.

use super::*;
use crate::folder::log::{Folder, Log, SOURCE_JOURNAL};
use crate::registry::surroundings::tests::Plain;
use crate::registry::{Registry, Surroundings};
use crate::store::Store;
use dray_engine::SourceRecord;
use dray_image::Image;
use dray_types::{Attempt, BLOCK_SIZE, Epoch, ImageId, MigrationId};
use dray_wire::{HandedOver, MapHash};
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const LEN: u64 = 16 * BLOCK_SIZE;
const NAME: &str = "disk";
const AWAY: MigrationId = MigrationId(5);

/// A host that has handed its image over; the target may lack any of it.
struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    fn new(growable: bool) -> Self {
        let host = Self::kept_as(growable);
        let registry = host.start();
        let entry = registry.get(NAME).unwrap();
        entry.disk.park(entry.disk.quiesce(Duration::ZERO).unwrap());
        registry.retire(&entry, Epoch(2), 0).unwrap();
        host
    }

    /// It is about to.
    fn kept() -> Self {
        Self::kept_as(false)
    }

    fn kept_as(growable: bool) -> Self {
        let host = Self { dir: tempfile::tempdir().unwrap() };
        let registry = host.start();
        let path = host.dir.path().join(NAME);
        let file = File::create(&path).unwrap();
        file.write_all_at(&[3; 4 * BLOCK_SIZE as usize], 0).unwrap();
        file.set_len(if growable { LEN / 2 } else { LEN }).unwrap();
        let record = ImageRecord {
            growable,
            migration: Some(AWAY),
            ..ImageRecord::owned(NAME.into(), ImageId(7), path, LEN)
        };
        let entry = registry.add(record.clone(), registry.open_file(&record).unwrap()).unwrap();
        entry.disk.write_at(&[4; 4096], 3 * BLOCK_SIZE, false).unwrap();
        host
    }

    fn start(&self) -> Arc<Registry> {
        let store = Store::open(&self.dir.path().join("state")).unwrap();
        Registry::load(store, Arc::new(Plain) as Arc<dyn Surroundings>).unwrap()
    }

    fn copy(&self) -> PathBuf {
        self.dir.path().join(".disk.dray-replica-2")
    }

    /// Why the image is closed after a start of the agent, other than because of its migration.
    fn refused(&self) -> Option<Reason> {
        let registry = self.start();
        let closed = registry.closed(NAME).filter(|_| registry.get(NAME).is_none());
        closed.map(|closed| closed.reason)
    }
}

fn open(path: &Path) -> File {
    // The file system's clock is coarse.
    std::thread::sleep(Duration::from_millis(20));
    File::options().write(true).open(path).unwrap()
}

/// What another program does to a copy.
type Change = fn(&Path);

#[test]
fn a_copy_that_was_written_to_is_not_what_was_handed_over() {
    let changes: [(&str, Change); 4] = [
        ("written to", |path| open(path).write_all_at(&[9; 512], 8192).unwrap()),
        ("cut off and made as long as before", |path| {
            let file = open(path);
            let len = file.metadata().unwrap().len();
            file.set_len(512).unwrap();
            file.set_len(len).unwrap();
        }),
        ("made longer", |path| open(path).set_len(2 * LEN).unwrap()),
        ("made again", |path| {
            let held = std::fs::read(path).unwrap();
            std::fs::remove_file(path).unwrap();
            std::fs::write(path, held).unwrap();
        }),
    ];
    for ((what, change), growable) in changes.into_iter().flat_map(|c| [(c, false), (c, true)]) {
        let host = Host::new(growable);
        change(&host.copy());
        let Reason { why, hint, .. } = host.refused().unwrap_or_else(|| panic!("{what}"));
        let is_another = what == "made again";
        assert!(why.contains(if is_another { "another file" } else { "was changed" }), "{why}");
        assert!(is_another || hint.contains("dray claim disk"), "{hint}");
    }
}

#[test]
fn a_copy_that_nobody_has_written_to_is_opened_at_each_start() {
    for growable in [false, true] {
        let host = Host::new(growable);
        for _ in 0..2 {
            assert_eq!(host.refused(), None);
        }
        std::fs::set_permissions(host.copy(), Permissions::from_mode(0o400)).unwrap();
        assert_eq!(host.refused(), None, "its mode is not what is in it");
        // An operator has given it its name back.
        std::fs::rename(host.copy(), host.dir.path().join(NAME)).unwrap();
        assert_eq!(host.refused(), None);
    }
}

/// Who knows that the file holds what it held gives it its time back.
#[test]
fn a_copy_is_opened_again_when_it_is_as_it_was() {
    let host = Host::new(false);
    let then = std::fs::metadata(host.copy()).unwrap().modified().unwrap();
    let file = open(&host.copy());
    file.write_all_at(&[4; 512], 3 * BLOCK_SIZE).unwrap();
    let registry = host.start();
    let hint = registry.closed(NAME).unwrap().reason.hint;
    let (_, command) = hint.split_once("touch -d @").unwrap();
    let since = then.duration_since(std::time::UNIX_EPOCH).unwrap();
    let time = format!("{}.{:09}", since.as_secs(), since.subsec_nanos());
    assert_eq!(command, format!("{time} {}`", host.copy().display()));
    assert!(registry.open_absent().is_empty());
    file.set_times(std::fs::FileTimes::new().set_modified(then)).unwrap();
    assert_eq!(registry.open_absent(), [NAME]);
}

/// The storage was put back to a state from before the handover: the time of change, which was durable then, is earlier.
#[test]
fn a_copy_that_is_older_than_what_was_handed_over_is_not_read_from() {
    for (later, is_refused) in [(0, false), (1, true)] {
        let host = Host::new(false);
        let registry = host.start();
        let entry = registry.get(NAME).unwrap();
        let (seconds, nanos) = registry.time_of(&entry).unwrap();
        registry.keep_time(&entry, Some((seconds + later, nanos)));
        drop((entry, registry));
        let refused = host.refused();
        assert_eq!(refused.is_some(), is_refused, "{refused:?}");
        assert!(refused.is_none_or(|reason| reason.why.contains("put back")));
    }
}

/// One whose migration is over is found out about when a migration back asks for it.
#[test]
fn a_copy_from_which_nobody_reads_is_opened_as_it_is() {
    let host = Host::new(false);
    let registry = host.start();
    let entry = registry.get(NAME).unwrap();
    registry.update(&entry, |record| record.migration = None).unwrap();
    drop((entry, registry));
    open(&host.copy()).write_all_at(&[9; 512], 0).unwrap();
    assert_eq!(host.refused(), None);
}

/// The agent died after the journal said that the image was handed over, and before its file was renamed.
#[test]
fn a_file_that_takes_the_place_of_what_was_just_handed_over_is_not_taken_for_it() {
    let host = Host::kept();
    let store = Store::open(&host.dir.path().join("state")).unwrap();
    let folder = Folder::create(&store, AWAY).unwrap();
    assert_eq!(host.refused(), None);
    let agreed = HandedOver { epoch: Epoch(2), attempt: Attempt(1), map_hash: MapHash::of(&[]) };
    let (mut log, _) = Log::open(&folder.file(SOURCE_JOURNAL)).unwrap();
    log.append(&[SourceRecord::HandedOver(agreed)]).unwrap();
    drop(log);
    assert_eq!(host.refused(), None);
    let path = host.dir.path().join(NAME);
    let held = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, held).unwrap();
    assert!(host.refused().is_some_and(|reason| reason.why.contains("another file")));
}

/// It is tried every two seconds as long as the image stays closed.
#[test]
fn a_copy_that_is_distrusted_already_is_not_recorded_again() {
    let host = Host::new(false);
    let registry = host.start();
    let record = registry.get(NAME).unwrap().record();
    let place = crate::record::NameKind::Partial;
    let record = ImageRecord { state: CopyState::Incoming, place, ..record };
    let record = registry.distrust_return(record).unwrap();
    assert!(record.replica.as_ref().unwrap().unproved);
    let at = registry.path_of(NAME);
    at.remove().unwrap();
    assert_eq!(registry.distrust_return(record.clone()).unwrap(), record);
    assert!(!at.exists().unwrap(), "it was written again");
}
