//! The paper's two estimators of chunk sizes: figure 9 against its definition taken literally, and what
//! the incremental one (section 5, figure 11) and figure 9 have in common.
//!
//! They measure different things. Figure 9 counts blocks within a *distance* of the first accesses,
//! figure 11 blocks in the same *aligned chunk*. A chunk of *s* blocks lies within the distance *s* − 1
//! of each of its blocks, and that distance round them within the chunk and its two neighbours. So
//! whatever a chunk size covers, figure 9's best distance covers for at most three times the storage.
//! The other way round nothing holds: what lies on two sides of a border is never in one chunk.

use dray_heat::offline::{self, Estimate};
use dray_heat::{Heat, HeatConfig, Op};
use dray_types::BlockRange;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A power of two, so that every chunk size divides it, and less than figure 9's 1000 steps.
const IMAGE: u64 = 512;
/// Rounding of a share; two sums of shares that differ are further apart.
const ROUNDING: f64 = 1e-9;

type Timed = (f64, BlockRange);

/// Accesses anywhere in `blocks` blocks and behind them, half of them near the start, at times of which
/// many are equal.
fn timed(blocks: u64) -> impl Strategy<Value = Vec<Timed>> {
    let anywhere = (0..blocks + 8, 1u64..9);
    let near = (0u64..40, 1u64..4);
    let access = (0u32..30, prop_oneof![anywhere, near]);
    prop::collection::vec(access, 0..60).prop_map(|mut all| {
        all.sort_by_key(|&(time, _)| time);
        let access = |(time, (start, len))| (f64::from(time), BlockRange::new(start, len));
        all.into_iter().map(access).collect()
    })
}

/// The distances of these blocks from the nearest block of `first`, which has some.
fn distances(first: &BTreeSet<u64>, blocks: impl Iterator<Item = u64>) -> Vec<u64> {
    let nearest = |block: u64| first.iter().map(|&other| other.abs_diff(block)).min();
    blocks.filter_map(nearest).collect()
}

/// Both shares at a distance.
fn shares(later: &[u64], image: &[u64], distance: u64) -> (f64, f64) {
    let share = |all: &[u64]| {
        all.iter().filter(|&&other| other <= distance).count() as f64 / all.len() as f64
    };
    (share(later), share(image))
}

/// What figure 9 found is what its definition says of that distance, and no candidate is better. Which of
/// equally good ones it takes is a matter of rounding.
fn is_the_best(
    found: Estimate,
    later: &[u64],
    image: &[u64],
    candidates: impl Iterator<Item = u64>,
) {
    let (access, storage) = shares(later, image, found.chunk_blocks);
    assert!((found.access - access).abs() < ROUNDING && (found.storage - storage).abs() < ROUNDING);
    for distance in candidates {
        let (a, s) = shares(later, image, distance);
        let better = (a - s) - (access - storage);
        assert!(better < ROUNDING, "{distance} is better than {found:?}");
    }
}

/// Figure 9 of accesses of which the first `alpha` of the time are learnt from.
fn figure_9_is_its_definition(blocks: u64, alpha: f64, all: &[Timed]) {
    let free = (0, u64::MAX);
    let found = offline::chunk_size(all, alpha, blocks, free);
    let span = all.last().map_or(0.0, |last| last.0) - all.first().map_or(0.0, |first| first.0);
    let part = |learnt: bool| -> BTreeSet<u64> {
        all.iter()
            .filter(|(time, _)| (time - all[0].0 < span * alpha) == learnt)
            .flat_map(|(_, range)| range.start..range.end())
            .filter(|&block| block < blocks)
            .collect()
    };
    let (first, second) = (part(true), part(false));
    let Some(found) = found else {
        return assert!(first.is_empty() || second.is_empty());
    };
    let (later, image) = (distances(&first, second.into_iter()), distances(&first, 0..blocks));
    let (least, greatest) = (*later.iter().min().unwrap(), *later.iter().max().unwrap());
    if greatest - least <= 1000 {
        is_the_best(found, &later, &image, least..=greatest);
    } else {
        let steps = (0..=1000).map(|step| least + (greatest - least) * step / 1000);
        is_the_best(found, &later, &image, steps);
    }
    let bounds = (3, 20);
    let bounded = offline::chunk_size(all, alpha, blocks, bounds).unwrap();
    let clamped = found.chunk_blocks.clamp(bounds.0, bounds.1);
    assert_eq!(bounded, Estimate { chunk_blocks: clamped, ..found });
}

