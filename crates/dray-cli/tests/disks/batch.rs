//! Several migrations with one command: shortest first, one budget, one failure, a dead agent.

use crate::guest::{BLOCK, compare, content};
use crate::lab::{Lab, wait_for};
use crate::moves::result;
use crate::refusals::{failed, refused};
use dray_types::BitRate;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Bytes a second for all together: the largest case takes twelve seconds.
const BUDGET: u64 = 8 << 20;
/// Longest time for everything.
const END: Duration = Duration::from_secs(90);
/// Exit code: not all came through.
const NOT_ALL: i32 = 16;
const INVALID: i32 = 4;

/// Images full of data that does not compress and that no other has, by name and MiB.
const IMAGES: [(&str, u64); 3] = [("big", 48), ("small", 16), ("middle", 32)];

fn blocks(mib: u64) -> u64 {
    (mib << 20) / BLOCK
}

/// What every block of an image holds: a version of its own.
fn version(name: &str) -> u64 {
    IMAGES.iter().position(|image| image.0 == name).unwrap() as u64 + 1
}

fn lab() -> Lab {
    let mut lab = Lab::new();
    for (name, mib) in IMAGES {
        let file = std::fs::File::create(lab.a.pool().join(name)).unwrap();
        for block in 0..blocks(mib) {
            file.write_all_at(&content(block, version(name)), block * BLOCK).unwrap();
        }
    }
    lab.start();
    for (name, _) in IMAGES {
        lab.a.add(name);
    }
    lab
}

/// Every image is at the target and nowhere else, byte for byte.
fn assert_moved(lab: &mut Lab) {
    wait_for("both hosts to forget", END, || {
        lab.a.open_migrations() + lab.b.open_migrations() == 0
    })
    .unwrap();
    for (name, mib) in IMAGES {
        assert_eq!(lab.b.image(name).unwrap()["state"], "owner");
        assert_eq!(lab.a.image(name).unwrap()["state"], "replica");
        let versions: BTreeMap<u64, u64> =
            (0..blocks(mib)).map(|block| (block, version(name))).collect();
        compare(&lab.b.pool().join(name), &versions).unwrap();
    }
}

fn batch(lab: &Lab) -> Value {
    lab.a.ask(json!("batches")).unwrap()[0].clone()
}

/// The states of a batch's moves by their names.
fn states(batch: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let moves = batch["moves"].as_array().unwrap();
    moves.iter().map(|one| (text(&one["name"]), text(&one["state"]))).collect()
}

/// Bytes that all moves of a batch have sent so far.
fn sent(batch: &Value) -> u64 {
    let of = |one: &Value| {
        let ended = one["summary"]["wire_bytes"]["total"].as_u64();
        ended.or(one["progress"]["wire_bytes"].as_u64()).unwrap_or(0)
    };
    batch["moves"].as_array().unwrap().iter().map(of).sum()
}

/// Bytes a second between a tenth and nine tenths of everything: the line that lies best between
/// all the points, since each was looked at up to a tenth of a second late.
fn rate(events: &[Value]) -> f64 {
    let points: Vec<(f64, u64)> = events
        .iter()
        .map(|event| (event["elapsed_seconds"].as_f64().unwrap(), sent(event)))
        .collect();
    let all = points.iter().map(|point| point.1).max().unwrap();
    let middle = points.iter().filter(|point| (all / 10..=all / 10 * 9).contains(&point.1));
    let middle: Vec<(f64, f64)> = middle.map(|&(at, sent)| (at, sent as f64)).collect();
    assert!(middle.len() >= 6, "too little was seen: {points:?}");
    let count = middle.len() as f64;
    let at = middle.iter().map(|point| point.0).sum::<f64>() / count;
    let sent = middle.iter().map(|point| point.1).sum::<f64>() / count;
    let together: f64 = middle.iter().map(|point| (point.0 - at) * (point.1 - sent)).sum();
    together / middle.iter().map(|point| (point.0 - at).powi(2)).sum::<f64>()
}

/// Begins a batch of all images, one after the other, and returns when some of the first was sent.
fn begin_one_by_one(lab: &Lab, bytes_per_second: u64) {
    let limit = BitRate { bytes_per_second };
    let one =
        |(name, _): (&str, u64)| json!({"subject": {"images": {"names": [name]}}, "to": "hostb"});
    let moves: Vec<Value> = IMAGES.into_iter().map(one).collect();
    let command = json!({"batch": {
        "moves": moves, "jobs": 1, "budget": limit, "in_order": true, "detach": true,
    }});
    lab.a.ask(command).unwrap();
    wait_for("the first copy", END, || sent(&batch(lab)) > 4 << 20).unwrap();
}

