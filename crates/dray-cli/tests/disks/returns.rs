//! Images that go back to a host that has a replica of an earlier generation: only what changed
//! crosses the wire, and whatever happens to a replica or an agent, no wrong block ever arrives.

use crate::again::make_again;
use crate::guest::{self, BLOCK, Guest, Versions, contents};
use crate::lab::{Host, Lab, read_record, wait_for, write_record};
use crate::moves::result;
use crate::nbd::{Client, WRITE, ZERO};
use serde_json::{Value, json};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const IMAGE: &str = "disk.img";
/// Blocks of a region, which an unclean stop makes suspect as a whole: 64 MiB.
const REGION: u64 = 16384;
/// Two regions and a bit, half of it data.
const BLOCKS: u64 = 2 * REGION + 1024;
/// One region with little data, and a bit of another.
const FEW: u64 = REGION + 512;
const END: Duration = Duration::from_secs(60);

/// An image on one of some hosts, and what each of its blocks holds.
struct World {
    lab: Lab,
    versions: Versions,
    version: u64,
}

impl World {
    /// The image is at hosta.
    fn begin(lab: Lab) -> Self {
        Self::begin_with(lab, BLOCKS)
    }

    fn begin_with(mut lab: Lab, blocks: u64) -> Self {
        guest::make_image(&lab.a.pool().join(IMAGE), blocks);
        lab.start();
        lab.a.add(IMAGE);
        let versions = guest::first_versions(blocks);
        Self { lab, versions, version: 1 }
    }

    fn write_on(&mut self, host: &str, ranges: &[(u64, u64)]) {
        let nbd = self.lab.host(host).nbd();
        self.version += 1;
        write(&nbd, &mut self.versions, self.version, ranges);
    }

    /// Begins to move it from hostb back to hosta, and waits for the first blocks there.
    fn begin_return(&self, bandwidth: &str) {
        let args = ["migrate", "--image", IMAGE, "--to", "hosta", "--strategy", "hybrid"];
        let more = ["--bandwidth", bandwidth, "--detach"];
        let begun = self.lab.b.dray(&[&args[..], &more].concat());
        assert!(begun.status.success(), "{begun:?}");
        wait_for("the first blocks", END, || {
            let done = self.lab.b.progress().and_then(|(_, p)| p["total"]["bytes_done"].as_u64());
            done.is_some_and(|done| done > 0)
        })
        .unwrap();
    }

    /// Moves it and waits until both hosts are done.
    fn go(&mut self, from: &str, to: &str, more: &[&str]) -> Value {
        let args = ["--json", "migrate", "--image", IMAGE, "--to", to];
        let output = self.lab.host(from).dray(&[&args[..], more].concat());
        let summary = result(&output);
        assert_eq!(summary["result"], "completed", "{output:?}");
        self.await_arrival(from, to).unwrap();
        summary
    }

    fn await_arrival(&mut self, from: &str, to: &str) -> Result<(), String> {
        wait_for("the end of the migration", END, || {
            let state = |image: Option<Value>, state: &str| {
                image.is_some_and(|image| {
                    let free = image["migration"].is_null() && image["missing_blocks"] == 0;
                    image["state"] == state && free
                })
            };
            state(self.lab.host(to).image(IMAGE), "owner")
                && state(self.lab.host(from).image(IMAGE), "replica")
                && self.lab.host(from).open_migrations() == 0
                && self.lab.host(to).open_migrations() == 0
        })
    }

    /// A bystander reads every block from the file of the owner.
    fn check(&mut self, owner: &str) {
        let path = self.lab.host(owner).pool().join(IMAGE);
        guest::compare(&path, &self.versions).unwrap();
    }

    fn replica(&mut self, host: &str) -> PathBuf {
        let files = self.lab.host(host).files();
        let name = files.iter().find(|name| name.contains(".dray-replica-")).unwrap();
        self.lab.host(host).pool().join(name)
    }
}

/// Writes `version` into ranges of blocks, zeros into every seventh version.
fn write(nbd: &std::path::Path, versions: &mut Versions, version: u64, ranges: &[(u64, u64)]) {
    let mut client = Client::connect(nbd, IMAGE).unwrap();
    for &(first, count) in ranges {
        let (offset, len) = (first * BLOCK, (count * BLOCK) as u32);
        let held = if version.is_multiple_of(7) { 0 } else { version };
        let data = contents(first, &vec![held; count as usize]);
        let (kind, data) = if held == 0 { (ZERO, &[][..]) } else { (WRITE, &data[..]) };
        client.request(kind, offset, len, data, &|| true).unwrap();
        versions.extend((first..first + count).map(|block| (block, held)));
    }
}

