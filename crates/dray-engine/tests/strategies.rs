//! Hot-set and auto, what throttles the guest, and what is counted.

mod support;

use dray_engine::throttle::Mode;
use dray_engine::{SECOND, Source, SourceEffect, SourceEvent, Tuning};
use dray_types::{BLOCK_SIZE, BlockSet, MAX_RUN_BLOCKS, Strategy};
use support::*;

fn tuned(strategy: Strategy, tuning: Tuning) -> S {
    let mut plan = source_plan(strategy);
    plan.tuning = tuning;
    S { machine: Source::new(plan), now: SECOND }
}

fn hot(strategy: Strategy, chosen: &BlockSet, handover_size: Option<u64>) -> S {
    let copy_only = Some(vec![chosen.clone()]);
    tuned(strategy, Tuning { copy_only, handover_size, ..Tuning::default() })
}

fn begin(source: &mut S, data: &BlockSet) -> Vec<SourceEffect> {
    source.step(SourceEvent::Start);
    source.step(SourceEvent::ImagesSynced(Ok(())));
    source.step(SourceEvent::LinkUp);
    let mut effects = source.opened(&BlockSet::new());
    effects.extend(source.step(SourceEvent::Scanned { image: IMAGE, data: data.clone() }));
    effects
}

/// A whole migration up to the question for the promise, with writes in each round; all effects in
/// order. What is asked is answered at once, what is sent arrives.
fn story(mut source: S) -> Vec<SourceEffect> {
    let mut all = Vec::new();
    let mut writes = vec![set(&[(7, 3)]), set(&[(301, 1)]), set(&[(40, 3), (500, 9)])];
    let mut waiting = begin(&mut source, &set(&[(0, 50), (300, 700)]));
    while prepare(&all).is_none() {
        if waiting.is_empty() {
            let ready = source.machine.is_ready();
            waiting =
                source.step(if ready { SourceEvent::BeginHandover } else { SourceEvent::Tick });
            assert!(!waiting.is_empty(), "nothing happens any more");
        }
        let effect = waiting.remove(0);
        all.push(effect.clone());
        waiting.extend(match effect {
            SourceEffect::SendRun { .. } => source.received(&[effect]),
            SourceEffect::TakeDirty { .. } => source.dirty(&writes.pop().unwrap_or_default()),
            SourceEffect::Quiesce => source.step(SourceEvent::Quiesced { lens: vec![LEN] }),
            SourceEffect::SyncImages => source.step(SourceEvent::ImagesSynced(Ok(()))),
            _ => Vec::new(),
        });
    }
    all
}

impl S {
    fn tick_after(&mut self, time: u64) -> Vec<SourceEffect> {
        self.now += time;
        self.step(SourceEvent::Tick)
    }
}

/// LiveFS, section V: with a threshold of zero it is pre-copy, with an infinite one post-copy.
#[test]
fn hot_set_falls_into_pre_copy_and_post_copy() {
    let everything = set(&[(0, BLOCKS)]);
    let pre = story(S::new(Strategy::PreCopy));
    assert_eq!(story(hot(Strategy::HotSet, &everything, None)), pre);
    assert!(prepare(&pre).is_some_and(|(missing, _)| missing.is_empty()));
    let post = story(S::new(Strategy::PostCopy));
    assert_eq!(story(hot(Strategy::HotSet, &BlockSet::new(), None)), post);
    assert!(tags(&post).is_empty() && prepare(&post).is_some());
    assert_ne!(pre, post);
}

