//! The source's machine: the way of each strategy, and every way back before the handover.

mod support;

use dray_engine::source::SourceNotice;
use dray_engine::{SECOND, SourceEffect, SourceEvent, SourceRecord};
use dray_types::{Attempt, BlockSet, Epoch, ErrorKind, Strategy};
use dray_wire::{HandedOver, MapHash, TargetState, ToSource, ToTarget};
use support::*;

fn journals(effects: &[SourceEffect], record: &SourceRecord) -> bool {
    effects.contains(&SourceEffect::Journal(record.clone()))
}

fn notices(effects: &[SourceEffect]) -> Vec<SourceNotice> {
    let notice = |effect: &SourceEffect| match effect {
        SourceEffect::Notice(notice) => Some(notice.clone()),
        _ => None,
    };
    effects.iter().filter_map(notice).collect()
}

fn void(attempt: u64) -> SourceRecord {
    SourceRecord::Void { attempt: Attempt(attempt) }
}

#[test]
fn hybrid_copies_once_and_hands_over_a_map() {
    let (mut source, effects) = S::begin(Strategy::Hybrid, &set(&[(0, 300), (500, 10)]));
    assert_eq!(runs(&effects), set(&[(0, 300), (500, 10)]));
    let effects = source.received(&effects);
    assert!(notices(&effects).contains(&SourceNotice::Ready));

    let effects = source.step(SourceEvent::BeginHandover);
    let attempt = SourceEffect::Journal(SourceRecord::Attempt { attempt: Attempt(1) });
    assert!(place(&effects, |e| *e == attempt) < place(&effects, |e| *e == SourceEffect::Quiesce));
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    assert_eq!(prepare(&source.dirty(&set(&[(5, 2)]))), None, "the images are not durable yet");
    let effects = source.step(SourceEvent::ImagesSynced(Ok(())));
    let (missing, map_hash) = prepare(&effects).unwrap();
    assert_eq!(missing, set(&[(5, 2)]));

    let effects = source.hear(EPOCH, 1, ToSource::Prepared { map_hash });
    let over = HandedOver { epoch: Epoch(4), attempt: Attempt(1), map_hash };
    let recorded = SourceEffect::Journal(SourceRecord::HandedOver(over));
    let recorded = place(&effects, |e| *e == recorded);
    let retired = place(&effects, |e| *e == SourceEffect::Retire);
    let committed = place(&effects, |e| matches!(e, SourceEffect::Send(_)));
    assert!(recorded < retired && retired < committed, "the point of no return comes first");
    assert_eq!(sent(&effects), [(Attempt(1), ToTarget::Commit(over))]);
    assert!(!source.machine.owns());

    source.hear(Epoch(4), 1, ToSource::Serving);
    let effects = source.hear(Epoch(4), 1, ToSource::Complete);
    assert!(journals(&effects, &SourceRecord::Done));
    assert!(source.machine.is_over());
}

#[test]
fn pre_copy_sends_the_rest_before_it_asks() {
    let (mut source, effects) = S::begin(Strategy::PreCopy, &set(&[(0, 50)]));
    source.received(&effects);
    let effects = source.dirty(&set(&[(1, 1)]));
    assert!(notices(&effects).contains(&SourceNotice::Ready), "one block fits any downtime");
    source.received(&effects);
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    source.step(SourceEvent::ImagesSynced(Ok(())));
    let effects = source.dirty(&set(&[(7, 3)]));
    assert_eq!(prepare(&effects), None);
    assert_eq!(runs(&effects), set(&[(7, 3)]));
    let (missing, _) = prepare(&source.received(&effects)).unwrap();
    assert!(missing.is_empty(), "everything is equal at handover");
}

#[test]
fn post_copy_sends_nothing_before_handover() {
    let (mut source, effects) = S::begin(Strategy::PostCopy, &set(&[(0, 50)]));
    assert!(tags(&effects).is_empty());
    assert!(source.machine.is_ready());
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    source.step(SourceEvent::ImagesSynced(Ok(())));
    let (missing, _) = prepare(&source.dirty(&set(&[(90, 1)]))).unwrap();
    assert_eq!(missing, set(&[(0, 50), (90, 1)]));
}

