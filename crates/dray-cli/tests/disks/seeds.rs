//! Images that begin with a backup at the target: the source sends what was written since, and
//! whatever a repository does, no wrong block ever arrives.

use crate::guest::{self, BLOCK, Versions, contents};
use crate::lab::{Host, Lab, wait_for};
use crate::moves::result;
use crate::nbd::{Client, WRITE};
use dray_backup::{
    Consistency, Info, Key, LocalStore, PIECE_BYTES, Repository, WriterOptions, piece_count,
};
use dray_types::{Ancestor, GenerationId, ImageId};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;
use std::time::Duration;

pub const IMAGE: &str = "disk.img";
/// A region of 64 MiB with little data, and a bit of another.
const BLOCKS: u64 = 16384 + 1024;
const END: Duration = Duration::from_secs(60);
const KEY: [u8; 32] = [7; 32];

/// An image at hostb that was at hosta before, and a third host that never had it.
pub struct World {
    pub lab: Lab,
    pub c: Host,
    pub versions: Versions,
    version: u64,
    /// What the image was when it left hosta.
    first: Versions,
}

fn number(digits: &Value) -> u128 {
    u128::from_str_radix(digits.as_str().unwrap(), 16).unwrap()
}

impl World {
    /// hostc knows these repositories: names and keys. They are below the lab's folder. Nobody has kept
    /// anything of the image.
    pub fn begin(places: &[(&str, bool)]) -> Self {
        let world = Self::with_replica(places);
        world.forget_at_a();
        world
    }

    /// Removes what hosta has kept.
    fn forget_at_a(&self) {
        self.lab.a.ask(json!({"image-remove": {"name": IMAGE, "delete": true}})).unwrap();
    }

    /// The same, and hosta has a replica of the first generation.
    pub fn with_replica(places: &[(&str, bool)]) -> Self {
        let mut lab = Lab::new();
        guest::make_image(&lab.a.pool().join(IMAGE), BLOCKS);
        let mut c = lab.third();
        let mut text = std::fs::read_to_string(c.config()).unwrap();
        let key = lab.dir.path().join("key");
        let digits: String = KEY.iter().map(|byte| format!("{byte:02x}")).collect();
        std::fs::write(&key, digits).unwrap();
        std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
        for (name, encrypted) in places {
            let path = lab.dir.path().join(name);
            text +=
                &format!("[[backup]]\nname = \"{name}\"\nurl = \"file://{}\"\n", path.display());
            if *encrypted {
                text += &format!("key_file = \"{}\"\n", key.display());
            }
        }
        std::fs::write(c.config(), text).unwrap();
        lab.start();
        c.start();
        lab.a.add(IMAGE);
        let versions = guest::first_versions(BLOCKS);
        let first = versions.clone();
        let world = Self { lab, c, versions, version: 1, first };
        go(&world.lab.a, &world.lab.b, &[]);
        world
    }

    fn place(&self, name: &str) -> PathBuf {
        self.lab.dir.path().join(name)
    }

    fn line(&self) -> Value {
        let told = self.lab.b.dray(&["--json", "lineage", IMAGE]);
        result(&told)
    }

    /// A backup of the first generation, as hosta would have made it.
    pub fn back_up(&self, name: &str, key: &Key) {
        self.back_up_as(name, key, &self.first);
    }

    /// A backup of the first generation with what somebody else wants it to hold.
    fn back_up_as(&self, name: &str, key: &Key, versions: &Versions) {
        let line = self.line();
        let at = Ancestor {
            id: GenerationId(number(&line["past"][0]["id"])),
            number: line["past"][0]["number"].as_u64().unwrap(),
        };
        write_backup(&self.place(name), key, ImageId(number(&line["id"])), at, versions);
    }

    /// Where the bytes of the image would come from.
    pub fn planned(&self, to: &str, more: &[&str]) -> Value {
        let args = ["--json", "plan", "--image", IMAGE, "--to", to];
        result(&self.lab.b.dray(&[&args[..], more].concat()))["images"][0].clone()
    }

    pub fn write(&mut self, ranges: &[(u64, u64)]) {
        let mut client = Client::connect(&self.lab.b.nbd(), IMAGE).unwrap();
        self.version += 1;
        for &(first, count) in ranges {
            let data = contents(first, &vec![self.version; count as usize]);
            let len = data.len() as u32;
            client.request(WRITE, first * BLOCK, len, &data, &|| true).unwrap();
            self.versions.extend((first..first + count).map(|block| (block, self.version)));
        }
    }