fn sent(summary: &Value) -> u64 {
    summary["blocks_sent"].as_u64().unwrap()
}

fn from_replica(summary: &Value) -> u64 {
    summary["images"][0]["bytes_from_replica"].as_u64().unwrap_or(0) / BLOCK
}

fn wire(summary: &Value) -> u64 {
    summary["wire_bytes"]["total"].as_u64().unwrap()
}

/// There and back, with every strategy, each time only what was written meanwhile.
#[test]
fn only_what_changed_goes_back() {
    let mut world = World::begin(Lab::new());
    world.write_on("hosta", &[(5, 3)]);
    let first = world.go("hosta", "hostb", &["--verify"]);
    assert!(sent(&first) > BLOCKS / 3, "{first}");
    assert_eq!(from_replica(&first), 0);
    let (mut from, mut to) = ("hostb", "hosta");
    let strategies =
        ["hybrid", "post-copy", "pre-copy", "deferred", "hot-set", "mirror", "auto", "hybrid"];
    for (nth, strategy) in (0..).zip(strategies) {
        let ranges = [(100 + 50 * nth, 7), (REGION + 100 * nth, 16), (BLOCKS - 2, 2)];
        world.write_on(from, &ranges);
        let mut more = vec!["--strategy", strategy, "--verify"];
        if strategy == "deferred" {
            more.push("--detach");
            let args = ["migrate", "--image", IMAGE, "--to", to];
            let output = world.lab.host(from).dray(&[&args[..], &more].concat());
            assert!(output.status.success(), "{output:?}");
            let owner = || world.lab.host(to).image(IMAGE).is_some_and(|i| i["state"] == "owner");
            wait_for("the handover", END, owner).unwrap();
            let missing = world.lab.host(to).image(IMAGE).unwrap()["missing_blocks"].as_u64();
            assert!(missing <= Some(25), "{missing:?}");
            let started = world.lab.host(to).dray(&["backfill", "start"]);
            assert!(started.status.success(), "{started:?}");
            world.await_arrival(from, to).unwrap();
        } else {
            let summary = world.go(from, to, &more);
            assert!(sent(&summary) <= 25, "{strategy}: {summary}");
            assert_eq!(from_replica(&summary), BLOCKS - 25, "{strategy}: {summary}");
            assert_eq!(summary["verified"], true, "{summary}");
            assert!(wire(&summary) < 2 << 20, "{strategy}: {summary}");
        }
        world.check(to);
        assert_eq!(world.lab.host(to).files(), [IMAGE]);
        (from, to) = (to, from);
    }
}

/// Another program changes the file in the middle of a move while no agent runs at the source: what was sent of
/// it before is not trusted, also after one more start, and what has arrived goes home as it is.
fn is_sent_again(orderly: bool, change: impl Fn(&Path)) {
    /// It was sent before.
    const CHANGED: u64 = 300;
    let mut world = World::begin_with(Lab::new(), FEW);
    let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--strategy", "pre-copy", "--detach"];
    let more = ["--bandwidth", "8MiB/s", "--order", "sequential"];
    assert!(world.lab.a.dray(&[&args[..], &more].concat()).status.success());
    wait_for("the first blocks", END, || {
        let done = world.lab.a.progress().and_then(|(_, p)| p["total"]["bytes_done"].as_u64());
        done.is_some_and(|done| done > 2 * CHANGED * BLOCK)
    })
    .unwrap();
    if orderly {
        world.lab.a.stop()
    } else {
        world.lab.a.kill()
    }
    let path = world.lab.a.pool().join(IMAGE);
    change(&path);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&contents(CHANGED, &[9]), CHANGED * BLOCK).unwrap();
    world.versions.insert(CHANGED, 9);
    // Nothing can be sent before the second start.
    world.lab.b.kill();
    world.lab.a.start();
    wait_for("the migration", END, || world.lab.a.open_migrations() == 1).unwrap();
    if orderly {
        world.lab.a.stop()
    } else {
        world.lab.a.kill()
    }
    world.lab.start();
    world
        .await_arrival("hosta", "hostb")
        .unwrap_or_else(|why| panic!("{why}\n{}", world.lab.a.log()));
    assert!(world.lab.a.log().contains("sends all of it again"), "{}", world.lab.a.log());
    world.check("hostb");
    let summary = world.go("hostb", "hosta", &["--verify"]);
    assert!(sent(&summary) == 0 && from_replica(&summary) == FEW, "{summary}");
    world.check("hosta");
}

