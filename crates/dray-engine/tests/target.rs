//! The target's machine: the promise, the handover, Backfill, and what a restart must not forget.

mod support;

use dray_engine::receiver::{Arrival, TargetNotice};
use dray_engine::{BackfillControl, SECOND, TargetEffect, TargetEvent, TargetRecord};
use dray_types::{Attempt, BlockRange, BlockSet, Epoch};
use dray_wire::{HandedOver, MapHash, Open, TargetState, ToSource, ToTarget};
use support::*;

fn journal(effects: &[TargetEffect]) -> Vec<TargetRecord> {
    let records = |effect: &TargetEffect| match effect {
        TargetEffect::Journal(records) => records.clone(),
        _ => Vec::new(),
    };
    effects.iter().flat_map(records).collect()
}

fn bodies(effects: &[TargetEffect]) -> Vec<ToSource> {
    said(effects).into_iter().map(|envelope| envelope.body).collect()
}

fn state(effects: &[TargetEffect]) -> TargetState {
    match &bodies(effects)[0] {
        ToSource::Opened { state, .. } => *state,
        other => panic!("{other:?}"),
    }
}

fn prepared(missing: &BlockSet) -> TargetRecord {
    let images = images(missing);
    let (attempt, map_hash, epoch) = (Attempt(1), MapHash::of(&images), EPOCH);
    TargetRecord::Prepared { attempt, map_hash, images, epoch }
}

#[test]
fn the_promise_is_durable_before_it_is_said() {
    let mut target = T::new();
    target.open(None);
    target.arrives(1, 0, 20, Arrival::Written);
    let missing = set(&[(5, 2)]);
    let effects = target.prepare(1, &missing);
    assert!(said(&effects).is_empty() && journal(&effects).is_empty());
    let effects = target.synced(sync_id(&effects));
    let received = TargetRecord::Received { image: IMAGE, blocks: set(&[(0, 20)]) };
    assert_eq!(journal(&effects), [received, prepared(&missing)]);
    let written = place(&effects, |e| matches!(e, TargetEffect::Journal(_)));
    assert!(written < place(&effects, |e| matches!(e, TargetEffect::Send(_))));
}

/// Once it was handed over nobody could serve it: there is no room for its end.
#[test]
fn an_image_that_is_longer_than_was_prepared_is_not_promised() {
    let mut target = T::new();
    target.open(None);
    let mut longer = images(&BlockSet::new());
    longer[0].len += 512;
    let map_hash = MapHash::of(&longer);
    let effects = target.hear(EPOCH, 1, ToTarget::Prepare { images: longer, map_hash });
    assert!(journal(&effects).is_empty());
    let [ToSource::Failed(why)] = &bodies(&effects)[..] else { panic!("{effects:?}") };
    assert!(why.why.contains("prepare again"), "{why}");
    // The next one is not held to that.
    assert!(matches!(target.prepare(2, &BlockSet::new())[..], [TargetEffect::SyncImages { .. }]));
}

#[test]
fn acknowledgements_go_together_when_nothing_waits() {
    let mut target = T::new();
    target.open(None);
    assert!(target.arrives(1, 0, 4, Arrival::Written).is_empty());
    assert!(target.arrives(2, 4, 4, Arrival::Written).is_empty());
    let effects = target.step(TargetEvent::Idle);
    assert_eq!(bodies(&effects), [ToSource::Received { tags: vec![1, 2] }]);
    let effects = target.arrives(3, 8, 4, Arrival::Damaged);
    assert_eq!(bodies(&effects), [ToSource::Mismatch { tag: 3 }]);
}

#[test]
fn a_frame_that_comes_during_the_sync_is_not_recorded_with_it() {
    let mut target = T::new();
    target.open(None);
    target.arrives(1, 0, 20, Arrival::Written);
    let effects = target.prepare(1, &BlockSet::new());
    target.arrives(2, 40, 1, Arrival::Written);
    let effects = target.synced(sync_id(&effects));
    let received = TargetRecord::Received { image: IMAGE, blocks: set(&[(0, 20)]) };
    assert_eq!(journal(&effects)[0], received);
    assert_eq!(
        bodies(&target.step(TargetEvent::Idle)),
        [ToSource::Received { tags: vec![1, 2] }],
        "a frame that overtook the void of its attempt is acknowledged"
    );
}

