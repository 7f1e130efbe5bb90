//! Images that begin with the replica that a host on their way has kept: neither the owner nor its disks
//! are asked for what another host has, and whatever that host does, no wrong block ever arrives.

use crate::guest::BLOCK;
use crate::lab::{Host, read_record, run, write_record};
use crate::seeds::{IMAGE, World, configure, sent, text};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest time that a host which says nothing may cost.
const PATIENCE: Duration = Duration::from_secs(40);

/// The file that hosta has kept.
fn replica(host: &Host) -> PathBuf {
    let names = host.files();
    let name = names.iter().find(|name| name.contains("dray-replica")).expect("a replica");
    host.pool().join(name)
}

/// Writes into a file behind everybody's back, and makes it look as before.
fn edit(path: &std::path::Path, offset: u64) {
    let reference = path.with_extension("reference");
    run(Command::new("touch").arg("-r").arg(path).arg(&reference));
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&[0x5a; 4096], offset).unwrap();
    run(Command::new("touch").arg("-r").arg(&reference).arg(path));
    std::fs::remove_file(reference).unwrap();
}

fn data(world: &World) -> u64 {
    world.versions.values().filter(|version| **version > 0).count() as u64
}

#[test]
fn what_another_host_has_left_does_not_come_from_the_source() {
    let mut world = World::with_replica(&[]);
    world.write(&[(10, 4), (15000, 8)]);
    let planned = world.planned("hostc", &[]);
    assert_eq!(planned["source"], 12 * BLOCK, "{planned}");
    assert!(planned["given"]["replica at hosta"].as_u64() > Some(1 << 20), "{planned}");
    let back = world.planned("hosta", &[]);
    assert_eq!((&back["source"], &back["given"]), (&(12 * BLOCK).into(), &serde_json::json!({})));
    assert!(back["at_target"].as_u64() > Some(1 << 20), "{back}");
    assert!(world.c.files().is_empty(), "nothing is made");
    let (summary, told) = world.go(&["--verify"]);
    assert!(told.contains("from replica at hosta"), "{told}");
    assert_eq!((sent(&summary), &summary["verified"]), (12, &true.into()), "{summary}");
    assert_eq!(world.c.files(), [IMAGE]);
    assert!(replica(&world.lab.a).exists(), "it is still there");
}

#[test]
fn who_may_not_use_the_pool_may_not_read_what_lies_in_it() {
    let mut world = World::with_replica(&[]);
    let path = world.lab.a.config();
    let before = std::fs::read_to_string(&path).unwrap();
    let (head, tail) = before.split_at(before.find("name = \"hostc\"").unwrap());
    std::fs::write(&path, head.to_owned() + &tail.replacen("[\"p\"]", "[]", 1)).unwrap();
    configure(&mut world.lab.a, "");
    world.write(&[(10, 4)]);
    let (summary, told) = world.go(&["--verify"]);
    assert!(!told.contains("hosta"), "{told}");
    assert!(sent(&summary) >= data(&world) - 4, "{summary}");
}

#[test]
fn a_replica_that_was_edited_is_not_read() {
    let mut world = World::with_replica(&[]);
    let file = std::fs::File::options().write(true).open(replica(&world.lab.a)).unwrap();
    file.write_all_at(&[0x5a; 4096], 8 * BLOCK).unwrap();
    world.write(&[(10, 4)]);
    let (summary, told) = world.go(&["--verify"]);
    assert!(!told.contains("hosta"), "{told}");
    assert!(sent(&summary) >= data(&world) - 4, "{summary}");
}

/// A backup of the same generation knows what each piece must be.
#[test]
fn a_host_that_lies_is_found_out_by_a_backup() {
    let mut world = World::with_replica(&[("nas", false)]);
    world.back_up("nas", &dray_backup::Key::None);
    for block in (0..16384).step_by(512) {
        edit(&replica(&world.lab.a), block * BLOCK);
    }
    world.write(&[(10, 4)]);
    let told = text(&world.lab.b.dray(&["seed", "--image", IMAGE, "--to", "hostc"]));
    assert!(told.contains("has generation 1"), "{told}");
    let (summary, _) = world.go(&["--verify"]);
    assert_eq!((sent(&summary), &summary["verified"]), (4, &true.into()), "{summary}");
}

/// A host that was taken over keeps records that say that nothing has happened.
#[test]
fn what_another_host_has_edited_does_not_count() {
    let mut world = World::with_replica(&[]);
    let file = replica(&world.lab.a);
    world.lab.a.stop();
    let at = world.lab.a.dir.join("state/images").join(format!("{IMAGE}.json"));
    let touched = |path: &Path| {
        let meta = path.metadata().unwrap();
        format!("\"touched\": [\n        {},\n        {}\n", meta.ctime(), meta.ctime_nsec())
    };
    let before = touched(&file);
    edit(&file, 512 * BLOCK);
    let record = read_record(&at);
    assert!(record.contains(&before), "{before}: {record}");
    write_record(&at, &record.replace(&before, &touched(&file)));
    world.lab.a.start();
    world.write(&[(10, 4)]);
    let (summary, told) = world.go(&["--verify"]);
    assert!(told.contains("from replica at hosta"), "{told}");
    assert_eq!((sent(&summary), &summary["verified"]), (5, &true.into()), "{summary}");
}

#[test]
fn a_host_that_dies_or_says_nothing_costs_time_and_nothing_else() {
    // Dead at once, and while it is read: there are some five answers.
    for answers in [0, 3] {
        let mut world = World::with_replica(&[]);
        world.write(&[(10, 4)]);
        world.lab.a.kill();
        world.lab.a.start_with(&[("DRAY_ABORT_BEFORE", &format!("replica-answer:{answers}"))]);
        let told = text(&world.lab.b.dray(&["seed", "--image", IMAGE, "--to", "hostc"]));
        world.lab.a.await_death().unwrap_or_else(|why| panic!("{why}: after {answers}: {told}"));
        assert!(told.contains("replica at hosta"), "after {answers}: {told}");
        let (summary, _) = world.go(&["--verify"]);
        assert_eq!(summary["verified"], true, "after {answers}: {summary}");
        assert_eq!(world.c.files(), [IMAGE], "after {answers}");
    }
    let mut world = World::with_replica(&[]);
    world.write(&[(10, 4)]);
    world.lab.a.signal("STOP");
    let begun = Instant::now();
    let (summary, _) = world.go(&["--verify"]);
    world.lab.a.signal("CONT");
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    assert!(sent(&summary) >= data(&world) - 4, "{summary}");
}

/// As after a migration back that came to nothing: those regions are not read.
#[test]
fn a_replica_that_a_migration_has_written_into_gives_the_rest() {
    let mut world = World::with_replica(&[]);
    world.write(&[(10, 4), (16500, 3)]);
    world.lab.a.stop();
    let path = world.lab.a.dir.join("state/images").join(format!("{IMAGE}.json"));
    let record = read_record(&path);
    let edited = record.replace("\"distrusted\": []", "\"distrusted\": [0]");
    assert_ne!(edited, record);
    write_record(&path, &edited);
    world.lab.a.start();
    let second = world.versions.range(16384..).filter(|(_, version)| **version > 0).count() as u64;
    let (summary, told) = world.go(&["--verify"]);
    assert!(told.contains("from replica at hosta"), "{told}");
    assert_eq!(sent(&summary), data(&world) - second + 3, "{summary}");
}
