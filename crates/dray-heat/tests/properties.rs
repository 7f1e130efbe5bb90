//! The incremental scheduler against slow models, and what holds for any input.

use dray_heat::{ColdOrder, Count, Heat, HeatConfig, Op, offline};
use dray_types::{BlockRange, BlockSet, Schedule};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};

const BLOCKS: u64 = 300;

fn accesses(max: usize) -> impl Strategy<Value = Vec<BlockRange>> {
    let range = (0..BLOCKS, 1u64..9).prop_map(|(start, len)| BlockRange::new(start, len));
    // Half of them near the start, so that frequencies rise and tie.
    let near = (0u64..20, 1u64..4).prop_map(|(start, len)| BlockRange::new(start, len));
    prop::collection::vec(prop_oneof![range, near], 0..max)
}

const IMAGE: u64 = 1 << 20;

/// Twelve logs that are written on, each where it has come, and single accesses anywhere.
fn logs(max: usize) -> impl Strategy<Value = Vec<BlockRange>> {
    let access = (0u64..16, 1u64..40, 0..IMAGE - 64);
    prop::collection::vec(access, 0..max).prop_map(|accesses| {
        let mut heads: Vec<u64> = (0..12).map(|log| log * (IMAGE / 12)).collect();
        let place = |(which, len, anywhere): (u64, u64, u64)| match heads.get_mut(which as usize) {
            Some(head) => {
                *head += len;
                BlockRange::new(*head - len, len)
            }
            None => BlockRange::new(anywhere, len),
        };
        accesses.into_iter().map(place).collect()
    })
}

fn small(round_operations: u32, candidates: u32) -> HeatConfig {
    HeatConfig { round_operations, candidates, smallest_chunk_blocks: 2, ..HeatConfig::paper() }
}

fn inside(range: BlockRange) -> std::ops::Range<u64> {
    range.start..range.end().min(BLOCKS)
}

/// Figure 11 for one candidate, with sets.
fn covered(round: &[BlockRange], smallest: u64, size: u64) -> (f64, f64) {
    let chunks = |part: &[BlockRange], size: u64| -> HashSet<u64> {
        part.iter().flat_map(|&r| inside(r)).map(|b| b / size).collect()
    };
    let (first, second) = round.split_at(round.len() / 2);
    let marked = chunks(first, size);
    let later = chunks(second, smallest);
    let hit = later.iter().filter(|&c| marked.contains(&(c * smallest / size))).count();
    (marked.len() as f64 / BLOCKS.div_ceil(size) as f64, hit as f64 / later.len().max(1) as f64)
}

/// Every block once, in the schedule's order; what it does not name in address order behind.
fn blocks(schedule: &Schedule) -> Vec<u64> {
    let named: Vec<u64> = schedule.ranges().iter().flat_map(|r| r.start..r.end()).collect();
    let set: HashSet<u64> = named.iter().copied().collect();
    assert_eq!(set.len(), named.len(), "a block is named twice");
    named.iter().copied().chain((0..BLOCKS).filter(|b| !set.contains(b))).collect()
}

