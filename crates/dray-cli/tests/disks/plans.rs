//! `dray plan` says where every byte will come from before anything moves, and the summary says
//! afterwards where it did: what was predicted is what crosses.

use crate::guest::{self, BLOCK, Versions, content};
use crate::lab::{Host, Lab};
use crate::moves::result;
use crate::nbd::{Client, WRITE};
use crate::seeds::{IMAGE, World, configure, go, sent};
use dray_backup::Key;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// What a prediction may be wrong by: this, and a twentieth.
const SLACK: u64 = 1 << 20;
/// Bytes a second for predicted times: what is there already would take seconds.
const RATE: u64 = 4 << 20;
/// Longest time that a host which says nothing may cost.
const PATIENCE: Duration = Duration::from_secs(40);

fn close(what: &str, predicted: u64, actual: u64) {
    let wrong = predicted.abs_diff(actual);
    assert!(wrong <= SLACK + actual / 20, "{what}: {predicted} bytes predicted, {actual} came");
}

fn plan(from: &Host, to: &str, more: &[&str]) -> Value {
    let args = ["--json", "plan", "--image", IMAGE, "--to", to];
    result(&from.dray(&[&args[..], more].concat()))
}

fn write(host: &Host, versions: &mut Versions, version: u64, ranges: &[(u64, u64)]) {
    let mut client = Client::connect(&host.nbd(), IMAGE).unwrap();
    for &(first, count) in ranges {
        let data: Vec<u8> = (first..first + count).flat_map(|b| content(b, version)).collect();
        client.request(WRITE, first * BLOCK, data.len() as u32, &data, &|| true).unwrap();
        versions.extend((first..first + count).map(|block| (block, version)));
    }
}

/// Seconds that a strategy is predicted to take.
fn seconds(plan: &Value, strategy: &str) -> f64 {
    let all = plan["strategies"].as_array().unwrap();
    let one = all.iter().find(|one| one["strategy"] == strategy).unwrap();
    one["predicted"]["total_seconds"].as_f64().unwrap()
}

/// What a summary says of one provider: predicted and actual bytes.
fn provided(summary: &Value, provider: &str) -> (u64, u64) {
    let all = summary["providers"].as_array().unwrap();
    let one = all.iter().find(|one| one["provider"] == provider);
    let one = one.unwrap_or_else(|| panic!("no {provider} in {summary}"));
    (one["predicted"].as_u64().unwrap(), one["bytes"].as_u64().unwrap())
}

#[test]
fn there_and_back_what_is_planned_is_what_crosses() {
    const BLOCKS: u64 = 16384 + 4096;
    let mut lab = Lab::new();
    guest::make_image(&lab.a.pool().join(IMAGE), BLOCKS);
    lab.start();
    lab.a.add(IMAGE);
    let mut versions = guest::first_versions(BLOCKS);
    let rate = format!("{}MiB/s", RATE >> 20);
    let limit = ["--bandwidth", &rate];

    let there = plan(&lab.a, "hostb", &limit);
    let image = &there["images"][0];
    assert_eq!((&image["source"], &image["data"]), (&there["data"], &there["data"]), "{there}");
    assert_eq!((&image["at_target"], &image["given"]), (&json!(0), &json!({})), "{there}");
    assert!(lab.b.image(IMAGE).is_none() && lab.b.files().is_empty(), "nothing is made");
    let (summary, _) = go(&lab.a, &lab.b, &["--no-reuse"]);
    close("there", image["source"].as_u64().unwrap(), sent(&summary) * BLOCK);

    write(&lab.b, &mut versions, 2, &[(5, 40), (9000, 300), (BLOCKS - 9, 9)]);
    let back = plan(&lab.b, "hosta", &limit);
    let image = &back["images"][0];
    assert_eq!(image["source"], (40 + 300 + 9) * BLOCK, "{back}");
    let lying = image["at_target"].as_u64().unwrap();
    assert_eq!(lying + 349 * BLOCK, back["data"].as_u64().unwrap(), "{back}");
    assert!(image["generation"].is_u64(), "{back}");
    assert_eq!(lab.b.open_migrations(), 0, "nothing moves");
    // 1.4 MiB instead of everything; what was written just now is taken to go on being written.
    for strategy in ["pre-copy", "post-copy", "hybrid", "mirror", "auto"] {
        let (home, away) = (seconds(&back, strategy), seconds(&there, strategy));
        let whole = lying as f64 / RATE as f64;
        assert!(away > whole && home < away / 3.0, "{strategy}: {home} s, {away} s");
    }
    let (summary, _) = go(&lab.b, &lab.a, &["--verify", "--bandwidth", &rate]);
    guest::compare(&lab.a.pool().join(IMAGE), &versions).unwrap();
    assert_eq!(summary["verified"], true, "{summary}");
    let (predicted, actual) = provided(&summary, "source");
    assert_eq!(actual, 349 * BLOCK, "{summary}");
    close("back", image["source"].as_u64().unwrap(), actual);
    close("back", predicted, actual);
    assert_eq!(provided(&summary, "replica at hosta"), (lying, lying), "{summary}");
    let predicted = summary["predicted"]["total_seconds"].as_f64().unwrap();
    assert!(predicted < lying as f64 / RATE as f64 / 3.0, "{summary}");
}