    /// From hostb to hostc, whose file a bystander reads then.
    pub fn go(&self, more: &[&str]) -> (Value, String) {
        let told = go(&self.lab.b, &self.c, more);
        guest::compare(&self.c.pool().join(IMAGE), &self.versions).unwrap();
        told
    }
}

fn write_backup(at: &Path, key: &Key, image: ImageId, generation: Ancestor, versions: &Versions) {
    let store = Arc::new(LocalStore::open(at).unwrap());
    let repository =
        Repository::open(Arc::clone(&store) as _, key).or_else(|_| Repository::create(store, key));
    let repository = repository.unwrap();
    let bytes = BLOCKS * BLOCK;
    let mut writer = repository.writer(image, bytes, None, WriterOptions::default()).unwrap();
    let blocks = PIECE_BYTES as u64 / BLOCK;
    for piece in 0..piece_count(bytes) {
        let range = piece * blocks..((piece + 1) * blocks).min(BLOCKS);
        let held: Vec<u64> = range.clone().map(|block| versions[&block]).collect();
        let data = contents(range.start, &held);
        writer.put(piece, &data).unwrap();
    }
    let info = Info {
        image,
        name: IMAGE.to_owned(),
        bytes,
        generation,
        parent: None,
        ancestors: Vec::new(),
        taken_unix_ms: 1,
        host: "hosta".to_owned(),
        consistency: Consistency::Crash,
    };
    writer.finish(info).unwrap();
}

/// Moves the image and waits until both hosts are done.
pub fn go(from: &Host, to: &Host, more: &[&str]) -> (Value, String) {
    let args = ["--json", "migrate", "--image", IMAGE, "--to", to.name];
    let output = from.dray(&[&args[..], more].concat());
    let summary = result(&output);
    assert_eq!(summary["result"], "completed", "{output:?}");
    for (host, state) in [(from, "replica"), (to, "owner")] {
        let settled = || {
            let image = host.image(IMAGE);
            image.is_some_and(|image| image["state"] == state && image["migration"].is_null())
                && host.open_migrations() == 0
        };
        wait_for("the end", END, settled).unwrap();
    }
    (summary, String::from_utf8_lossy(&output.stderr).into_owned())
}

pub fn sent(summary: &Value) -> u64 {
    summary["blocks_sent"].as_u64().unwrap()
}

pub fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// Changes bytes in the middle of every file below that is longer than so many bytes.
fn damage(folder: &Path, longer: u64) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let meta = path.metadata().unwrap();
        if meta.is_dir() {
            damage(&path, longer);
        } else if meta.len() > longer {
            let mut bytes = std::fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle..middle + 16].fill(0x5a);
            std::fs::write(&path, bytes).unwrap();
        }
    }
}

#[test]
fn what_a_backup_has_does_not_come_from_the_source() {
    let mut world = World::begin(&[("nas", false)]);
    world.back_up("nas", &Key::None);
    world.write(&[(10, 4), (15000, 8), (BLOCKS - 3, 3)]);
    let planned = world.planned("hostc", &[]);
    assert_eq!((&planned["source"], &planned["generation"]), (&(15 * BLOCK).into(), &1.into()));
    let data = world.first.values().filter(|version| **version > 0).count() as u64 * BLOCK;
    assert!(planned["given"]["nas"].as_u64() >= Some(data), "{planned}");
    assert_eq!(world.planned("hostc", &["--no-backups"])["source"], planned["data"]);
    assert!(world.c.files().is_empty() && world.c.image(IMAGE).is_none(), "nothing is made");
    let (summary, _) = world.go(&["--verify"]);
    assert_eq!(sent(&summary), 15, "{summary}");
    assert_eq!(summary["verified"], true, "{summary}");
    assert!(summary["wire_bytes"]["total"].as_u64() < Some(1 << 20), "{summary}");
    assert_eq!(world.c.files(), [IMAGE]);
}

