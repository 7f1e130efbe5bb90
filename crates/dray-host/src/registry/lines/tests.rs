//! What an open migration learns of an image that was changed while no agent ran.

use super::*;
use crate::registry::surroundings::tests::Plain;
use dray_image::{INTENT_REGION_BYTES, IntentLog};
use dray_types::{BLOCK_SIZE, BlockSet, Epoch, ImageId, MigrationId};
use dray_wire::ImageOffer;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const LEN: u64 = 2 * INTENT_REGION_BYTES;
const WHOLE: u64 = LEN / BLOCK_SIZE;
const AWAY: MigrationId = MigrationId(5);
const NAMES: [&str; 2] = ["one", "two"];

/// A host with two images that a migration takes away.
struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let host = Self { dir: tempfile::tempdir().unwrap() };
        let registry = host.start();
        let images: Vec<_> =
            (0..).zip(NAMES).map(|(ix, name)| host.add(&registry, ix, name)).collect();
        let intent = SourceIntent {
            migration: AWAY,
            peer: "hostb".into(),
            images,
            owner: None,
            vm: None,
            options: None,
            epoch: Epoch(1),
            started_unix_ms: 0,
            adopted: Vec::new(),
        };
        let folder = Folder::create(&host.store(), AWAY).unwrap();
        folder.file(SOURCE_INTENT).put(&intent).unwrap();
        drop(Intents::open(&host.list(), &[LEN; 2], true));
        host
    }

    fn add(&self, registry: &Registry, ix: u128, name: &str) -> SourceImage {
        let path = self.file(name);
        std::fs::File::create(&path).unwrap().set_len(LEN).unwrap();
        let id = ImageId(ix);
        let mut record = ImageRecord::owned(name.into(), id, path.clone(), LEN);
        record.migration = Some(AWAY);
        registry.add(record.clone(), registry.open_file(&record).unwrap()).unwrap();
        let offer = ImageOffer { id, name: name.into(), len: LEN, read_only: false };
        SourceImage::new(name.into(), offer, path, None)
    }

    fn store(&self) -> Store {
        Store::open(&self.dir.path().join("state")).unwrap()
    }

    fn start(&self) -> Arc<Registry> {
        Registry::load(self.store(), Arc::new(Plain)).unwrap()
    }

    fn list(&self) -> StatePath {
        Folder::of(&self.store(), AWAY).file(SOURCE_INTENTS)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Blocks that the migration does not trust after a start, per image.
    fn suspects(&self) -> Vec<u64> {
        let list = Intents::open(&self.list(), &[LEN; 2], false);
        list.inherited_regions().iter().map(BlockSet::len).collect()
    }
}

fn write_to(path: &Path) {
    // The file system's clock is coarse.
    std::thread::sleep(Duration::from_millis(20));
    let file = std::fs::File::options().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"somebody else's", LEN - 4096).unwrap();
}

/// What another program does to an image's file.
type Change = fn(&Path);

fn replace(path: &Path) {
    let new = path.with_extension("new");
    std::fs::copy(path, &new).unwrap();
    std::fs::rename(new, path).unwrap();
}

/// The file system may give the new file the number of the old one, as ext4 does.
fn make_again(path: &Path) {
    let held = std::fs::read(path).unwrap();
    std::fs::remove_file(path).unwrap();
    std::fs::write(path, held).unwrap();
}

#[test]
fn an_image_that_was_changed_while_no_agent_ran_is_sent_again() {
    let changes: [(&str, bool, Change, u64); 6] = [
        ("stopped, written to", true, write_to, WHOLE),
        ("stopped, replaced", true, replace, WHOLE),
        ("killed, replaced", false, replace, WHOLE),
        ("killed, made again", false, make_again, WHOLE),
        ("stopped, as it was", true, |_| (), 0),
        ("killed, as it was", false, |_| (), 0),
    ];
    for (what, orderly, change, suspect) in changes {
        let host = Host::new();
        // An agent that has it as it is now, and ends.
        let registry = host.start();
        if orderly {
            registry.stop_lines(Duration::from_secs(5));
        }
        drop(registry);
        change(&host.file(NAMES[1]));
        drop(host.start());
        assert_eq!(host.suspects(), [0, suspect], "{what}");
        // The next agent finds a line that is as it should be, and the migration has not sent it by then.
        let registry = host.start();
        assert_eq!(host.suspects(), [0, suspect], "{what}, started once more");
        registry.stop_lines(Duration::from_secs(5));
        drop(registry);
        drop(host.start());
        assert_eq!(host.suspects(), [0, suspect], "{what}, started a third time");
    }
}

/// Without its line nobody knows which file it was.
#[test]
fn an_image_whose_line_is_lost_is_sent_again() {
    let host = Host::new();
    line_path(&host.store(), NAMES[0]).remove().unwrap();
    drop(host.start());
    assert_eq!(host.suspects(), [WHOLE, 0]);
}

#[test]
fn what_is_open_already_stays_so() {
    let host = Host::new();
    let list = Intents::open(&host.list(), &[LEN; 2], false);
    crate::folder::intents::IntentFile::new(list, 0).open_region(1).unwrap();
    replace(&host.file(NAMES[1]));
    drop(host.start());
    assert_eq!(host.suspects(), [WHOLE / 2, WHOLE]);
}

/// The migration cannot be brought back now; it may be later.
#[test]
fn a_migration_whose_intent_cannot_be_read_trusts_nothing() {
    let host = Host::new();
    let intent = Folder::of(&host.store(), AWAY).file(SOURCE_INTENT);
    std::fs::write(&intent, "x").unwrap();
    replace(&host.file(NAMES[1]));
    drop(host.start());
    assert_eq!(host.suspects(), [WHOLE, WHOLE]);
}

/// A new line would hide the change.
#[test]
fn an_image_stays_closed_as_long_as_its_migration_cannot_learn_of_a_change() {
    let host = Host::new();
    replace(&host.file(NAMES[1]));
    let list = host.list();
    list.remove().unwrap();
    std::fs::create_dir(&list).unwrap();
    let registry = host.start();
    assert!(registry.get(NAMES[0]).is_some() && registry.get(NAMES[1]).is_none());
    let why = registry.closed(NAMES[1]).unwrap().reason.why;
    assert!(why.contains("sent again"), "{why}");
    std::fs::remove_dir(&list).unwrap();
    registry.open_absent();
    assert!(registry.get(NAMES[1]).is_some());
    assert_eq!(host.suspects(), [WHOLE, WHOLE]);
}
