//! `dray claim`: an image is taken although another host had it, and stays taken whatever restarts,
//! dies, is full or comes back. What it holds is read by somebody else, and only one host has it under
//! its name.

use crate::guest::{self, BLOCK, Versions, content, contents};
use crate::lab::{Host, Lab, opens, wait_for};
use crate::mounts::Mount;
use crate::moves::result;
use crate::nbd::{Client, FLUSH, Fault, READ, WRITE};
use crate::refusals::{CONFLICT, refused};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// Blocks of an image, all of them data: 4 MiB.
const BLOCKS: u64 = 1024;
/// Blocks that a request of the bystander has.
const PIECE: u64 = 256;
pub const IMAGE: &str = "disk.img";
const OTHER: &str = "data.img";
pub const WAIT: Duration = Duration::from_secs(30);
/// Exit code where data would be lost.
const AT_RISK: i32 = 15;

const FENCED: [&str; 3] = ["claim", IMAGE, "--source-is-fenced"];
pub const CLAIM: [&str; 5] = ["--json", "claim", IMAGE, "--source-is-fenced", "--accept-loss"];
const CLAIM_OTHER: [&str; 5] = ["--json", "claim", OTHER, "--source-is-fenced", "--accept-loss"];

/// What every block of a new image holds.
pub fn fresh() -> Versions {
    (0..BLOCKS).map(|block| (block, 1)).collect()
}

/// A new image in the source's pool.
pub fn make(lab: &Lab, name: &str) {
    let file = std::fs::File::create(lab.a.pool().join(name)).unwrap();
    for block in 0..BLOCKS {
        file.write_all_at(&content(block, 1), block * BLOCK).unwrap();
    }
}

/// The images are the target's, which has nothing of them yet.
fn hand_over(lab: &mut Lab, names: &[&str]) {
    names.iter().for_each(|name| make(lab, name));
    lab.start();
    names.iter().for_each(|name| lab.a.add(name));
    let mut args = vec!["migrate", "--to", "hostb", "--strategy", "deferred", "--detach"];
    names.iter().for_each(|name| args.extend(["--image", name]));
    let begun = lab.a.dray(&args);
    assert!(begun.status.success(), "{begun:?}");
    let owned = |name: &&str| lab.b.image(name).is_some_and(|image| image["state"] == "owner");
    let left = |name: &&str| lab.a.image(name).is_some_and(|image| image["state"] == "replica");
    wait_for("the handover", WAIT, || names.iter().all(owned) && names.iter().all(left))
        .unwrap_or_else(|why| panic!("{why}\n{}\n{}", lab.a.log(), lab.b.log()));
}

fn handed_over(names: &[&str]) -> Lab {
    let mut lab = Lab::new();
    hand_over(&mut lab, names);
    lab
}

/// Nothing has been fetched, a guest has written fifty blocks at the target, and the source is dead.
fn used_at_target() -> (Lab, Versions) {
    let (mut lab, mut versions) = (handed_over(&[IMAGE]), fresh());
    write(&lab.b, IMAGE, &mut versions, 100, 50, 7);
    lab.a.kill();
    (lab, versions)
}

/// A guest writes some blocks and has them made durable.
pub fn write(
    host: &Host,
    name: &str,
    versions: &mut Versions,
    first: u64,
    count: u64,
    version: u64,
) {
    let mut client = Client::connect(&host.nbd(), name).unwrap();
    let data = contents(first, &vec![version; count as usize]);
    client.request(WRITE, first * BLOCK, (count * BLOCK) as u32, &data, &|| true).unwrap();
    client.request(FLUSH, 0, 0, &[], &|| true).unwrap();
    versions.extend((first..first + count).map(|block| (block, version)));
}

fn read(host: &Host, name: &str, first: u64, count: u64) -> Vec<u8> {
    let mut client = Client::connect(&host.nbd(), name).unwrap();
    client.request(READ, first * BLOCK, (count * BLOCK) as u32, &[], &|| true).unwrap()
}

