//! The source's state directory is full, or a name is taken, while a migration runs: guests see no
//! error, one host serves, and all goes on by itself when there is room again.

use crate::guest::BLOCK;
use crate::lab::{Host, Lab, wait_for};
use crate::mounts::Mount;
use crate::nbd::{Client, FLUSH, Fault, READ, WRITE};
use serde_json::json;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Regions of 64 MiB, each with a write intent of its own.
const REGION: u64 = 64 << 20;
/// Regions of the image that a guest writes into all over.
const REGIONS: u64 = 40;
/// Data at the beginning of an image, so that a copy takes a while.
const DATA: u64 = 12 << 20;
/// Longest time that anything here may take.
const LONG: Duration = Duration::from_secs(45);

fn make(path: &Path, len: u64) {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(len).unwrap();
    // Nothing that can be compressed.
    let mut state = 88_172_645_463_325_252_u64;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let random: Vec<u8> = (0..DATA / 8).flat_map(|_| word()).collect();
    file.write_all_at(&random, 0).unwrap();
}

/// A file system for the source's state, and what fills it.
struct Small {
    _mount: Mount,
    ballast: PathBuf,
}

impl Small {
    fn over(lab: &Lab) -> Option<Self> {
        let state = lab.a.dir.join("state");
        let mount = Mount::tmpfs(&state, "size=2m")?;
        Some(Self { ballast: state.join("ballast"), _mount: mount })
    }

    /// Not a byte is left, nor a file.
    fn fill(&self) {
        let mut file = std::fs::File::create(&self.ballast).unwrap();
        for size in [1 << 16, 1 << 12, 1] {
            while file.write_all(&vec![1; size]).is_ok() {}
        }
    }

    fn empty(&self) {
        std::fs::remove_file(&self.ballast).unwrap();
    }
}

fn migrate(lab: &Lab, names: &[&str], strategy: &str, rate: Option<u64>) {
    let bandwidth = rate.map(|rate| json!({"bytes_per_second": rate}));
    let command = json!({"migrate": {
        "subject": {"images": {"names": names}}, "to": "hostb", "strategy": strategy,
        "bandwidth": bandwidth, "detach": true,
    }});
    lab.a.ask(command).unwrap();
}

/// The image "wide" is being copied at `rate` when the source's state directory becomes full.
fn full_during_copy(rate: u64) -> Option<(Lab, Small)> {
    let mut lab = Lab::new();
    let small = Small::over(&lab)?;
    make(&lab.a.pool().join("wide"), REGIONS * REGION);
    lab.start();
    lab.a.add("wide");
    migrate(&lab, &["wide"], "hybrid", Some(rate));
    let begun =
        || lab.a.progress().is_some_and(|(_, p)| p["total"]["bytes_done"].as_u64() > Some(0));
    wait_for("the copy", LONG, begun).unwrap();
    small.fill();
    Some((lab, small))
}

fn owns(host: &Host, name: &str) -> bool {
    host.image(name).is_some_and(|image| image["state"] == "owner")
}

/// What the source says of the migration.
fn said(host: &Host) -> String {
    host.migrations().first().map(|shown| shown["error"].to_string()).unwrap_or_default()
}

fn await_owner(lab: &Lab, name: &str) {
    let there = || owns(&lab.b, name) && lab.b.image(name).unwrap()["missing_blocks"] == 0;
    let owned = wait_for("the target", LONG, there);
    owned.unwrap_or_else(|why| panic!("{why}: {} {}", said(&lab.a), lab.a.log()));
}

/// Both hosts have forgotten the migration and the source has replicas.
fn await_end(lab: &Lab, names: &[&str]) {
    let ended = wait_for("the end", LONG, || {
        lab.a.open_migrations() + lab.b.open_migrations() == 0
            && names.iter().all(|name| lab.a.image(name).unwrap()["state"] == "replica")
    });
    ended.unwrap_or_else(|why| panic!("{why}: {} {}", said(&lab.a), lab.a.log()));
}

fn write(client: &mut Client, offset: u64, byte: u8, patience: Duration) -> Result<(), Fault> {
    let until = Instant::now() + patience;
    let data = [byte; BLOCK as usize];
    client.request(WRITE, offset, BLOCK as u32, &data, &|| Instant::now() < until).map(drop)
}

fn holds(client: &mut Client, offset: u64) -> u8 {
    let data = client.request(READ, offset, BLOCK as u32, &[], &|| true).unwrap();
    assert!(data.iter().all(|&byte| byte == data[0]), "a block of two writes");
    data[0]
}

