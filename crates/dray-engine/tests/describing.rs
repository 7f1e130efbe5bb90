//! Runs that are described: what the target has does not cross the link, the rest goes as data.

mod support;

use dray_engine::receiver::Arrival;
use dray_engine::{Source, SourceEffect, SourceEvent, TargetEffect, TargetRecord};
use dray_types::{BlockRange, BlockSet, Strategy};
use dray_wire::ToSource;
use support::*;

/// Copy has begun at a session that can, or cannot, answer what is described.
fn begun(known: bool, data: &BlockSet) -> (S, Vec<SourceEffect>) {
    describing(Strategy::Hybrid, true, known, data)
}

fn described(effects: &[SourceEffect]) -> Vec<(u64, BlockRange)> {
    let one = |effect: &SourceEffect| match effect {
        SourceEffect::Describe { tag, range, .. } => Some((*tag, *range)),
        _ => None,
    };
    effects.iter().filter_map(one).collect()
}

fn kept(effects: &[SourceEffect]) -> Vec<(u64, u64, BlockRange)> {
    let one = |effect: &SourceEffect| match effect {
        SourceEffect::SendKept { tag, of, range, .. } => Some((*tag, *of, *range)),
        _ => None,
    };
    effects.iter().filter_map(one).collect()
}

/// Answers that the target has everything; what the source does then.
fn all_found(source: &mut S, effects: &[SourceEffect]) -> Vec<SourceEffect> {
    let tags = described(effects).into_iter().map(|(tag, _)| tag).collect();
    source.hear(EPOCH, 0, ToSource::Received { tags })
}

#[test]
fn a_session_that_cannot_gets_data_at_once() {
    let (_, effects) = begun(false, &set(&[(0, 640)]));
    assert!(described(&effects).is_empty());
    assert_eq!(runs(&effects), set(&[(0, 640)]));
}

#[test]
fn a_sample_comes_first_and_everything_follows_when_it_is_found() {
    let (mut source, effects) = begun(true, &set(&[(3, 640)]));
    let sample = described(&effects);
    assert!(sample.len() > 5 && sample.iter().all(|(_, range)| range.len == 16), "{sample:?}");
    assert!(runs(&effects).is_empty(), "nothing else before that is answered");
    let mut effects = all_found(&mut source, &effects);
    // The ends that are no whole pieces go as data.
    let mut data = BlockSet::new();
    let mut asked: BlockSet = sample.iter().map(|(_, range)| *range).collect();
    while !source.machine.is_ready() {
        data.union_with(&runs(&effects));
        asked.union_with(&described(&effects).iter().map(|(_, range)| *range).collect());
        let mut next = source.received(&effects);
        next.extend(all_found(&mut source, &effects));
        effects = next;
    }
    assert_eq!(data, set(&[(3, 13), (640, 3)]));
    assert_eq!(asked, set(&[(16, 624)]));
    let status = source.machine.status();
    assert_eq!((status.image_blocks_found[0], status.blocks_sent), (624, 16));
}

#[test]
fn a_target_that_does_not_answer_the_sample_is_not_waited_for() {
    let (mut source, effects) = begun(true, &set(&[(0, 640)]));
    let sample = described(&effects).len() as u64 * 16;
    assert!(sample > 80 && runs(&effects).is_empty());
    source.now += 300_000_000;
    assert_eq!(runs(&source.step(SourceEvent::Tick)).len() + sample, 640, "each block once");
}

#[test]
fn nothing_found_means_data_from_then_on() {
    let (mut source, effects) = begun(true, &set(&[(0, 640)]));
    let sample = described(&effects);
    let mut data = BlockSet::new();
    for (tag, range) in &sample {
        let effects = source.hear(EPOCH, 0, ToSource::Lack { tag: *tag, pieces: u16::MAX });
        assert_eq!(kept(&effects).first().map(|(_, of, part)| (*of, *part)), Some((*tag, *range)));
        data.insert(*range);
        data.union_with(&runs(&effects));
        assert!(described(&effects).is_empty());
    }
    assert_eq!(data, set(&[(0, 640)]));
    assert_eq!(source.machine.status().image_blocks_found[0], 0);
}

#[test]
fn only_the_pieces_that_lack_are_sent_and_nothing_younger_overtakes_them() {
    let (mut source, effects) = begun(true, &set(&[(0, 640)]));
    let effects = all_found(&mut source, &effects);
    let long = described(&effects).into_iter().find(|(_, range)| range.len >= 48);
    let (tag, range) = long.unwrap();
    let effects = source.hear(EPOCH, 0, ToSource::Lack { tag, pieces: 0b010 });
    let sent = kept(&effects);
    assert_eq!(sent[0].2, BlockRange::new(range.start + 16, 16));
    let again = source.hear(EPOCH, 0, ToSource::Lack { tag, pieces: 0b111 });
    assert!(kept(&again).is_empty(), "one answer for each description");
    // It arrives damaged: from now on it is a run like any other, read anew.
    let effects = source.hear(EPOCH, 0, ToSource::Mismatch { tag: sent[0].0 });
    assert_eq!(runs(&effects), set(&[(range.start + 16, 16)]));
}