/// This host has the image, all of it, and serves what `versions` say.
fn has(host: &Host, name: &str, versions: &Versions) -> (u64, String) {
    let image = host.image(name).unwrap_or_else(|| panic!("no {name}: {}", host.log()));
    let free = image["migration"].is_null() && image["missing_blocks"] == 0;
    assert!(image["state"] == "owner" && free, "{image}\n{}", host.log());
    assert!(opens(&host.pool().join(name)), "{:?}", host.files());
    for first in (0..BLOCKS).step_by(PIECE as usize) {
        let held: Vec<u64> = (first..first + PIECE).map(|block| versions[&block]).collect();
        let same = read(host, name, first, PIECE) == contents(first, &held);
        assert!(same, "{name} from block {first} differs at {}", host.name);
    }
    (image["epoch"].as_u64().unwrap(), image["id"].as_str().unwrap().to_owned())
}

/// Nobody may use the image here, and it is not lost.
fn is_closed(host: &Host, name: &str) {
    assert!(!host.image(name).unwrap()["closed"]["why"].is_null());
    // Who was attached waits; somebody else is refused.
    let uri = format!("nbd+unix:///{name}?socket={}", host.nbd().display());
    let stranger = Command::new("qemu-img").args(["info", &uri]).output().unwrap();
    let text = String::from_utf8_lossy(&stranger.stderr).into_owned();
    assert!(!stranger.status.success() && text.contains("claim"), "{text}");
    assert!(!opens(&host.pool().join(name)), "{:?}", host.files());
    assert!(!host.image(name).unwrap()["migration"].is_null());
    let remove = ["images", "remove", name, "--delete"];
    refused(host, &remove, CONFLICT, &["claim"]);
}

/// An orderly restart, then a sudden one: each time the image is what it was.
pub fn restart_twice(host: &mut Host, name: &str, versions: &Versions) {
    let before = has(host, name, versions);
    host.stop();
    host.start();
    assert_eq!(has(host, name, versions), before);
    host.kill();
    host.start();
    assert_eq!(has(host, name, versions), before);
}

/// All agents are dead, and the file itself is looked at.
fn only_at(owner: &Host, other: &Host, name: &str, versions: &Versions) {
    assert!(!owner.is_up() && !other.is_up());
    guest::compare(&owner.pool().join(name), versions).unwrap();
    let (here, there) = (owner.pool().join(name), other.pool().join(name));
    assert!(opens(&here) && !opens(&there), "{:?} {:?}", owner.files(), other.files());
}

pub fn claim(host: &Host, args: &[&str]) -> Value {
    let output = host.dray(args);
    assert!(output.status.success(), "{output:?}\n{}", host.log());
    result(&output)
}

/// Time for two agents to find each other and to say what they believe.
fn settle() {
    std::thread::sleep(Duration::from_secs(2));
}

#[test]
fn a_claim_at_the_source_outlives_restarts_and_the_other_host() {
    let mut lab = handed_over(&[IMAGE]);
    lab.b.kill();
    refused(&lab.a, &["claim", IMAGE], AT_RISK, &["--source-is-fenced"]);
    refused(&lab.a, &FENCED, AT_RISK, &["since the handover", "--accept-loss"]);
    let claimed = claim(&lab.a, &CLAIM);
    assert_eq!((&claimed["epoch"], &claimed["writes_may_be_lost"]), (&4.into(), &true.into()));
    let mut versions = fresh();
    write(&lab.a, IMAGE, &mut versions, 5, 3, 9);
    assert_eq!(claim(&lab.a, &CLAIM), claimed, "it is told again, and nothing is done again");
    restart_twice(&mut lab.a, IMAGE, &versions);
    assert_eq!(lab.a.open_migrations(), 0);
    // The other host has seen nothing of this.
    lab.b.start();
    settle();
    has(&lab.a, IMAGE, &versions);
    restart_twice(&mut lab.a, IMAGE, &versions);
    settle();
    has(&lab.a, IMAGE, &versions);
    lab.a.kill();
    lab.b.kill();
    only_at(&lab.a, &lab.b, IMAGE, &versions);
}