#[test]
fn a_promise_waits_for_the_sync_that_is_under_way() {
    let mut target = T::new();
    target.open(None);
    target.arrives(1, 0, 20, Arrival::Written);
    let first = sync_id(&target.tick_after(3 * SECOND));
    assert!(target.prepare(1, &BlockSet::new()).is_empty());
    let effects = target.synced(first);
    assert!(said(&effects).is_empty());
    let effects = target.synced(sync_id(&effects));
    assert!(matches!(&bodies(&effects)[..], [ToSource::Prepared { .. }]));
}

#[test]
fn a_failed_sync_promises_nothing_and_forgets_what_it_covered() {
    let mut target = T::new();
    target.open(None);
    target.arrives(1, 0, 20, Arrival::Written);
    let id = sync_id(&target.prepare(1, &BlockSet::new()));
    let result = Err("no space left on device".to_owned().into());
    let effects = target.step(TargetEvent::ImagesSynced { id, result });
    assert!(matches!(&bodies(&effects)[..], [ToSource::Failed(_)]));
    let lost = TargetRecord::Lost { image: IMAGE, blocks: set(&[(0, 20)]) };
    assert_eq!(journal(&effects), [lost], "older records may name those blocks");
    let effects = target.open(None);
    let [ToSource::Opened { images, .. }] = &bodies(&effects)[..] else { panic!("{effects:?}") };
    assert!(images[0].have.is_empty() && !images[0].zeroed);
}

const ANEW: TargetEffect = TargetEffect::BeginAnew { image: IMAGE };

/// A target with a failed sync behind it, in the life in which it failed and in the next one.
fn that_have_lost() -> [T; 2] {
    let mut target = T::new();
    target.open(None);
    target.arrives(1, 0, 20, Arrival::Written);
    let id = sync_id(&target.tick_after(3 * SECOND));
    let durable = target.synced(id);
    target.arrives(2, 20, 20, Arrival::Written);
    let id = sync_id(&target.tick_after(3 * SECOND));
    let result = Err("no space left on device".to_owned().into());
    let effects = target.step(TargetEvent::ImagesSynced { id, result });
    let touched = vec![TargetRecord::Touched];
    let records = [touched, journal(&durable), journal(&effects)].concat();
    [target, T::recover(&records)]
}

/// The system still shows what it has lost, and takes it for written down: a comparison would find it there, and no
/// later sync writes it.
#[test]
fn a_file_that_has_lost_writes_is_begun_anew_before_the_source_hears_what_is_here() {
    let distrusted = TargetRecord::Distrusted { image: IMAGE };
    for mut target in that_have_lost() {
        let effects = target.open(None);
        assert_eq!(journal(&effects), std::slice::from_ref(&distrusted));
        let recorded = place(&effects, |e| matches!(e, TargetEffect::Journal(_)));
        let begun = place(&effects, |e| *e == ANEW);
        let said = place(&effects, |e| matches!(e, TargetEffect::Send(_)));
        assert!(recorded < begun && begun < said, "{effects:?}");
        let [ToSource::Opened { images, .. }] = &bodies(&effects)[..] else {
            panic!("{effects:?}")
        };
        assert!(images[0].have.is_empty() && !images[0].zeroed);
        // Once is enough.
        target.arrives(3, 0, 40, Arrival::Written);
        assert!(!target.open(None).contains(&ANEW));
        let effects = target.prepare(1, &BlockSet::new());
        let effects = target.synced(sync_id(&effects));
        assert!(matches!(&bodies(&effects)[..], [ToSource::Prepared { .. }]));
    }
    // A kill between the record and the new beginning.
    let lost = TargetRecord::Lost { image: IMAGE, blocks: set(&[(0, 20)]) };
    let mut target = T::recover(&[TargetRecord::Touched, lost, distrusted]);
    assert!(target.open(None).contains(&ANEW));
}

/// Whatever else has told the shell that writes were lost.
#[test]
fn a_file_of_which_only_the_shell_knows_that_it_has_lost_writes_is_begun_anew() {
    let mut target = T::new();
    target.machine.doubt(IMAGE);
    assert!(target.open(None).contains(&ANEW));
}

#[test]
fn after_a_loss_nothing_is_recorded_or_promised_before_the_new_beginning() {
    let [mut target, _] = that_have_lost();
    target.arrives(3, 40, 20, Arrival::Written);
    assert!(journal(&target.tick_after(3 * SECOND)).is_empty());
    let effects = target.prepare(1, &BlockSet::new());
    assert!(matches!(&bodies(&effects)[..], [ToSource::Failed(_)]), "{effects:?}");
}

