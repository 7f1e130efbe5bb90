//! The source, when the target has a replica of an earlier generation.

mod support;

use dray_engine::{SourceEffect, SourceEvent, SourceRecord};
use dray_types::{BlockRange, BlockSet, Strategy};
use dray_wire::{TargetImage, TargetState, ToSource};
use support::*;

/// Everything but `changed` is in the target's replica.
fn shared(changed: &[(u64, u64)]) -> SourceEvent {
    let blocks = set(changed).complement_in(BlockRange::new(0, BLOCKS));
    SourceEvent::Shared { image: IMAGE, blocks }
}

/// The target answers: its file is no new one.
fn opened(source: &mut S, have: &[(u64, u64)]) -> Vec<SourceEffect> {
    let images = vec![TargetImage { have: set(have), zeroed: false }];
    source.hear(EPOCH, 0, ToSource::Opened { state: TargetState::Receiving, images })
}

/// The source of an image of which the first 100 blocks hold data.
fn begin(strategy: Strategy, changed: &[(u64, u64)]) -> (S, Vec<SourceEffect>) {
    let mut source = S::new(strategy);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::ImagesSynced(Ok(())));
    source.step(SourceEvent::LinkUp);
    opened(&mut source, &[]);
    source.step(shared(changed));
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data: set(&[(0, 100)]) });
    (source, effects)
}

fn zeros(effects: &[SourceEffect]) -> BlockSet {
    let zero = |effect: &SourceEffect| match effect {
        SourceEffect::SendZero { range, .. } => Some(*range),
        _ => None,
    };
    effects.iter().filter_map(zero).collect()
}

#[test]
fn only_what_changed_is_sent_and_new_holes_are_named() {
    let (source, effects) = begin(Strategy::PreCopy, &[(10, 5), (300, 2)]);
    assert_eq!(runs(&effects), set(&[(10, 5)]));
    assert_eq!(zeros(&effects), set(&[(300, 2)]), "they hold data in the replica");
    assert_eq!(source.machine.status().shared, [BLOCKS - 7]);
}

#[test]
fn in_post_copy_the_map_is_what_changed() {
    let (mut source, effects) = begin(Strategy::PostCopy, &[(10, 5), (300, 2)]);
    assert!(runs(&effects).is_empty());
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    source.step(SourceEvent::ImagesSynced(Ok(())));
    let effects = source.dirty(&set(&[(50, 1)]));
    let (missing, _) = prepare(&effects).unwrap();
    assert_eq!(missing, set(&[(10, 5), (50, 1), (300, 2)]));
}

#[test]
fn a_block_written_over_the_replica_is_not_trusted_after_a_lost_link() {
    let (mut source, effects) = begin(Strategy::PreCopy, &[(10, 5)]);
    source.received(&effects);
    let effects = source.dirty(&set(&[(40, 1)]));
    assert_eq!(runs(&effects), set(&[(40, 1)]));
    source.received(&effects);
    source.step(SourceEvent::LinkDown);
    source.step(SourceEvent::LinkUp);
    // The target lost power: it has the replica's version of block 40, or a part of the younger one.
    let effects = opened(&mut source, &[(10, 5)]);
    assert_eq!(runs(&effects), set(&[(40, 1)]));
    // Whatever it says, once more in the next session.
    source.received(&effects);
    source.step(SourceEvent::LinkDown);
    source.step(SourceEvent::LinkUp);
    assert_eq!(runs(&opened(&mut source, &[(10, 5), (40, 1)])), set(&[(40, 1)]));
}

#[test]
fn a_frame_over_the_replica_that_was_under_way_is_sent_again() {
    let (mut source, effects) = begin(Strategy::PreCopy, &[(10, 5)]);
    source.received(&effects);
    source.dirty(&set(&[(40, 1)]));
    source.step(SourceEvent::LinkDown);
    source.step(SourceEvent::LinkUp);
    assert_eq!(runs(&opened(&mut source, &[(10, 5)])), set(&[(40, 1)]));
}

#[test]
fn a_restart_shares_what_the_line_still_vouches_for() {
    let records = [SourceRecord::Begun, SourceRecord::Settled];
    let mut source = S::recover(Strategy::Hybrid, &records);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::LinkUp);
    opened(&mut source, &[(10, 2)]);
    // A region was open: all of it may have changed.
    source.step(shared(&[(0, 32)]));
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data: set(&[(0, 100)]) });
    assert_eq!(runs(&effects), set(&[(0, 10), (12, 20)]));
}

#[test]
fn a_restart_before_the_first_sync_still_trusts_the_replica() {
    let mut source = S::recover(Strategy::Hybrid, &[SourceRecord::Begun]);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::LinkUp);
    opened(&mut source, &[(10, 2)]);
    source.step(shared(&[(0, 32)]));
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data: set(&[(0, 100)]) });
    assert_eq!(runs(&effects), set(&[(0, 32)]), "what it received is suspect, the rest is not");
}

#[test]
fn what_is_told_too_late_changes_nothing() {
    let (mut source, effects) = begin(Strategy::PreCopy, &[(10, 5)]);
    source.received(&effects);
    source.step(shared(&[]));
    source.step(SourceEvent::LinkDown);
    source.step(SourceEvent::LinkUp);
    assert_eq!(runs(&opened(&mut source, &[])), set(&[(10, 5)]));
}