#[test]
fn a_claim_at_the_target_makes_zeros_of_what_is_gone_for_good() {
    let (mut lab, mut versions) = used_at_target();
    let missing = lab.b.image(IMAGE).unwrap()["missing_blocks"].as_u64().unwrap();
    assert_eq!(missing, BLOCKS - 50);
    refused(&lab.b, &FENCED, AT_RISK, &["3.8 MiB", "become zeros"]);
    let claimed = claim(&lab.b, &CLAIM);
    assert_eq!(claimed["bytes_lost"], missing * BLOCK);
    assert_eq!(claimed["lost"].as_array().unwrap().len(), 2);
    assert_eq!((&claimed["epoch"], &claimed["writes_may_be_lost"]), (&4.into(), &false.into()));
    versions.values_mut().filter(|version| **version == 1).for_each(|version| *version = 0);
    write(&lab.b, IMAGE, &mut versions, 300, 5, 8);
    restart_twice(&mut lab.b, IMAGE, &versions);
    assert_eq!(lab.b.open_migrations(), 0);
    // The source still believes that the target needs it: it is told, and changes nothing.
    lab.a.start();
    let told = || {
        let shown = lab.a.migrations();
        shown.first().is_some_and(|first| first["error"].to_string().contains("claimed"))
    };
    wait_for("the source to be told", WAIT, told)
        .unwrap_or_else(|why| panic!("{why}: {:?}\n{}", lab.a.migrations(), lab.a.log()));
    assert_eq!(lab.a.image(IMAGE).unwrap()["state"], "replica");
    restart_twice(&mut lab.b, IMAGE, &versions);
    lab.a.kill();
    lab.b.kill();
    only_at(&lab.b, &lab.a, IMAGE, &versions);
}

/// Its migration would be open for ever, and the image could not come home.
#[test]
fn the_source_of_a_claimed_target_lets_go_when_it_is_told_to() {
    let (mut lab, mut versions) = used_at_target();
    claim(&lab.b, &CLAIM);
    versions.values_mut().filter(|version| **version == 1).for_each(|version| *version = 0);
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "LetGo-Forget")]);
    let is_told = |a: &Host| {
        let told = || {
            let shown = a.migrations();
            shown.first().is_some_and(|first| first["error"].to_string().contains("dray cancel"))
        };
        wait_for("the source to be told", WAIT, told).unwrap();
    };
    is_told(&lab.a);
    refused(&lab.a, &["images", "remove", IMAGE, "--delete"], CONFLICT, &["dray cancel"]);
    assert!(!lab.a.dray(&["cancel"]).status.success(), "it dies");
    wait_for("the death", WAIT, || lab.a.has_died()).unwrap();
    lab.a.start();
    assert!(lab.a.image(IMAGE).unwrap()["migration"].is_null() && lab.a.open_migrations() == 1);
    is_told(&lab.a);
    let cancelled = lab.a.dray(&["cancel"]);
    let said = String::from_utf8_lossy(&cancelled.stdout).into_owned();
    assert!(cancelled.status.success() && said.contains("as replicas"), "{cancelled:?}");
    for _ in 0..2 {
        assert_eq!(lab.a.open_migrations(), 0);
        let left = lab.a.image(IMAGE).unwrap();
        assert!(left["state"] == "replica" && left["migration"].is_null(), "{left}");
        lab.a.kill();
        lab.a.start();
    }
    let file = lab.a.image(IMAGE).unwrap()["path"].as_str().unwrap().to_owned();
    guest::compare(file.as_ref(), &fresh()).unwrap();
    let home = ["migrate", "--image", IMAGE, "--to", "hosta"];
    refused(&lab.b, &home, CONFLICT, &["exists here already", "dray images remove"]);
    let removed = lab.a.dray(&["images", "remove", IMAGE, "--delete"]);
    assert!(removed.status.success(), "{removed:?}");
    assert!(lab.b.dray(&home).status.success(), "{}", lab.b.log());
    let owned = || lab.a.image(IMAGE).is_some_and(|image| image["migration"].is_null());
    wait_for("the end", WAIT, owned).unwrap();
    has(&lab.a, IMAGE, &versions);
    lab.a.kill();
    lab.b.kill();
    only_at(&lab.a, &lab.b, IMAGE, &versions);
}