#[test]
fn hot_set_copies_what_is_hot_and_hands_over_the_rest() {
    let mut source = hot(Strategy::HotSet, &set(&[(100, 100)]), Some(4 * 4096));
    let effects = begin(&mut source, &set(&[(0, 50), (120, 200)]));
    assert_eq!(runs(&effects), set(&[(120, 80)]));
    source.received(&effects);
    let effects = source.dirty(&set(&[(10, 9), (130, 5), (600, 1)]));
    assert_eq!(runs(&effects), set(&[(130, 5)]), "five are too many, and what is cold stays");
    assert!(!source.machine.is_ready());
    source.received(&effects);
    let effects = source.dirty(&set(&[(140, 3), (130, 1)]));
    assert!(tags(&effects).is_empty() && source.machine.is_ready(), "four may be dirty");

    // More of it is written while the memory moves: it is sent again, each block once.
    let effects = source.tick_after(SECOND);
    assert!(effects.contains(&SourceEffect::TakeDirty { image: IMAGE }));
    let effects = source.dirty(&set(&[(130, 1), (150, 2)]));
    assert_eq!(runs(&effects), set(&[(130, 1), (140, 3), (150, 2)]));
    source.received(&effects);
    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    source.step(SourceEvent::ImagesSynced(Ok(())));
    let effects = source.dirty(&set(&[(140, 1)]));
    assert!(tags(&effects).is_empty());
    let (missing, _) = prepare(&effects).unwrap();
    assert_eq!(missing, set(&[(0, 50), (200, 120), (600, 1), (140, 1)]));
}

#[test]
fn hot_set_that_does_not_converge_hands_over_a_larger_map() {
    let mut source = hot(Strategy::HotSet, &set(&[(0, 500)]), Some(0));
    let mut effects = begin(&mut source, &set(&[(0, BLOCKS)]));
    for _ in 0..40 {
        if source.machine.is_ready() {
            return;
        }
        source.now += SECOND;
        source.received(&effects);
        effects = source.dirty(&set(&[(0, 400)]));
    }
    panic!("it goes on and on");
}

#[test]
fn auto_copies_its_choice_once_and_names_all_zeros() {
    let mut source = hot(Strategy::Auto, &set(&[(100, 100)]), None);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::LinkUp);
    let images = vec![dray_wire::TargetImage { have: BlockSet::new(), zeroed: false }];
    let state = dray_wire::TargetState::Receiving;
    source.hear(EPOCH, 0, dray_wire::ToSource::Opened { state, images });
    let data = set(&[(0, 150)]);
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data });
    assert_eq!(runs(&effects), set(&[(100, 50)]));
    let zeros = |e: &SourceEffect| matches!(e, SourceEffect::SendZero { .. });
    assert!(effects.iter().any(zeros), "an old disk: what holds nothing is cheap to name");
    source.received(&effects);
    assert!(source.machine.is_ready());
    assert!(source.tick_after(SECOND).is_empty(), "nothing is sent a second time");
    assert_eq!(source.machine.status().left, [100]);
}

/// What the guest writes moves on while a disk is copied.
#[test]
fn auto_may_choose_again_until_copy_ends() {
    let choose =
        |blocks: &BlockSet| SourceEvent::Choose { image: IMAGE, copy_only: blocks.clone() };
    let mut source = hot(Strategy::Auto, &set(&[(0, 50)]), None);
    // Before the target has answered it stands in the place of the first choice.
    source.step(choose(&set(&[(0, 20), (40, 60)])));
    let effects = begin(&mut source, &set(&[(0, 100)]));
    assert_eq!(runs(&effects), set(&[(0, 20), (40, 60)]));
    let more = source.step(choose(&set(&[(0, 10), (25, 75)])));
    assert_eq!(runs(&more), set(&[(25, 15)]), "what is under way stays so and goes once");
    source.received(&effects);
    assert!(!source.machine.is_ready());
    source.received(&more);
    assert!(source.machine.is_ready());
    assert_eq!(source.machine.status().left, [5]);
    assert!(source.step(choose(&set(&[(0, BLOCKS)]))).is_empty(), "too late");
    assert_eq!(source.machine.status().left, [5]);
}

#[test]
fn only_auto_chooses_again() {
    let whole = set(&[(0, BLOCKS)]);
    for strategy in [Strategy::HotSet, Strategy::Hybrid] {
        let mut source = hot(strategy, &set(&[(0, 50)]), Some(0));
        begin(&mut source, &set(&[(0, 100)]));
        let choose = SourceEvent::Choose { image: IMAGE, copy_only: whole.clone() };
        assert!(source.step(choose).is_empty(), "{strategy}");
    }
}

