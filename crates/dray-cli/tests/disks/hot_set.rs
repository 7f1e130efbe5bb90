//! Hot-set: what the guest uses moves before it, the rest after it.

use crate::case::{Case, DATA, IMAGE};
use crate::lab::{Lab, wait_for};
use crate::moves::SLOW;
use serde_json::{Value, json};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(20);

fn migrate(case: &Case, hot_set: Value) {
    case.lab
        .a
        .ask(json!({"migrate": {
            "subject": {"images": {"names": [IMAGE]}}, "to": "hostb", "strategy": "hot-set",
            "bandwidth": {"bytes_per_second": SLOW}, "tuning": {"hot_set": hot_set},
            "verify": true, "detach": true,
        }}))
        .unwrap();
}

/// Most bytes that were ever missing at the target.
fn most_missing(case: &Case) -> u64 {
    let mut most = 0;
    wait_for("the end", SOON * 3, || {
        let Some((state, progress)) = case.lab.a.progress() else { return true };
        most = most.max(progress["total"]["bytes_missing"].as_u64().unwrap_or(0));
        state != "running"
    })
    .unwrap();
    most
}

#[test]
fn only_what_the_guest_uses_is_copied_before_it_moves() {
    let mut case = Case::begin_small(Lab::new());
    // The guest keeps to the first of the image's 88 segments, or is on its way into the second.
    migrate(&case, json!({"observe_ms": 1000, "segment": 1 << 20}));
    let missing = most_missing(&case);
    assert!(missing > DATA * 3 / 4, "{missing} of {DATA} bytes were left: {}", case.picture());
    case.await_end().unwrap();
    let summary = case.lab.a.migrations().pop().unwrap()["summary"].clone();
    assert_eq!(summary["strategy"], "hot-set", "{summary}");
    assert_eq!(summary["verified"], true, "{summary}");
    case.end().unwrap();
}

#[test]
fn with_a_threshold_of_zero_everything_is_copied() {
    let mut case = Case::begin_small(Lab::new());
    migrate(&case, json!({"threshold": 0.0}));
    assert_eq!(most_missing(&case), 0, "it is pre-copy");
    case.await_end().unwrap();
    case.end().unwrap();
}

#[test]
fn an_observation_can_be_cancelled() {
    let mut case = Case::begin_small(Lab::new());
    migrate(&case, json!({"observe_ms": 600_000}));
    std::thread::sleep(Duration::from_millis(500));
    let (state, progress) = case.lab.a.progress().unwrap();
    assert_eq!(
        (state.as_str(), progress["wire_bytes"].as_u64() < Some(100_000)),
        ("running", true)
    );
    let discarded = progress["migration"].clone();
    assert!(case.lab.a.dray(&["cancel", "--discard"]).status.success());
    wait_for("the image to be free", SOON, || {
        case.lab.a.image(IMAGE).is_some_and(|image| image["migration"].is_null())
    })
    .unwrap();
    case.migrate("post-copy", None).unwrap();
    case.await_end().unwrap();
    // Not one that the target may be throwing away.
    let all = case.lab.a.migrations();
    let completed = all.iter().find(|one| one["state"] == "completed").unwrap();
    assert_ne!(completed["progress"]["migration"], discarded, "{all:?}");
    case.end().unwrap();
}
