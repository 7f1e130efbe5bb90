//! Files that another program changes between two agents, and faults in the agents that follow.

use super::*;
use crate::folder::intent::{Settings, TargetImageIntent, TargetIntent};
use crate::folder::log::{Folder, Log, SOURCE_JOURNAL, TARGET_INTENT, TARGET_JOURNAL};
use crate::folder::standing;
use crate::lineage::{ReplicaNote, stamp_of};
use crate::record::{CopyState, ImageRecord};
use crate::registry::Registry;
use crate::registry::surroundings::tests::Plain;
use crate::store::Store;
use dray_engine::lineage::Lineage;
use dray_engine::{SourceRecord, TargetRecord};
use dray_files::files::Files;
use dray_files::files::sim::{Fault, Mount, SimDisk};
use dray_image::StateImages;
use dray_types::{Attempt, BLOCK_SIZE, BlockSet, Epoch, GenerationId, ImageId, MigrationId};
use dray_wire::{HandedOver, ImageHandover, ImageOffer, MapHash};
use std::path::{Path, PathBuf};

const BEAT: &str = "/state/disk.beat";
const NAME: &str = "disk";
const PARTIAL: &str = "/pool/.disk.dray-partial";
const LEN: u64 = 4 * BLOCK_SIZE;
const MIGRATION: MigrationId = MigrationId(5);

fn disk() -> Arc<SimDisk> {
    SimDisk::new(1, &["/", "/state", "/pool"].map(Path::new))
}

fn among(disk: &Arc<SimDisk>, path: &str) -> StatePath {
    StatePath::new(Arc::new(disk.files()) as Arc<dyn Files>, path)
}

fn edit(disk: &Arc<SimDisk>, path: &str) {
    among(disk, path).open().unwrap().write_at(&[9; 16], 0).unwrap();
}

#[test]
fn what_is_later_than_the_last_touch_is_another_programs() {
    for (since, cut, is_ours) in
        [(0, false, true), (LATE - 1, false, true), (LATE + 1, false, false)]
            .into_iter()
            .chain([(LATE + 1, true, true), (LOST + 1, true, false)])
    {
        let disk = disk();
        let (beat, file) = (among(&disk, BEAT), among(&disk, "/pool/disk"));
        file.replace(&[1; 16]).unwrap();
        let heartbeats = Heartbeats::default();
        let held = heartbeats.make(&beat, &[]).unwrap();
        disk.pass(100);
        heartbeats.beat();
        drop(held);
        disk.pass(since);
        edit(&disk, "/pool/disk");
        disk.kill();
        if cut {
            disk.cut();
        }
        let (beat, file) = (among(&disk, BEAT), among(&disk, "/pool/disk"));
        let left = is_left(&beat, &file.look().unwrap()).unwrap();
        assert_eq!(left, is_ours, "{since} s after it, power cut: {cut}");
    }
}

#[test]
fn a_file_that_this_agent_does_not_have_open_is_not_its_own() {
    let disk = disk();
    let (beat, file) = (among(&disk, BEAT), among(&disk, "/pool/disk"));
    file.replace(&[1; 16]).unwrap();
    let heartbeats = Heartbeats::default();
    drop(heartbeats.make(&beat, &[]).unwrap());
    for _ in 0..10 {
        disk.pass(1);
        heartbeats.beat();
    }
    edit(&disk, "/pool/disk");
    assert!(!is_left(&beat, &file.look().unwrap()).unwrap());
    drop(heartbeats.begin(&beat, &[]).unwrap());
    assert!(is_left(&beat, &file.look().unwrap()).unwrap(), "it was looked at");
    beat.remove().unwrap();
    assert!(!is_left(&beat, &file.look().unwrap()).unwrap(), "nobody can say so");
    beat.replace(b"DRAYBEA1, and what is nothing like it, of about the length").unwrap();
    assert!(!is_left(&beat, &file.look().unwrap()).unwrap(), "nor can this");
}

#[test]
fn a_clock_that_was_set_back_makes_nothing_older() {
    let dir = tempfile::tempdir().unwrap();
    let at = StatePath::real(dir.path().join("beat"));
    let ahead = std::time::SystemTime::now() + Duration::from_secs(1000);
    let heartbeats = Heartbeats::default();
    drop(heartbeats.make(&at, &[]).unwrap());
    let file = std::fs::File::options().write(true).open(at.path()).unwrap();
    file.set_times(std::fs::FileTimes::new().set_modified(ahead)).unwrap();
    let before = at.look().unwrap().changed;
    let _held = heartbeats.begin(&at, &[]).unwrap();
    assert_eq!(at.look().unwrap().changed, before);
    heartbeats.beat();
    assert_eq!(at.look().unwrap().changed, before);
}

