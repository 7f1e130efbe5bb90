//! What becomes of a migration away that cannot be brought back, as a file of it is lost, and that an operator lets
//! go, wherever the agent dies meanwhile.

use super::*;
use crate::folder::intent::tests::options_of_a_test;
use crate::folder::intent::{SourceImage, SourceIntent, SourceVm};
use crate::migration::fate;
use crate::migration::revive::{Launch, Revival};
use crate::process::QemuProcess;
use crate::record::{CopyState, ImageRecord};
use crate::registry::Process;
use crate::registry::surroundings::tests::Plain;
use crate::store::Store;
use dray_engine::SourceRecord;
use dray_types::{Attempt, BLOCK_SIZE, Epoch};
use dray_wire::{HandedOver, ImageOffer, MapHash};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const LEN: u64 = 16 * BLOCK_SIZE;
const AWAY: MigrationId = MigrationId(7);
/// The copy of the first is lost, the other is there.
const IMAGES: [(&str, ImageId); 2] = [("disk", ImageId(3)), ("data", ImageId(4))];
/// The epoch in which their target owns them.
const OVER: Epoch = Epoch(2);
/// The steps of letting a migration go.
const STEPS: usize = 3;

/// What another program does to a copy.
type Damage = fn(PathBuf);

/// All of that, and whether what lies there then is dray's own file.
const DAMAGES: [(Damage, bool); 3] = [(remove, false), (put_another_there, false), (edit, true)];

fn remove(path: PathBuf) {
    std::fs::remove_file(path).unwrap();
}

fn put_another_there(path: PathBuf) {
    let other = path.with_extension("other");
    std::fs::copy(&path, &other).unwrap();
    std::fs::rename(other, path).unwrap();
}

fn edit(path: PathBuf) {
    // The file system's clock is coarse.
    std::thread::sleep(Duration::from_millis(20));
    std::fs::write(path, [9; LEN as usize]).unwrap();
}

/// A loop starts when every image is there.
struct Starts<'a>(&'a Registry);

impl Launch for Starts<'_> {
    type Source = ();

    fn source(&self, intent: SourceIntent) -> io::Result<()> {
        match intent.images.iter().all(|image| self.0.get(&image.name).is_some()) {
            true => Ok(()),
            false => Err(io::Error::other("an image of it is not there")),
        }
    }

    fn target(&self, _intent: TargetIntent) -> io::Result<()> {
        Ok(())
    }

    fn seeds(&self) {}
}

/// An agent that has just started.
struct Agent {
    store: Store,
    registry: Arc<Registry>,
    unrevived: Unrevived,
    /// How many migrations go on.
    revived: usize,
}