#[test]
fn a_backup_and_a_replica_at_a_third_host_are_in_the_plan_and_in_the_summary() {
    let mut world = World::with_replica(&[("nas", false)]);
    world.back_up("nas", &Key::None);
    world.write(&[(10, 4), (15000, 8)]);
    let plan = world.planned("hostc", &[]);
    assert_eq!(plan["source"], 12 * BLOCK, "{plan}");
    let given = plan["given"].as_object().unwrap();
    assert!(given.contains_key("nas") && given.contains_key("replica at hosta"), "{plan}");
    let expected: u64 = given.values().filter_map(Value::as_u64).sum();
    let (summary, _) = world.go(&["--verify"]);
    let both = [provided(&summary, "nas"), provided(&summary, "replica at hosta")];
    assert_eq!(both.map(|one| one.0).iter().sum::<u64>(), expected, "{summary}");
    // Who of them is quicker is not known before.
    close("both", expected, both.map(|one| one.1).iter().sum());
    let (predicted, actual) = provided(&summary, "source");
    close("source", predicted, actual);
    assert_eq!(actual, 12 * BLOCK, "{summary}");
    let image = &summary["images"][0];
    assert_eq!(image["given"].as_array().unwrap().len(), 2, "{summary}");
}

#[test]
fn a_provider_that_cannot_be_asked_costs_a_line() {
    let mut world = World::with_replica(&[("nas", false), ("gone", false)]);
    world.back_up("nas", &Key::None);
    world.write(&[(10, 4)]);
    let note = |plan: &Value, of: &str| {
        let notes = plan["notes"].as_array().unwrap();
        assert_eq!(notes.len(), 2, "{plan}");
        notes.iter().any(|note| note.as_str().unwrap().starts_with(of))
    };
    // Dead, and silent.
    for silent in [false, true] {
        if silent {
            world.lab.a.start();
            world.lab.a.signal("STOP");
        } else {
            world.lab.a.kill();
        }
        let begun = Instant::now();
        let plan = world.planned("hostc", &[]);
        assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
        assert_eq!(
            (&plan["source"], plan["given"].as_object().unwrap().len()),
            (&(4 * BLOCK).into(), 1)
        );
        assert!(note(&plan, "hosta: ") && note(&plan, "gone: "), "{plan}");
    }
    world.lab.a.signal("CONT");
    // Without the backup everything is the source's.
    std::fs::remove_dir_all(world.lab.dir.path().join("nas")).unwrap();
    world.lab.a.kill();
    let plan = world.planned("hostc", &[]);
    assert_eq!((&plan["source"], &plan["given"]), (&plan["data"], &json!({})), "{plan}");
    let notes = plan["notes"].as_array().unwrap();
    assert!(notes.iter().any(|note| note.as_str().unwrap().starts_with("nas: ")), "{plan}");
}

/// An image of which the target has nearly everything goes before a smaller one that it lacks.
#[test]
fn the_order_of_a_batch_counts_what_lies_at_the_target() {
    let mut lab = Lab::new();
    guest::make_image(&lab.a.pool().join(IMAGE), 16384);
    lab.start();
    lab.a.add(IMAGE);
    go(&lab.a, &lab.b, &[]);
    guest::make_image(&lab.b.pool().join("small"), 4096);
    lab.b.add("small");
    let args = ["--json", "migrate", "--each", "--image", "small", "--image", IMAGE];
    let more = ["--to", "hosta", "--bandwidth", "8MiB/s", "--jobs", "1", "--no-reuse"];
    let ended = result(&lab.b.dray(&[&args[..], &more].concat()));
    let names: Vec<_> = ended["moves"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
    assert_eq!(names, [IMAGE, "small"], "{ended}");
    let predicted = |nth: usize| ended["moves"][nth]["predicted_seconds"].as_f64().unwrap();
    assert!(predicted(0) < 0.5 && predicted(1) > 1.0, "{ended}");
}

#[test]
fn a_line_is_drawn_with_who_holds_it() {
    let mut world = World::with_replica(&[]);
    let nas = world.lab.dir.path().join("nas");
    let place = format!("[[backup]]\nname = \"nas\"\nurl = \"file://{}\"\n", nas.display());
    configure(&mut world.lab.b, &place);
    world.back_up("nas", &Key::None);
    let line = |world: &World, more: &[&str]| {
        result(&world.lab.b.dray(&[&["--json", "lineage", IMAGE], more].concat()))
    };
    let told = line(&world, &[]);
    let holder = |place: &str, held_as: &str| json!({"place": place, "held_as": held_as});
    let both = json!([holder("nas", "backup"), holder("hosta", "replica")]);
    assert_eq!((&told["past"][0]["held"], &told["silent"]), (&both, &Value::Null), "{told}");
    let text = crate::seeds::text(&world.lab.b.dray(&["lineage", IMAGE]));
    assert!(text.contains("held by nas (backup), hosta (replica)"), "{text}");
    world.lab.a.kill();
    let told = line(&world, &[]);
    assert_eq!(told["past"][0]["held"], json!([holder("nas", "backup")]), "{told}");
    let silent = told["silent"].as_array().unwrap();
    assert!(silent.len() == 1 && silent[0].as_str().unwrap().starts_with("hosta: "), "{told}");
    let here = line(&world, &["--here"]);
    assert!(here["past"][0].get("held").is_none() && here.get("silent").is_none(), "{here}");
}
