//! Generations against a model that remembers what every block held at every handover.

use dray_engine::lineage::{
    AtStop, DeviceStamp, FileIdentity, Generation, Lineage, LineageRecord, MAX_PAST, MERGED,
    Reason, Stamp, Unfit, fits, recover,
};
use dray_types::{Ancestor, BlockRange, BlockSet, GenerationId};
use proptest::prelude::*;

const BLOCKS: u64 = 256;
const REGION: u64 = 16;

fn id(number: u64) -> GenerationId {
    GenerationId(1000 + u128::from(number))
}

fn set(ranges: &[(u64, u64)]) -> BlockSet {
    ranges.iter().map(|&(start, len)| BlockRange::new(start, len)).collect()
}

/// Hands the image on: what the next owner knows.
fn hand_over(line: &Lineage, changed: BlockSet, next: u64) -> Lineage {
    Lineage::after(line.closed(changed, "hosta", next), id(next)).unwrap()
}

#[test]
fn a_replica_differs_only_in_what_later_generations_changed() {
    let first = Lineage::new(id(1));
    assert!(!first.has_past());
    let second = hand_over(&first, set(&[(0, 100)]), 2);
    let third = hand_over(&second, set(&[(3, 2)]), 3);
    let fourth = hand_over(&third, set(&[(9, 1), (4, 1)]), 4);
    let open = set(&[(200, 1)]);
    assert_eq!(fourth.changed_since(id(3), &open), Some(open.clone()));
    assert_eq!(fourth.changed_since(id(2), &open), Some(set(&[(4, 1), (9, 1), (200, 1)])));
    assert_eq!(fourth.changed_since(id(1), &open), Some(set(&[(3, 2), (9, 1), (200, 1)])));
    assert_eq!(fourth.changed_since(id(4), &open), None, "nobody has a copy of what is open");
    assert_eq!(fourth.changed_since(id(7), &open), None);
}

#[test]
fn a_backup_closes_a_generation_as_a_handover_does() {
    let first = Lineage::new(id(1));
    let second = first.turned(set(&[(0, 9)]), "hosta", 5, id(2), &[]).unwrap();
    assert_eq!(second.open(), Ancestor { number: 2, id: id(2) });
    let third = hand_over(&second, set(&[(3, 2)]), 3);
    let reasons: Vec<_> = third.past().iter().map(|past| past.reason).collect();
    assert_eq!(reasons, [Reason::Backup, Reason::Handover]);
    assert_eq!(third.past()[0].closed_unix_ms, 5);
    let open = set(&[(7, 1)]);
    assert_eq!(third.changed_since(id(1), &open), Some(set(&[(3, 2), (7, 1)])));
    let mut line = third;
    for next in 4..200 {
        line = line.turned(set(&[(next, 1)]), "hosta", next, id(next), &[]).unwrap();
    }
    assert_eq!(line.past().len(), MERGED);
}

/// Hourly backups for two years, and an image that was at another host once.
#[test]
fn frequent_backups_do_not_push_out_an_old_replica() {
    const HOUR: u64 = 3_600_000;
    const HOURS: u64 = 2 * 365 * 24;
    let mut line = hand_over(&Lineage::new(id(1)), BlockSet::new(), 2);
    let weekly = id(300);
    for hour in 3..HOURS {
        let blocks = set(&[(hour % 1000, 1)]);
        line = line.turned(blocks, "hosta", hour * HOUR, id(hour), &[weekly]).unwrap();
    }
    let past = line.past();
    assert_eq!(past.len(), MERGED);
    assert_eq!(past[0].at.id, id(1), "a handover left a replica");
    assert!(past.iter().any(|past| past.at.id == weekly), "somebody needs it");
    // One of each of the last sixteen hours, of some of the last days, weeks and months.
    let within = |from: u64, to: u64| {
        let ages = past.iter().map(|past| HOURS - past.closed_unix_ms / HOUR);
        ages.filter(|age| (from..to).contains(age)).count()
    };
    assert!(within(0, 18) >= 16, "{}", within(0, 18));
    for (from, to) in [(18, 72), (72, 24 * 14), (24 * 14, 24 * 60), (24 * 60, HOURS)] {
        assert!(within(from, to) >= 4, "{from} to {to} hours ago: {}", within(from, to));
    }
    let changed = line.changed_since(id(1), &BlockSet::new()).unwrap();
    assert_eq!(changed.len(), 1000, "nothing that was written is forgotten");
}