#[test]
fn a_void_attempt_does_not_make_post_copy_send() {
    let (mut source, _) = S::begin(Strategy::PostCopy, &set(&[(0, 50)]));
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    source.step(SourceEvent::ImagesSynced(Err("input/output error".into())));
    let effects = source.dirty(&set(&[(90, 1)]));
    assert!(tags(&effects).is_empty(), "{effects:?}");
}

#[test]
fn pre_copy_that_does_not_converge_gives_up_with_a_hint() {
    let (mut source, mut effects) = S::begin(Strategy::PreCopy, &set(&[(0, BLOCKS)]));
    for _ in 0..40 {
        source.now += SECOND;
        source.received(&effects);
        effects = source.dirty(&set(&[(0, BLOCKS)]));
        if source.machine.is_over() {
            let told = notices(&effects);
            let [SourceNotice::Abandoned { why: Some(why) }] = &told[..] else {
                panic!("{told:?}")
            };
            assert!(why.in_words().contains("--strategy hybrid"), "{why}");
            assert!(
                effects
                    .contains(&SourceEffect::PutBack { image: IMAGE, blocks: set(&[(0, BLOCKS)]) })
            );
            return;
        }
    }
    panic!("it goes on and on");
}

#[test]
fn pre_copy_knows_after_two_long_rounds() {
    let (mut source, mut effects) = S::begin(Strategy::PreCopy, &set(&[(0, BLOCKS)]));
    for round in 1..=3 {
        assert!(!source.machine.is_over(), "round {round}");
        source.now += 6 * SECOND;
        source.received(&effects);
        effects = source.dirty(&set(&[(0, BLOCKS)]));
    }
    assert!(source.machine.is_over());
}

#[test]
fn a_lost_link_costs_only_what_did_not_arrive() {
    let (mut source, _) = S::begin(Strategy::Hybrid, &set(&[(0, 600)]));
    source.step(SourceEvent::LinkDown);
    source.step(SourceEvent::LinkUp);
    let effects = source.opened(&set(&[(0, 256)]));
    assert_eq!(runs(&effects), set(&[(256, 344)]));
}

#[test]
fn a_lost_link_voids_the_handover_in_every_step() {
    for step in 0..3 {
        let mut source = S::ready();
        source.step(SourceEvent::BeginHandover);
        if step > 0 {
            source.step(SourceEvent::Quiesced { lens: vec![LEN] });
        }
        if step > 1 {
            source.step(SourceEvent::ImagesSynced(Ok(())));
            source.dirty(&BlockSet::new());
        }
        let effects = source.step(SourceEvent::LinkDown);
        assert!(journals(&effects, &void(1)), "step {step}");
        assert!(effects.contains(&SourceEffect::Resume), "step {step}");
        assert!(source.machine.owns() && source.machine.is_ready(), "step {step}");
    }
}

#[test]
fn a_handover_without_an_answer_becomes_void() {
    let mut source = S::ready();
    source.ask(&BlockSet::new());
    source.now += 11 * SECOND;
    let effects = source.step(SourceEvent::Tick);
    assert!(journals(&effects, &void(1)));
    assert_eq!(sent(&effects), [(Attempt(1), ToTarget::Void)]);
}

#[test]
fn a_promise_for_a_void_attempt_voids_that_attempt_only() {
    let mut source = S::ready();
    let map_hash = source.ask(&BlockSet::new());
    source.step(SourceEvent::AbortHandover { why: "QEMU gave up".into() });
    source.ask(&BlockSet::new());
    let effects = source.hear(EPOCH, 1, ToSource::Prepared { map_hash });
    assert_eq!(sent(&effects), [(Attempt(1), ToTarget::Void)]);
    let effects = source.hear(EPOCH, 2, ToSource::Prepared { map_hash });
    assert!(!source.machine.owns(), "{effects:?}");
}

#[test]
fn a_promise_for_another_map_is_worth_nothing() {
    let mut source = S::ready();
    source.ask(&set(&[(3, 1)]));
    source.hear(EPOCH, 1, ToSource::Prepared { map_hash: MapHash([9; 16]) });
    assert!(source.machine.owns());
}

