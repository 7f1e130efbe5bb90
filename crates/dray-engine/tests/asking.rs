//! Backfill asks for hashes first: what the target has does not cross the link, everything else does
//! so once, and no guest waits for an answer.

mod support;

use dray_engine::receiver::{Arrival, BackfillControl};
use dray_engine::{SECOND, SourceEffect, SourceEvent, TargetEffect, TargetEvent, TargetRecord};
use dray_types::{BlockRange, BlockSet, Epoch, ImageIndex, Strategy};
use dray_wire::{TargetState, ToSource, ToTarget};
use support::*;

/// The source knows little of its target.
const DESCRIBES: ToTarget =
    ToTarget::Describes { together: false, link_rate: 0, in_place: Vec::new() };

/// An owner that may ask, and whose guest runs; others may move to the same host.
fn asker(missing: &BlockSet, together: bool) -> (T, Vec<TargetEffect>) {
    let mut target = T::new();
    target.open(None);
    let effects = target.prepare(1, missing);
    target.synced(sync_id(&effects));
    let describes = ToTarget::Describes { together, link_rate: 0, in_place: Vec::new() };
    target.hear(Epoch(4), 1, describes);
    target.hear(Epoch(4), 1, ToTarget::Commit(over(missing)));
    target.step(TargetEvent::GuestReachable(Ok(())));
    let effects = target.step(TargetEvent::GuestStarted(Ok(())));
    (target, effects)
}

/// Questions and their tags.
fn asked(effects: &[TargetEffect]) -> Vec<(u64, BlockRange)> {
    let one = |envelope: dray_wire::Envelope<ToSource>| match envelope.body {
        ToSource::Describe { tag, range, .. } => Some((tag, range)),
        _ => None,
    };
    said(effects).into_iter().filter_map(one).collect()
}

/// A target's shell: what is missing, which pieces are there anyway, and what has crossed the link.
struct Shell {
    target: T,
    missing: BlockSet,
    there: BlockSet,
    /// Of pieces that lack blocks may be there.
    near: bool,
    crossed: BlockSet,
    described: BlockSet,
    checkpoint: bool,
}

impl Shell {
    fn new(missing: &BlockSet, there: &BlockSet) -> (Self, Vec<TargetEffect>) {
        let (target, effects) = asker(missing, false);
        let (missing, there) = (missing.clone(), there.clone());
        let (crossed, described) = (BlockSet::new(), BlockSet::new());
        let (near, checkpoint) = (false, false);
        (Self { target, missing, there, near, crossed, described, checkpoint }, effects)
    }

    /// Carries everything out until nothing is left to do.
    fn run(&mut self, effects: Vec<TargetEffect>) {
        let mut waiting: std::collections::VecDeque<_> = effects.into();
        while let Some(effect) = waiting.pop_front() {
            waiting.extend(self.carry_out(effect));
        }
    }

