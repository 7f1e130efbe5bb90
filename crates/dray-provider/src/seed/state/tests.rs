//! Seeds that an agent goes on with, and those that are not what it has left.

use super::*;
use dray_config::Config;
use dray_host::store::Store;
use dray_image::{Image, ImageFile};
use dray_types::GenerationId;
use dray_vm::flat::Pools;
use std::fs::{File, FileTimes};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

const LEN: u64 = 3 * TASK_BYTES + 4096;

/// Two agents, one after the other.
struct World {
    dir: tempfile::TempDir,
    registry: Arc<Registry>,
}

fn agent(dir: &Path) -> Arc<Registry> {
    let text =
        format!("[agent]\nname = 'b'\nstate_dir = '{0}'\n[tls]\ndir = '{0}'\n", dir.display());
    let config = Config::parse(&text, Path::new("dray.toml")).unwrap();
    let store = Store::open(&dir.join("state")).unwrap();
    Registry::load(store, Arc::new(Pools(Arc::new(config)))).unwrap()
}

impl World {
    fn begin() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["state", "pool"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let registry = agent(dir.path());
        Self { dir, registry }
    }

    /// Another agent after this one.
    fn restart(&mut self) {
        self.registry = agent(self.dir.path());
    }

    /// The same, and this one was killed before its last changes to files.
    fn restart_late(&mut self) {
        let beat = File::options().write(true).open(self.pool().join("vm1.beat"));
        let then = SystemTime::now() - Duration::from_secs(10);
        beat.unwrap().set_times(FileTimes::new().set_modified(then)).unwrap();
        self.restart();
    }

    fn pool(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    fn seeds(&self) -> StatePath {
        StatePath::real(self.pool())
    }

    fn note(&self) -> SeedNote {
        note_path(&self.seeds(), "vm1").get().unwrap()
    }

    fn open(&self, generation: u128) -> SeedFile {
        let note = SeedNote {
            name: "vm1".to_owned(),
            id: ImageId(1),
            path: self.pool().join("vm1"),
            len: LEN,
            read_only: false,
            generation: Ancestor { id: GenerationId(generation), number: 3 },
            epoch: Epoch(2),
            done: Vec::new(),
            file: None,
            left: None,
            finished: None,
            file_system: None,
        };
        SeedFile::open(&self.registry, &self.seeds(), note, PoolIo::Buffered).unwrap()
    }

    /// A seed that an agent has read whole, and has not left.
    fn open_whole(&self) -> SeedFile {
        let mut seed = self.open(7);
        seed.file.write_bulk(&[1; 4096], 0).unwrap();
        seed.save(&[true; 4]).unwrap();
        seed
    }

    /// One that is finished, and the agent dies before it has its name as a replica.
    fn finish(&self) {
        let mut seed = self.open_whole();
        seed.note.finished = Some(Vec::new());
        seed.leave(&[true; 4]).unwrap();
    }

    /// The agent takes up what is finished: whether there is a replica.
    fn revives(&self) -> bool {
        revive(&self.seeds(), &self.registry, Duration::MAX);
        self.registry.get("vm1").is_some()
    }
}

/// The file system's clock is coarse.
fn wait() {
    std::thread::sleep(Duration::from_millis(20));
}

fn edit(path: &Path) {
    wait();
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&[5; 4096], 0).unwrap();
}

fn replace(path: &Path) {
    let other = path.with_extension("other");
    File::create(&other).unwrap().set_len(LEN).unwrap();
    std::fs::rename(other, path).unwrap();
}

#[test]
fn what_was_saved_is_not_read_again_and_another_generation_begins_anew() {
    let world = World::begin();
    let mut seed = world.open(7);
    assert_eq!(seed.done(), [false; 4]);
    seed.file.write_bulk(&[1; 4096], 0).unwrap();
    seed.file.write_bulk(&[2; 4096], 2 * TASK_BYTES).unwrap();
    seed.save(&[true, false, true, true]).unwrap();
    drop(seed);
    let seed = world.open(7);
    assert_eq!(seed.done(), [true, false, true, true]);
    let mut bytes = [0; 4096];
    seed.file.read_at(&mut bytes, 2 * TASK_BYTES).unwrap();
    assert_eq!(bytes, [2; 4096]);
    drop(seed);
    let seed = world.open(8);
    assert_eq!(seed.done(), [false; 4]);
    seed.file.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [0; 4096]);
    seed.remove().unwrap();
    assert_eq!(std::fs::read_dir(world.pool()).unwrap().count(), 0);
}

#[test]
fn a_file_without_its_note_or_a_note_without_its_file_begins_anew() {
    let world = World::begin();
    for gone in [".vm1.dray-seed", "vm1.json"] {
        let mut seed = world.open(7);
        seed.file.write_bulk(&[1; 4096], 0).unwrap();
        seed.save(&[true; 4]).unwrap();
        drop(seed);
        std::fs::remove_file(world.pool().join(gone)).unwrap();
        assert_eq!(world.open(7).done(), [false; 4], "{gone}");
    }
}