#[test]
fn answers_to_an_older_attempt_do_not_count() {
    let mut source = S::ready();
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::AbortHandover { why: "QEMU gave up".into() });
    source.step(SourceEvent::BeginHandover);
    let effects = source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    assert!(effects.is_empty(), "that was the first quiesce: {effects:?}");
    let effects = source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    assert!(effects.contains(&SourceEffect::SyncImages));

    source.step(SourceEvent::AbortHandover { why: "QEMU gave up".into() });
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    source.dirty(&BlockSet::new());
    source.dirty(&BlockSet::new());
    let effects = source.step(SourceEvent::ImagesSynced(Ok(())));
    assert_eq!(prepare(&effects), None, "that sync began while the guest still wrote");
    assert!(prepare(&source.step(SourceEvent::ImagesSynced(Ok(())))).is_some());
}

#[test]
fn a_quiesce_that_comes_too_late_is_undone() {
    let mut source = S::ready();
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::AbortHandover { why: "QEMU gave up".into() });
    let effects = source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    assert_eq!(effects, [SourceEffect::Resume]);
}

#[test]
fn two_versions_of_a_block_are_never_in_flight() {
    let (mut source, effects) = S::begin(Strategy::PreCopy, &set(&[(0, 50)]));
    source.received(&effects);
    let flying = source.dirty(&set(&[(10, 5)]));
    assert_eq!(runs(&flying), set(&[(10, 5)]));
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    source.step(SourceEvent::ImagesSynced(Ok(())));
    let effects = source.dirty(&set(&[(12, 5)]));
    assert_eq!(runs(&effects), set(&[(15, 2)]), "blocks 12 to 14 wait for the older frame");
    let effects = source.received(&flying);
    assert_eq!(runs(&effects), set(&[(12, 3)]));
}

#[test]
fn blocks_sent_again_are_not_trusted_in_the_next_session() {
    let (mut source, effects) = S::begin(Strategy::PreCopy, &set(&[(0, 50)]));
    source.received(&effects);
    let effects = source.dirty(&set(&[(10, 5)]));
    source.received(&effects);
    source.step(SourceEvent::LinkDown);
    source.step(SourceEvent::LinkUp);
    // The target's record may be older than a power cut that took the second version away.
    let effects = source.opened(&set(&[(0, 50)]));
    assert_eq!(runs(&effects), set(&[(10, 5)]));
}

#[test]
fn a_restart_before_the_first_sync_trusts_nothing() {
    let mut source = S::recover(Strategy::Hybrid, &[SourceRecord::Begun]);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::LinkUp);
    source.opened(&set(&[(0, 50)]));
    let data = set(&[(0, 40)]);
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data });
    assert_eq!(runs(&effects), set(&[(0, 50)]), "what became a hole is sent too");

    let mut source = S::recover(Strategy::Hybrid, &[SourceRecord::Begun, SourceRecord::Settled]);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::LinkUp);
    source.opened(&set(&[(0, 50)]));
    let data = set(&[(0, 60)]);
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data });
    assert_eq!(runs(&effects), set(&[(50, 10)]), "tracked all along: only the rest");
}

#[test]
fn cancel_leaves_the_guest_here_and_the_tracker_whole() {
    let (mut source, _) = S::begin(Strategy::Hybrid, &set(&[(0, 50)]));
    let effects = source.step(SourceEvent::Cancel { discard: true });
    assert_eq!(sent(&effects), [(Attempt(0), ToTarget::Abandon { discard: true })]);
    assert!(journals(&effects, &SourceRecord::Abandoned));
    let back = SourceEffect::PutBack { image: IMAGE, blocks: set(&[(0, 50)]) };
    assert!(effects.contains(&back));
    assert!(source.machine.owns() && source.machine.is_over());
}

#[test]
fn cancel_after_the_point_of_no_return_is_refused() {
    let (mut source, _) = S::handed_over(&BlockSet::new());
    let effects = source.step(SourceEvent::Cancel { discard: false });
    assert!(matches!(&notices(&effects)[..], [SourceNotice::Refused { .. }]));
}

#[test]
fn an_abandoned_migration_sends_nothing_more() {
    let mut source = S::new(Strategy::Hybrid);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::LinkUp);
    source.step(SourceEvent::Cancel { discard: false });
    assert!(source.opened(&BlockSet::new()).is_empty());
    let data = set(&[(0, 50)]);
    assert!(source.step(SourceEvent::Scanned { image: IMAGE, data }).is_empty());
    assert!(source.step(SourceEvent::ImagesSynced(Ok(()))).is_empty());
}