/// Whoever may write to a repository can put there what he likes, under hashes that are right for it. The owner's
/// hashes decide: in Copy, and after the handover in Backfill.
#[test]
fn what_a_repository_has_made_up_does_not_count() {
    for strategy in ["pre-copy", "post-copy"] {
        let mut world = World::begin(&[("nas", false)]);
        let mut lies = world.first.clone();
        let data: Vec<u64> = lies.keys().copied().filter(|block| lies[block] > 0).collect();
        let changed: Vec<u64> = data.into_iter().step_by(300).collect();
        assert!(changed.len() > 3);
        lies.extend(changed.iter().map(|block| (*block, 77)));
        world.back_up_as("nas", &Key::None, &lies);
        world.write(&[(10, 4)]);
        let (summary, told) = world.go(&["--verify", "--strategy", strategy]);
        assert!(told.contains("from nas"), "{told}");
        assert_eq!(summary["verified"], true, "{strategy}: {summary}");
        let expected = 4 + changed.iter().filter(|block| !(10..14).contains(*block)).count() as u64;
        assert_eq!(sent(&summary), expected, "{strategy}: only what was made up: {summary}");
    }
}

/// Every client of the API gets the migration that the command line gets.
#[test]
fn the_agent_itself_begins_with_a_backup() {
    let mut world = World::begin(&[("nas", false)]);
    world.back_up("nas", &Key::None);
    world.write(&[(10, 4)]);
    let subject = json!({ "images": { "names": [IMAGE] } });
    let migrate = json!({ "migrate": { "subject": subject, "to": "hostc" } });
    let summary = world.lab.b.ask(migrate).unwrap();
    assert_eq!(sent(&summary), 4, "{summary}");
    guest::compare(&world.c.pool().join(IMAGE), &world.versions).unwrap();
}

#[test]
fn seeding_beforehand_is_a_command_of_its_own() {
    let mut world = World::begin(&[("nas", false), ("offsite", true)]);
    let nothing = world.lab.b.dray(&["seed", "--image", IMAGE, "--to", "hostc"]);
    assert!(nothing.status.success(), "{nothing:?}");
    assert!(text(&nothing).contains("no backup or replica of disk.img is used"), "{nothing:?}");
    world.back_up("nas", &Key::None);
    world.back_up("offsite", &Key::Raw(KEY));
    let seeded = result(&world.lab.b.dray(&["--json", "seed", "--image", IMAGE, "--to", "hostc"]));
    let image = &seeded["images"][0];
    assert_eq!((&image["generation"], &image["missing_bytes"]), (&1.into(), &0.into()), "{seeded}");
    let given: u64 = image["given"].as_object().unwrap().values().filter_map(Value::as_u64).sum();
    let data = world.first.values().filter(|version| **version > 0).count() as u64;
    assert!(given >= data * BLOCK, "{given} of {} blocks of data: {seeded}", data);
    let replica = world.c.image(IMAGE).unwrap();
    assert_eq!(replica["state"], "replica", "{replica}");
    // There is no more to be had, and nothing is read again.
    let again = result(&world.lab.b.dray(&["--json", "seed", "--image", IMAGE, "--to", "hostc"]));
    assert!(again["images"][0].get("generation").is_none(), "{again}");
    world.write(&[(700, 9)]);
    // Both agents may be restarted in between.
    for host in [&mut world.lab.b, &mut world.c] {
        host.stop();
        host.start();
    }
    world.write(&[(900, 2)]);
    let (summary, _) = world.go(&["--strategy", "post-copy"]);
    assert_eq!(sent(&summary), 11, "{summary}");
}

#[test]
fn what_no_repository_can_give_comes_from_the_source() {
    let mut world = World::begin(&[("nas", false)]);
    world.back_up("nas", &Key::None);
    damage(&world.place("nas").join("packs"), 1 << 20);
    world.write(&[(10, 4)]);
    let seeded = world.lab.b.dray(&["seed", "--image", IMAGE, "--to", "hostc"]);
    let told = text(&seeded);
    assert!(told.contains("of it come from the source"), "{told}");
    assert!(told.contains("nas: "), "{told}");
    let (summary, _) = world.go(&[]);
    assert!(sent(&summary) > 4, "{summary}");
}

#[test]
fn a_second_repository_gives_what_the_first_one_cannot() {
    let mut world = World::begin(&[("nas", false), ("offsite", true)]);
    world.back_up("nas", &Key::None);
    world.back_up("offsite", &Key::Raw(KEY));
    damage(&world.place("nas").join("packs"), 1 << 20);
    world.write(&[(10, 4)]);
    let seeded = result(&world.lab.b.dray(&["--json", "seed", "--image", IMAGE, "--to", "hostc"]));
    assert_eq!(seeded["images"][0]["missing_bytes"], 0, "{seeded}");
    let (summary, _) = world.go(&[]);
    assert_eq!(sent(&summary), 4, "{summary}");
}