#[test]
fn an_image_that_is_written_to_while_its_source_is_stopped_is_sent_again() {
    is_sent_again(true, |_| ());
}

#[test]
fn an_image_that_is_replaced_while_its_source_is_dead_is_sent_again() {
    is_sent_again(false, |path| {
        let new = path.with_extension("new");
        std::fs::copy(path, &new).unwrap();
        std::fs::rename(new, path).unwrap();
    });
}

/// The file system gives the new file the number of the old one, if it can.
#[test]
fn an_image_that_is_made_again_while_its_source_is_dead_is_sent_again() {
    is_sent_again(false, |path| {
        let held = std::fs::read(path).unwrap();
        make_again(path, &held);
        std::fs::write(path, held).unwrap();
    });
}

#[test]
fn a_third_host_passes_the_line_on() {
    let lab = Lab::new();
    let mut c = lab.third();
    let mut world = World::begin(lab);
    c.start();
    world.go("hosta", "hostb", &[]);
    world.write_on("hostb", &[(10, 4), (20000, 8)]);
    let go = |from: &Host, to: &str| {
        let summary = result(&from.dray(&["--json", "migrate", "--image", IMAGE, "--to", to]));
        assert_eq!(summary["result"], "completed", "{summary}");
        summary
    };
    let settled = |host: &Host, state: &str| {
        wait_for("the end", END, || {
            let image = host.image(IMAGE);
            image.is_some_and(|i| i["state"] == state && i["migration"].is_null())
                && host.open_migrations() == 0
        })
        .unwrap();
    };
    go(&world.lab.b, "hostc");
    settled(&world.lab.b, "replica");
    settled(&c, "owner");
    write(&c.nbd(), &mut world.versions, 99, &[(12, 4), (33000, 1)]);
    // hosta has what the image was before hostb and hostc.
    let summary = go(&c, "hosta");
    settled(&c, "replica");
    settled(&world.lab.a, "owner");
    assert_eq!(sent(&summary), 6 + 8 + 1, "{summary}");
    world.check("hosta");
    // hostb has what it was before hostc; nothing was written here.
    let summary = world.go("hosta", "hostb", &["--verify"]);
    assert_eq!(sent(&summary), 4 + 1, "{summary}");
    world.check("hostb");
    let lineage = world.lab.b.dray(&["--json", "lineage", IMAGE]);
    let lineage = result(&lineage);
    let hosts: Vec<_> = lineage["past"].as_array().unwrap().iter().map(|g| &g["host"]).collect();
    assert_eq!(hosts, ["hosta", "hostb", "hostc", "hosta"], "{lineage}");
    assert_eq!(lineage["open"]["number"], 5);
}

#[test]
fn a_restart_in_order_forgets_nothing_and_a_kill_distrusts_regions() {
    let mut world = World::begin(Lab::new());
    world.go("hosta", "hostb", &[]);
    world.write_on("hostb", &[(10, 4), (20000, 8)]);
    for host in ["hosta", "hostb"] {
        world.lab.host(host).stop();
        world.lab.host(host).start();
    }
    world.write_on("hostb", &[(14, 1)]);
    world.lab.b.stop();
    world.lab.b.start();
    let summary = world.go("hostb", "hosta", &["--verify"]);
    assert_eq!(sent(&summary), 13, "{summary}");
    world.check("hosta");
    world.write_on("hosta", &[(40, 2)]);
    world.lab.a.kill();
    world.lab.b.kill();
    world.lab.a.start();
    world.lab.b.start();
    let summary = world.go("hosta", "hostb", &["--verify"]);
    assert_eq!(from_replica(&summary), BLOCKS - REGION, "one region was open: {summary}");
    // Which is compared by its hashes, 32 bytes for 64 KiB, and found in its place.
    assert_eq!(sent(&summary), 2, "{summary}");
    assert!(wire(&summary) < 128 << 10, "{summary}");
    assert!(summary["bytes_from_target"].as_u64().unwrap() > REGION / 16 * BLOCK, "{summary}");
    world.check("hostb");
}