/// It serves what nobody gives it the rest of. Its operator hears why, and which commands end that.
#[test]
fn the_target_of_a_claimed_source_is_told_so_and_lets_go_when_it_is_claimed() {
    let mut lab = handed_over(&[IMAGE]);
    lab.b.kill();
    let claimed = claim(&lab.a, &CLAIM);
    lab.b.start();
    let said = || lab.b.migrations().first().map_or(String::new(), |one| one["error"].to_string());
    wait_for("the source's answer", WAIT, || said().contains("was claimed there"))
        .unwrap_or_else(|why| panic!("{why}: {}\n{}", said(), lab.b.log()));
    let id = lab.b.migrations()[0]["migration"].as_str().unwrap().to_owned();
    let ways = ["hosta", "was claimed there", "`dray claim disk.img --source-is-fenced`", "remove"];
    refused(&lab.b, &["cancel", &id], CONFLICT, &ways);
    refused(&lab.b, &["images", "remove", IMAGE], CONFLICT, &ways);
    claim(&lab.b, &CLAIM);
    assert_eq!(lab.b.open_migrations(), 0);
    assert!(lab.b.dray(&["images", "remove", IMAGE]).status.success());
    std::fs::remove_file(lab.b.pool().join(IMAGE)).unwrap();
    assert_eq!(claimed["epoch"], has(&lab.a, IMAGE, &fresh()).0);
    let moved = lab.a.dray(&["migrate", "--image", IMAGE, "--to", "hostb"]);
    assert!(moved.status.success(), "{moved:?}");
    has(&lab.b, IMAGE, &fresh());
}

#[test]
fn a_target_that_is_claimed_after_a_restart_knows_what_it_has() {
    let (mut lab, mut versions) = used_at_target();
    lab.b.kill();
    lab.b.start();
    assert_eq!(claim(&lab.b, &CLAIM)["bytes_lost"], (BLOCKS - 50) * BLOCK);
    versions.values_mut().filter(|version| **version == 1).for_each(|version| *version = 0);
    restart_twice(&mut lab.b, IMAGE, &versions);
    lab.b.kill();
    only_at(&lab.b, &lab.a, IMAGE, &versions);
}

#[test]
fn a_target_that_has_promised_can_be_claimed() {
    let mut lab = Lab::new();
    make(&lab, IMAGE);
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "Journal-HandedOver")]);
    lab.b.start();
    lab.a.add(IMAGE);
    let mut versions = fresh();
    write(&lab.a, IMAGE, &mut versions, 9, 9, 3);
    let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--strategy", "pre-copy"];
    let _ = lab.a.dray(&[&args[..], &["--detach"]].concat());
    wait_for("the source's death", WAIT, || lab.a.has_died()).unwrap();
    refused(&lab.b, &FENCED, AT_RISK, &["promise", "--accept-loss"]);
    assert_eq!(lab.b.image(IMAGE).unwrap()["state"], "incoming");
    // It knows all that it knew.
    lab.b.kill();
    lab.b.start();
    let claimed = claim(&lab.b, &CLAIM);
    assert_eq!((&claimed["writes_may_be_lost"], &claimed["bytes_lost"]), (&true.into(), &0.into()));
    // Above the 2 in which its source would hand it over.
    assert_eq!(claimed["epoch"], 3);
    restart_twice(&mut lab.b, IMAGE, &versions);
    lab.a.start();
    settle();
    restart_twice(&mut lab.b, IMAGE, &versions);
    lab.b.kill();
    guest::compare(&lab.b.pool().join(IMAGE), &versions).unwrap();
}

#[test]
fn what_is_still_on_its_way_cannot_be_claimed() {
    let mut lab = Lab::new();
    make(&lab, IMAGE);
    lab.start();
    lab.a.add(IMAGE);
    let args = ["migrate", "--image", IMAGE, "--to", "hostb", "--strategy", "pre-copy"];
    let more = ["--detach", "--bandwidth", "256KiB/s"];
    assert!(lab.a.dray(&[&args[..], &more].concat()).status.success());
    let arrives = || lab.b.image(IMAGE).is_some();
    wait_for("the image", WAIT, arrives).unwrap();
    lab.a.kill();
    refused(&lab.b, &CLAIM[1..], CONFLICT, &["not complete"]);
    // It was not harmed: the source goes on with it.
    lab.a.start();
    let limit = lab.a.dray(&["limit", "none"]);
    assert!(limit.status.success(), "{limit:?}");
    let owned =
        || lab.b.image(IMAGE).is_some_and(|i| i["state"] == "owner" && i["migration"].is_null());
    wait_for("the end", WAIT, owned).unwrap();
    has(&lab.b, IMAGE, &fresh());
    lab.a.kill();
    lab.b.kill();
}