#[test]
fn a_repository_that_cannot_be_read_costs_nothing_but_the_traffic() {
    type Spoil = fn(&World);
    let spoilt: [(&str, Spoil); 3] = [
        ("a truncated manifest", |world| {
            let folder = world.place("nas").join("manifests");
            for image in std::fs::read_dir(folder).unwrap() {
                for manifest in std::fs::read_dir(image.unwrap().path()).unwrap() {
                    let file = std::fs::File::options().write(true).open(manifest.unwrap().path());
                    file.unwrap().set_len(40).unwrap();
                }
            }
        }),
        ("another key", |world| {
            std::fs::remove_dir_all(world.place("nas")).unwrap();
            world.back_up("nas", &Key::Raw([9; 32]));
        }),
        ("nothing", |world| std::fs::remove_dir_all(world.place("nas")).unwrap()),
    ];
    for (what, spoil) in spoilt {
        let mut world = World::begin(&[("nas", true)]);
        world.back_up("nas", &Key::Raw(KEY));
        spoil(&world);
        world.write(&[(10, 4)]);
        let seeded = text(&world.lab.b.dray(&["seed", "--image", IMAGE, "--to", "hostc"]));
        assert!(
            seeded.contains("no backup or replica of disk.img is used: nas: "),
            "{what}: {seeded}"
        );
        let (summary, _) = world.go(&["--verify"]);
        assert!(sent(&summary) > 1000, "{what}: {summary}");
        assert_eq!(world.c.files(), [IMAGE], "{what}");
    }
}

/// The target's agent dies while it reads, before it says that all is there, and before the file has a
/// replica's name.
#[test]
fn a_target_that_dies_while_it_reads_goes_on() {
    for step in ["seed-read", "seed-finish", "seed-name"] {
        let mut world = World::begin(&[("nas", false)]);
        world.back_up("nas", &Key::None);
        world.c.kill();
        world.c.spawn(&[("DRAY_ABORT_BEFORE", step)]);
        wait_for("hostc", END, || world.c.ask("info".into()).is_ok()).unwrap();
        let asked = {
            let (socket, c) = (world.lab.b.api(), &mut world.c);
            std::thread::scope(|scope| {
                let asked = scope.spawn(|| {
                    let mut dray = std::process::Command::new(crate::lab::DRAY);
                    let seed = ["--json", "seed", "--image", IMAGE, "--to", "hostc"];
                    dray.arg("--socket").arg(socket).args(seed).output().unwrap()
                });
                wait_for("its death", END, || c.has_died()).unwrap();
                c.start();
                asked.join().unwrap()
            })
        };
        let seeded = result(&asked);
        let replica = world.c.image(IMAGE).unwrap();
        assert_eq!(replica["state"], "replica", "{step}: {seeded}");
        world.write(&[(10, 4)]);
        let (summary, _) = world.go(&["--verify"]);
        assert_eq!(sent(&summary), 4, "{step}: {summary}");
        assert_eq!(world.c.files(), [IMAGE], "{step}");
    }
}

/// A host with an old replica reads the younger backup, and the old copy stays aside.
#[test]
fn a_younger_backup_is_better_than_an_old_replica() {
    let mut world = World::begin(&[("nas", false)]);
    world.write(&[(10, 4), (15000, 800)]);
    world.first = world.versions.clone();
    // To hostc and back: hostc keeps a replica of the second generation, hostb of the third.
    go(&world.lab.b, &world.c, &[]);
    go(&world.c, &world.lab.b, &[]);
    world.write(&[(300, 600)]);
    let second = world.versions.clone();
    go(&world.lab.b, &world.lab.a, &["--no-backups"]);
    go(&world.lab.a, &world.lab.b, &["--no-backups"]);
    world.forget_at_a();
    let line = world.line();
    let past = line["past"].as_array().unwrap();
    // What hostb gave away to hosta, which nobody has written to since.
    let last = &past[past.len() - 2];
    let at = Ancestor {
        id: GenerationId(number(&last["id"])),
        number: last["number"].as_u64().unwrap(),
    };
    write_backup(&world.place("nas"), &Key::None, ImageId(number(&line["id"])), at, &second);
    world.write(&[(50, 5)]);
    let seeded = result(&world.lab.b.dray(&["--json", "seed", "--image", IMAGE, "--to", "hostc"]));
    // Pieces of 64 KiB in which nothing was written since are at hand.
    let given = &seeded["images"][0]["given"];
    let (read, old) =
        (given["nas"].as_u64().unwrap(), given["an old copy there"].as_u64().unwrap());
    assert!(read <= 39 * PIECE_BYTES as u64, "{seeded}");
    assert!(old >= second.values().filter(|version| **version > 0).count() as u64 * BLOCK - read);
    let (summary, _) = world.go(&["--verify"]);
    assert_eq!(sent(&summary), 5, "{summary}");
    assert_eq!(world.c.files().len(), 2, "the old replica is still there: {:?}", world.c.files());
}