/// A target whose agent has recorded that it received something, and perhaps its promise.
fn begin_target(folder: &Folder, offer: &ImageOffer, promised: bool) {
    let image = TargetImageIntent {
        offer: offer.clone(),
        path: PathBuf::from("/pool/disk"),
        zeroed: true,
        replica: None,
        refused: None,
        in_place: None,
        qcow2: false,
    };
    let intent = TargetIntent {
        migration: MIGRATION,
        peer: "a".to_owned(),
        images: vec![image],
        settings: Settings::default(),
        guest: None,
        qemu: None,
        started_unix_ms: 7,
    };
    folder.file(TARGET_INTENT).put(&intent).unwrap();
    let images = vec![ImageHandover { len: LEN, missing: BlockSet::new() }];
    let (attempt, map_hash, epoch) = (Attempt(1), MapHash::of(&images), Epoch(1));
    let mut records = vec![TargetRecord::Touched];
    let promise = TargetRecord::Prepared { attempt, map_hash, images, epoch };
    records.extend(promised.then_some(promise));
    Log::open(&folder.file(TARGET_JOURNAL)).unwrap().0.append(&records).unwrap();
}

/// What an image is to this host.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Part {
    /// A migration brings it.
    Coming,
    /// The same, and this host has promised to serve it.
    Promised,
    /// This host serves it, and blocks of it are still to come.
    Filling,
    /// A migration brings it back into the copy that it had left behind.
    Returning,
    /// A migration was to do so, and the agent died before its intent was durable.
    Unbegun,
    /// A migration has just taken it away, and its file has still its name.
    Leaving,
    /// It is nobody else's, and its line knows a generation that is elsewhere.
    Owned,
}

/// A host that has one image.
struct Host {
    disk: Arc<SimDisk>,
    part: Part,
}

impl Host {
    /// An agent that has run for a while with the image, and was killed.
    fn new(part: Part) -> Self {
        let host = Self { disk: disk(), part };
        let registry = host.start().unwrap();
        host.add(&registry);
        host.disk.pass(100);
        registry.heartbeats.beat();
        host.disk.kill();
        host.disk.pass(100);
        host
    }

    fn add(&self, registry: &Registry) {
        let path = PathBuf::from("/pool/disk");
        let folder = || Folder::create(&self.store(), MIGRATION).unwrap();
        let owned = ImageRecord::owned(NAME.into(), ImageId(7), path.clone(), LEN);
        if self.comes() {
            return self.bring(registry);
        }
        among(&self.disk, "/pool/disk").replace(&[1; LEN as usize]).unwrap();
        if self.part == Part::Owned {
            let line = Lineage::new(GenerationId(1));
            let line = Lineage::after(line.closed(BlockSet::new(), "a", 0), GenerationId(2));
            let file = registry.open_file(&owned).unwrap();
            let entry = registry.add_again(owned, file, (line.unwrap(), BlockSet::new())).unwrap();
            return entry.line().unwrap().settle(&entry.disk, Some(&BlockSet::new())).unwrap();
        }
        let record = ImageRecord { migration: Some(MIGRATION), ..owned };
        registry.add(record.clone(), registry.open_file(&record).unwrap()).unwrap();
        let handed =
            HandedOver { epoch: Epoch(2), attempt: Attempt(1), map_hash: MapHash::of(&[]) };
        let (mut log, _) = Log::open(&folder().file(SOURCE_JOURNAL)).unwrap();
        log.append(&[SourceRecord::HandedOver(handed)]).unwrap();
    }

    fn bring(&self, registry: &Registry) {
        let offer = ImageOffer { id: ImageId(7), name: NAME.into(), len: LEN, read_only: false };
        if self.part != Part::Unbegun {
            begin_target(
                &Folder::create(&self.store(), MIGRATION).unwrap(),
                &offer,
                matches!(self.part, Part::Promised | Part::Filling),
            );
        }
        let coming = ImageRecord::coming(&offer, PathBuf::from("/pool/disk"), MIGRATION);
        if matches!(self.part, Part::Coming | Part::Promised | Part::Filling) {
            let entry = registry.make_partial(coming).unwrap();
            entry.file.write_at(&[1; LEN as usize], 0, true).unwrap();
            if self.part == Part::Filling {
                registry.update(&entry, |record| record.state = CopyState::Owner).unwrap();
            }
            let at = registry.time_of(&entry);
            return registry.keep_time(&entry, at);
        }
        let copy = among(&self.disk, PARTIAL);
        copy.replace(&[1; LEN as usize]).unwrap();
        let replica = Some(ReplicaNote {
            generation: Lineage::new(GenerationId(1)).open(),
            stamp: stamp_of(&copy).unwrap(),
            since_unix_ms: 0,
            stays: false,
            lost: None,
            distrusted: Vec::new(),
            unproved: false,
        });
        let record = ImageRecord { replica, ..coming };
        let file = registry.open_file(&record).unwrap();
        registry.add(record, file).unwrap();
    }