/// The source does not send what such a copy has in common with the image.
#[test]
fn a_copy_that_returns_and_has_lost_writes_is_not_gone_on_with() {
    let mut plan = target_plan();
    plan.based = vec![true];
    let lost = TargetRecord::Lost { image: IMAGE, blocks: set(&[(0, 20)]) };
    let mut target = T::recover(&[]);
    target.machine = dray_engine::Target::recover(plan, &[TargetRecord::Touched, lost]);
    let effects = target.open(None);
    let [ToSource::Failed(why)] = &bodies(&effects)[..] else { panic!("{effects:?}") };
    assert!(why.why.contains("migrate again") && !effects.contains(&ANEW), "{effects:?}");
}

#[test]
fn only_the_attempt_that_is_named_becomes_void() {
    let mut target = T::new();
    target.open(None);
    let effects = target.prepare(2, &BlockSet::new());
    target.hear(EPOCH, 1, ToTarget::Void);
    let effects = target.synced(sync_id(&effects));
    assert!(matches!(&bodies(&effects)[..], [ToSource::Prepared { .. }]));
    target.hear(EPOCH, 1, ToTarget::Void);
    assert_eq!(target.machine.phase(), dray_engine::Phase::Handover);
    let effects = target.hear(EPOCH, 2, ToTarget::Void);
    assert_eq!(journal(&effects), [TargetRecord::Void { attempt: Attempt(2) }]);
}

#[test]
fn commit_is_recorded_then_served_then_the_guest_is_looked_for() {
    let missing = set(&[(5, 2)]);
    let (target, effects) = T::owner(&missing);
    let recorded = TargetEffect::Journal(vec![TargetRecord::Committed(over(&missing))]);
    let exposed = TargetEffect::Expose { images: images(&missing) };
    let recorded = place(&effects, |e| *e == recorded);
    let exposed = place(&effects, |e| *e == exposed);
    assert!(recorded < exposed);
    assert!(exposed < place(&effects, |e| *e == TargetEffect::ReachGuest));
    assert!(target.machine.owns());
}

#[test]
fn a_commit_for_something_else_is_ignored() {
    let mut target = T::new();
    target.open(None);
    let id = sync_id(&target.prepare(1, &BlockSet::new()));
    target.synced(id);
    let commit = ToTarget::Commit(over(&set(&[(1, 1)])));
    assert!(target.hear(Epoch(4), 1, commit).is_empty());
    assert!(!target.machine.owns());
}

#[test]
fn an_owner_does_not_listen_to_the_epoch_before() {
    let (mut target, _) = T::owner(&BlockSet::new());
    for body in [ToTarget::Void, ToTarget::Abandon { discard: true }] {
        assert!(target.hear(EPOCH, 1, body).is_empty());
    }
    assert!(target.hear(Epoch(4), 1, ToTarget::Abandon { discard: true }).is_empty());
    assert!(target.machine.owns());
}

#[test]
fn a_prepared_target_asks_after_a_restart_and_never_guesses() {
    let missing = set(&[(5, 2)]);
    let records = [TargetRecord::Touched, prepared(&missing)];
    let mut target = T::recover(&records);
    assert!(target.step(TargetEvent::Start).is_empty());
    let effects = target.open(Some(over(&missing)));
    assert!(matches!(state(&effects), TargetState::Prepared { attempt: Attempt(1), .. }));
    target.hear(Epoch(4), 1, ToTarget::Commit(over(&missing)));
    assert!(target.machine.owns());

    let mut target = T::recover(&records);
    target.step(TargetEvent::Start);
    let effects = target.open(None);
    assert_eq!(journal(&effects), [TargetRecord::Void { attempt: Attempt(1) }]);
    assert!(!target.machine.owns());
}

#[test]
fn a_restart_at_each_step_of_ownership_goes_on_there() {
    let missing = set(&[(5, 2)]);
    let mut records = vec![prepared(&missing), TargetRecord::Committed(over(&missing))];
    let expose = TargetEffect::Expose { images: images(&missing) };
    let start = |records: &[TargetRecord]| T::recover(records).step(TargetEvent::Start);
    assert_eq!(start(&records), [expose.clone(), TargetEffect::ReachGuest]);
    records.push(TargetRecord::GuestStarting);
    let writable = [expose, TargetEffect::LetChange];
    assert_eq!(start(&records), [&writable[..], &[TargetEffect::StartGuest]].concat());
    records.push(TargetRecord::GuestStarted);
    assert_eq!(start(&records), writable);
    records.push(TargetRecord::Complete);
    assert_eq!(start(&records), [TargetEffect::Finish]);
}

