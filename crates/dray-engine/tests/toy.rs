//! A strategy that is none of those with a name. All of it is here: its row, and what comes of it.

mod support;

use dray_engine::{Source, SourceEffect, SourceEvent, Tuning};
use dray_sim::run::run_with_crash;
use dray_sim::{Crash, crash_everywhere};
use dray_types::{BlockRange, BlockSet, Choice, Strategy, StrategyTraits};
use support::*;

/// Some blocks are copied and mirrored, the others wait for the operator. None with a name does that.
const TOY: StrategyTraits = StrategyTraits {
    name: "toy",
    summary: "Some blocks are mirrored, the rest stays until `dray backfill start`",
    choice: Choice::Hot,
    syncs: true,
    mirrors: true,
    defers: true,
    ..StrategyTraits::ONCE
};

/// Every other block, from `first` on.
fn every_other(first: u64) -> BlockSet {
    (first..BLOCKS).step_by(2).map(|block| BlockRange::new(block, 1)).collect()
}

/// A source that copies the even blocks of an image that is full.
fn begin() -> (S, Vec<SourceEffect>) {
    let mut plan = source_plan(Strategy::Hybrid);
    plan.strategy = TOY;
    plan.tuning = Tuning { copy_only: Some(vec![every_other(0)]), ..Tuning::default() };
    let mut source = S::new(Strategy::Hybrid);
    source.machine = Source::new(plan);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::ImagesSynced(Ok(())));
    source.step(SourceEvent::LinkUp);
    source.opened(&BlockSet::new());
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data: set(&[(0, BLOCKS)]) });
    (source, effects)
}

#[test]
fn even_blocks_move_before_the_handover_and_odd_ones_when_the_operator_says() {
    assert!(TOY.is_sound());
    let (mut source, effects) = begin();
    assert_eq!(runs(&effects), every_other(0));
    source.received(&effects);
    let effects = source.dirty(&BlockSet::new());
    assert!(source.machine.is_ready(), "{effects:?}");
    // Of a write that crosses both, one goes at once, the other is left.
    let written = SourceEvent::Written { image: IMAGE, range: BlockRange::new(10, 2) };
    let effects = source.step(written);
    assert_eq!(runs(&effects), set(&[(10, 1)]));
    source.received(&effects);

    source.step(SourceEvent::BeginHandover);
    source.step(SourceEvent::Quiesced { lens: vec![LEN] });
    source.step(SourceEvent::ImagesSynced(Ok(())));
    let effects = source.dirty(&set(&[(11, 1)]));
    let (missing, _) = prepare(&effects).expect("the source asks");
    assert_eq!(missing, every_other(1));
    let defer = |(_, body): &(_, dray_wire::ToTarget)| *body == dray_wire::ToTarget::Defer;
    assert!(sent(&effects).iter().any(defer));
}

/// With all that can go wrong, and the checkers of the simulator.
#[test]
fn no_crash_between_two_effects_breaks_an_invariant() {
    let (mut runs, mut done) = (0, 0);
    for seed in 0..6 {
        let calm = run_with_crash(seed, TOY, None).unwrap_or_else(|report| panic!("{report}"));
        done += u64::from(calm.ending == "done");
        for crash in [Crash::Kill, Crash::PowerCut] {
            runs += crash_everywhere(seed, TOY, crash).unwrap_or_else(|report| panic!("{report}"));
        }
    }
    assert!(
        runs > 200 && done > 2,
        "{runs} runs with a crash, {done} of 6 without one came to an end"
    );
}