/// Distrusted regions whose blocks changed here and there, on both sides: the replica, which nobody
/// should have touched, by a few bytes that keep its length and time. The image goes `back` to it.
fn distrusted_regions(back: &[&str]) {
    let mut world = World::begin(Lab::new());
    world.go("hosta", "hostb", &[]);
    let scattered: Vec<_> = (0..60).map(|nth| (nth * 300 + nth % 16, 1)).collect();
    world.write_on("hostb", &scattered);
    world.lab.b.kill();
    let replica = world.lab.a.pool().read_dir().unwrap().filter_map(Result::ok);
    let mut replica = replica
        .map(|entry| entry.path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().contains("replica"));
    let path = replica.next().expect("a replica");
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let time = file.metadata().unwrap().modified().unwrap();
    // In a region that is open at hostb: what a disk that lies would do, too.
    let lost: Vec<_> = (0..40).map(|nth| 64 + nth * 97).collect();
    for block in &lost {
        file.write_all_at(&[0xa5; 16], block * BLOCK + 2048).unwrap();
    }
    file.set_times(std::fs::FileTimes::new().set_modified(time)).unwrap();
    drop(file);
    world.lab.b.start();
    let summary = world.go("hostb", "hosta", back);
    world.check("hosta");
    assert_eq!(summary["verified"], true, "{summary}");
    let most = (scattered.len() + lost.len()) as u64;
    assert!(sent(&summary) <= most, "not more than {most} blocks differ: {summary}");
    assert!(wire(&summary) < most * BLOCK + (256 << 10), "{summary}");
}

#[test]
fn distrusted_regions_are_compared_by_hash_and_never_taken_on_trust() {
    distrusted_regions(&["--verify"]);
}

#[test]
fn distrusted_regions_are_compared_by_hash_in_backfill_too() {
    distrusted_regions(&["--verify", "--strategy", "post-copy"]);
}

/// An image that has another name than its file.
#[test]
fn a_file_gets_its_own_name_back() {
    const FILE: &str = "vm1.raw";
    let mut lab = Lab::new();
    guest::make_image(&lab.a.pool().join(FILE), FEW);
    lab.start();
    let path = lab.a.pool().join(FILE);
    lab.a.ask(json!({"image-add": {"name": IMAGE, "path": path}})).unwrap();
    let mut world = World { lab, versions: guest::first_versions(FEW), version: 1 };
    world.go("hosta", "hostb", &[]);
    assert_eq!(world.lab.b.files(), [IMAGE]);
    world.write_on("hostb", &[(10, 4)]);
    let summary = world.go("hostb", "hosta", &["--verify"]);
    assert_eq!(sent(&summary), 4, "{summary}");
    assert_eq!(world.lab.a.files(), [FILE]);
    guest::compare(&path, &world.versions).unwrap();
}

/// Everything is copied, the summary says why, and the old copy stays under another name.
fn copied_in_full(world: &mut World, why: &str) {
    // What the index has found of the old copy by now would not be sent either.
    let summary = world.go("hostb", "hosta", &["--verify", "--no-reuse"]);
    assert_eq!(from_replica(&summary), 0, "{summary}");
    assert!(sent(&summary) > BLOCKS / 3, "{summary}");
    let told = summary["images"][0]["replica_not_used"].as_str().unwrap_or_default();
    assert!(told.contains(why), "{summary}");
    world.check("hosta");
    let aside = world.lab.a.image("disk.img.replica-2").unwrap();
    assert_eq!(aside["state"], "replica", "{aside}");
    assert_eq!(world.lab.a.files(), [".disk.img.dray-replica-2", IMAGE]);
}

#[test]
fn a_replica_edited_behind_drays_back_is_not_used() {
    let mut world = World::begin(Lab::new());
    world.go("hosta", "hostb", &[]);
    world.write_on("hostb", &[(10, 4)]);
    let replica = world.replica("hosta");
    std::thread::sleep(Duration::from_millis(20));
    let file = std::fs::File::options().write(true).open(&replica).unwrap();
    file.write_all_at(&[7; 4096], 30 * BLOCK).unwrap();
    copied_in_full(&mut world, "changed after the handover");
    // The copy that was set aside is removed by hand.
    let removed = world.lab.a.dray(&["images", "remove", "disk.img.replica-2", "--delete"]);
    assert!(removed.status.success(), "{removed:?}");
    assert_eq!(world.lab.a.files(), [IMAGE]);
}