#[test]
fn a_restarted_target_no_longer_knows_that_the_rest_is_zeros() {
    let mut target = T::recover(&[]);
    let effects = target.open(None);
    let touched = place(&effects, |e| *e == TargetEffect::Journal(vec![TargetRecord::Touched]));
    assert!(touched < place(&effects, |e| matches!(e, TargetEffect::Send(_))));
    let [ToSource::Opened { images, .. }] = &bodies(&effects)[..] else { panic!("{effects:?}") };
    assert!(images[0].zeroed, "nobody has sent it anything");

    let mut target = T::recover(&[TargetRecord::Touched]);
    let effects = target.open(None);
    let [ToSource::Opened { images, .. }] = &bodies(&effects)[..] else { panic!("{effects:?}") };
    assert!(!images[0].zeroed, "a frame may have been written that no record names");
}

#[test]
fn nothing_changes_before_it_is_recorded_that_the_images_stay() {
    let starting = TargetEffect::Journal(vec![TargetRecord::GuestStarting]);
    let (mut target, effects) = T::owner(&BlockSet::new());
    assert!(!effects.contains(&TargetEffect::LetChange), "{effects:?}");
    let effects = target.step(TargetEvent::GuestReachable(Ok(())));
    let expected = [starting.clone(), TargetEffect::LetChange, TargetEffect::StartGuest];
    assert_eq!(effects, expected);

    // Somebody else is faster.
    let (mut target, _) = T::owner(&BlockSet::new());
    let effects = target.step(TargetEvent::ChangeWaits);
    assert_eq!(effects, [starting, TargetEffect::LetChange]);
    assert!(target.step(TargetEvent::ChangeWaits).is_empty(), "once");
    let effects = target.step(TargetEvent::GuestReachable(Ok(())));
    assert_eq!(effects, [TargetEffect::StartGuest]);
}

#[test]
fn images_that_something_has_changed_here_stay_although_the_guest_cannot_be_reached() {
    let (mut target, _) = T::owner(&BlockSet::new());
    target.step(TargetEvent::ChangeWaits);
    let effects = target.step(TargetEvent::GuestReachable(Err("it has ended".into())));
    assert!(!bodies(&effects).contains(&ToSource::HandBack) && target.machine.owns());
    let failed = TargetNotice::GuestFailed { why: "it has ended".into() };
    assert!(effects.contains(&TargetEffect::Notice(failed)), "{effects:?}");
    // What comes after the images have gone back is changed by nobody.
    let (mut target, _) = T::owner(&BlockSet::new());
    target.step(TargetEvent::GuestReachable(Err("it has ended".into())));
    assert!(target.step(TargetEvent::ChangeWaits).is_empty());
}

#[test]
fn an_unreachable_guest_sends_the_images_back() {
    let (mut target, _) = T::owner(&BlockSet::new());
    let effects = target.step(TargetEvent::GuestReachable(Err("no answer".into())));
    let fenced = TargetEffect::Journal(vec![TargetRecord::Fenced]);
    let fenced = place(&effects, |e| *e == fenced);
    assert!(fenced < place(&effects, |e| *e == TargetEffect::Withdraw));
    assert!(fenced < place(&effects, |e| matches!(e, TargetEffect::Send(_))));
    assert!(!target.machine.owns());
    let effects = target.open(Some(over(&BlockSet::new())));
    assert_eq!(state(&effects), TargetState::Fenced);
}

#[test]
fn a_guest_that_was_started_keeps_the_images_here() {
    let (mut target, _) = T::running(&BlockSet::new());
    assert!(target.step(TargetEvent::GuestReachable(Err("late".into()))).is_empty());
    assert!(target.machine.owns());
}

#[test]
fn complete_waits_until_the_guest_runs() {
    let (mut target, _) = T::owner(&BlockSet::new());
    target.step(TargetEvent::GuestReachable(Ok(())));
    target.step(TargetEvent::Tick);
    let effects = target.next_missing(None);
    assert!(!effects.iter().any(|e| matches!(e, TargetEffect::Checkpoint { .. })));
    let effects = target.step(TargetEvent::GuestStarted(Ok(())));
    assert!(effects.contains(&TargetEffect::Checkpoint { id: 1 }));
    let effects = target.step(TargetEvent::Checkpointed { id: 1, result: Ok(()) });
    assert_eq!(journal(&effects), [TargetRecord::Complete]);
    assert!(bodies(&effects).contains(&ToSource::Complete));
}