#[test]
fn dirty_blocks_that_come_after_the_end_go_back() {
    let (mut source, effects) = S::begin(Strategy::PreCopy, &set(&[(0, 50)]));
    source.received(&effects);
    source.step(SourceEvent::Cancel { discard: false });
    let effects = source.dirty(&set(&[(4, 1)]));
    assert_eq!(effects, [SourceEffect::PutBack { image: IMAGE, blocks: set(&[(4, 1)]) }]);
}

#[test]
fn damaged_four_times_in_a_row_ends_it() {
    let (mut source, mut effects) = S::begin(Strategy::Hybrid, &set(&[(0, 50)]));
    for _ in 0..3 {
        let tag = tags(&effects)[0];
        effects = source.hear(EPOCH, 0, ToSource::Mismatch { tag });
        assert_eq!(runs(&effects), set(&[(0, 50)]));
    }
    let tag = tags(&effects)[0];
    let effects = source.hear(EPOCH, 0, ToSource::Mismatch { tag });
    let told = notices(&effects);
    assert!(matches!(&told[..], [SourceNotice::Abandoned { why: Some(_) }]), "{told:?}");
    let back = SourceEffect::PutBack { image: IMAGE, blocks: set(&[(0, 50)]) };
    assert!(effects.contains(&back), "the blocks are not forgotten");
}

#[test]
fn an_unreadable_block_ends_it_before_handover() {
    let (mut source, effects) = S::begin(Strategy::Hybrid, &set(&[(0, 50)]));
    let tag = tags(&effects)[0];
    let effects = source.step(SourceEvent::RunFailed { tag, why: "input/output error".into() });
    assert_eq!(sent(&effects), [(Attempt(0), ToTarget::Abandon { discard: false })]);
    assert!(source.machine.owns() && source.machine.is_over());
}

#[test]
fn hand_back_takes_a_new_epoch_before_it_restores() {
    let (mut source, _) = S::handed_over(&BlockSet::new());
    let effects = source.hear(Epoch(4), 1, ToSource::HandBack);
    let back = SourceEffect::Journal(SourceRecord::TakenBack { epoch: Epoch(5) });
    assert!(place(&effects, |e| *e == back) < place(&effects, |e| *e == SourceEffect::Restore));
    assert!(source.machine.owns());
}

#[test]
fn a_voice_from_an_older_epoch_is_not_heard() {
    let (mut source, _) = S::handed_over(&BlockSet::new());
    for body in [ToSource::HandBack, ToSource::Complete, ToSource::Serving] {
        assert!(source.hear(EPOCH, 1, body).is_empty());
    }
}

#[test]
fn a_restart_ends_the_attempt_or_goes_on_serving() {
    let attempt = SourceRecord::Attempt { attempt: Attempt(1) };
    let mut source = S::recover(Strategy::Hybrid, std::slice::from_ref(&attempt));
    assert!(journals(&source.step(SourceEvent::Start), &void(1)));

    let over = HandedOver { epoch: Epoch(4), attempt: Attempt(1), map_hash: MapHash([1; 16]) };
    let records = [attempt, SourceRecord::HandedOver(over)];
    let mut source = S::recover(Strategy::Hybrid, &records);
    assert_eq!(source.step(SourceEvent::Start), [SourceEffect::Retire]);
    source.step(SourceEvent::LinkUp);
    let state = TargetState::Prepared { attempt: Attempt(1), map_hash: MapHash([1; 16]) };
    let effects = source.hear(EPOCH, 1, ToSource::Opened { state, images: Vec::new() });
    assert_eq!(sent(&effects), [(Attempt(1), ToTarget::Commit(over))]);
}

#[test]
fn a_target_that_forgot_its_promise_changes_nothing() {
    let (mut source, _) = S::handed_over(&BlockSet::new());
    source.step(SourceEvent::LinkDown);
    source.step(SourceEvent::LinkUp);
    let effects = source.opened(&BlockSet::new());
    assert!(matches!(&notices(&effects)[..], [SourceNotice::Broken { .. }]));
    assert!(!source.machine.owns());
}