#[test]
fn what_was_left_goes_back_to_the_tracker_when_it_ends() {
    let mut source = hot(Strategy::HotSet, &set(&[(100, 100)]), Some(0));
    let effects = begin(&mut source, &set(&[(100, 10)]));
    source.received(&effects);
    source.dirty(&set(&[(5, 5)]));
    let effects = source.step(SourceEvent::Cancel { discard: false });
    let back = SourceEffect::PutBack { image: IMAGE, blocks: set(&[(5, 5)]) };
    assert!(effects.contains(&back), "{effects:?}");
}

fn limits(effects: &[SourceEffect]) -> Vec<Option<u64>> {
    let limit = |effect: &SourceEffect| match effect {
        SourceEffect::Throttle { limit } => Some(limit.map(|limit| limit.bytes_per_second)),
        _ => None,
    };
    effects.iter().filter_map(limit).collect()
}

/// A pre-copy in its rounds, whose guest is slowed.
fn slowed() -> (S, Vec<SourceEffect>) {
    let mut source = tuned(Strategy::PreCopy, Tuning { throttle: Mode::Soft, ..Tuning::default() });
    let mut flying = begin(&mut source, &set(&[(0, BLOCKS)]));
    let mut seen = Vec::new();
    // Frames arrive one by one, the last one too, so that there is a rate.
    while !flying.is_empty() && tags(&flying).len() > 1 {
        let tag = tags(&flying)[0];
        flying.retain(|e| !matches!(e, SourceEffect::SendRun { tag: t, .. } if *t == tag));
        source.now += SECOND / 5;
        let tags = vec![tag];
        flying.extend(source.hear(EPOCH, 0, dray_wire::ToSource::Received { tags }));
    }
    source.now += SECOND / 5;
    seen.extend(source.received(&flying));
    seen.extend(source.dirty(&set(&[(0, BLOCKS)])));
    let last = limits(&seen).last().copied().flatten();
    let carried = 5 * MAX_RUN_BLOCKS * BLOCK_SIZE;
    assert!(last.is_some_and(|limit| limit <= carried / 2), "{last:?} of {carried}");
    (source, seen)
}

#[test]
fn every_way_out_of_sync_lets_the_guest_go() {
    let cancel = SourceEvent::Cancel { discard: false };
    for way in [cancel, SourceEvent::LinkDown] {
        let (mut source, _) = slowed();
        let effects = source.step(way.clone());
        assert_eq!(limits(&effects), [None], "{way:?}");
        assert_eq!(source.machine.write_limit(), None);
    }
    let (mut source, flying) = slowed();
    let tag = tags(&flying)[0];
    let effects = source.step(SourceEvent::RunFailed { tag, why: "input/output error".into() });
    assert_eq!(limits(&effects), [None]);

    let (mut source, flying) = slowed();
    source.received(&flying);
    source.dirty(&BlockSet::new());
    assert!(source.machine.is_ready() && source.machine.write_limit().is_some());
    let effects = source.step(SourceEvent::BeginHandover);
    assert_eq!(limits(&effects), [None], "what drains need not wait");
    let why = "QEMU gave up".to_owned();
    let effects = source.step(SourceEvent::AbortHandover { why });
    assert!(matches!(limits(&effects)[..], [Some(_)]), "and it goes on");
}

#[test]
fn nothing_slows_a_guest_that_need_not_converge() {
    for strategy in [Strategy::Hybrid, Strategy::PostCopy, Strategy::Auto] {
        let tuning = Tuning { throttle: Mode::Aggressive, ..Tuning::default() };
        let mut source = tuned(strategy, tuning);
        let effects = begin(&mut source, &set(&[(0, 50)]));
        source.now += SECOND;
        let more = source.received(&effects);
        assert!(limits(&effects).is_empty() && limits(&more).is_empty(), "{strategy}");
    }
}

#[test]
fn blocks_are_counted_for_each_image() {
    let (mut source, effects) = S::begin(Strategy::PreCopy, &set(&[(0, 50)]));
    source.received(&effects);
    source.dirty(&set(&[(1, 4), (90, 2)]));
    let status = source.machine.status();
    assert_eq!((status.image_blocks_sent, status.image_blocks_resent), (vec![56], vec![4]));
    assert_eq!((status.blocks_sent, status.blocks_resent), (56, 4));
}