#[test]
fn backfill_asks_once_for_each_block() {
    let (mut target, effects) = T::running(&set(&[(0, 8)]));
    assert!(
        effects.iter().any(|e| matches!(
            e,
            TargetEffect::AskMissing { range: BlockRange { start: 0, .. }, .. }
        ))
    );
    let effects = target.next_missing(Some((0, 8)));
    let [(tag, range, false)] = fetches(&effects)[..] else { panic!("{effects:?}") };
    assert_eq!(range, BlockRange::new(0, 8));
    let runs = vec![BlockRange::new(2, 1)];
    let effects = target.step(TargetEvent::Demand { image: IMAGE, runs });
    assert!(fetches(&effects).is_empty(), "it is on its way");
    target.arrives(tag, 0, 8, Arrival::Written);
    let effects = target.next_missing(Some((0, 8)));
    assert!(fetches(&effects).is_empty(), "an answer older than the arrival");
}

#[test]
fn a_demand_goes_at_once_and_the_scan_goes_on_behind_it() {
    let (mut target, _) = T::running(&set(&[(0, 900)]));
    target.next_missing(None);
    let runs = vec![BlockRange::new(500, 4)];
    let effects = target.step(TargetEvent::Demand { image: IMAGE, runs });
    assert!(matches!(&fetches(&effects)[..], [(_, range, true)] if range.start == 500));
}

#[test]
fn a_demand_hurries_what_is_on_its_way_once() {
    let (mut target, _) = T::running(&set(&[(0, 8)]));
    let effects = target.next_missing(Some((0, 8)));
    let (tag, ..) = fetches(&effects)[0];
    let demand = || TargetEvent::Demand { image: IMAGE, runs: vec![BlockRange::new(2, 1)] };
    let hurry = ToSource::Hurry { tag };
    assert_eq!(bodies(&target.step(demand())), [hurry]);
    assert!(bodies(&target.step(demand())).is_empty(), "said once");
    target.step(TargetEvent::LinkDown);
    target.step(TargetEvent::LinkUp);
    assert!(bodies(&target.step(demand())).is_empty(), "the source has not opened");
    let effects = target.open(Some(over(&set(&[(0, 8)]))));
    assert!(matches!(fetches(&effects)[..], [(_, _, true)]), "asked for as urgent now");
}

#[test]
fn an_unreadable_block_is_asked_for_again_later_and_not_before() {
    let (mut target, _) = T::running(&set(&[(0, 8)]));
    let effects = target.next_missing(Some((0, 8)));
    let (tag, ..) = fetches(&effects)[0];
    let why = "input/output error".to_owned();
    let effects = target.hear(Epoch(4), 1, ToTarget::Unreadable { tag, why });
    let told =
        |e: &TargetEffect| matches!(e, TargetEffect::Notice(TargetNotice::Unreadable { .. }));
    assert!(effects.iter().any(told));
    let effects = target.next_missing(Some((0, 8)));
    assert!(fetches(&effects).is_empty());
    assert!(matches!(&fetches(&target.tick_after(2 * SECOND))[..], [(_, _, false)]));
}

#[test]
fn after_a_lost_link_everything_under_way_is_asked_for_once_more() {
    let (mut target, _) = T::running(&set(&[(0, 8)]));
    target.next_missing(Some((0, 8)));
    target.step(TargetEvent::LinkDown);
    target.step(TargetEvent::LinkUp);
    assert!(fetches(&target.step(TargetEvent::Tick)).is_empty(), "not before the source opens");
    let effects = target.open(Some(over(&set(&[(0, 8)]))));
    assert_eq!(fetches(&effects).len(), 1);
}

/// A fetch in the background for blocks 0 to 7; a guest asks for block 2; Backfill is paused.
fn demanded_and_paused() -> (T, u64) {
    let (mut target, _) = T::running(&set(&[(0, 8)]));
    let effects = target.next_missing(Some((0, 8)));
    let [(tag, _, false)] = fetches(&effects)[..] else { panic!("{effects:?}") };
    let runs = vec![BlockRange::new(2, 1)];
    assert!(fetches(&target.step(TargetEvent::Demand { image: IMAGE, runs })).is_empty());
    target.step(TargetEvent::BackfillControl(BackfillControl::Pause));
    (target, tag)
}