    fn store(&self) -> Store {
        let files: Arc<dyn Files> = Arc::new(self.disk.files());
        let state = StatePath::new(Arc::clone(&files), "/state");
        Store::among(state, Arc::new(StateImages(files))).unwrap()
    }

    fn start(&self) -> io::Result<Arc<Registry>> {
        let files: Arc<dyn Files> = Arc::new(self.disk.files());
        let state = StatePath::new(Arc::clone(&files), "/state");
        Registry::load(Store::among(state, Arc::new(StateImages(files)))?, Arc::new(Plain))
    }

    fn comes(&self) -> bool {
        !matches!(self.part, Part::Leaving | Part::Owned)
    }

    /// Its storage is put back: what was durable when a record named what is in the file is not there any more.
    fn put_back(&self) {
        let touched = among(&self.disk, PARTIAL).look().unwrap().touched;
        let beat = self.store().images().join(format!("{NAME}.beat"));
        let known = decode(&beat.read().unwrap()).unwrap();
        assert_eq!(known.times.kept, touched, "it was kept");
        let kept = (touched.0 + 1, touched.1);
        let last = beat.look().unwrap().changed;
        let file = beat.open().unwrap();
        file.write_at(&encode(&known.id, Times { kept, ..known.times }), 0).unwrap();
        file.touch(last).unwrap();
        // The system has written it down by then: of what it had not, no power cut is told.
        file.sync().unwrap();
    }

    fn edit(&self) {
        edit(&self.disk, if self.comes() { PARTIAL } else { "/pool/disk" });
    }

    /// An agent that meets a fault at this of its calls, runs on for a while if it can, and is killed. Tells whether
    /// it met that.
    fn agent_with(&self, fault: Fault, call: u64) -> bool {
        let met = self.disk.met();
        self.disk.plan(self.disk.calls() + call, fault);
        if let Ok(registry) = self.start() {
            for _ in 0..3 {
                self.disk.pass(10);
                registry.open_absent();
                registry.heartbeats.look();
                registry.heartbeats.beat();
            }
        }
        self.disk.plan_nothing();
        self.disk.kill();
        self.disk.pass(100);
        self.disk.met() > met
    }

    /// How often it is recorded that its file is doubted.
    fn doubts(&self) -> usize {
        let journal = Folder::of(&self.store(), MIGRATION).file(TARGET_JOURNAL);
        let records: Vec<TargetRecord> = standing::read(&journal).unwrap();
        records.iter().filter(|record| matches!(record, TargetRecord::Distrusted { .. })).count()
    }

    /// Whether an agent takes its file for what it left.
    fn trusts(&self) -> bool {
        let registry = self.start().unwrap();
        let entry = registry.get(NAME);
        match self.part {
            Part::Unbegun => entry.is_some_and(|entry| !entry.record().replica.unwrap().unproved),
            Part::Coming | Part::Promised => entry.is_some() && self.doubts() == 0,
            Part::Owned => entry.unwrap().line().unwrap().lineage().has_past(),
            _ => entry.is_some(),
        }
    }
}

const PARTS: [Part; 6] =
    [Part::Coming, Part::Promised, Part::Returning, Part::Unbegun, Part::Leaving, Part::Owned];

#[test]
fn what_was_changed_is_seen_by_every_later_agent_whatever_the_first_one_meets() {
    let mut runs = 0;
    for (part, fault) in PARTS.iter().flat_map(|&part| Fault::ALL.map(|fault| (part, fault))) {
        for call in 1.. {
            let host = Host::new(part);
            host.edit();
            let met = host.agent_with(fault, call);
            for _ in 0..2 {
                assert!(!host.trusts(), "{part:?} {fault:?} at call {call}");
                host.disk.kill();
                host.disk.pass(100);
            }
            runs += 1;
            if !met {
                break;
            }
        }
    }
    assert!(runs > 60, "{runs}");
}