#[test]
fn a_damaged_description_and_a_lost_link_end_in_data_or_a_new_question() {
    let (mut source, effects) = begun(true, &set(&[(0, 640)]));
    let (tag, range) = described(&effects)[0];
    let effects = source.hear(EPOCH, 0, ToSource::Mismatch { tag });
    assert_eq!(runs(&effects), [range].into_iter().collect());
    source.step(SourceEvent::LinkDown);
    source.step(SourceEvent::Reuse { known: false, together: false });
    source.step(SourceEvent::LinkUp);
    let effects = source.opened(&set(&[(range.start, 4)]));
    assert!(described(&effects).is_empty());
    assert_eq!(runs(&effects), set(&[(4, 636)]), "all but what had arrived");
}

#[test]
fn the_target_records_what_it_found_and_names_what_it_lacks() {
    let mut target = T::new();
    target.open(None);
    let effects = target.arrives(9, 32, 48, Arrival::Partly { lacking: 0b010, near: 0 });
    let said = effects.iter().find_map(|effect| match effect {
        TargetEffect::Send(envelope) => Some(envelope.body.clone()),
        _ => None,
    });
    assert_eq!(said, Some(ToSource::Lack { tag: 9, pieces: 0b010 }));
    assert_recorded(&mut target, &[(32, 16), (64, 16)]);
}

/// With the next flush of its images exactly these blocks are recorded as received.
fn assert_recorded(target: &mut T, blocks: &[(u64, u64)]) {
    target.now += 3_000_000_000;
    let effects = target.step(dray_engine::TargetEvent::Tick);
    let id = effects.iter().find_map(|effect| match effect {
        TargetEffect::SyncImages { id } => Some(*id),
        _ => None,
    });
    let result = Ok(());
    let effects = target.step(dray_engine::TargetEvent::ImagesSynced { id: id.unwrap(), result });
    let record = TargetRecord::Received { image: IMAGE, blocks: set(blocks) };
    assert!(effects.contains(&TargetEffect::Journal(vec![record])), "{effects:?}");
}

/// What is described block by block, and as a part of which description.
fn blocks(effects: &[SourceEffect]) -> Vec<(u64, u64, BlockRange)> {
    let one = |effect: &SourceEffect| match effect {
        SourceEffect::DescribeBlocks { tag, of, range, .. } => Some((*tag, *of, *range)),
        _ => None,
    };
    effects.iter().filter_map(one).collect()
}

fn sent_parts(effects: &[SourceEffect]) -> Vec<(u64, u64, BlockRange, [u64; 4])> {
    let one = |effect: &SourceEffect| match effect {
        SourceEffect::SendPart { tag, of, range, blocks, .. } => Some((*tag, *of, *range, *blocks)),
        _ => None,
    };
    effects.iter().filter_map(one).collect()
}

/// A described run of which the target lacks three pieces, and has something like two of them.
fn near() -> (S, (u64, u64, BlockRange)) {
    let (mut source, effects) = begun(true, &set(&[(0, 640)]));
    let effects = all_found(&mut source, &effects);
    let long = described(&effects).into_iter().find(|(_, range)| range.len >= 48);
    let (tag, range) = long.unwrap();
    let answer = ToSource::Near { tag, pieces: 0b111, near: 0b110 };
    let effects = source.hear(EPOCH, 0, answer);
    assert_eq!(kept(&effects)[0].2, BlockRange::new(range.start, 16), "nothing is like it");
    let asked = blocks(&effects);
    assert_eq!(asked[0].1, tag);
    assert_eq!(asked[0].2, BlockRange::new(range.start + 16, 32));
    (source, asked[0])
}

#[test]
fn of_a_piece_that_is_like_another_only_the_blocks_that_lack_are_sent() {
    let (mut source, (tag, _, range)) = near();
    let before = source.machine.status();
    let effects = source.hear(EPOCH, 0, ToSource::LackBlocks { tag, blocks: [0b101, 0, 0, 1] });
    let sent = sent_parts(&effects);
    assert_eq!((sent[0].1, sent[0].2, sent[0].3), (tag, range, [0b101, 0, 0, 0]));
    let status = source.machine.status();
    assert_eq!(status.blocks_sent - before.blocks_sent, 2);
    assert_eq!(status.image_blocks_found[0] - before.image_blocks_found[0], 30);
    let again = source.hear(EPOCH, 0, ToSource::LackBlocks { tag, blocks: [1, 0, 0, 0] });
    assert!(sent_parts(&again).is_empty(), "one answer for each description");
    // A part that arrives damaged goes as a whole run, read anew.
    let effects = source.hear(EPOCH, 0, ToSource::Mismatch { tag: sent[0].0 });
    assert_eq!(runs(&effects), [range].into_iter().collect());
}