#[test]
fn a_guest_that_waits_for_a_background_fetch_outlasts_a_pause_and_a_lost_link() {
    let (mut target, _) = demanded_and_paused();
    target.step(TargetEvent::LinkDown);
    let effects = target.open(Some(over(&set(&[(0, 8)]))));
    let [(_, range, true)] = fetches(&effects)[..] else { panic!("{effects:?}") };
    assert!(range.contains(BlockRange::new(2, 1)));
}

#[test]
fn a_guest_that_waits_for_a_damaged_background_fetch_outlasts_a_pause() {
    let (mut target, tag) = demanded_and_paused();
    target.arrives(tag, 0, 8, Arrival::Damaged);
    assert!(matches!(&fetches(&target.tick_after(2 * SECOND))[..], [(_, _, true)]));
    // The other way round: first damaged, then waited for.
    let (mut target, _) = T::running(&set(&[(0, 8)]));
    let (tag, ..) = fetches(&target.next_missing(Some((0, 8))))[0];
    target.arrives(tag, 0, 8, Arrival::Damaged);
    let runs = vec![BlockRange::new(2, 1)];
    target.step(TargetEvent::Demand { image: IMAGE, runs });
    target.step(TargetEvent::BackfillControl(BackfillControl::Pause));
    assert!(matches!(&fetches(&target.tick_after(2 * SECOND))[..], [(_, _, true)]));
}

#[test]
fn a_map_that_goes_past_the_end_is_not_promised() {
    for behind in [(BLOCKS, 1), (BLOCKS - 1, 2), (1 << 50, 8)] {
        let mut target = T::new();
        target.open(None);
        let effects = target.prepare(1, &set(&[(5, 2), behind]));
        let [ToSource::Failed(why)] = &bodies(&effects)[..] else { panic!("{effects:?}") };
        assert!(why.why.contains("'root'"), "{why}");
        assert!(!effects.iter().any(|e| matches!(e, TargetEffect::SyncImages { .. })));
    }
    let mut target = T::new();
    target.open(None);
    let effects = target.prepare(1, &set(&[(BLOCKS - 1, 1)]));
    assert!(effects.iter().any(|e| matches!(e, TargetEffect::SyncImages { .. })));
}

/// A source that has one attempt after the other come to nothing would fill the target's state directory.
#[test]
fn attempts_whose_maps_take_too_much_are_not_promised_any_more() {
    let scattered = |parts: u64| (0..parts).map(|nth| BlockRange::new(nth << 15, 1)).collect();
    for (before, is_promised) in [(0, true), ((1 << 16) - 1, true), (1 << 16, false)] {
        let records = [prepared(&scattered(before)), TargetRecord::Void { attempt: Attempt(1) }];
        let mut target = T::recover(&records);
        target.open(None);
        let effects = target.prepare(2, &set(&[(5, 2)]));
        let syncs = effects.iter().any(|e| matches!(e, TargetEffect::SyncImages { .. }));
        let refused = matches!(&bodies(&effects)[..], [ToSource::Failed(_)]);
        assert_eq!((syncs, refused), (is_promised, !is_promised), "{before}");
    }
}

#[test]
fn other_images_than_prepared_are_refused_in_the_epoch_of_the_asker() {
    let mut target = T::new();
    target.step(TargetEvent::LinkUp);
    let mut images = offers();
    images[0].len *= 2;
    let open = Open { migration: dray_types::MigrationId(1), images, handed_over: None };
    let effects = target.hear(EPOCH, 0, ToTarget::Open(open));
    let [envelope] = &said(&effects)[..] else { panic!("{effects:?}") };
    assert!(matches!(envelope.body, ToSource::Failed(_)));
    assert_eq!(envelope.epoch, EPOCH, "the source would not hear a lower one");
}

#[test]
fn an_abandoned_copy_is_kept_or_removed_as_asked() {
    let mut target = T::new();
    target.open(None);
    target.arrives(1, 0, 20, Arrival::Written);
    let effects = target.hear(EPOCH, 0, ToTarget::Abandon { discard: false });
    assert!(!effects.contains(&TargetEffect::Discard));
    let effects = target.hear(EPOCH, 0, ToTarget::Abandon { discard: true });
    assert_eq!(journal(&effects), [TargetRecord::Discarded]);
    assert!(effects.contains(&TargetEffect::Discard));
}