/// A round's operations for both: the incremental one, and figure 9 with the same halves. The sizes'
/// shares, the size that is chosen, figure 9's answer.
fn both(round: &[BlockRange]) -> (Vec<dray_heat::CandidateCoverage>, u64, Option<Estimate>) {
    let config = HeatConfig {
        round_operations: round.len() as u32,
        smallest_chunk_blocks: 1,
        candidates: IMAGE.ilog2() + 1,
        ..HeatConfig::paper()
    };
    let mut heat = Heat::new(IMAGE, config);
    round.iter().for_each(|&range| heat.access(Op::Write, range));
    let coverage = heat.coverage(Op::Write).to_vec();
    // What a round chose is what the next one counts by, and schedules are made of a whole round.
    round.iter().for_each(|&range| heat.access(Op::Write, range));
    let timed: Vec<Timed> =
        round.iter().zip(0..).map(|(&range, n)| (f64::from(n), range)).collect();
    let found = offline::chunk_size(&timed, 0.5, IMAGE, (0, u64::MAX));
    (coverage, heat.chunk_blocks(Op::Write), found)
}

/// An even number of accesses inside the image.
fn round() -> impl Strategy<Value = Vec<BlockRange>> {
    let access = prop_oneof![0..IMAGE, 0u64..40].prop_map(|start| BlockRange::new(start, 1));
    prop::collection::vec(access, 2..60).prop_map(|mut all| {
        all.truncate(all.len() / 2 * 2);
        all
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn figure_9_finds_the_best_distance(all in timed(300), tenths in 0u32..=10) {
        figure_9_is_its_definition(300, f64::from(tenths) / 10.0, &all);
    }

    /// Distances further apart than the thousand steps.
    #[test]
    fn figure_9_finds_the_best_step_of_a_large_image(all in timed(2500)) {
        figure_9_is_its_definition(2500, 0.7, &all);
    }

    #[test]
    fn figure_9_is_no_worse_than_any_chunk_size_for_three_times_its_storage(all in round()) {
        let (coverage, _, found) = both(&all);
        let found = found.unwrap();
        for size in coverage.iter().filter(|size| size.access > 0.0) {
            let least = size.access - 3.0 * size.storage;
            prop_assert!(found.access - found.storage > least - ROUNDING, "{:?} {:?}", size, found);
        }
    }

    /// A guest that uses aligned extents, each of them in the first half: neither looks beyond an
    /// extent, and their balanced coverages are no further apart than three times the extents' share
    /// of the image.
    #[test]
    fn both_stay_within_the_extents_of_a_guest(
        power in 0u32..6,
        which in prop::sample::subsequence((0..16u64).collect::<Vec<_>>(), 1..5),
        within in prop::collection::vec((any::<prop::sample::Index>(), 0u64..32), 16..60),
    ) {
        let extent = 1u64 << power;
        let block = |place: u64, at: u64| BlockRange::new(place * 32 + at % extent, 1);
        let mut first: Vec<_> = which.iter().map(|&place| block(place, place)).collect();
        let mut rest = within.iter().map(|(place, at)| block(*place.get(&which), *at));
        first.extend(rest.by_ref().take(8));
        let second: Vec<_> = rest.chain(first.iter().copied()).take(first.len()).collect();
        let (coverage, chosen, found) = both(&[first, second].concat());
        let found = found.unwrap();
        prop_assert!(chosen <= extent && found.chunk_blocks < extent, "{} {:?}", chosen, found);
        let size = coverage.iter().find(|size| size.chunk_blocks == chosen).unwrap();
        let apart = (size.balanced() - (1.0 + found.access - found.storage)).abs();
        let share = (which.len() as u64 * extent) as f64 / IMAGE as f64;
        prop_assert!(apart <= 3.0 * share + ROUNDING, "{:?} {:?}", size, found);
    }
}

/// Where the definitions part: a file goes on behind the border of all chunks but the whole image.
#[test]
fn what_lies_behind_a_border_only_figure_9_sees() {
    let half = IMAGE / 2;
    let (coverage, chosen, found) = both(&[half - 1, half].map(|block| BlockRange::new(block, 1)));
    let found = found.unwrap();
    assert_eq!((found.chunk_blocks, found.access, found.storage), (1, 1.0, 3.0 / IMAGE as f64));
    let seen: Vec<f64> = coverage.iter().map(|size| size.access).collect();
    assert_eq!(seen, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]);
    // The whole image covers both at the cost of everything, one block covers nothing and costs less.
    assert_eq!(coverage[0].balanced(), 1.0 - 1.0 / IMAGE as f64);
    assert_eq!((coverage[9].balanced(), chosen), (1.0, IMAGE));
}