#[test]
fn described_blocks_that_are_all_found_or_come_damaged_need_no_part() {
    let (mut source, (tag, _, range)) = near();
    let found = source.machine.status().image_blocks_found[0];
    let effects = source.hear(EPOCH, 0, ToSource::Received { tags: vec![tag] });
    assert!(sent_parts(&effects).is_empty() && runs(&effects).is_empty());
    assert_eq!(source.machine.status().image_blocks_found[0], found + range.len);
    let (mut source, (tag, _, range)) = near();
    let effects = source.hear(EPOCH, 0, ToSource::Mismatch { tag });
    assert_eq!(runs(&effects), [range].into_iter().collect());
}

/// The blocks that the target said it has are not trusted over the end of a session.
#[test]
fn a_lost_link_sends_the_whole_of_a_part_again() {
    let (mut source, (tag, _, range)) = near();
    source.hear(EPOCH, 0, ToSource::LackBlocks { tag, blocks: [1, 0, 0, 0] });
    source.step(SourceEvent::LinkDown);
    source.step(SourceEvent::Reuse { known: false, together: false });
    source.step(SourceEvent::LinkUp);
    let effects = source.opened(&BlockSet::new());
    assert!(runs(&effects).contains_range(range));
}

#[test]
fn the_target_records_the_blocks_it_found_and_names_those_it_lacks() {
    let mut target = T::new();
    target.open(None);
    let said = |effects: &[TargetEffect]| {
        let one = |effect: &TargetEffect| match effect {
            TargetEffect::Send(envelope) => Some(envelope.body.clone()),
            _ => None,
        };
        effects.iter().find_map(one)
    };
    let effects = target.arrives(9, 32, 48, Arrival::Partly { lacking: 0b011, near: 0b010 });
    assert_eq!(said(&effects), Some(ToSource::Near { tag: 9, pieces: 0b011, near: 0b010 }));
    let lacking = [0b11, 0, 0, 0];
    let effects = target.arrives(10, 48, 16, Arrival::SomeBlocks { lacking });
    assert_eq!(said(&effects), Some(ToSource::LackBlocks { tag: 10, blocks: lacking }));
    assert_recorded(&mut target, &[(50, 14), (64, 16)]);
}

/// A source that reuses content, whose target begins with a replica: `shared` is known to be equal there, and `data` is
/// what the image has.
fn onto_replica(shared: &[(u64, u64)], data: &[(u64, u64)]) -> (S, Vec<SourceEffect>) {
    let mut plan = source_plan(Strategy::Hybrid);
    plan.tuning.reuse = true;
    let mut source = S::new(Strategy::Hybrid);
    source.machine = Source::new(plan);
    source.step(SourceEvent::Start);
    source.step(SourceEvent::ImagesSynced(Ok(())));
    source.step(SourceEvent::Reuse { known: true, together: false });
    source.step(SourceEvent::LinkUp);
    source.opened(&BlockSet::new());
    source.step(SourceEvent::Shared { image: IMAGE, blocks: set(shared) });
    let effects = source.step(SourceEvent::Scanned { image: IMAGE, data: set(data) });
    (source, effects)
}

/// What the target's replica has some version of is described even where nothing else is found.
#[test]
fn what_a_replica_may_have_is_described_whatever_the_sample_says() {
    // All but one region of its blocks are known to be equal.
    let (mut source, mut effects) = onto_replica(&[(0, 320), (643, 357)], &[(0, 1000)]);
    let (mut asked, mut data) = (BlockSet::new(), BlockSet::new());
    while !source.machine.is_ready() {
        data.union_with(&runs(&effects));
        let mut next = source.received(&effects);
        let pieces = described(&effects);
        asked.union_with(&pieces.iter().map(|(_, range)| *range).collect());
        for (tag, _) in pieces {
            next.extend(source.hear(EPOCH, 0, ToSource::Lack { tag, pieces: u16::MAX }));
        }
        let kept = kept(&next);
        data.union_with(&kept.iter().map(|(_, _, range)| *range).collect());
        let tags = kept.iter().map(|(tag, ..)| *tag).collect();
        next.extend(source.hear(EPOCH, 0, ToSource::Received { tags }));
        effects = next;
    }
    assert_eq!((asked, data), (set(&[(320, 320)]), set(&[(320, 323)])));
}

/// Of a replica that nobody vouches for, whole pieces are described, also where data and holes meet within one.
#[test]
fn holes_in_pieces_with_data_are_described_with_them() {
    let (mut source, mut effects) = onto_replica(&[], &[(3, 1), (100, 60), (990, 10)]);
    let (mut asked, mut sent) = (BlockSet::new(), BlockSet::new());
    for _ in 0..10 {
        sent.union_with(&runs(&effects));
        let mut next = source.received(&effects);
        let pieces = described(&effects);
        asked.union_with(&pieces.iter().map(|(_, range)| *range).collect());
        let tags = pieces.iter().map(|(tag, _)| *tag).collect();
        next.extend(source.hear(EPOCH, 0, ToSource::Received { tags }));
        effects = next;
    }
    assert!(source.machine.is_ready());
    // The image's end is not that of a piece.
    assert_eq!((asked, sent), (set(&[(0, 16), (96, 64), (976, 16)]), set(&[(992, 8)])));
}
