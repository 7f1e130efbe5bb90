//! Backups in an object store: made, restored, and begun with at the target of a migration; and what
//! remains of that when the store is busy, silent, or does not know who asks.

use crate::guest::{self, BLOCK};
use crate::moves::result;
use crate::seeds::{IMAGE, World, configure, sent, text};
use crate::store::{Bucket, Door};
use serde_json::Value;
use std::time::{Duration, Instant};

/// A store that says nothing may keep a migration waiting for so long: a listing is given up after
/// half of it.
const PATIENCE: Duration = Duration::from_secs(60);

/// An image at hostb, which backs it up into the bucket; hostc may read it there.
fn world(bucket: &Bucket) -> World {
    let mut world = World::begin(&[]);
    let place = bucket.place("bucket", world.lab.dir.path());
    configure(&mut world.lab.b, &place);
    configure(&mut world.c, &place);
    for args in [&["backups", "init", "bucket"][..], &["backup", IMAGE, "--to", "bucket"]] {
        let told = world.lab.b.dray(args);
        assert!(told.status.success(), "{}", text(&told));
    }
    world
}

fn back_up(world: &World) -> Value {
    let done = result(&world.lab.b.dray(&["--json", "backup", IMAGE, "--to", "bucket"]));
    done["images"][0].clone()
}

fn seed(world: &World) -> String {
    text(&world.lab.b.dray(&["seed", "--image", IMAGE, "--to", "hostc"]))
}

#[test]
fn backups_in_a_bucket_are_restored_and_begun_with() {
    let Some(bucket) = Bucket::start() else { return };
    let mut world = world(&bucket);
    let first = world.versions.clone();
    world.write(&[(40, 30), (9000, 5)]);
    let second = back_up(&world);
    assert!(!second["parent"].is_null(), "{second}");
    // Pieces of 64 KiB.
    assert!(second["bytes_read"].as_u64().unwrap_or(0) <= 5 << 16, "{second}");
    let verified = world.c.dray(&["verify", "bucket", "--read-data"]);
    assert!(verified.status.success(), "{}", text(&verified));
    let number = second["generation"]["number"].as_u64().unwrap();
    for (generation, versions) in [(number - 1, &first), (number, &world.versions)] {
        let name = format!("restored-{generation}");
        let from = format!("{IMAGE}@{generation}");
        let told = world.lab.a.dray(&["restore", &from, "--from", "bucket", "--as", &name]);
        assert!(!told.status.success(), "hosta knows of no bucket");
        let told = world.lab.b.dray(&["restore", &from, "--from", "bucket", "--as", &name]);
        assert!(told.status.success(), "{}", text(&told));
        guest::compare(&world.lab.b.pool().join(&name), versions).unwrap();
    }
    world.write(&[(700, 9)]);
    let (summary, told) = world.go(&["--verify"]);
    assert!(told.contains("from bucket"), "{told}");
    assert_eq!((sent(&summary), &summary["verified"]), (9, &Value::Bool(true)), "{summary}");
    let log = world.lab.b.log() + &world.c.log() + &told;
    assert!(!log.contains("not/secret") && !log.contains("AKIATEST"), "a key is in a log");
}

#[test]
fn a_store_that_does_not_know_who_asks_costs_nothing_but_the_traffic() {
    let Some(bucket) = Bucket::start() else { return };
    let mut world = world(&bucket);
    world.write(&[(40, 30)]);
    bucket.forget_all_accounts();
    let told = text(&world.lab.b.dray(&["backup", IMAGE, "--to", "bucket"]));
    assert!(told.contains("the store refuses") && told.contains("credentials"), "{told}");
    let told = seed(&world);
    assert!(told.contains("no backup or replica of disk.img is used: bucket: "), "{told}");
    assert!(told.contains("the store refuses"), "{told}");
    let (summary, _) = world.go(&["--verify"]);
    assert!(sent(&summary) * BLOCK > 1 << 20, "{summary}");
}

#[test]
fn a_busy_store_is_left_alone_and_a_silent_one_not_waited_for() {
    for door in [Door::Busy, Door::Silent] {
        let Some(bucket) = Bucket::start() else { return };
        let mut world = world(&bucket);
        world.write(&[(40, 30)]);
        bucket.set(door);
        let begun = Instant::now();
        let (summary, told) = world.go(&["--verify"]);
        assert!(
            told.contains("no backup or replica of disk.img is used: bucket: "),
            "{door:?}: {told}"
        );
        assert!(sent(&summary) * BLOCK > 1 << 20, "{door:?}: {summary}");
        assert!(begun.elapsed() < PATIENCE, "{door:?}: {:?}", begun.elapsed());
        // The image is a replica at hostb now, the backups are still of its line.
        bucket.set(Door::Open);
    }
}
