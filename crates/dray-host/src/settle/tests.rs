//! Every combination, and what must hold of each whatever rule decides.

use super::*;
use std::collections::{BTreeMap, BTreeSet};

const RECORDED: [Recorded; 11] = [
    Recorded::Plain,
    Recorded::Resident,
    Recorded::Adopting,
    Recorded::Adopted,
    Recorded::Releasing,
    Recorded::Released,
    Recorded::Moving,
    Recorded::Prepared,
    Recorded::Incomplete,
    Recorded::Arrived,
    Recorded::Replica,
];
const VMS: [Vm; 4] = [Vm::Gone, Vm::Same, Vm::Other, Vm::Silent];
const DISKS: [Disk; 4] = [Disk::OnFile, Disk::OnExport, Disk::Elsewhere, Disk::Unknown];
const LOCKS: [Lock; 4] = [Lock::Free, Lock::Ours, Lock::Others, Lock::Unknown];
const FILES: [File; 3] = [File::AsRecorded, File::Absent, File::Other];

/// All combinations.
fn cells() -> Vec<Seen> {
    let mut all = Vec::new();
    for recorded in RECORDED {
        for (vm, disk) in VMS.into_iter().flat_map(|vm| DISKS.map(|disk| (vm, disk))) {
            for (lock, file) in LOCKS.into_iter().flat_map(|lock| FILES.map(|file| (lock, file))) {
                all.push(Seen { recorded, vm, disk, lock, file });
            }
        }
    }
    all
}

/// Those that a rule decides about.
fn decided() -> Vec<(Seen, Rule)> {
    let with = |seen| (seen, rule(seen));
    cells().into_iter().map(with).filter(|(_, rule)| *rule != Rule::Impossible).collect()
}

#[test]
fn the_manual_lists_every_rule_and_how_much_it_decides() {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for seen in cells() {
        *counts.entry(format!("{:?}", rule(seen))).or_default() += 1;
    }
    assert_eq!(counts.values().sum::<usize>(), 2112);
    let manual = include_str!("../../../../docs/explanation/settling.md");
    let rows = manual.lines().filter_map(|line| {
        let mut fields = line.strip_prefix("| `")?.split(" | ");
        let name = fields.next()?.trim_end_matches('`').to_owned();
        Some((name, fields.next()?.parse().ok()?))
    });
    assert_eq!(rows.collect::<BTreeMap<String, usize>>(), counts);
}

/// A VM that nobody has asked, or that has ended, shows no disk; nothing else is impossible.
#[test]
fn only_what_nobody_can_have_seen_is_impossible() {
    for seen in cells() {
        let unseen = matches!(seen.vm, Vm::Gone | Vm::Silent) && seen.disk != Disk::Unknown;
        assert_eq!(rule(seen) == Rule::Impossible, unseen, "{seen:?}");
    }
}

#[test]
fn nobody_new_is_served_what_another_has_or_may_have() {
    for (seen, rule) in decided() {
        let of_a_loop = rule == Rule::OfItsMigration;
        let elsewhere = seen.lock == Lock::Others || seen.disk == Disk::OnFile;
        let absent = seen.file != File::AsRecorded;
        let halfway =
            matches!(seen.recorded, Recorded::Adopting | Recorded::Releasing | Recorded::Released);
        if !of_a_loop && (elsewhere || absent || halfway) {
            assert!(!rule.serves_new(), "{seen:?}: {rule:?}");
        }
    }
}

#[test]
fn no_lock_stands_in_the_way_of_a_qemu_that_has_the_file_or_may_have_it() {
    for (seen, rule) in decided() {
        let has = seen.vm == Vm::Same && seen.disk == Disk::OnFile;
        let halfway = matches!(seen.recorded, Recorded::Adopting | Recorded::Releasing);
        let may_have = halfway && seen.disk == Disk::Unknown;
        let next = seen.vm == Vm::Gone && seen.recorded == Recorded::Adopted;
        let own = rule == Rule::OfItsMigration || seen.file != File::AsRecorded;
        if !own && rule != Rule::NotOwned && (has || may_have || next) {
            assert_eq!(rule.locking(), Locking::None, "{seen:?}: {rule:?}");
        }
    }
}

/// A line is trusted only where everything that was written has gone through dray.
#[test]
fn what_somebody_else_may_have_written_counts_as_changed() {
    for (seen, rule) in decided().into_iter().filter(|(_, rule)| *rule != Rule::OfItsMigration) {
        let others = seen.lock == Lock::Others && rule != Rule::StayedUnderDray;
        let was_halfway =
            matches!(seen.recorded, Recorded::Adopting | Recorded::Releasing | Recorded::Released)
                && rule != Rule::StayedUnderDray;
        if others || was_halfway || seen.disk == Disk::OnFile {
            assert!(!rule.trusts(), "{seen:?}: {rule:?}");
        }
        // Only its own VM can say that a release never came to its pivot.
        if rule == Rule::StayedUnderDray {
            assert_eq!((seen.vm, seen.disk), (Vm::Same, Disk::OnExport), "{seen:?}");
        }
    }
}

/// What is half done is decided by a look at the VM, and by nothing else.
#[test]
fn every_splice_that_was_cut_short_has_a_way_out() {
    for recorded in [Recorded::Adopting, Recorded::Releasing, Recorded::Released] {
        for disk in [Disk::OnFile, Disk::OnExport, Disk::Elsewhere] {
            let found: BTreeSet<_> = LOCKS
                .map(|lock| {
                    rule(Seen { recorded, vm: Vm::Same, disk, lock, file: File::AsRecorded })
                })
                .into();
            assert_eq!(found.len(), 1, "{recorded:?} {disk:?}: locks decide nothing here");
            assert!(!found.contains(&Rule::Undecided), "{recorded:?} {disk:?}");
        }
    }
}

#[test]
fn what_a_record_and_a_note_say_together() {
    use crate::record::Adopted;
    use dray_types::{Epoch, ImageId, MigrationId};
    let plain = ImageRecord::owned("disk".into(), ImageId(1), "/pool/disk".into(), 4096);
    let adopted = |done| {
        let (qmp, device, splice) = ("/run/qmp".into(), "disk0".into(), serde_json::Value::Null);
        let adopted = Adopted { qmp, qemu: None, device, splice, noted: false, done };
        ImageRecord { adopted: Some(adopted), ..plain.clone() }
    };
    let of = |record: &ImageRecord| Recorded::of(record, None, false, false);
    assert_eq!(of(&plain), Recorded::Plain);
    assert_eq!(Recorded::of(&plain, None, false, true), Recorded::Resident);
    assert_eq!(of(&ImageRecord { epoch: Epoch(2), ..plain.clone() }), Recorded::Arrived);
    assert_eq!((of(&adopted(false)), of(&adopted(true))), (Recorded::Adopting, Recorded::Adopted));
    let moving = ImageRecord { migration: Some(MigrationId(1)), ..adopted(true) };
    assert_eq!(of(&moving), Recorded::Moving);
    assert_eq!(Recorded::of(&moving, None, true, false), Recorded::Incomplete);
    let of_state = |state| of(&ImageRecord { state, ..moving.clone() });
    assert_eq!(of_state(CopyState::Incoming), Recorded::Prepared);
    assert_eq!(of_state(CopyState::Replica), Recorded::Replica);
}