#[test]
fn of_two_images_at_the_source_the_other_one_waits_for_its_own_claim() {
    let mut lab = Lab::with(|_, config| config + "[replicas]\nkeep = 0\n");
    hand_over(&mut lab, &[IMAGE, OTHER]);
    lab.b.kill();
    let claimed = claim(&lab.a, &CLAIM);
    assert_eq!(claimed["others"], serde_json::json!([OTHER]));
    is_closed(&lab.a, OTHER);
    restart_twice(&mut lab.a, IMAGE, &fresh());
    lab.b.start();
    settle();
    is_closed(&lab.a, OTHER);
    restart_twice(&mut lab.a, IMAGE, &fresh());
    is_closed(&lab.a, OTHER);
    assert_eq!(claim(&lab.a, &CLAIM_OTHER)["others"], serde_json::json!([]));
    assert_eq!(lab.a.open_migrations(), 0);
    for name in [IMAGE, OTHER] {
        restart_twice(&mut lab.a, name, &fresh());
    }
    lab.a.kill();
    lab.b.kill();
    for name in [IMAGE, OTHER] {
        only_at(&lab.a, &lab.b, name, &fresh());
    }
}

#[test]
fn of_two_images_at_the_target_the_other_one_keeps_what_it_has() {
    let mut lab = handed_over(&[IMAGE, OTHER]);
    let mut versions = fresh();
    write(&lab.b, OTHER, &mut versions, 40, 20, 6);
    lab.a.kill();
    let mut attached = Client::connect(&lab.b.nbd(), OTHER).unwrap();
    assert_eq!(claim(&lab.b, &CLAIM)["others"], serde_json::json!([OTHER]));
    // Who is attached waits, also when somebody would end the stall.
    refused(&lab.b, &["unstall", OTHER], CONFLICT, &["does not know yet", "dray claim"]);
    let began = Instant::now();
    let patient = || began.elapsed() < Duration::from_secs(1);
    let read = attached.request(READ, 40 * BLOCK, BLOCK as u32, &[], &patient);
    assert!(matches!(read, Err(Fault::Lost)), "{read:?}");
    let zeros: Versions = (0..BLOCKS).map(|block| (block, 0)).collect();
    is_closed(&lab.b, OTHER);
    restart_twice(&mut lab.b, IMAGE, &zeros);
    lab.a.start();
    settle();
    is_closed(&lab.b, OTHER);
    restart_twice(&mut lab.b, IMAGE, &zeros);
    assert_eq!(claim(&lab.b, &CLAIM_OTHER)["bytes_lost"], (BLOCKS - 20) * BLOCK);
    versions.values_mut().filter(|version| **version == 1).for_each(|version| *version = 0);
    restart_twice(&mut lab.b, OTHER, &versions);
    assert_eq!(lab.b.open_migrations(), 0);
    lab.a.kill();
    lab.b.kill();
    only_at(&lab.b, &lab.a, IMAGE, &zeros);
    only_at(&lab.b, &lab.a, OTHER, &versions);
}

/// Two images that the target owns; it has all of the second one.
fn one_is_whole() -> (Lab, Versions) {
    let mut lab = handed_over(&[IMAGE, OTHER]);
    let mut versions = fresh();
    write(&lab.b, OTHER, &mut versions, 0, BLOCKS, 6);
    lab.a.kill();
    (lab, versions)
}

/// The second image is the target's as if the migration had ended, whatever comes.
fn goes_on(mut lab: Lab, versions: &Versions) {
    let zeros: Versions = (0..BLOCKS).map(|block| (block, 0)).collect();
    assert_eq!(has(&lab.b, OTHER, versions).0, 2);
    refused(&lab.b, &CLAIM_OTHER[1..], CONFLICT, &["owns it already"]);
    assert_eq!(lab.b.open_migrations(), 0);
    lab.a.start();
    settle();
    assert_eq!(lab.a.image(OTHER).unwrap()["state"], "replica");
    for (name, held) in [(IMAGE, &zeros), (OTHER, versions)] {
        restart_twice(&mut lab.b, name, held);
    }
    lab.a.kill();
    lab.b.kill();
    only_at(&lab.b, &lab.a, IMAGE, &zeros);
    only_at(&lab.b, &lab.a, OTHER, versions);
}