/// Blocks of a replica get other content, and the file its old time of change: nothing but the time of the last
/// change of anything tells of it, which nobody can put back.
fn edit_in_secret(world: &mut World, blocks: &[u64]) {
    let path = world.replica("hosta");
    // The clock that files get their times from goes in steps.
    std::thread::sleep(Duration::from_millis(20));
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let time = file.metadata().unwrap().modified().unwrap();
    for block in blocks {
        file.write_all_at(&[0xa5; 16], block * BLOCK + 2048).unwrap();
    }
    file.set_times(std::fs::FileTimes::new().set_modified(time)).unwrap();
}

#[test]
fn a_replica_edited_in_secret_is_compared_piece_by_piece() {
    let edited: Vec<_> = (0..40).map(|nth| 64 + nth * 97).collect();
    for cancel in [false, true] {
        let mut world = World::begin(Lab::new());
        world.go("hosta", "hostb", &[]);
        world.write_on("hostb", &[(10, 4)]);
        edit_in_secret(&mut world, &edited);
        if cancel {
            // What nobody trusted is not trusted after this either.
            world.begin_return("400kbit");
            assert!(world.lab.b.dray(&["cancel", "--discard"]).status.success());
        }
        let summary = world.go("hostb", "hosta", &["--verify"]);
        world.check("hosta");
        assert!(sent(&summary) <= 44, "{cancel}: {summary}");
    }
}

#[test]
fn a_replica_that_was_only_touched_is_used() {
    use std::os::unix::fs::PermissionsExt;
    let mut world = World::begin(Lab::new());
    world.go("hosta", "hostb", &[]);
    world.write_on("hostb", &[(10, 4)]);
    let path = world.replica("hosta");
    std::thread::sleep(Duration::from_millis(20));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o440)).unwrap();
    let summary = world.go("hostb", "hosta", &["--verify"]);
    world.check("hosta");
    assert_eq!(sent(&summary), 4, "everything else is compared: {summary}");
}

#[test]
fn a_diverged_replica_is_not_used() {
    let mut world = World::begin(Lab::new());
    world.go("hosta", "hostb", &[]);
    world.lab.a.stop();
    // As if hosta had written to its copy under the same number.
    let path = world.lab.a.dir.join("state/images/disk.img.json");
    let record = read_record(&path);
    let (before, after) = record.split_once("\"generation\"").unwrap();
    let (open, rest) = after.split_once("\"id\": ").unwrap();
    let (_, rest) = rest.split_once(',').unwrap();
    write_record(&path, &format!("{before}\"generation\"{open}\"id\": 7,{rest}"));
    world.lab.a.start();
    copied_in_full(&mut world, "diverged");
}

/// What a return that came to nothing wrote is not trusted, the rest is.
#[test]
fn a_return_that_is_given_up_leaves_a_replica() {
    let mut world = World::begin(Lab::new());
    world.go("hosta", "hostb", &[]);
    world.write_on("hostb", &[(10, 4), (20000, 8), (300, 200)]);
    world.begin_return("400kbit");
    assert_eq!(world.lab.a.files(), [".disk.img.dray-partial"]);
    assert!(world.lab.b.dray(&["cancel", "--discard"]).status.success());
    wait_for("the replica", END, || world.lab.a.files() == [".disk.img.dray-replica-2"]).unwrap();
    wait_for("the record", END, || {
        world.lab.a.image(IMAGE).is_some_and(|image| image["state"] == "replica")
            && world.lab.a.open_migrations() == 0
    })
    .unwrap();
    world.write_on("hostb", &[(600, 1)]);
    for host in ["hosta", "hostb"] {
        world.lab.host(host).stop();
        world.lab.host(host).start();
    }
    let summary = world.go("hostb", "hosta", &["--verify"]);
    let shared = from_replica(&summary);
    let expected = BLOCKS - 2 * REGION..BLOCKS - REGION + 100;
    assert!(expected.contains(&shared), "{summary}");
    world.check("hosta");
}