/// Blocks that a record names are not in an older file: they come again, or the image waits.
#[test]
fn a_file_that_was_put_back_is_seen_by_every_later_agent_whatever_the_first_one_meets() {
    let parts = [Part::Coming, Part::Promised, Part::Filling];
    for (part, fault) in parts.iter().flat_map(|&part| Fault::ALL.map(|fault| (part, fault))) {
        for call in 1.. {
            let host = Host::new(part);
            host.put_back();
            let met = host.agent_with(fault, call);
            for _ in 0..2 {
                assert!(!host.trusts(), "{part:?} {fault:?} at call {call}");
                host.disk.kill();
                host.disk.pass(100);
            }
            if !met {
                break;
            }
        }
    }
}

#[test]
fn what_was_not_changed_stays_trusted_whatever_agents_meet() {
    for (part, fault) in PARTS.iter().flat_map(|&part| Fault::ALL.map(|fault| (part, fault))) {
        // A line that cannot be written ends.
        if part == Part::Owned && !fault.ends() {
            continue;
        }
        for call in 1.. {
            let host = Host::new(part);
            let met = host.agent_with(fault, call);
            assert!(host.trusts(), "{part:?} {fault:?} at call {call}");
            if !met {
                break;
            }
        }
    }
}

/// As many restarts as one likes, a state directory without room, and a pool that is not mounted.
#[test]
fn what_was_changed_is_not_forgotten() {
    for (part, full, absent) in PARTS
        .iter()
        .flat_map(|&part| [(part, false, false), (part, true, false), (part, true, true)])
    {
        let host = Host::new(part);
        host.edit();
        host.disk.fill(full);
        let mount = Mount::Away;
        host.disk.mount(Path::new("/pool"), absent.then_some(mount));
        for _ in 0..100 {
            if let Ok(registry) = host.start() {
                registry.open_absent();
                registry.heartbeats.beat();
            }
            host.disk.kill();
            host.disk.pass(100);
        }
        host.disk.fill(false);
        host.disk.mount(Path::new("/pool"), None);
        assert!(!host.trusts(), "{part:?}, full: {full}, absent: {absent}");
    }
}

/// A full state directory does not keep an agent from opening what was not changed, nor the next one.
#[test]
fn without_room_an_image_is_opened_as_ever() {
    for part in PARTS {
        let host = Host::new(part);
        host.disk.fill(true);
        for _ in 0..2 {
            assert!(host.start().unwrap().get(NAME).is_some(), "{part:?}");
            host.disk.kill();
            host.disk.pass(100);
        }
    }
}

/// Nothing of it counts as received, once for all: without a promise the source finds zeros, as it believes, and after
/// one what lies there stays for a claim.
#[test]
fn an_image_that_comes_and_was_changed_is_received_anew() {
    for (part, stays) in [(Part::Coming, false), (Part::Promised, true)] {
        let host = Host::new(part);
        host.edit();
        host.disk.fill(true);
        for _ in 0..3 {
            let opened = host.start().unwrap().get(NAME).is_some();
            assert_eq!(opened, host.doubts() == 1, "{part:?}: not before it is recorded");
            host.disk.kill();
            host.disk.pass(100);
        }
        host.disk.fill(false);
        assert!(host.start().unwrap().get(NAME).is_some(), "{part:?}");
        assert_eq!(host.doubts(), 1, "{part:?}");
        let len = among(&host.disk, PARTIAL).look().unwrap().len;
        assert_eq!(len, if stays { LEN } else { 0 }, "{part:?}");
        host.disk.kill();
        host.disk.pass(100);
        // What is changed after that is seen as well.
        host.edit();
        assert!(host.start().unwrap().get(NAME).is_some(), "{part:?}");
        assert_eq!(among(&host.disk, PARTIAL).look().unwrap().len, len, "{part:?}");
    }
}

#[test]
fn a_file_that_is_older_than_it_was_seen_was_put_back() {
    for (changes_for, is_older) in [(LOST - 5, false), (LOST + 5, true)] {
        let disk = disk();
        let (beat, file) = (among(&disk, BEAT), among(&disk, "/pool/disk"));
        let hidden = among(&disk, PARTIAL);
        hidden.replace(&[1; 16]).unwrap();
        let heartbeats = Heartbeats::default();
        let _held = heartbeats.make(&beat, &[hidden.clone(), file.clone()]).unwrap();
        // It has arrived.
        hidden.rename(&file).unwrap();
        let before = file.look().unwrap();
        disk.pass(changes_for);
        edit(&disk, "/pool/disk");
        heartbeats.look();
        disk.kill();
        let (beat, file) = (among(&disk, BEAT), among(&disk, "/pool/disk"));
        assert!(!is_put_back(&beat, &file.look().unwrap()).unwrap());
        assert_eq!(is_put_back(&beat, &before).unwrap(), is_older, "{changes_for}");
        // Who opens it has drawn the consequence.
        let _held = Heartbeats::default().begin(&beat, std::slice::from_ref(&file)).unwrap();
        assert!(!is_put_back(&beat, &file.look().unwrap()).unwrap());
    }
}