/// Adds to the configuration of a host that runs.
pub fn configure(host: &mut Host, more: &str) {
    host.stop();
    let config = std::fs::read_to_string(host.config()).unwrap() + more;
    std::fs::write(host.config(), config).unwrap();
    host.start();
}

/// hosta offers its store to hostb, and `to_c` as well; the other two hosts know of it.
fn offered_by_a(to_c: bool) -> World {
    let mut world = World::begin(&[]);
    let store = world.lab.dir.path().join("offered");
    let offer = format!("[backup_store]\npath = \"{}\"\n", store.display());
    if !to_c {
        let text = std::fs::read_to_string(world.lab.a.config()).unwrap();
        let (before, hostc) = text.rsplit_once(", \"store\"").unwrap();
        std::fs::write(world.lab.a.config(), format!("{before}{hostc}")).unwrap();
    }
    // The last section is hostc's.
    configure(&mut world.lab.a, &format!("reads_store_of = [\"hostb\"]\n{offer}"));
    let place = "[[backup]]\nname = \"far\"\nurl = \"dray://hosta/team1\"\n";
    configure(&mut world.lab.b, place);
    configure(&mut world.c, &place.replace("hosta/", "hosta/@hostb/"));
    world.write(&[(40, 30)]);
    for args in [&["backups", "init", "far"][..], &["backup", IMAGE, "--to", "far"]] {
        let told = world.lab.b.dray(args);
        assert!(told.status.success(), "{}", text(&told));
    }
    assert!(store.join("hostb/team1/config").exists());
    world
}

/// The host that has the backups dies while they are read.
#[test]
fn a_backup_host_that_dies_costs_time_and_nothing_else() {
    // Dead at once, and while it is read: there are some ten answers.
    for answers in [0, 5, 8] {
        let mut world = offered_by_a(true);
        world.write(&[(10, 4)]);
        world.lab.a.kill();
        world.lab.a.start_with(&[("DRAY_ABORT_BEFORE", &format!("store-answer:{answers}"))]);
        let told = text(&world.lab.b.dray(&["seed", "--image", IMAGE, "--to", "hostc"]));
        world.lab.a.await_death().unwrap_or_else(|why| panic!("{why}: after {answers}: {told}"));
        assert!(told.contains("far"), "after {answers}: {told}");
        let (summary, _) = world.go(&["--verify"]);
        assert_eq!(summary["verified"], true, "after {answers}: {summary}");
        assert!(sent(&summary) >= 4, "after {answers}: {summary}");
        assert_eq!(world.c.files(), [IMAGE], "after {answers}");
    }
}

/// The repository is at another dray host, which has nothing else to do with the move.
#[test]
fn a_repository_at_another_host_is_as_good() {
    let mut world = offered_by_a(false);
    world.write(&[(10, 4)]);
    let told = world.lab.b.dray(&["backup", IMAGE, "--to", "far"]);
    assert!(told.status.success(), "{}", text(&told));
    world.write(&[(700, 9)]);
    // hostc may not use it, and says so.
    let refused = text(&world.lab.b.dray(&["seed", "--image", IMAGE, "--to", "hostc"]));
    assert!(refused.contains("hostc does not have the right 'store' on hosta"), "{refused}");
    let text_a = std::fs::read_to_string(world.lab.a.config()).unwrap();
    let both = text_a.replace("\"reuse\"]", "\"reuse\", \"store\"]");
    std::fs::write(world.lab.a.config(), both).unwrap();
    world.lab.a.stop();
    world.lab.a.start();
    let (summary, _) = world.go(&["--verify"]);
    assert_eq!(sent(&summary), 9, "{summary}");
    let verified = world.c.dray(&["verify", "far", "--read-data"]);
    assert!(verified.status.success(), "{}", text(&verified));
}
