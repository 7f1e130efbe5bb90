//! `auto` and `plan`: what is written all the time is not copied before the handover, and what was
//! predicted stands beside what came of it.

use crate::case::IMAGE;
use crate::guest::BLOCK;
use crate::lab::Lab;
use crate::moves::{SLOW, result};
use crate::nbd::WRITE;
use crate::orders::{BLOCKS, CHUNK, User, full_lab};
use serde_json::{Value, json};
use std::time::Duration;

#[test]
fn what_would_be_sent_twice_is_left_for_later_and_the_prediction_is_kept() {
    let lab = full_lab();
    // Up to 1,000 writes a second to each of two chunks of 1,024 blocks: whichever of them is copied
    // first is dirty again when the other one is there.
    let users = [0, 1]
        .map(|chunk| User::start(&lab.a.nbd(), WRITE, chunk, u64::MAX, Duration::from_millis(1)));
    std::thread::sleep(Duration::from_secs(2));
    let rate = format!("{}MiB/s", SLOW >> 20);
    let plan =
        lab.a.dray(&["--json", "plan", "--image", IMAGE, "--to", "hostb", "--bandwidth", &rate]);
    let plan = result(&plan);
    assert_eq!(plan["data"], BLOCKS * BLOCK, "{plan}");
    assert!(plan["written"].as_u64().unwrap() > 100 * BLOCK, "{plan}");
    let of = |name: &str| {
        let all = plan["strategies"].as_array().unwrap();
        all.iter().find(|one| one["strategy"] == name).unwrap()["predicted"].clone()
    };
    let twice = |name: &str| of(name)["bytes_twice"].as_u64().unwrap();
    assert!(twice("auto") < twice("hybrid"), "{plan}");
    assert!(lab.a.migrations().is_empty(), "nothing moves");
    let args = ["--json", "migrate", "--image", IMAGE, "--to", "hostb", "--verify", "--strategy"];
    let more = ["auto", "--deadline", "10m", "--bandwidth", &rate];
    let summary = result(&lab.a.dray(&[&args[..], &more].concat()));
    users.into_iter().for_each(User::stop);
    assert_eq!(summary["result"], "completed", "{summary}");
    assert_eq!(summary["verified"], true, "{summary}");
    // One of them was left for later: what is sent twice is of the other one.
    assert!(summary["blocks_sent_twice"].as_u64().unwrap() <= CHUNK, "{summary}");
    let predicted = summary["predicted"]["total_seconds"].as_f64().unwrap();
    let actual = summary["total_seconds"].as_f64().unwrap();
    assert!(predicted > 4.0 && predicted < 2.0 * actual, "{predicted} s, {actual} s: {summary}");
    assert_phases(&lab, &summary);
}

/// They add up to the total, and what was done after it was done until the end.
fn assert_phases(lab: &Lab, summary: &Value) {
    let number = |value: &Value| value.as_f64().unwrap();
    let of = |name: &str| number(&summary["phase_seconds"][name]);
    let phases = ["prepare", "copy", "sync", "handover", "backfill"].map(of);
    let total = number(&summary["total_seconds"]);
    assert!((phases.iter().sum::<f64>() - total).abs() < 1e-6, "{summary}");
    assert!(phases.iter().all(|&took| took >= 0.0) && of("copy") > 1.0, "{summary}");
    let lasted = number(&summary["ended_unix_ms"]) - number(&summary["started_unix_ms"]);
    assert!((total + of("after") - lasted / 1e3).abs() < 0.1, "{summary}");
    let measured = &summary["downtime_ms"]["total"];
    assert!((of("handover") * 1e3 - number(measured)).abs() < 0.01, "{summary}");
    let migration = &lab.a.migrations()[0];
    assert_eq!(&migration["progress"]["downtime_ms"], measured, "{migration}");
}

#[test]
fn only_auto_has_a_deadline() {
    let lab = full_lab();
    let refused = lab.a.ask(json!({"migrate": {
        "subject": {"images": {"names": [IMAGE]}}, "to": "hostb", "deadline_ms": 5,
        "strategy": "hybrid",
    }}));
    assert_eq!(refused.unwrap_err()["kind"], "invalid");
    let unknown = lab.a.ask(json!({"plan": {
        "subject": {"images": {"names": ["other"]}}, "to": "hostb",
    }}));
    assert_eq!(unknown.unwrap_err()["kind"], "not-found");
}