#[test]
fn only_a_copy_of_an_ancestor_fits() {
    let mut line = Lineage::new(id(1));
    for next in 2..5 {
        line = hand_over(&line, BlockSet::new(), next);
    }
    let mut ancestors = line.ancestors();
    let at = |number, id| Ancestor { number, id };
    assert_eq!(fits(&ancestors, at(2, id(2))), Ok(()));
    assert_eq!(fits(&ancestors, at(2, id(9))), Err(Unfit::Diverged { number: 2 }));
    assert_eq!(fits(&ancestors, line.open()), Err(Unfit::Ahead { number: 4 }));
    ancestors.remove(1);
    assert_eq!(fits(&ancestors, at(2, id(2))), Err(Unfit::Forgotten { number: 2 }), "merged");
    ancestors.remove(0);
    assert_eq!(fits(&ancestors, at(1, id(1))), Err(Unfit::Forgotten { number: 1 }));
    assert_eq!(fits(&[], at(1, id(1))), Err(Unfit::Forgotten { number: 1 }));
}

#[test]
fn what_is_remembered_is_bounded() {
    let mut line = Lineage::new(id(1));
    for next in 2..200 {
        line = hand_over(&line, set(&[(next, 1)]), next);
    }
    assert_eq!(line.past().len(), MAX_PAST);
    assert_eq!(line.changed_since(id(1), &BlockSet::new()), None);
    let oldest = line.past()[0].at.id;
    let changed = line.changed_since(oldest, &BlockSet::new()).unwrap();
    assert_eq!(changed.len(), MAX_PAST as u64 - 1);

    // Each of these sets takes 8 MiB.
    let scattered = |bit: u64| -> BlockSet {
        (0..1 << 26).step_by(128).map(|at| BlockRange::new(at + bit, 1)).collect()
    };
    let mut line = Lineage::new(id(1));
    for next in 2..8 {
        line = hand_over(&line, scattered(next), next);
    }
    let bytes: usize = line.past().iter().map(|past| past.changed.encode().len()).sum();
    assert!(bytes <= dray_engine::lineage::MAX_CHANGED_BYTES, "{bytes}");
    assert!(line.has_past());
}

/// A peer's list is taken only when it is a line (I7).
#[test]
fn a_list_that_is_no_line_is_refused() {
    let generation = |number| Generation {
        at: Ancestor { number, id: id(number) },
        reason: Reason::Handover,
        host: "hosta".to_owned(),
        closed_unix_ms: 0,
        changed: BlockSet::new(),
    };
    let after = |numbers: &[u64]| {
        Lineage::after(numbers.iter().map(|&number| generation(number)).collect(), id(99))
    };
    assert_eq!(after(&[3, 4]).unwrap().open().number, 5);
    assert_eq!(after(&[]).unwrap(), Lineage::new(id(99)));
    assert!(after(&[4, 3]).is_none());
    assert!(after(&[4, 4]).is_none());
    assert!(after(&[u64::MAX]).is_none());
    assert!(after(&(1..=MAX_PAST as u64 + 1).collect::<Vec<_>>()).is_none());
}

#[test]
fn a_region_that_was_open_counts_as_written() {
    let line = hand_over(&Lineage::new(id(1)), BlockSet::new(), 2);
    let whole = |changed: BlockSet| LineageRecord::Whole { lineage: line.clone(), changed };
    let file = FileIdentity { inode: 6, birth: Some((7, 8)) };
    let stamp = Stamp { len: 1, changed: (2, 3), touched: (4, 5), file };
    let read = |records: &[LineageRecord]| recover(records, REGION);
    assert_eq!(read(&[]), None);
    let records = [whole(set(&[(1, 1)])), LineageRecord::Opened { region: 2 }];
    assert_eq!(read(&records).unwrap().changed, set(&[(1, 1), (32, 16)]));
    let closed = [&records[..], &[whole(set(&[(1, 1), (33, 1)]))]].concat();
    assert_eq!(read(&closed).unwrap().changed, set(&[(1, 1), (33, 1)]));
    let stopped = [&closed[..], &[LineageRecord::Stopped { stamp }]].concat();
    assert_eq!(read(&stopped).unwrap().stopped, Some(AtStop::File(stamp)));
    let again = [&stopped[..], &[LineageRecord::Opened { region: 0 }]].concat();
    assert_eq!(read(&again).unwrap().stopped, None, "it went on, and did not stop in order");
    let (boot, number, sequence) = (vec![7], (8, 1), Some(9));
    let stamp = DeviceStamp { boot, number, sequence, written: 10, discarded: 11 };
    let stopped = [&closed[..], &[LineageRecord::StoppedDevice { stamp: stamp.clone() }]].concat();
    assert_eq!(read(&stopped).unwrap().stopped, Some(AtStop::Device(stamp)));
    let again = [&stopped[..], &[LineageRecord::Opened { region: 0 }]].concat();
    assert_eq!(read(&again).unwrap().stopped, None, "it went on, and did not stop in order");
}