/// A host that has handed its images over.
struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    fn new(handed_over: bool) -> Self {
        let host = Self { dir: tempfile::tempdir().unwrap() };
        let agent = host.start();
        let images =
            IMAGES.map(|(name, id)| host.hand_over(&agent.registry, name, id, handed_over));
        let intent = SourceIntent {
            migration: AWAY,
            peer: "hostb".into(),
            images: images.to_vec(),
            owner: None,
            vm: None,
            options: Some(options_of_a_test()),
            epoch: Epoch(1),
            started_unix_ms: 0,
            adopted: Vec::new(),
        };
        let folder = Folder::begin(&agent.store, AWAY, End::Source, &intent).unwrap();
        let over = HandedOver { epoch: OVER, attempt: Attempt(1), map_hash: MapHash::of(&[]) };
        let mut records = vec![SourceRecord::Begun];
        records.extend(handed_over.then_some(SourceRecord::HandedOver(over)));
        Log::open(&folder.file(SOURCE_JOURNAL)).unwrap().0.append(&records).unwrap();
        host
    }

    fn hand_over(&self, registry: &Registry, name: &str, id: ImageId, over: bool) -> SourceImage {
        let path = self.dir.path().join(name);
        std::fs::write(&path, [3; LEN as usize]).unwrap();
        let record = ImageRecord {
            migration: Some(AWAY),
            ..ImageRecord::owned(name.into(), id, path.clone(), LEN)
        };
        let entry = registry.add(record.clone(), registry.open_file(&record).unwrap()).unwrap();
        entry.disk.park_now();
        if over {
            registry.retire(&entry, OVER, 0).unwrap();
        }
        let offer = ImageOffer { id, name: name.into(), len: LEN, read_only: false };
        SourceImage::new(name.into(), offer, path, None)
    }

    /// Its agent starts.
    fn start(&self) -> Agent {
        let store = Store::open(&self.dir.path().join("state")).unwrap();
        let registry = Registry::load(store.clone(), Arc::new(Plain)).unwrap();
        let unrevived = Unrevived::default();
        let launch = Starts(&registry);
        let revival =
            Revival { store: &store, registry: &registry, unrevived: &unrevived, launch: &launch };
        let revived = revival.begin().len();
        Agent { store, registry, unrevived, revived }
    }

    fn copy(&self) -> PathBuf {
        self.dir.path().join(".disk.dray-replica-2")
    }

    /// The agent dies after so many steps of letting the migration go.
    fn dies_after(&self, steps: usize) {
        let agent = self.start();
        let folder = Folder::of(&agent.store, AWAY);
        let names = named_away(&folder, &[]).unwrap();
        let left = Left { migration: AWAY, names, epoch: OVER, unix_ms: 1 };
        let all: [&dyn Fn() -> io::Result<()>; STEPS] = [
            &|| agent.registry.retire_left(&left),
            &|| folder.remove_intents(End::Source),
            &|| agent.registry.let_go_left(&left),
        ];
        all.iter().take(steps).for_each(|step| step().unwrap());
    }
}

/// The VM's QEMU is not forgotten with a migration that cannot be brought back.
#[test]
fn the_qemu_of_a_vm_that_is_let_go_is_of_the_past() {
    let host = Host::new(true);
    let own = i32::try_from(std::process::id()).unwrap();
    let qemu = QemuProcess::find(Path::new("/qmp"), own).unwrap();
    remove(host.copy());
    let agent = host.start();
    let file = Folder::of(&agent.store, AWAY).file(SOURCE_INTENT);
    let mut intent: SourceIntent = file.get().unwrap();
    let (vm, facts) = (Some(qemu.clone()), None);
    intent.vm =
        Some(SourceVm { qmp: "/qmp".into(), name: None, qemu: vm, target_qmp: None, facts });
    file.put(&intent).unwrap();
    agent
        .registry
        .attached(IMAGES[1].0, Process { pid: std::process::id(), started: qemu.started });
    assert!(!agent.registry.has_left(&qemu));
    assert_eq!(agent.let_go(), Some(LetGo::Gone));
    assert!(agent.registry.has_left(&qemu));
}

impl Agent {
    fn let_go(&self) -> Option<LetGo> {
        self.unrevived.let_go(&self.registry, AWAY, 1).unwrap()
    }

    fn fate(&self) -> Fate {
        fate::of(&self.store, &self.registry, "hostb", AWAY, &IMAGES.map(|(_, id)| id)).unwrap()
    }

    /// Nothing of the migration is left, and its images are copies that nobody waits for.
    fn is_free(&self) {
        assert!(!Folder::of(&self.store, AWAY).is_there().unwrap());
        assert_eq!((self.unrevived.away(), self.revived), (Vec::new(), 0));
        let records = self.registry.all_records();
        assert_eq!(records.len(), IMAGES.len());
        for record in records {
            assert!(record.has_left() && record.epoch == OVER, "{record:?}");
            assert!(record.replica.unwrap().stays, "a limit may remove it");
        }
        assert_eq!(self.fate(), Fate::Unknown { owned: false }, "no promise is void for it");
    }
}