/// A return that was interrupted goes on with what arrived.
#[test]
fn a_cancelled_return_is_taken_up_again() {
    let mut world = World::begin(Lab::new());
    world.go("hosta", "hostb", &[]);
    world.write_on("hostb", &[(1000, 200), (20000, 200)]);
    world.begin_return("2Mbit");
    assert!(world.lab.b.dray(&["cancel"]).status.success());
    world.write_on("hostb", &[(1000, 1), (30, 2)]);
    let summary = world.go("hostb", "hosta", &["--verify"]);
    assert!(sent(&summary) <= 403 && from_replica(&summary) >= BLOCKS - 402, "{summary}");
    world.check("hosta");
}

/// Where either agent dies during a return, with a guest that writes all along.
const DEATHS: &[(&str, &str, &str)] = &[
    ("hostb", "Journal-Begun", "hybrid"),
    ("hostb", "StartTracking", "pre-copy"),
    ("hostb", "Send-Open", "hybrid"),
    ("hostb", "SendRun:3", "hybrid"),
    ("hostb", "Journal-Attempt", "post-copy"),
    ("hostb", "Send-Prepare", "hybrid"),
    ("hostb", "Journal-HandedOver", "hybrid"),
    ("hostb", "Retire", "pre-copy"),
    ("hostb", "Send-Commit", "post-copy"),
    ("hostb", "Journal-Done", "hybrid"),
    ("hosta", "Journal-Touched", "hybrid"),
    ("hosta", "Send-Opened", "hybrid"),
    ("hosta", "Send-Received:0", "pre-copy"),
    ("hosta", "SyncImages", "hybrid"),
    ("hosta", "Journal-Prepared", "hybrid"),
    ("hosta", "Send-Prepared", "post-copy"),
    ("hosta", "Journal-Committed", "hybrid"),
    ("hosta", "Expose", "post-copy"),
    ("hosta", "Notice-Serving", "hybrid"),
    ("hosta", "Send-Fetch:0", "post-copy"),
    ("hosta", "Checkpoint", "hybrid"),
    ("hosta", "Finish", "hybrid"),
    ("hosta", "Notice-Complete", "post-copy"),
];

fn die(seed: u64, host: &str, effect: &str, strategy: &str) -> Result<(), String> {
    let mut world = World::begin_with(Lab::new(), FEW);
    world.go("hosta", "hostb", &[]);
    world.write_on("hostb", &[(10, 4), (REGION + 100, 100)]);
    for name in ["hosta", "hostb"] {
        world.lab.host(name).kill();
        let variable = [("DRAY_ABORT_BEFORE", effect)];
        let variables: &[_] = if name == host { &variable } else { &[] };
        world.lab.host(name).start_with(variables);
    }
    let before = std::mem::take(&mut world.versions);
    let guest = Guest::go_on([&world.lab.b, &world.lab.a], IMAGE, before, FEW, seed);
    // The agent that is asked may be the one that dies.
    let _ = world.lab.b.ask(json!({"migrate": {
        "subject": {"images": {"names": [IMAGE]}}, "to": "hosta", "strategy": strategy,
        "detach": true,
    }}));
    wait_for("the death", END, || world.lab.host(host).has_died() || guest.complaint().is_some())?;
    world.lab.host(host).start();
    world.await_arrival("hostb", "hosta")?;
    world.versions = guest.shut_down()?;
    world.lab.a.kill();
    world.lab.b.kill();
    guest::compare(&world.lab.a.pool().join(IMAGE), &world.versions)?;
    // And on, with what each of them remembers after a kill.
    world.lab.a.start();
    world.lab.b.start();
    let summary = world.go("hosta", "hostb", &["--verify"]);
    if summary["verified"] != true {
        return Err(format!("not equal: {summary}"));
    }
    guest::compare(&world.lab.b.pool().join(IMAGE), &world.versions)
}

#[test]
fn any_agent_may_die_during_a_return() {
    let only = std::env::var("DRAY_KILL_ONLY").unwrap_or_default();
    let deaths: Vec<_> = DEATHS.iter().filter(|(_, effect, _)| effect.contains(&only)).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let nth = next.fetch_add(1, Ordering::Relaxed);
                    let Some((host, effect, strategy)) = deaths.get(nth) else { return };
                    if let Err(why) = die(nth as u64, host, effect, strategy) {
                        eprintln!("{host} before {effect} ({strategy}): {why}");
                        failed.lock().unwrap().push(effect);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{failed:#?}");
}