#[test]
fn of_two_images_at_the_target_one_that_is_whole_goes_on() {
    let (lab, mut versions) = one_is_whole();
    let mut attached = Client::connect(&lab.b.nbd(), OTHER).unwrap();
    assert_eq!(claim(&lab.b, &CLAIM)["others"], serde_json::json!([]));
    let held = attached.request(READ, 40 * BLOCK, BLOCK as u32, &[], &|| true).unwrap();
    assert_eq!(held, content(40, 6));
    write(&lab.b, OTHER, &mut versions, 3, 4, 7);
    goes_on(lab, &versions);
}

#[test]
fn an_image_that_is_whole_goes_on_wherever_the_claim_beside_it_dies() {
    for step in ["Claim-Close", "Claim-Leave", "Claim-Record", "Claim-Forget"] {
        let (mut lab, versions) = one_is_whole();
        lab.b.kill();
        lab.b.start_with(&[("DRAY_ABORT_BEFORE", step)]);
        assert!(!lab.b.dray(&CLAIM).status.success(), "{step} did not come");
        wait_for("the death", WAIT, || lab.b.has_died()).unwrap();
        lab.b.start();
        has(&lab.b, OTHER, &versions);
        if step != "Claim-Forget" {
            assert_eq!(claim(&lab.b, &CLAIM)["others"], serde_json::json!([]), "{step}");
        }
        goes_on(lab, &versions);
    }
}

#[test]
fn an_image_whose_claim_has_made_zeros_waits_for_its_own_claim() {
    let mut lab = handed_over(&[IMAGE, OTHER]);
    lab.a.kill();
    lab.b.kill();
    lab.b.start_with(&[("DRAY_ABORT_BEFORE", "Claim-Record")]);
    assert!(!lab.b.dray(&CLAIM_OTHER).status.success());
    wait_for("the death", WAIT, || lab.b.has_died()).unwrap();
    lab.b.start();
    is_closed(&lab.b, OTHER);
    assert_eq!(claim(&lab.b, &CLAIM)["others"], serde_json::json!([OTHER]));
    is_closed(&lab.b, OTHER);
    assert_eq!(claim(&lab.b, &CLAIM_OTHER)["bytes_lost"], BLOCKS * BLOCK);
    lab.b.kill();
}

/// What `dray claim` does, one after the other.
const STEPS: [&str; 9] = [
    "Claim-Void",
    "Claim-Close",
    "Claim-Fill",
    "Claim-Zero",
    "Claim-Record",
    "Claim-Name",
    "Claim-Named",
    "Claim-Open",
    "Claim-Forget",
];

/// The agent dies before the step; afterwards the image is claimed, or can be.
fn dies_before(step: &str, at_source: bool, versions: &mut Versions) {
    let mut lab = handed_over(&[IMAGE]);
    write(&lab.b, IMAGE, versions, 100, 50, 7);
    if at_source {
        versions.extend(fresh());
    } else {
        versions.values_mut().filter(|version| **version == 1).for_each(|version| *version = 0);
    }
    lab.a.kill();
    lab.b.kill();
    let host = if at_source { &mut lab.a } else { &mut lab.b };
    host.start_with(&[("DRAY_ABORT_BEFORE", step)]);
    let asked = host.dray(&CLAIM);
    if asked.status.success() {
        let filled = ["Claim-Fill", "Claim-Zero"].contains(&step);
        assert!(at_source && filled, "{step} did not come");
    } else {
        wait_for("the death", WAIT, || host.has_died()).unwrap();
        host.start();
        let image = host.image(IMAGE).unwrap();
        let decided = ["Claim-Name", "Claim-Named", "Claim-Open", "Claim-Forget"].contains(&step);
        assert_eq!(image["migration"].is_null(), decided, "{step}: {image}");
        if !decided {
            if step != "Claim-Void" {
                is_closed(host, IMAGE);
            }
            refused(host, &FENCED, AT_RISK, &[if at_source { "handover" } else { "3.8 MiB" }]);
        }
        // What the claim before it has made zeros of already is lost all the same.
        let (lost, told) = (if at_source { 0 } else { BLOCKS - 50 }, claim(host, &CLAIM));
        assert_eq!(told["bytes_lost"], lost * BLOCK, "{step}");
        assert_eq!(told["writes_may_be_lost"], at_source, "{step}");
    }
    restart_twice(host, IMAGE, versions);
    assert_eq!(host.open_migrations(), 0, "{step}");
    lab.a.kill();
    lab.b.kill();
    let (owner, other) = if at_source { (&lab.a, &lab.b) } else { (&lab.b, &lab.a) };
    only_at(owner, other, IMAGE, versions);
}