/// What one owner does: writes, and stops between them.
#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64),
    CloseRegions,
    Crash,
    HandOver,
    /// A backup; its record may not become durable before a crash.
    BackUp {
        crash: bool,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..BLOCKS, 1..20u64).prop_map(|(start, len)| Step::Write(start, len)),
        2 => Just(Step::CloseRegions),
        1 => Just(Step::Crash),
        2 => Just(Step::HandOver),
        2 => any::<bool>().prop_map(|crash| Step::BackUp { crash }),
    ];
    proptest::collection::vec(step, 0..60)
}

proptest! {
    /// Whatever happens, a block that differs from a replica is among those that may differ.
    #[test]
    fn no_changed_block_is_ever_left_out(steps in steps()) {
        let mut content = vec![0u64; BLOCKS as usize];
        let mut replicas = Vec::new();
        let mut line = Lineage::new(id(1));
        let mut changed = BlockSet::new();
        let mut records = Vec::new();
        let mut open = std::collections::BTreeSet::new();
        let mut next = 2;
        for (version, step) in (1..).zip(steps) {
            let whole = |line: &Lineage, changed: &BlockSet| {
                vec![LineageRecord::Whole { lineage: line.clone(), changed: changed.clone() }]
            };
            match step {
                Step::Write(start, len) => {
                    let range = BlockRange::new(start, len.min(BLOCKS - start));
                    changed.insert(range);
                    for region in start / REGION..=(range.end() - 1) / REGION {
                        if open.insert(region) {
                            records.push(LineageRecord::Opened { region });
                        }
                    }
                    content[start as usize..range.end() as usize].fill(version);
                }
                Step::CloseRegions => {
                    records = whole(&line, &changed);
                    open.clear();
                }
                Step::Crash => {
                    let Some(found) = recover(&records, REGION) else { continue };
                    prop_assert_eq!(&found.lineage, &line);
                    changed = found.changed;
                    records = whole(&line, &changed);
                    open.clear();
                }
                Step::HandOver => {
                    replicas.push((line.open(), content.clone()));
                    line = hand_over(&line, std::mem::take(&mut changed), next);
                    next += 1;
                    records = whole(&line, &changed);
                    open.clear();
                }
                // Regions that are open stay open, and are named beside the new line.
                Step::BackUp { crash: false } => {
                    replicas.push((line.open(), content.clone()));
                    let closed = std::mem::take(&mut changed);
                    line = line.turned(closed, "hosta", next, id(next), &[]).unwrap();
                    next += 1;
                    records = whole(&line, &changed);
                    records.extend(open.iter().map(|&region| LineageRecord::Opened { region }));
                }
                Step::BackUp { crash: true } => {
                    let Some(found) = recover(&records, REGION) else { continue };
                    changed = found.changed;
                    next += 1;
                }
            }
            for (at, was) in &replicas {
                prop_assert_eq!(fits(&line.ancestors(), *at), Ok(()));
                let differs = line.changed_since(at.id, &changed).unwrap();
                for block in 0..BLOCKS {
                    let same = was[block as usize] == content[block as usize];
                    prop_assert!(same || differs.contains(block), "block {} is left out", block);
                }
            }
        }
    }

    /// Against a line that forgets nothing: of every generation that is still known the same blocks
    /// are told, and those that a replica or somebody else holds stay known.
    #[test]
    fn merging_changes_nothing_for_what_is_known(
        steps in proptest::collection::vec((0..BLOCKS, 1..9u64, 1..1000u64, 0..12u8), 60..160)
    ) {
        let mut all: Vec<(GenerationId, BlockSet)> = Vec::new();
        let mut line = Lineage::new(id(1));
        let (mut now, mut held, mut handovers) = (0, Vec::new(), Vec::new());
        for (next, (start, len, later, what)) in (2..).zip(steps) {
            now += later;
            let changed = set(&[(start, len.min(BLOCKS - start))]);
            all.push((line.open().id, changed.clone()));
            if what == 0 && handovers.len() < MAX_PAST - MERGED {
                handovers.push(line.open().id);
                line = Lineage::after(line.closed(changed, "hosta", now), id(next)).unwrap();
            } else {
                line = line.turned(changed, "hosta", now, id(next), &held).unwrap();
            }
            if what == 1 && held.len() < 10 {
                held.push(all.last().unwrap().0);
            }
            prop_assert!(line.past().len() <= MAX_PAST);
            if !u64::is_multiple_of(next, 8) {
                continue;
            }
            for known in line.ancestors() {
                let at = all.iter().position(|(id, _)| *id == known.id).unwrap();
                let mut wanted = BlockSet::new();
                all[at + 1..].iter().for_each(|(_, changed)| wanted.union_with(changed));
                prop_assert_eq!(line.changed_since(known.id, &BlockSet::new()), Some(wanted));
            }
        }
        let known: Vec<_> = line.ancestors().iter().map(|known| known.id).collect();
        prop_assert!(held.iter().chain(&handovers).all(|id| known.contains(id)));
    }
}