#[test]
fn what_cannot_be_brought_back_is_let_go_wherever_the_agent_dies() {
    for ((damage, _), steps) in DAMAGES.iter().flat_map(|it| (0..=STEPS).map(move |n| (it, n))) {
        let host = Host::new(true);
        damage(host.copy());
        host.dies_after(steps);
        let agent = host.start();
        // Nothing is sent of what is not the copy any more.
        assert_eq!(agent.revived, 0, "{steps}");
        if steps < STEPS {
            assert_eq!(agent.fate(), Fate::HandedOver);
            assert_eq!(agent.unrevived.away(), [AWAY]);
            let hint = agent.registry.closed("data").unwrap().reason.hint;
            let cancel = format!("`dray cancel {AWAY}` here");
            assert!(hint.contains(&cancel) && hint.contains("`dray claim data` at"), "{hint}");
            assert_eq!(agent.let_go(), Some(LetGo::Gone));
        }
        agent.is_free();
        assert_eq!(agent.let_go(), None);
        assert!(agent.registry.closed("data").is_none());
        host.start().is_free();
    }
}

/// The hint of a copy whose own file is not as it was, and what it says after that.
#[test]
fn a_copy_that_is_lost_names_the_way_out_and_can_be_removed_after_it() {
    for ((damage, own), deletes) in DAMAGES.iter().flat_map(|it| [(it, true), (it, false)]) {
        let host = Host::new(true);
        damage(host.copy());
        let was_there = host.copy().exists();
        let agent = host.start();
        let registry = &agent.registry;
        let reason = registry.closed("disk").unwrap().reason;
        for said in ["`dray claim disk` at hostb", &format!("`dray cancel {AWAY}` here")] {
            assert!(reason.hint.contains(said), "{reason:?}");
        }
        let path = host.copy().display().to_string();
        assert!(reason.why.contains(&path), "{reason:?}");
        assert!(registry.forget_unfit("disk", deletes).unwrap().is_none(), "it takes part in it");
        agent.let_go().unwrap();
        assert!(registry.forget_unfit("disk", deletes).unwrap().is_some());
        assert!(registry.closed("disk").is_none());
        let stays = was_there && !(deletes && *own);
        assert_eq!(host.copy().exists(), stays, "what is not dray's stays");
        assert_eq!(host.start().registry.all_records().len(), 1);
    }
}

/// When it is open again by then.
#[test]
fn another_file_in_a_copy_s_place_is_not_deleted() {
    let host = Host::new(true);
    put_another_there(host.copy());
    let agent = host.start();
    agent.let_go().unwrap();
    agent.registry.open_absent();
    agent.registry.remove_replica(&agent.registry.get("disk").unwrap()).unwrap();
    assert!(host.copy().exists() && agent.registry.get("disk").is_none());
}

/// The agent had died before the record said that the image was handed over.
#[test]
fn an_image_that_was_handed_over_is_no_owner_s_after_that() {
    for is_there in [false, true] {
        let host = Host::new(true);
        let agent = host.start();
        let entry = agent.registry.get("disk").unwrap();
        agent
            .registry
            .update(&entry, |record| {
                record.state = CopyState::Owner;
                record.place = crate::record::NameKind::Named;
                (record.epoch, record.replica) = (Epoch(1), None);
            })
            .unwrap();
        drop((entry, agent));
        // The other one keeps it from being brought back.
        let lost = if is_there { ".data.dray-replica-2" } else { ".disk.dray-replica-2" };
        remove(host.dir.path().join(lost));
        let agent = host.start();
        assert_eq!(agent.let_go(), Some(LetGo::Gone));
        for agent in [agent, host.start()] {
            let mut records = agent.registry.all_records().into_iter();
            assert!(records.all(|record| record.has_left() && record.epoch == OVER));
            assert_eq!(agent.registry.get("disk").is_some(), is_there);
        }
    }
}

#[test]
fn what_was_not_handed_over_is_not_let_go() {
    let host = Host::new(false);
    remove(host.dir.path().join("data"));
    for _ in 0..2 {
        let agent = host.start();
        let Some(LetGo::Kept { hint, .. }) = agent.let_go() else { panic!("it was let go") };
        assert!(hint.contains("`dray claim d"), "{hint}");
        assert_eq!(agent.unrevived.away(), [AWAY]);
    }
}
