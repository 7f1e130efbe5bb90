//! What was sent before an agent was killed is not sent again, and in no phase do two hosts have an
//! image that opens.

use crate::case::{Case, DATA, IMAGE};
use crate::lab::{Lab, opens};
use crate::links::sent;

/// Bytes a second: half of the data takes longer than what was received takes to become durable.
const RATE: u64 = 3 << 20;
/// Sent again by a source that was killed: the 64 MiB that the guest wrote in.
const DOUBTED: u64 = DATA / 4;
/// Lost at most by a target that was killed, in two seconds and the time of a sync.
const NOT_DURABLE: u64 = 3 * RATE;
/// What the guest wrote meanwhile, the maps, and what was under way.
const MARGIN: u64 = 3 << 20;
/// Of the data this much is there when an agent is killed.
const THERE: u64 = DATA / 4 * 3;

struct Kill {
    source: bool,
    target: bool,
}

/// Kills in the middle of the copy, or of the backfill; returns what all processes of the source
/// counted on the wire.
fn killed_half_way(strategy: &str, kill: &Kill) -> u64 {
    let mut case = Case::begin_small(Lab::new());
    case.migrate(strategy, Some(RATE)).unwrap();
    case.await_bytes(THERE).unwrap();
    let after = strategy == "post-copy";
    let lab = &mut case.lab;
    if kill.source {
        lab.a.kill();
    }
    if kill.target {
        lab.b.kill();
    }
    if kill.source && kill.target {
        assert_eq!(opens(&lab.a.pool().join(IMAGE)), !after, "{:?}", lab.a.files());
        assert!(!opens(&lab.b.pool().join(IMAGE)), "{:?}", lab.b.files());
    }
    for host in [&mut lab.a, &mut lab.b] {
        if !host.is_up() {
            host.start();
        }
    }
    case.await_end().unwrap();
    let sent = sent(&case);
    case.end().unwrap();
    sent
}

fn check(strategy: &str) {
    let one = |source, target| {
        let sent = killed_half_way(strategy, &Kill { source, target });
        assert!(sent > DATA - MARGIN, "{sent} counted in {strategy}: not what was sent before");
        sent
    };
    let sent = one(true, false);
    assert!(sent < DATA + MARGIN + DOUBTED, "source killed in {strategy}: {sent} sent");
    let sent = one(false, true);
    assert!(sent < DATA + MARGIN + NOT_DURABLE, "target killed in {strategy}: {sent} sent");
    let sent = one(true, true);
    assert!(sent < DATA + MARGIN + DOUBTED + NOT_DURABLE, "both killed in {strategy}: {sent}");
}

#[test]
fn a_copy_survives_the_agents() {
    check("hybrid");
}

#[test]
fn a_backfill_survives_the_agents() {
    check("post-copy");
}