proptest! {
    #[test]
    fn the_paper_s_order_is_a_sort_by_frequency(all in accesses(120), read: bool) {
        let op = if read { Op::Read } else { Op::Write };
        let mut heat = Heat::new(BLOCKS, small(1000, 1));
        all.iter().for_each(|&range| heat.access(op, range));
        let mut frequencies: BTreeMap<u64, u64> = BTreeMap::new();
        all.iter().flat_map(|&r| inside(r)).for_each(|b| *frequencies.entry(b / 2).or_default() += 1);
        let frequency = |block: &u64| frequencies.get(&(block / 2)).copied().unwrap_or(0);
        for block in 0..BLOCKS {
            prop_assert_eq!(heat.frequency(op, block), frequency(&block) as f64);
        }
        let ours = blocks(&heat.unguarded(op));
        let sorted = blocks(&offline::schedule(op, &all, 2, BLOCKS));
        // Ties may differ; what was never accessed must not.
        for (ours, sorted) in ours.iter().zip(&sorted) {
            prop_assert_eq!(frequency(ours), frequency(sorted));
            prop_assert!(frequency(ours) > 0 || ours == sorted);
        }
    }

    #[test]
    fn in_a_frequency_the_last_accessed_chunk_comes_first(order in prop::sample::subsequence((0..150u64).collect::<Vec<_>>(), 1..150).prop_shuffle()) {
        let mut heat = Heat::new(BLOCKS, small(1000, 1));
        order.iter().for_each(|&chunk| heat.access(Op::Read, BlockRange::new(chunk * 2, 1)));
        let first: Vec<u64> = blocks(&heat.unguarded(Op::Read))
            .chunks(2).take(order.len()).map(|pair| pair[0] / 2).collect();
        prop_assert!(first.iter().eq(order.iter().rev()));
    }

    #[test]
    fn chunk_sizes_come_from_balanced_coverage(all in accesses(200)) {
        let round = 40;
        let mut heat = Heat::new(BLOCKS, small(round, 5));
        all.iter().for_each(|&range| heat.access(Op::Write, range));
        let rounds: Vec<_> = all.chunks_exact(round as usize).collect();
        let Some(last) = rounds.last() else {
            prop_assert!(heat.coverage(Op::Write).is_empty());
            return Ok(());
        };
        let mut best = (0, f64::MIN);
        for (k, ours) in heat.coverage(Op::Write).iter().enumerate() {
            let (storage, access) = covered(last, 2, 2 << k);
            prop_assert_eq!((ours.chunk_blocks, ours.storage, ours.access), (2 << k, storage, access));
            if ours.balanced() > best.1 {
                best = (ours.chunk_blocks, ours.balanced());
            }
        }
        // The next round counts at the chosen size.
        let mut more = heat.clone();
        (0..round).for_each(|_| more.access(Op::Write, BlockRange::new(0, 1)));
        let whole = all.len() % round as usize == 0;
        prop_assert!(!whole || more.chunk_blocks(Op::Write) == best.0);
        // Schedules are made of the previous round alone.
        let size = heat.chunk_blocks(Op::Write);
        let count: u64 = last.iter().flat_map(|&r| inside(r)).filter(|b| b / size == 0).count() as u64;
        prop_assert_eq!(heat.frequency(Op::Write, 0), count as f64);
    }

    #[test]
    fn halving_is_what_decay_means(all in accesses(200)) {
        let config = HeatConfig { round_operations: 30, smallest_chunk_blocks: 2, ..HeatConfig::default() };
        let mut heat = Heat::new(BLOCKS, config);
        let mut model: BTreeMap<u64, u64> = BTreeMap::new();
        for (at, &range) in all.iter().enumerate() {
            heat.access(Op::Write, range);
            inside(range).for_each(|b| *model.entry(b / 2).or_default() += 16);
            if (at + 1) % 30 == 0 {
                model.values_mut().for_each(|weight| {
                    let half = *weight / 2;
                    *weight = if half < 256 { half } else { half / 16 * 16 };
                });
            }
        }
        for chunk in 0..BLOCKS / 2 {
            let weight = model.get(&chunk).copied().unwrap_or(0);
            prop_assert_eq!(heat.frequency(Op::Write, chunk * 2), weight as f64 / 16.0);
        }
    }

    #[test]
    fn schedules_name_each_block_once(all in accesses(150), far: bool, by_blocks: bool, max_chunks in 1usize..60) {
        let cold = if far { ColdOrder::FarFirst } else { ColdOrder::Address };
        let count = if by_blocks { Count::Blocks } else { Count::Operations };
        let mut heat = Heat::new(BLOCKS, HeatConfig {
            cold, count, max_chunks, round_operations: 50, smallest_chunk_blocks: 1, ..HeatConfig::default()
        });
        for (at, &range) in all.iter().enumerate() {
            heat.access(if at % 2 == 0 { Op::Read } else { Op::Write }, range);
        }
        for op in [Op::Read, Op::Write] {
            let mut order = blocks(&heat.unguarded(op));
            // From hot to cold as distances from the next chunk with a count, each no nearer than
            // its neighbourhood allows; here: what has a count is together at the hot end.
            if op == Op::Write {
                order.reverse();
            }
            let counts: Vec<f64> = order.iter().map(|&b| heat.frequency(op, b)).collect();
            prop_assert!(counts.is_sorted_by(|a, b| a >= b), "{:?}", counts);
            prop_assert_eq!(order.len() as u64, BLOCKS);
        }
        if !heat.unguarded(Op::Write).is_sequential() {
            let mut set = BlockSet::new();
            heat.unguarded(Op::Write).ranges().iter().for_each(|&range| set.insert(range));
            prop_assert_eq!(set.len(), BLOCKS, "the copy schedule names every block");
        }
    }

    #[test]
    fn heat_survives_being_written_down(all in accesses(150), paper: bool) {
        let config = if paper { small(40, 4) } else {
            HeatConfig { smallest_chunk_blocks: 2, round_operations: 40, ..HeatConfig::default() }
        };
        let mut heat = Heat::new(BLOCKS, config);
        for (at, &range) in all.iter().enumerate() {
            heat.access(if at % 3 == 0 { Op::Read } else { Op::Write }, range);
        }
        let back = Heat::decode(&heat.encode(), BLOCKS, config).unwrap();
        for op in [Op::Read, Op::Write] {
            prop_assert_eq!(back.chunk_blocks(op), heat.chunk_blocks(op));
            prop_assert_eq!(back.regret(op), heat.regret(op));
            prop_assert_eq!(back.unguarded(op), heat.unguarded(op));
            for block in 0..BLOCKS {
                prop_assert_eq!(back.frequency(op, block), heat.frequency(op, block));
            }
        }
        prop_assert_eq!(back.copy_schedule(), heat.copy_schedule());
        prop_assert_eq!(back.backfill_schedule(), heat.backfill_schedule());
        prop_assert_eq!(back.encode(), heat.encode());
        prop_assert_eq!(back.blocks(), heat.blocks());
    }

    /// Rounds of a few operations, so that trials end, weights are learnt and trials pause.
    #[test]
    fn a_restart_does_not_show_in_schedules(
        before in logs(700), after in logs(300), guard: bool, round in 20u32..60,
    ) {
        let config = HeatConfig { smallest_chunk_blocks: 4, round_operations: round, guard, ..HeatConfig::default() };
        let mut heat = Heat::new(IMAGE, config);
        before.iter().for_each(|&range| heat.access(Op::Write, range));
        let bytes = heat.encode();
        let mut back = Heat::decode(&bytes, IMAGE, config).unwrap();
        prop_assert_eq!(back.copy_schedule(), heat.copy_schedule());
        prop_assert_eq!(back.unguarded(Op::Write), heat.unguarded(Op::Write));
        // Streams go on, counts fade. Trials are another thing: one that is under way is lost.
        if !guard {
            for &range in &after {
                heat.access(Op::Write, range);
                back.access(Op::Write, range);
            }
            prop_assert_eq!(back.copy_schedule(), heat.copy_schedule());
            prop_assert_eq!(back.encode(), heat.encode());
        }
    }

    #[test]
    fn hostile_bytes_are_refused(all in accesses(60), at: prop::sample::Index, bit in 0u8..8, cut: prop::sample::Index, junk in prop::collection::vec(any::<u8>(), 0..80)) {
        let config = HeatConfig { smallest_chunk_blocks: 2, ..HeatConfig::default() };
        let mut heat = Heat::new(BLOCKS, config);
        all.iter().for_each(|&range| heat.access(Op::Write, range));
        let good = heat.encode();
        let mut bad = good.clone();
        bad[at.index(good.len())] ^= 1 << bit;
        prop_assert!(Heat::decode(&bad, BLOCKS, config).is_err());
        prop_assert!(Heat::decode(&good[..cut.index(good.len())], BLOCKS, config).is_err());
        prop_assert!(Heat::decode(&junk, BLOCKS, config).is_err());
        // With a checksum that fits, anything may come out but a panic.
        let mut whole = good[..good.len() - 8].to_vec();
        let end = whole.len() - at.index(whole.len() - 6);
        whole.splice(end.., junk.iter().copied());
        for forged in [sealed([&b"dheat\x01"[..], &junk[..]].concat()), sealed([&good[..6], &junk[..]].concat()), sealed(whole)] {
            if let Ok(mut heat) = Heat::decode(&forged, BLOCKS, config) {
                (0..300).for_each(|n| heat.access(Op::Write, BlockRange::new(n, 8)));
                for schedule in [heat.copy_schedule(), heat.backfill_schedule(), heat.unguarded(Op::Write)] {
                    blocks(&schedule);
                }
                let _ = heat.encode();
            }
        }
    }

    #[test]
    fn hostile_counts_are_bounded_by_the_image_and_the_settings(
        chunk_power in 0u32..64,
        chunks in prop::collection::vec((any::<u64>(), prop_oneof![0u64..4, any::<u64>()]), 0..40),
        ids in prop_oneof![Just(1u64 << 63), Just(BLOCKS), Just(4u64)],
        claimed in prop_oneof![Just(None), any::<u64>().prop_map(Some)],
        blocks in prop_oneof![Just(BLOCKS), any::<u64>(), Just(1 << 56), Just((1 << 56) - 1)],
        operations: u64,
        max_chunks in 1usize..40,
        learnt in prop::option::of(learnt()),
    ) {
        let config = HeatConfig { smallest_chunk_blocks: 1, max_chunks, ..HeatConfig::default() };
        let mut chunks = chunks;
        chunks.iter_mut().for_each(|(id, _)| *id %= ids);
        let mut bytes = [b"dheat".to_vec(), vec![if learnt.is_some() { 2 } else { 1 }]].concat();
        leb(&mut bytes, blocks);
        for _ in 0..2 {
            bytes.push(0);
            leb(&mut bytes, 1 << chunk_power);
            for number in [operations & 0xffff_ffff, operations, operations] {
                leb(&mut bytes, number);
            }
            bytes.extend([0; 16]);
            leb(&mut bytes, claimed.unwrap_or(chunks.len() as u64));
            for &(id, more) in &chunks {
                leb(&mut bytes, id);
                leb(&mut bytes, more);
            }
            if let Some((pause, weights, streams)) = &learnt {
                leb(&mut bytes, *pause);
                leb(&mut bytes, weights.len() as u64);
                weights.iter().for_each(|weight| bytes.extend(weight.to_le_bytes()));
                for (at, heads) in streams.iter().enumerate() {
                    leb(&mut bytes, heads.len() as u64);
                    for &(head, come) in heads {
                        leb(&mut bytes, head);
                        if at == 0 || head > 0 {
                            leb(&mut bytes, come);
                        }
                    }
                }
            }
        }
        let bytes = sealed(bytes);
        for image in [BLOCKS, blocks, 1 << 57] {
            let Ok(mut heat) = Heat::decode(&bytes, image, config) else { continue };
            prop_assert!(blocks <= image);
            prop_assert!(chunks.len() <= max_chunks);
            prop_assert!(heat.chunk_blocks(Op::Read) <= 2 * blocks.max(1 << 31));
            let segment = (blocks / 64).max(1);
            let _ = heat.segment_scores(segment).count();
            for op in [Op::Read, Op::Write] {
                heat.access(op, BlockRange::new(0, 8));
                for range in heat.unguarded(op).ranges() {
                    prop_assert!(range.start.checked_add(range.len).is_some_and(|end| end <= image));
                }
            }
            let _ = heat.encode();
        }
    }
}