/// A record says what is in the file, and that is durable with its time: no time is too short to tell an older one.
#[test]
fn a_file_that_is_older_than_what_a_record_names_is_told_at_once() {
    let disk = disk();
    let (beat, file) = (among(&disk, BEAT), among(&disk, "/pool/disk"));
    file.replace(&[1; 16]).unwrap();
    let heartbeats = Heartbeats::default();
    let held = heartbeats.make(&beat, std::slice::from_ref(&file)).unwrap();
    let before = file.look().unwrap();
    disk.pass(1);
    edit(&disk, "/pool/disk");
    assert!(!is_put_back(&beat, &before).unwrap(), "no record names what was written");
    held.keep(held.changed().unwrap()).unwrap();
    let kept = file.look().unwrap();
    disk.pass(1);
    edit(&disk, "/pool/disk");
    heartbeats.look();
    drop(held);
    assert!(is_put_back(&beat, &before).unwrap());
    assert!(!is_put_back(&beat, &kept).unwrap(), "what came after the record may be lost");
    assert!(!is_put_back(&beat, &file.look().unwrap()).unwrap());
    // Who opens an older one has drawn the consequence.
    let held = Heartbeats::default().begin(&beat, std::slice::from_ref(&file)).unwrap();
    drop(held);
    assert!(!is_put_back(&beat, &file.look().unwrap()).unwrap());
}

/// Whatever a pool does, the other images go on.
#[test]
fn a_touch_waits_for_no_pool() {
    let disk = disk();
    let (beat, file) = (among(&disk, BEAT), among(&disk, "/pool/disk"));
    file.replace(&[1; 16]).unwrap();
    let heartbeats = Heartbeats::default();
    let _held = heartbeats.make(&beat, std::slice::from_ref(&file)).unwrap();
    let looks = disk.looks();
    heartbeats.beat();
    assert_eq!(disk.looks(), looks);
}

#[test]
fn a_file_that_is_changed_after_the_clock_was_set_back_was_not_put_back() {
    let disk = disk();
    let (beat, file) = (among(&disk, BEAT), among(&disk, "/pool/disk"));
    file.replace(&[1; 16]).unwrap();
    let heartbeats = Heartbeats::default();
    let _held = heartbeats.make(&beat, std::slice::from_ref(&file)).unwrap();
    disk.pass(1000);
    edit(&disk, "/pool/disk");
    heartbeats.look();
    heartbeats.beat();
    let touched = beat.look().unwrap().changed;
    disk.pass(-500);
    edit(&disk, "/pool/disk");
    heartbeats.look();
    assert_eq!(beat.look().unwrap().changed, touched, "no heartbeat becomes older");
    disk.kill();
    let (beat, file) = (among(&disk, BEAT), among(&disk, "/pool/disk"));
    assert!(!is_put_back(&beat, &file.look().unwrap()).unwrap());
}

/// Who closes a file may do so while its storage hangs, and what comes to it then another program does.
#[test]
fn a_file_that_was_closed_is_looked_at_no_more() {
    let disk = disk();
    let (beat, file) = (among(&disk, BEAT), among(&disk, "/pool/disk"));
    file.replace(&[1; 16]).unwrap();
    let heartbeats = Heartbeats::default();
    drop(heartbeats.make(&beat, std::slice::from_ref(&file)).unwrap());
    disk.pass(100);
    edit(&disk, "/pool/disk");
    let before = beat.read().unwrap();
    heartbeats.look();
    assert_eq!(beat.read().unwrap(), before);
    assert!(!is_left(&beat, &file.look().unwrap()).unwrap());
}

/// What nobody could look at may be an older one.
#[test]
fn a_look_that_fails_finds_no_file_as_it_was() {
    let host = Host::new(Part::Owned);
    let registry = host.start().unwrap();
    let record = registry.get(NAME).unwrap().record();
    assert!(!registry.is_put_back(&record));
    let from = host.disk.looks();
    registry.is_put_back(&record);
    let looks = host.disk.looks() - from;
    // The first one is whether there is a file under this name.
    for look in 2..=looks {
        host.disk.plan(host.disk.looks() + look, Fault::Unread);
        assert!(registry.is_put_back(&record), "look {look} of {looks}");
        assert!(!registry.is_put_back(&record));
    }
}