/// It may have died between the record and what follows it.
#[test]
fn a_fenced_target_withdraws_again_after_a_restart() {
    let handed_over = HandedOver {
        epoch: Epoch(EPOCH.0 + 1),
        attempt: Attempt(1),
        map_hash: MapHash::of(&images(&BlockSet::new())),
    };
    let fenced = [
        TargetRecord::Touched,
        prepared(&BlockSet::new()),
        TargetRecord::Committed(handed_over),
        TargetRecord::Fenced,
    ];
    let mut target = T::recover(&fenced);
    assert_eq!(target.step(TargetEvent::Start), [TargetEffect::Withdraw]);
    assert!(!target.machine.owns());
}

#[test]
fn a_discarded_target_goes_again_after_a_restart() {
    let mut target = T::recover(&[TargetRecord::Touched, TargetRecord::Discarded]);
    let effects = target.step(TargetEvent::Start);
    let gone = TargetNotice::Abandoned { discarded: true };
    assert_eq!(effects, [TargetEffect::Discard, TargetEffect::Notice(gone)]);
}

/// Another program may have changed the file: what was received counts for nothing, and what was agreed stays.
#[test]
fn what_was_changed_after_the_promise_is_fetched_again() {
    let (received, missing) = (set(&[(0, 20)]), set(&[(20, 5)]));
    let distrusted = TargetRecord::Distrusted { image: IMAGE };
    let records = [
        TargetRecord::Touched,
        TargetRecord::Received { image: IMAGE, blocks: received },
        prepared(&missing),
        distrusted,
    ];
    let whole = set(&[(0, BlockRange::whole(LEN).len)]);
    let mut target = T::recover(&records);
    let effects = target.open(Some(over(&missing)));
    let [ToSource::Opened { state: TargetState::Prepared { map_hash, .. }, .. }] =
        &bodies(&effects)[..]
    else {
        panic!("{effects:?}")
    };
    assert_eq!(*map_hash, over(&missing).map_hash, "the source commits to what it has recorded");
    let effects = target.hear(Epoch(4), 1, ToTarget::Commit(over(&missing)));
    let exposed = TargetEffect::Expose { images: images(&whole) };
    assert!(effects.contains(&exposed), "{effects:?}");
    // A later life exposes the same.
    let committed = TargetRecord::Committed(over(&missing));
    let mut again = T::recover(&[&records[..], &[committed]].concat());
    assert!(again.step(TargetEvent::Start).contains(&exposed));
}

/// The source has not handed over: it sends everything again to a file that was made zeros.
#[test]
fn what_was_changed_before_a_promise_is_sent_again() {
    let received = TargetRecord::Received { image: IMAGE, blocks: set(&[(0, 20)]) };
    let distrusted = TargetRecord::Distrusted { image: IMAGE };
    for records in [vec![TargetRecord::Touched, received, distrusted.clone()], vec![distrusted]] {
        let mut target = T::recover(&records);
        let effects = target.open(None);
        let [ToSource::Opened { state: TargetState::Receiving, images }] = &bodies(&effects)[..]
        else {
            panic!("{effects:?}")
        };
        assert!(images[0].have.is_empty() && !images[0].zeroed, "{records:?}");
    }
}

/// The source takes what it never sent for zeros, which are not there any more.
#[test]
fn what_was_changed_after_a_promise_that_is_void_is_not_gone_on_with() {
    let distrusted = TargetRecord::Distrusted { image: IMAGE };
    let mut records = vec![TargetRecord::Touched, prepared(&BlockSet::new()), distrusted.clone()];
    let mut target = T::recover(&records);
    let effects = target.open(None);
    let void = TargetRecord::Void { attempt: Attempt(1) };
    assert_eq!(journal(&effects), std::slice::from_ref(&void));
    assert!(matches!(&bodies(&effects)[..], [ToSource::Failed(_)]), "{effects:?}");
    records.push(void);
    let mut target = T::recover(&records);
    assert!(matches!(&bodies(&target.open(None))[..], [ToSource::Failed(_)]));
    // The next agent has made it zeros.
    records.push(distrusted);
    let mut target = T::recover(&records);
    assert!(matches!(&bodies(&target.open(None))[..], [ToSource::Opened { .. }]));
}