#[test]
fn an_agent_may_die_at_any_step_of_a_claim_at_the_source() {
    STEPS.iter().for_each(|step| dies_before(step, true, &mut fresh()));
}

#[test]
fn an_agent_may_die_at_any_step_of_a_claim_at_the_target() {
    STEPS.iter().for_each(|step| dies_before(step, false, &mut fresh()));
}

fn without_room(at_source: bool) {
    let mut lab = Lab::new();
    let state = if at_source { &lab.a } else { &lab.b }.dir.join("state");
    let Some(_mount) = Mount::tmpfs(&state, "size=32m") else { return };
    hand_over(&mut lab, &[IMAGE]);
    let ballast = state.join("ballast");
    // Fills the file system; the error is wanted.
    let _ = std::fs::write(&ballast, vec![1; 64 << 20]);
    let (host, other) = if at_source { (&mut lab.a, &mut lab.b) } else { (&mut lab.b, &mut lab.a) };
    other.kill();
    let before = host.image(IMAGE).unwrap();
    refused(host, &CLAIM[1..], 10, &["No space left"]);
    let after = host.image(IMAGE).unwrap();
    assert_eq!((&before["state"], &before["epoch"]), (&after["state"], &after["epoch"]));
    assert_eq!(before["migration"], after["migration"]);
    std::fs::remove_file(&ballast).unwrap();
    claim(host, &CLAIM);
    let held = u64::from(at_source);
    let versions: Versions = (0..BLOCKS).map(|block| (block, held)).collect();
    restart_twice(host, IMAGE, &versions);
    lab.a.kill();
    lab.b.kill();
}

#[test]
fn a_full_state_directory_puts_a_claim_off() {
    without_room(true);
    without_room(false);
}

#[test]
fn the_other_host_may_come_back_in_the_middle_of_a_claim() {
    let mut lab = handed_over(&[IMAGE]);
    lab.b.kill();
    lab.a.kill();
    lab.a.start_with(&[("DRAY_STOP_BEFORE", "Claim-Record")]);
    let socket = lab.a.api();
    let asked = std::thread::spawn(move || {
        let mut dray = std::process::Command::new(crate::lab::DRAY);
        dray.arg("--socket").arg(socket).args(CLAIM).output().unwrap()
    });
    let stopped = || {
        std::fs::read_dir(lab.a.dir.join("state/migrations"))
            .unwrap()
            .any(|folder| folder.unwrap().path().join("source.void").exists())
    };
    wait_for("the middle of the claim", WAIT, stopped).unwrap();
    lab.b.start();
    settle();
    lab.a.signal("CONT");
    let asked = asked.join().unwrap();
    assert!(asked.status.success(), "{asked:?}");
    settle();
    restart_twice(&mut lab.a, IMAGE, &fresh());
    lab.a.kill();
    lab.b.kill();
    only_at(&lab.a, &lab.b, IMAGE, &fresh());
}

#[test]
fn a_claimed_image_moves_on_to_a_third_host() {
    let mut lab = Lab::new();
    let mut third = lab.third();
    hand_over(&mut lab, &[IMAGE]);
    third.start();
    lab.b.kill();
    claim(&lab.a, &CLAIM);
    let mut versions = fresh();
    write(&lab.a, IMAGE, &mut versions, 500, 10, 4);
    lab.b.start();
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hostc", "--verify"];
    let summary = result(&lab.a.dray(&args));
    assert_eq!((&summary["result"], &summary["verified"]), (&"completed".into(), &true.into()));
    let owned =
        || third.image(IMAGE).is_some_and(|i| i["state"] == "owner" && i["migration"].is_null());
    wait_for("the end", WAIT, owned).unwrap();
    restart_twice(&mut third, IMAGE, &versions);
    lab.a.kill();
    lab.b.kill();
    third.kill();
    only_at(&third, &lab.a, IMAGE, &versions);
    only_at(&third, &lab.b, IMAGE, &versions);
}