    fn carry_out(&mut self, effect: TargetEffect) -> Vec<TargetEffect> {
        match effect {
            TargetEffect::AskMissing { range, max, .. } => {
                let run = self.missing.next_run(range.start, max).map(|run| run.intersect(range));
                let run = run.filter(|run| !run.is_empty());
                self.target.next_missing(run.map(|run| (run.start, run.len)))
            }
            TargetEffect::Checkpoint { id } => {
                self.checkpoint = true;
                self.target.step(TargetEvent::Checkpointed { id, result: Ok(()) })
            }
            TargetEffect::Send(envelope) => match envelope.body {
                ToSource::Fetch { tag, range, .. } => self.arrives(tag, range),
                ToSource::Describe { tag, range, blocks: true, .. } => self.compares(tag, range),
                ToSource::Describe { tag, range, .. } => self.looks(tag, range),
                _ => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    fn arrives(&mut self, tag: u64, range: BlockRange) -> Vec<TargetEffect> {
        assert!(!self.crossed.intersects(range), "{range:?} crosses the link twice");
        self.crossed.insert(range);
        self.missing.remove(range);
        self.target.arrives(tag, range.start, range.len, Arrival::Written)
    }

    fn looks(&mut self, tag: u64, range: BlockRange) -> Vec<TargetEffect> {
        self.described.insert(range);
        let mut lacking = 0;
        for piece in 0..range.len / 16 {
            let part = BlockRange::new(range.start + piece * 16, 16);
            if self.there.contains_range(part) {
                self.missing.remove(part);
            } else {
                lacking |= 1 << piece;
            }
        }
        let arrival = match lacking {
            0 => Arrival::Written,
            lacking => Arrival::Partly { lacking, near: if self.near { lacking } else { 0 } },
        };
        self.target.arrives(tag, range.start, range.len, arrival)
    }

    fn compares(&mut self, tag: u64, range: BlockRange) -> Vec<TargetEffect> {
        assert!(self.near && range.len <= 64);
        let mut lacking = [0; 4];
        for nth in 0..range.len {
            let block = BlockRange::new(range.start + nth, 1);
            if self.there.contains_range(block) {
                self.missing.remove(block);
            } else {
                lacking[0] |= 1 << nth;
            }
        }
        let arrival = match lacking {
            [0, ..] => Arrival::Written,
            lacking => Arrival::SomeBlocks { lacking },
        };
        self.target.arrives(tag, range.start, range.len, arrival)
    }
}

#[test]
fn what_is_there_does_not_cross_the_link() {
    let missing = set(&[(3, 640)]);
    let (mut shell, effects) = Shell::new(&missing, &missing);
    assert!(asked(&effects).len() > 5 && fetches(&effects).is_empty(), "a sample comes first");
    shell.run(effects);
    assert_eq!(shell.crossed, set(&[(3, 13), (640, 3)]), "the ends that are no whole pieces");
    assert!(shell.checkpoint && shell.target.machine.is_complete());
    assert_eq!(shell.target.machine.status().blocks_found, [624]);
}

#[test]
fn where_nothing_is_there_everything_crosses_once_and_little_is_asked() {
    let missing = set(&[(0, 640)]);
    let (mut shell, effects) = Shell::new(&missing, &BlockSet::new());
    let sample: u64 = asked(&effects).iter().map(|(_, range)| range.len).sum();
    shell.run(effects);
    assert_eq!((&shell.crossed, shell.described.len()), (&missing, sample));
    assert!(shell.target.machine.is_complete());
    assert_eq!(shell.target.machine.status().blocks_found, [0]);
}

#[test]
fn of_scattered_content_each_block_is_found_or_crosses_once() {
    let missing = set(&[(0, 1000)]);
    let there: BlockSet = (0..31).map(|nth| BlockRange::new(nth * 32, 16)).collect();
    let (mut shell, effects) = Shell::new(&missing, &there);
    shell.run(effects);
    let found = shell.target.machine.status().blocks_found[0];
    assert_eq!(shell.crossed.len() + found, 1000);
    assert!(found > 100 && shell.target.machine.is_complete(), "{found}");
}

#[test]
fn of_pieces_that_lack_only_the_blocks_that_differ_cross() {
    let missing = set(&[(0, 640)]);
    // Every third piece is there, of every other one but two blocks.
    let differ: BlockSet = (0..40)
        .filter(|piece| piece % 3 > 0)
        .flat_map(|piece| [3, 9].map(|nth| BlockRange::new(piece * 16 + nth, 1)))
        .collect();
    let (mut shell, effects) = Shell::new(&missing, &differ.complement_in(BlockRange::new(0, 640)));
    shell.near = true;
    shell.run(effects);
    assert_eq!(shell.crossed, differ);
    assert!(shell.target.machine.is_complete());
    assert_eq!(shell.target.machine.status().blocks_found, [640 - differ.len()]);
}

/// As after an unclean stop: whole regions count as changed, and nothing else says where to look.
#[test]
fn what_the_image_s_own_file_may_hold_is_asked_about_whatever_the_sample_says() {
    let missing = set(&[(0, 640)]);
    for in_place in [vec![IMAGE], vec![], vec![ImageIndex(9)]] {
        let (mut shell, effects) = Shell::new(&missing, &BlockSet::new());
        let here = in_place.contains(&IMAGE);
        let describes = ToTarget::Describes { together: false, link_rate: 0, in_place };
        shell.target.hear(Epoch(4), 1, describes);
        shell.run(effects);
        assert_eq!(shell.crossed, missing);
        assert_eq!(shell.described == missing, here, "{:?}", shell.described);
    }
}

#[test]
fn a_session_that_did_not_offer_hashes_gets_no_question() {
    let (mut target, _) = T::running(&set(&[(0, 640)]));
    let effects = target.next_missing(Some((0, 64)));
    assert!(asked(&effects).is_empty() && fetches(&effects).len() == 1, "{effects:?}");
}

/// The blocks of the first question, whose look-up goes on. What lacks goes before everything else:
/// others may want it too.
fn asking(missing: &BlockSet) -> (T, u64, BlockRange) {
    let (target, effects) = asker(missing, true);
    let (tag, range) = asked(&effects)[0];
    (target, tag, range)
}

#[test]
fn a_demand_waits_for_no_look_and_its_blocks_cross_once() {
    let (mut target, tag, range) = asking(&set(&[(0, 640)]));
    let runs = vec![BlockRange::new(range.start + 4, 2)];
    let demand = || TargetEvent::Demand { image: IMAGE, runs: runs.clone() };
    let effects = target.step(demand());
    let [(urgent, wanted, true)] = fetches(&effects)[..] else { panic!("{effects:?}") };
    assert_eq!(wanted, runs[0]);
    assert!(fetches(&target.step(demand())).is_empty(), "it is on its way");
    // The look finds nothing, and the sample is waited for no longer.
    target.arrives(tag, range.start, range.len, Arrival::Partly { lacking: 1, near: 0 });
    target.now += SECOND;
    let mut effects = target.step(TargetEvent::Tick);
    let mut crossed = BlockSet::new();
    while crossed.len() < 14 {
        let [TargetEffect::AskMissing { range: of, .. }] = &effects[..] else {
            panic!("{effects:?}")
        };
        assert!(range.contains(*of), "what lacks comes first: {of:?}");
        effects = target.next_missing(Some((of.start, of.len)));
        for (_, wanted, urgent) in fetches(&effects) {
            assert!(!urgent && !wanted.intersect(range).is_empty());
            crossed.insert(wanted);
        }
        effects.retain(|effect| matches!(effect, TargetEffect::AskMissing { .. }));
    }
    assert_eq!(crossed, set(&[(range.start, 4), (range.start + 6, 10)]));
    target.arrives(urgent, runs[0].start, 2, Arrival::Written);
    assert!(fetches(&target.step(demand())).is_empty(), "it is here");
}

#[test]
fn what_a_guest_writes_while_it_is_looked_up_is_not_fetched() {
    let missing = set(&[(0, 64)]);
    let (mut shell, effects) = Shell::new(&missing, &BlockSet::new());
    let (tag, range) = asked(&effects)[0];
    shell.missing.remove(BlockRange::new(range.start, 10));
    let answer = Arrival::Partly { lacking: 1, near: 0 };
    shell.target.arrives(tag, range.start, range.len, answer);
    let effects = shell.target.tick_after(SECOND);
    shell.run(effects);
    assert!(!shell.crossed.intersects(BlockRange::new(range.start, 10)), "{:?}", shell.crossed);
    assert!(shell.crossed.contains_range(BlockRange::new(range.start + 10, 6)));
}

#[test]
fn what_a_sample_lacks_waits_for_its_turn_unless_others_wait_for_it() {
    let (mut target, effects) = asker(&set(&[(0, 640)]), false);
    let (tag, range) = asked(&effects)[3];
    assert!(range.start > 100);
    target.arrives(tag, range.start, range.len, Arrival::Partly { lacking: 1, near: 0 });
    let effects = target.tick_after(SECOND);
    let [TargetEffect::AskMissing { range: of, .. }] = effects[..] else { panic!("{effects:?}") };
    assert!(of.start < range.start);
}

#[test]
fn what_is_being_looked_up_is_not_fetched_as_well() {
    let (mut target, _, first) = asking(&set(&[(0, 640)]));
    assert_eq!(first, BlockRange::new(0, 16));
    target.tick_after(SECOND);
    // Blocks 48 to 64 were asked about too.
    let fetched = fetches(&target.next_missing(Some((0, 64))));
    assert!(matches!(fetched[..], [(_, BlockRange { start: 16, len: 32 }, false)]), "{fetched:?}");
}

#[test]
fn a_lost_link_forgets_questions_and_their_answers() {
    let missing = set(&[(0, 64)]);
    let (mut target, tag, range) = asking(&missing);
    target.step(TargetEvent::LinkDown);
    assert!(target.arrives(tag, range.start, range.len, Arrival::Written).is_empty());
    let effects = target.open(Some(over(&missing)));
    assert!(asked(&effects).is_empty(), "this session has offered nothing");
    let effects = target.next_missing(Some((0, 64)));
    assert_eq!(fetches(&effects).iter().map(|fetch| fetch.1.len).sum::<u64>(), 64);
}

#[test]
fn a_pause_holds_what_lacks_and_asks_nothing() {
    let (mut target, tag, range) = asking(&set(&[(0, 640)]));
    target.step(TargetEvent::BackfillControl(BackfillControl::Pause));
    let answer = Arrival::Partly { lacking: 1, near: 0 };
    let quiet = |effects: &[TargetEffect]| {
        asked(effects).is_empty()
            && fetches(effects).is_empty()
            && !effects.iter().any(|e| matches!(e, TargetEffect::AskMissing { .. }))
    };
    assert!(quiet(&target.arrives(tag, range.start, range.len, answer)));
    assert!(quiet(&target.tick_after(SECOND)));
    let effects = target.step(TargetEvent::BackfillControl(BackfillControl::Start));
    let lacking =
        |e: &TargetEffect| matches!(e, TargetEffect::AskMissing { range: of, .. } if *of == range);
    assert!(effects.iter().any(lacking), "{effects:?}");
}

#[test]
fn a_look_that_hangs_and_blocks_that_cannot_be_described_are_fetched() {
    let missing = set(&[(0, 64)]);
    for hangs in [true, false] {
        let (mut target, tag, range) = asking(&missing);
        let effects = if hangs {
            let effects = target.tick_after(29 * SECOND);
            assert!(!effects.iter().any(|e| asks_for(e, range)));
            assert!(target.next_missing(None).is_empty(), "two questions are open");
            target.tick_after(2 * SECOND)
        } else {
            target.now += SECOND;
            let why = "input/output error".to_owned();
            target.hear(Epoch(4), 1, ToTarget::Unreadable { tag, why })
        };
        assert!(effects.iter().any(|e| asks_for(e, range)), "{effects:?}");
        let effects = target.next_missing(Some((range.start, range.len)));
        let [(_, wanted, false)] = fetches(&effects)[..] else { panic!("{effects:?}") };
        assert_eq!(wanted, range);
        let late = target.arrives(tag, range.start, range.len, Arrival::Written);
        assert!(late.is_empty(), "nobody waits for it any more: {late:?}");
    }
}

fn asks_for(effect: &TargetEffect, range: BlockRange) -> bool {
    matches!(effect, TargetEffect::AskMissing { range: of, .. } if *of == range)
}

/// A source whose operator wants hashes given, or not, up to the target's promise.
fn promised(wanted: bool, known: bool) -> (S, Vec<SourceEffect>) {
    let (mut source, _) = describing(Strategy::PostCopy, wanted, known, &set(&[(0, 640)]));
    let map_hash = source.ask(&BlockSet::new());
    let effects = source.hear(EPOCH, 1, ToSource::Prepared { map_hash });
    (source, effects)
}

fn describe(start: u64, len: u64) -> ToSource {
    let range = BlockRange::new(start, len);
    ToSource::Describe { tag: 9, image: IMAGE, range, blocks: false }
}

#[test]
fn a_source_offers_hashes_before_the_target_serves_and_again_in_a_new_session() {
    let (mut source, effects) = promised(true, true);
    let said = sent(&effects);
    assert!(
        matches!(said[..], [(_, ToTarget::Describes { .. }), (_, ToTarget::Commit(_))]),
        "{said:?}"
    );
    source.hear(Epoch(4), 1, ToSource::Serving);
    source.step(SourceEvent::LinkDown);
    source.step(SourceEvent::LinkUp);
    let opened = ToSource::Opened { state: TargetState::Owner, images: Vec::new() };
    let said = sent(&source.hear(Epoch(4), 1, opened));
    assert!(said.iter().any(|(_, body)| *body == DESCRIBES), "{said:?}");
    let effects = source.step(SourceEvent::Reuse { known: true, together: true });
    let together = ToTarget::Describes { together: true, link_rate: 0, in_place: Vec::new() };
    assert_eq!(sent(&effects).last().map(|(_, body)| body.clone()), Some(together));
}

#[test]
fn a_source_describes_what_is_frozen_and_inside_and_sends_it_where_that_is_not_wanted() {
    let (mut source, _) = promised(true, true);
    let range = BlockRange::new(16, 32);
    let effects = source.hear(Epoch(4), 1, describe(16, 32));
    assert_eq!(effects, [SourceEffect::Describe { tag: 9, image: IMAGE, range }]);
    let blocks = ToSource::Describe { tag: 9, image: IMAGE, range, blocks: true };
    let effects = source.hear(Epoch(4), 1, blocks);
    assert!(matches!(effects[..], [SourceEffect::DescribeBlocks { tag: 9, .. }]), "{effects:?}");
    let effects = source.hear(Epoch(4), 1, describe(992, 16));
    assert!(matches!(sent(&effects)[..], [(_, ToTarget::Unreadable { tag: 9, .. })]));
    let image = ImageIndex(7);
    let effects =
        source.hear(Epoch(4), 1, ToSource::Describe { tag: 9, image, range, blocks: false });
    assert!(matches!(sent(&effects)[..], [(_, ToTarget::Unreadable { tag: 9, .. })]));
    assert_eq!(source.machine.status().blocks_sent, 0, "hashes are no blocks");

    for (wanted, known) in [(false, true), (true, false)] {
        let (mut source, effects) = promised(wanted, known);
        assert!(matches!(sent(&effects)[..], [(_, ToTarget::Commit(_))]));
        assert_eq!(runs(&source.hear(Epoch(4), 1, describe(16, 32))), set(&[(16, 32)]));
    }
    let mut source = S::new(Strategy::PostCopy);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::LinkUp);
    source.opened(&BlockSet::new());
    assert!(source.hear(EPOCH, 0, describe(16, 32)).is_empty(), "nothing before the handover");
}

#[test]
fn a_restart_asks_anew() {
    let missing = set(&[(0, 640)]);
    let map = images(&missing);
    let records = [
        TargetRecord::Prepared {
            attempt: dray_types::Attempt(1),
            map_hash: dray_wire::MapHash::of(&map),
            images: map,
            epoch: dray_types::Epoch(1),
        },
        TargetRecord::Committed(over(&missing)),
        TargetRecord::GuestStarting,
        TargetRecord::GuestStarted,
    ];
    let mut target = T::recover(&records);
    target.step(TargetEvent::Start);
    target.open(Some(over(&missing)));
    // The live map was asked before the offer came: what it names first is fetched.
    let effects = target.hear(Epoch(4), 1, DESCRIBES);
    assert!(effects.is_empty(), "{effects:?}");
    let effects = target.next_missing(Some((0, 64)));
    assert!(asked(&effects).len() > 5, "{effects:?}");
}