#[test]
fn fetches_are_served_after_handover_only_and_inside_the_image() {
    let range = dray_types::BlockRange::new(BLOCKS - 1, 2);
    let fetch = |range| ToSource::Fetch { tag: 9, image: IMAGE, range, urgent: true };
    let mut source = S::ready();
    assert!(source.hear(EPOCH, 0, fetch(range)).is_empty());
    let (mut source, _) = S::handed_over(&BlockSet::new());
    let effects = source.hear(Epoch(4), 1, fetch(range));
    assert!(matches!(&sent(&effects)[..], [(_, ToTarget::Unreadable { tag: 9, .. })]));
    let effects = source.hear(Epoch(4), 1, fetch(dray_types::BlockRange::new(0, 4)));
    assert_eq!(runs(&effects), set(&[(0, 4)]));
}

#[test]
fn a_session_may_replace_one_that_nobody_saw_end() {
    let (mut source, _) = S::begin(Strategy::Hybrid, &set(&[(0, 600)]));
    source.step(SourceEvent::LinkUp);
    let effects = source.opened(&set(&[(0, 256)]));
    assert_eq!(runs(&effects), set(&[(256, 344)]), "what was in flight is sent again");
    source.received(&effects);
    source.step(SourceEvent::BeginHandover);
    let effects = source.step(SourceEvent::LinkUp);
    assert!(journals(&effects, &void(1)));
}

#[test]
fn the_beginning_is_recorded_before_anything_is_sent() {
    let mut source = S::recover(Strategy::Hybrid, &[]);
    let effects = source.step(SourceEvent::Start);
    let begun = SourceEffect::Journal(SourceRecord::Begun);
    assert!(place(&effects, |e| *e == begun) < place(&effects, |e| *e == SourceEffect::SyncImages));
    let effects = source.step(SourceEvent::ImagesSynced(Ok(())));
    assert!(journals(&effects, &SourceRecord::Settled));
}

fn not_recorded(source: &mut S, record: SourceRecord) -> Vec<SourceEffect> {
    let (kind, why) = (ErrorKind::NoSpace, "no space left on device".into());
    source.step(SourceEvent::NotRecorded { record, kind, why })
}

#[test]
fn a_handed_over_record_that_is_not_there_leaves_the_guest_here() {
    let mut source = S::ready();
    let map_hash = source.ask(&set(&[(5, 2)]));
    source.hear(EPOCH, 1, ToSource::Prepared { map_hash });
    let over = HandedOver { epoch: Epoch(4), attempt: Attempt(1), map_hash };
    let effects = not_recorded(&mut source, SourceRecord::HandedOver(over));
    assert!(source.machine.owns());
    assert_eq!(source.machine.epoch(), EPOCH);
    assert!(effects.contains(&SourceEffect::Resume));
    assert_eq!(sent(&effects), [(Attempt(1), ToTarget::Void)]);
    let told = notices(&effects);
    let [SourceNotice::HandoverFailed { why }] = &told[..] else { panic!("{told:?}") };
    assert!(why.contains("no space left"), "{why}");
    // A promise that comes late is worth nothing, and the next attempt is another one.
    let late = source.hear(EPOCH, 1, ToSource::Prepared { map_hash });
    assert!(source.machine.owns() && !late.contains(&SourceEffect::Retire));
    let map_hash = source.ask(&set(&[]));
    let effects = source.hear(EPOCH, 2, ToSource::Prepared { map_hash });
    let over = HandedOver { epoch: Epoch(4), attempt: Attempt(2), map_hash };
    assert!(journals(&effects, &SourceRecord::HandedOver(over)));
}

#[test]
fn an_attempt_without_a_number_is_none() {
    let mut source = S::ready();
    source.step(SourceEvent::BeginHandover);
    let effects = not_recorded(&mut source, SourceRecord::Attempt { attempt: Attempt(1) });
    assert!(matches!(notices(&effects)[..], [SourceNotice::HandoverFailed { .. }]));
    let map_hash = source.ask(&set(&[]));
    let effects = source.hear(EPOCH, 2, ToSource::Prepared { map_hash });
    assert!(effects.contains(&SourceEffect::Retire), "the next one is asked for and answered");
}

#[test]
fn a_migration_whose_beginning_is_not_recorded_sends_nothing() {
    let mut source = S::new(Strategy::Hybrid);
    source.step(SourceEvent::Start);
    let effects = not_recorded(&mut source, SourceRecord::Begun);
    assert!(journals(&effects, &SourceRecord::Abandoned));
    assert!(matches!(notices(&effects)[..], [SourceNotice::Abandoned { why: Some(_) }]));
    assert!(source.machine.is_over() && source.machine.owns());
}