#[test]
fn a_complete_image_is_claimed_from_a_migration_whose_source_is_gone() {
    complete_image_is_claimed(false);
}

#[test]
fn a_complete_image_is_claimed_after_a_restart_too() {
    complete_image_is_claimed(true);
}

fn complete_image_is_claimed(restarted: bool) {
    let mut lab = Lab::new();
    let mut third = lab.third();
    make(&lab, IMAGE);
    make(&lab, OTHER);
    lab.a.start_with(&[("DRAY_ABORT_BEFORE", "Journal-Done")]);
    lab.b.start();
    third.start();
    lab.a.add(IMAGE);
    lab.a.add(OTHER);
    let images = ["migrate", "--image", IMAGE, "--image", OTHER];
    let args = [&images[..], &["--to", "hostb", "--verify", "--detach"]].concat();
    assert!(lab.a.dray(&args).status.success());
    wait_for("the source's death", WAIT, || lab.a.has_died()).unwrap();
    let mut versions = fresh();
    write(&lab.b, IMAGE, &mut versions, 20, 10, 4);
    assert!(!lab.b.image(IMAGE).unwrap()["migration"].is_null());
    // It would wait for its source for ever, and could not move on.
    let on = ["--json", "migrate", "--image", IMAGE, "--to", "hostc", "--verify"];
    refused(&lab.b, &on, CONFLICT, &["takes part", "dray claim"]);
    if restarted {
        lab.b.kill();
        lab.b.start();
    }
    let claimed = claim(&lab.b, &[&["--json"], &FENCED[..]].concat());
    assert_eq!(
        (&claimed["bytes_lost"], &claimed["writes_may_be_lost"]),
        (&0.into(), &false.into())
    );
    assert_eq!(claimed["others"], serde_json::json!([]));
    restart_twice(&mut lab.b, IMAGE, &versions);
    restart_twice(&mut lab.b, OTHER, &fresh());
    assert_eq!(lab.b.open_migrations(), 0);
    let summary = result(&lab.b.dray(&on));
    assert_eq!((&summary["result"], &summary["verified"]), (&"completed".into(), &true.into()));
    // The source believes that it has still to be told of the end.
    lab.a.start();
    settle();
    for host in [&mut lab.a, &mut lab.b, &mut third] {
        host.kill();
    }
    only_at(&third, &lab.a, IMAGE, &versions);
    only_at(&third, &lab.b, IMAGE, &versions);
    only_at(&lab.b, &lab.a, OTHER, &fresh());
}

#[test]
fn a_guest_that_waits_for_lost_blocks_goes_on_once_they_are_claimed() {
    let (mut lab, mut versions) = used_at_target();
    let socket = lab.b.nbd();
    let waits = std::thread::spawn(move || {
        let mut client = Client::connect(&socket, IMAGE).unwrap();
        let half = vec![9; BLOCK as usize / 2];
        // Part of a block that only the source has, then one that is here.
        client.request(WRITE, 0, half.len() as u32, &half, &|| true).unwrap();
        client.request(READ, 100 * BLOCK, BLOCK as u32, &[], &|| true).unwrap()
    });
    let waiting = || {
        let answer = lab.b.ask(serde_json::json!({"unstall": {"image": IMAGE}}));
        answer.is_ok_and(|answer| answer["waiting"] == 1)
    };
    wait_for("the guest", WAIT, waiting).unwrap();
    claim(&lab.b, &CLAIM);
    assert_eq!(waits.join().unwrap(), content(100, 7));
    let first = read(&lab.b, IMAGE, 0, 1);
    let (half, rest) = first.split_at(BLOCK as usize / 2);
    assert!(half.iter().all(|&byte| byte == 9) && rest.iter().all(|&byte| byte == 0));
    versions.values_mut().filter(|version| **version == 1).for_each(|version| *version = 0);
    write(&lab.b, IMAGE, &mut versions, 0, 1, 8);
    restart_twice(&mut lab.b, IMAGE, &versions);
    lab.b.kill();
    only_at(&lab.b, &lab.a, IMAGE, &versions);
}