#[test]
fn the_shortest_goes_first_one_budget_holds_all_and_a_failure_stops_nobody() {
    let mut lab = lab();
    let limit = format!("{}MiB/s", BUDGET >> 20);
    let args = ["--json", "migrate", "--each", "--image", "big", "--image", "gone", "--image"];
    let more = ["small", "--image", "middle", "--to", "hostb", "--jobs", "2", "--verify"];
    let output = lab.a.dray(&[&args[..], &more, &["--bandwidth", &limit]].concat());
    assert_eq!(output.status.code(), Some(NOT_ALL), "{output:?}");
    let ended = result(&output);
    let names: Vec<_> = ended["moves"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
    assert_eq!(names, ["small", "middle", "big", "gone"], "{ended}");
    for one in &ended["moves"].as_array().unwrap()[..3] {
        assert_eq!(
            (&one["state"], &one["summary"]["verified"]),
            (&json!("completed"), &json!(true))
        );
        assert!(one["predicted_seconds"].as_f64().is_some_and(|time| time > 1.0), "{one}");
    }
    assert_eq!(ended["moves"][3]["error"]["kind"], "not-found", "{ended}");
    // The two short ones begin together, the long one when the first of them is over.
    let at = |nth: usize, what: &str| ended["moves"][nth]["summary"][what].as_u64().unwrap();
    let (started, over) = ("started_unix_ms", "ended_unix_ms");
    assert!(at(1, started) < at(0, over) && at(2, started) >= at(0, over), "{ended}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (measured, budget) = (rate(&events), BUDGET as f64);
    println!("{measured} bytes a second of {budget}");
    assert!((measured / budget - 1.0).abs() < 0.05, "{measured} bytes a second, not {budget}");
    assert_moved(&mut lab);
}

#[test]
fn the_queue_outlives_the_command_and_the_agent() {
    let mut lab = lab();
    begin_one_by_one(&lab, 2 * BUDGET);
    let before = batch(&lab);
    assert_eq!(states(&before)["big"], "running", "{before}");
    lab.a.kill();
    lab.a.start();
    let after = batch(&lab);
    assert_eq!((&after["batch"], &after["budget"]), (&before["batch"], &before["budget"]));
    assert_eq!(states(&after)["small"], "waiting", "{after}");
    wait_for("the end of the batch", END, || batch(&lab)["over"] == true).unwrap();
    let ended = batch(&lab);
    for (name, state) in states(&ended) {
        assert_eq!(state, "completed", "{name}: {ended}");
    }
    assert_moved(&mut lab);
    // And it is still known after another restart.
    lab.a.kill();
    lab.a.start();
    assert_eq!(batch(&lab), ended);
}

/// A pool is mounted after the agent has started: what was begun waits for it, and so does the rest of the queue.
#[test]
fn the_queue_waits_for_a_pool_that_is_mounted_late() {
    let mut lab = lab();
    begin_one_by_one(&lab, BUDGET);
    lab.a.kill();
    let (pool, away) = (lab.a.pool(), lab.a.dir.join("not-mounted"));
    std::fs::rename(&pool, &away).unwrap();
    lab.a.start();
    std::thread::sleep(Duration::from_secs(3));
    let waits = batch(&lab);
    let waiting = |state: &String| ["running", "waiting"].contains(&state.as_str());
    assert!(states(&waits).values().all(waiting), "{waits}");
    std::fs::rename(&away, &pool).unwrap();
    wait_for("the end of the batch", END, || batch(&lab)["over"] == true).unwrap();
    let ended = batch(&lab);
    for (name, state) in states(&ended) {
        assert_eq!(state, "completed", "{name}: {ended}");
    }
    assert_moved(&mut lab);
}

#[test]
fn a_cancelled_batch_begins_nothing_more() {
    let lab = lab();
    let args = ["migrate", "--each", "--image", "small", "--image", "big", "--image", "middle"];
    let more = ["--to", "hostb", "--jobs", "1", "--bandwidth", "1MiB/s", "--detach", "--in-order"];
    let begun = lab.a.dray(&[&args[..], &more].concat());
    assert!(begun.status.success(), "{begun:?}");
    wait_for("the copy", END, || sent(&batch(&lab)) > 1 << 20).unwrap();
    let cancelled = result(&lab.a.dray(&["--json", "batch", "cancel"]));
    assert!(states(&cancelled).values().filter(|state| *state == "cancelled").count() >= 2);
    wait_for("the end", END, || batch(&lab)["over"] == true).unwrap();
    let ended = batch(&lab);
    for (name, state) in states(&ended) {
        assert_eq!(state, "cancelled", "{name}: {ended}");
        assert_eq!(lab.a.image(&name).unwrap()["state"], "owner");
    }
    refused(&lab.a, &["batch", "cancel"], 5, &["none is running"]);
}

#[test]
fn what_cannot_be_a_batch_is_refused() {
    let lab = lab();
    let each = ["migrate", "--to", "hostb", "--each", "--image", "small"];
    let twice = [&each[..], &["--image", "small"]].concat();
    refused(&lab.a, &twice, INVALID, &["the batch contains image 'small' twice"]);
    let nowhere = ["migrate", "--to", "hostx", "--each", "--image", "small"];
    refused(&lab.a, &nowhere, 5, &["no peer of that name"]);
    let nothing = lab.a.dray(&["migrate", "--all", "--to", "hostb"]);
    failed(&["--all"], &nothing, 5, &["nothing is prepared for hostb"]);
    let alone = ["migrate", "--image", "small", "--to", "hostb", "--jobs", "2"];
    refused(&lab.a, &alone, INVALID, &["this is one"]);
    let both = ["migrate", "--image", "small", "--vm", "/q=/t", "--to", "hostb"];
    refused(&lab.a, &both, INVALID, &["--each"]);
    assert_eq!(lab.a.ask(json!("batches")).unwrap(), json!([]));
}