#[test]
fn a_note_of_more_than_the_image_has_is_cut() {
    let world = World::begin();
    let mut seed = world.open(7);
    seed.note.done = vec![(1, 1), (3, u64::MAX), (u64::MAX, 9)];
    assert_eq!(seed.done(), [false, true, false, true]);
}

const SEED: &str = ".vm1.dray-seed";

#[test]
fn the_next_agent_goes_on_with_what_the_last_one_has_read() {
    let mut world = World::begin();
    drop(world.open_whole());
    world.restart();
    assert_eq!(world.open(7).done(), [true; 4]);
    world.open_whole().leave(&[true; 4]).unwrap();
    assert_eq!(world.open(7).done(), [true; 4], "it is asked for again");
    world.open_whole().leave(&[true; 4]).unwrap();
    world.restart_late();
    assert_eq!(world.open(7).done(), [true; 4], "it is exactly as it was left");
}

#[test]
fn a_file_that_others_have_put_there_or_written_to_is_read_anew() {
    for change in [edit, replace] {
        let mut world = World::begin();
        drop(world.open_whole());
        change(&world.pool().join(SEED));
        world.restart_late();
        assert_eq!(world.open(7).done(), [false; 4], "while it was read");
        // The agent after a kill may be there so soon that only what was noted tells.
        world.open_whole().leave(&[true; 4]).unwrap();
        change(&world.pool().join(SEED));
        world.restart();
        let seed = world.open(7);
        assert_eq!(seed.done(), [false; 4], "after it was left");
        let mut bytes = [9; 4096];
        seed.file.read_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0; 4096]);
    }
}

/// Nobody had asked for it when another agent ran, and after that one there was a third.
#[test]
fn what_was_written_to_it_while_an_agent_ran_that_did_not_have_it_is_seen() {
    let mut world = World::begin();
    drop(world.open_whole());
    wait();
    world.restart_late();
    edit(&world.pool().join(SEED));
    world.restart();
    assert_eq!(world.open(7).done(), [false; 4]);
}

#[test]
fn a_finished_seed_becomes_a_replica_if_it_is_as_it_was_left() {
    let mut world = World::begin();
    world.finish();
    world.restart();
    assert!(world.revives());
    for change in [edit, replace] {
        for renamed in [false, true] {
            let mut world = World::begin();
            world.finish();
            let names = ImageNames::of(&world.pool().join("vm1")).unwrap();
            let mut path = names.seed();
            if renamed {
                names.finish_seed(Epoch(2)).unwrap();
                path = names.replica(Epoch(2));
            }
            change(&path);
            world.restart();
            assert!(!world.revives(), "renamed: {renamed}");
            assert!(path.exists(), "it may be somebody's");
            assert_eq!(world.note(), world.note().distrusted());
            assert_eq!(world.open(7).done(), [false; 4]);
        }
    }
}

#[test]
fn a_seed_that_got_its_name_before_the_agent_died_becomes_a_replica() {
    for late in [false, true] {
        let mut world = World::begin();
        world.finish();
        let names = ImageNames::of(&world.pool().join("vm1")).unwrap();
        names.finish_seed(Epoch(2)).unwrap();
        if late {
            world.restart_late()
        } else {
            world.restart()
        }
        assert_eq!(world.revives(), !late);
    }
}

#[test]
fn a_file_that_was_put_in_its_place_meanwhile_is_not_finished() {
    let world = World::begin();
    let seed = world.open_whole();
    replace(&world.pool().join(SEED));
    let why = seed.finish(&[], &world.registry).unwrap_err().to_string();
    assert!(why.contains("another file is at"), "{why}");
    assert!(world.registry.get("vm1").is_none());
    assert_eq!(world.open(7).done(), [false; 4]);
}

/// The folder below a mount point has no seed: the one that is too old lies on the pool, and its note stays for it.
#[test]
fn a_seed_whose_pool_is_not_mounted_is_not_forgotten() {
    let world = World::begin();
    drop(world.open(7));
    let (at, names) =
        (note_path(&world.seeds(), "vm1"), ImageNames::of(&world.pool().join("vm1")).unwrap());
    let elsewhere = file_system_below(&world.pool().join("vm1")).map(|number| number + 1);
    at.put(&SeedNote { file_system: elsewhere, ..world.note() }).unwrap();
    let aside = world.pool().join("aside");
    std::fs::rename(names.seed(), &aside).unwrap();
    revive(&world.seeds(), &world.registry, Duration::ZERO);
    assert!(at.exists().unwrap());
    std::fs::rename(&aside, names.seed()).unwrap();
    revive(&world.seeds(), &world.registry, Duration::ZERO);
    assert!(!at.exists().unwrap() && !names.seed().exists());
}