/// The guest writes into regions that nobody has written into while nothing can be added to the state
/// directory; and the images go over all the same.
#[test]
fn a_full_state_directory_at_the_source_costs_the_guest_no_write() {
    let Some((mut lab, small)) = full_during_copy(3 << 20) else { return };
    let mut client = Client::connect(&lab.a.nbd(), "wide").unwrap();
    for region in 0..REGIONS {
        let offset = region * REGION + 4096 * BLOCK;
        let written = write(&mut client, offset, region as u8 + 1, LONG);
        assert!(written.is_ok(), "region {region}: {written:?}: {}", lab.a.log());
    }
    client.request(FLUSH, 0, 0, &[], &|| true).unwrap();
    await_owner(&lab, "wide");
    let mut there = Client::connect(&lab.b.nbd(), "wide").unwrap();
    for region in 0..REGIONS {
        assert_eq!(holds(&mut there, region * REGION + 4096 * BLOCK), region as u8 + 1);
    }
    small.empty();
    await_end(&lab, &["wide"]);
    lab.a.kill();
    lab.b.kill();
}

/// `dray cancel` ends it at once, and the guest goes on.
#[test]
fn a_migration_is_cancelled_with_a_full_state_directory() {
    let Some((mut lab, small)) = full_during_copy(1 << 20) else { return };
    let cancelled = lab.a.dray(&["cancel"]);
    let mut client = Client::connect(&lab.a.nbd(), "wide").unwrap();
    for region in 0..REGIONS {
        let written = write(&mut client, region * REGION, 7, LONG);
        assert!(written.is_ok(), "region {region}: {written:?}");
    }
    small.empty();
    let ended = wait_for("the end", LONG, || {
        lab.a.progress().is_some_and(|(state, _)| state == "cancelled")
            && lab.a.image("wide").unwrap()["migration"].is_null()
    });
    ended.unwrap_or_else(|why| panic!("{why}: {cancelled:?} {} {}", said(&lab.a), lab.a.log()));
    assert!(owns(&lab.a, "wide"));
    lab.a.kill();
    lab.b.kill();
}

/// Two disks are past the point of no return and the first cannot be renamed or recorded: what is
/// written at the other one here would be lost.
fn handed_over(spoil: impl FnOnce(&Lab), said_of: &str, mend: impl FnOnce(&Lab)) {
    let mut lab = Lab::new();
    for name in ["one", "two"] {
        make(&lab.a.pool().join(name), 2 * REGION);
    }
    lab.a.start_with(&[("DRAY_STOP_BEFORE", "Retire")]);
    lab.b.start();
    lab.a.add("one");
    lab.a.add("two");
    let connect = |name| Client::connect(&lab.a.nbd(), name).unwrap();
    let mut clients = ["one", "two"].map(connect);
    migrate(&lab, &["one", "two"], "hybrid", None);
    wait_for("the handover", LONG, || lab.a.log().contains("handover began")).unwrap();
    // It stops; nobody but the kernel can tell.
    wait_for("the stop", LONG, || lab.a.is_stopped()).unwrap();
    spoil(&lab);
    lab.a.signal("CONT");
    await_owner(&lab, "one");
    await_owner(&lab, "two");
    for (client, name) in clients.iter_mut().zip(["one", "two"]) {
        let written = write(client, REGION, 9, Duration::from_millis(500));
        assert!(matches!(written, Err(Fault::Lost)), "{name} here: {written:?}");
        let unstalled = lab.a.dray(&["unstall", name]);
        assert!(!unstalled.status.success(), "{unstalled:?}");
        let mut again = Client::connect(&lab.a.nbd(), name).unwrap();
        let written = write(&mut again, REGION, 9, Duration::from_millis(500));
        assert!(matches!(written, Err(Fault::Lost)), "{name} after unstall: {written:?}");
    }
    wait_for("a word", LONG, || said(&lab.a).contains(said_of)).unwrap();
    mend(&lab);
    await_end(&lab, &["one", "two"]);
    lab.a.kill();
    lab.b.kill();
}

#[test]
fn a_full_state_directory_after_the_handover_opens_no_disk() {
    // The lab's own file system is not full: the records' folder is.
    let folder = |lab: &Lab| lab.a.dir.join("state/images");
    handed_over(
        |lab| drop(std::fs::rename(folder(lab), lab.a.dir.join("state/away"))),
        "images",
        |lab| drop(std::fs::rename(lab.a.dir.join("state/away"), folder(lab))),
    );
}

#[test]
fn a_name_that_is_taken_after_the_handover_opens_no_disk() {
    let replica = |lab: &Lab| lab.a.pool().join(".one.dray-replica-2");
    handed_over(
        |lab| std::fs::write(replica(lab), b"left over").unwrap(),
        ".one.dray-replica-2",
        |lab| std::fs::remove_file(replica(lab)).unwrap(),
    );
}

#[test]
fn a_limit_that_a_full_state_directory_cannot_keep_holds_all_the_same() {
    let mut lab = Lab::new();
    let Some(small) = Small::over(&lab) else { return };
    make(&lab.a.pool().join("disk"), REGION);
    lab.start();
    lab.a.add("disk");
    migrate(&lab, &["disk"], "hybrid", Some(100_000));
    small.fill();
    let limited = lab.a.ask(json!({"limit": {"bandwidth": null}})).unwrap();
    assert!(limited["not_kept"].to_string().contains("No space"), "{limited}");
    small.empty();
    await_owner(&lab, "disk");
    await_end(&lab, &["disk"]);
}