type Learnt = (u64, Vec<f64>, [Vec<(u64, u64)>; 2]);

/// A pause, weights and streams as nobody would have written them, or nearly so.
fn learnt() -> impl Strategy<Value = Learnt> {
    let weight = prop_oneof![8 => 0.5..1e6, 1 => any::<f64>()];
    let weights = prop_oneof![prop::collection::vec(weight, 12), Just(vec![1.0; 70]), Just(vec![])];
    let head = || prop_oneof![4 => 0..BLOCKS, 1 => any::<u64>()];
    let come = prop_oneof![4 => 64u64..400, 1 => any::<u64>()];
    let grown = prop::collection::vec((head(), come), 0..70);
    let young =
        prop::collection::vec((head(), prop_oneof![4 => 0u64..64, 1 => any::<u64>()]), 0..5);
    (any::<u64>(), weights, [grown.boxed(), young.boxed()])
}

fn leb(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let add = |s: u64, &b: &u8| (s ^ u64::from(b)).wrapping_mul(0x100_0000_01b3);
    let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, add);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// What the version before wrote: its tracks end with their chunks.
#[test]
fn counts_without_what_was_learnt_are_read() {
    let config = HeatConfig { smallest_chunk_blocks: 2, ..HeatConfig::default() };
    let mut bytes = b"dheat\x01".to_vec();
    leb(&mut bytes, BLOCKS);
    for (id, frequency) in [(7, 32), (9, 48)] {
        bytes.push(0);
        [2, 3, 48, 3].into_iter().for_each(|number| leb(&mut bytes, number));
        bytes.extend([0; 16]);
        [1, id, frequency].into_iter().for_each(|number| leb(&mut bytes, number));
    }
    let heat = Heat::decode(&sealed(bytes), BLOCKS, config).unwrap();
    assert_eq!((heat.frequency(Op::Read, 15), heat.frequency(Op::Write, 18)), (2.0, 3.0));
    let mut counted = Heat::new(BLOCKS, config);
    (0..2).for_each(|_| counted.access(Op::Read, BlockRange::new(14, 1)));
    (0..3).for_each(|_| counted.access(Op::Write, BlockRange::new(18, 1)));
    assert_eq!(heat.unguarded(Op::Read), counted.unguarded(Op::Read));
    assert_eq!(heat.unguarded(Op::Write), counted.unguarded(Op::Write));
    assert_eq!(Heat::decode(&heat.encode(), BLOCKS, config).unwrap().encode(), heat.encode());
}

#[test]
fn heat_of_another_size_or_with_too_many_chunks_is_refused() {
    let config = HeatConfig { smallest_chunk_blocks: 1, ..HeatConfig::default() };
    let mut heat = Heat::new(1000, config);
    (0..100).for_each(|n| heat.access(Op::Write, BlockRange::new(n * 9, 1)));
    let bytes = heat.encode();
    assert!(Heat::decode(&bytes, 999, config).is_err(), "more blocks than the image has");
    assert_eq!(Heat::decode(&bytes, 2000, config).unwrap().blocks(), 2000, "the image has grown");
    let fewer = HeatConfig { max_chunks: 99, ..config };
    assert!(Heat::decode(&bytes, 1000, fewer).is_err(), "before it is built");
}
