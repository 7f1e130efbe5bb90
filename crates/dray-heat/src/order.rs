//! From the counts of a round to an order of blocks.

use crate::config::{ColdOrder, HeatConfig};
use crate::density::{Density, Weights};
use crate::joined::{Joined, Piece};
use crate::op::Op;
use crate::round::Round;
use crate::streams::Streams;
use dray_types::{BlockRange, Schedule};
use std::cmp::Reverse;

/// Each neighbourhood is this many times the one inside it: with chunks of 4 MiB they are 32 MiB,
/// 256 MiB and 2 GiB. Measured on traces: a factor of 2 costs twice the seeks and gains nothing.
const STEP: u64 = 8;
const NEIGHBOURHOODS: u32 = 3;

/// Chunks of a round without an access, by how near the next access is.
struct Cold<'a> {
    round: &'a Round,
    blocks: u64,
    /// Neighbourhoods with an access, in address order; the smallest, the chunks, first.
    touched: Vec<Vec<u64>>,
}

/// For copying while the guest writes: cold chunks, then from least to most frequently accessed.
pub(crate) fn copy(round: &Round, blocks: u64, cold: ColdOrder) -> Schedule {
    if round.list.len() == 0 {
        return Schedule::SEQUENTIAL;
    }
    let mut schedule = Schedule::default();
    match cold {
        ColdOrder::Address => {
            let end = blocks.div_ceil(round.chunk_blocks);
            let cold = Cold::new(round, blocks);
            cold.gaps(&cold.touched[0], 1, 0, end, &mut schedule);
        }
        ColdOrder::FarFirst | ColdOrder::Density => {
            let cold = Cold::new(round, blocks);
            cold.far(&mut schedule);
            (0..NEIGHBOURHOODS).rev().for_each(|level| cold.near(level, &mut schedule));
        }
    }
    for (id, _) in round.list.ascending() {
        schedule.push(chunks(round, blocks, id, id + 1));
    }
    schedule
}

/// For fetching what a running guest reads: from most to least frequently accessed, then (not
/// named: address order) the cold ones.
pub(crate) fn backfill(round: &Round, blocks: u64, cold: ColdOrder) -> Schedule {
    let hot = round.list.descending().map(|(id, _)| chunks(round, blocks, id, id + 1));
    let mut schedule: Schedule = hot.collect();
    if cold != ColdOrder::Address {
        let cold = Cold::new(round, blocks);
        (0..NEIGHBOURHOODS).for_each(|level| cold.near(level, &mut schedule));
    }
    schedule
}

/// Chunks `from .. to` as blocks of the image, however far past its end they go.
pub(crate) fn chunks(round: &Round, blocks: u64, from: u64, to: u64) -> BlockRange {
    let start = from.saturating_mul(round.chunk_blocks).min(blocks);
    let end = to.saturating_mul(round.chunk_blocks).min(blocks);
    BlockRange::new(start, end.saturating_sub(start))
}

impl<'a> Cold<'a> {
    fn new(round: &'a Round, blocks: u64) -> Self {
        let mut touched: Vec<Vec<u64>> = vec![round.touched()];
        for level in 0..NEIGHBOURHOODS as usize {
            let mut wider: Vec<u64> = touched[level].iter().map(|id| id / STEP).collect();
            wider.dedup();
            touched.push(wider);
        }
        Self { round, blocks, touched }
    }

    /// The gaps between `inner` (in address order) in chunk range `from .. to`, as blocks.
    fn gaps(&self, inner: &[u64], size: u64, from: u64, to: u64, schedule: &mut Schedule) {
        let mut at = from;
        for &id in inner {
            schedule.push(chunks(self.round, self.blocks, at, (id * size).max(at)));
            at = (id + 1) * size;
        }
        schedule.push(chunks(self.round, self.blocks, at, to.max(at)));
    }

    /// What lies outside every touched neighbourhood of the widest kind.
    fn far(&self, schedule: &mut Schedule) {
        let size = STEP.pow(NEIGHBOURHOODS);
        let end = self.blocks.div_ceil(self.round.chunk_blocks);
        self.gaps(&self.touched[NEIGHBOURHOODS as usize], size, 0, end, schedule);
    }

    /// What lies in a touched neighbourhood of kind `level + 1` and in none of kind `level`.
    fn near(&self, level: u32, schedule: &mut Schedule) {
        let (inner, size) = (&self.touched[level as usize], STEP.pow(level));
        let mut rest = &inner[..];
        for outer in &self.touched[level as usize + 1] {
            let inside = rest.partition_point(|id| id / STEP <= *outer);
            let (these, others) = rest.split_at(inside);
            let from = outer * STEP * size;
            self.gaps(these, size, from, from + STEP * size, schedule);
            rest = others;
        }
    }
}

/// So many jumps are few for any image: 160 ms.
const FREE_JUMPS: u64 = 16;

/// A jump delays the accesses that are still to come when it is made: this share of all, on average.
/// Measured on traces and loads: 0.1 gains what 0 gains, 1 loses a twentieth of it; and without it a hot
/// area in which nothing is hotter than the rest costs a jump for every chunk that chance was kind to.
const LATER: f64 = 0.1;

/// Classes of densities: one for each binary exponent.
const CLASSES: usize = 1 << 11;

/// Densities of one class differ by less than a factor of two.
fn class(piece: &Piece) -> usize {
    (piece.density.to_bits() >> 52) as usize % CLASSES
}

/// Backfill's schedule leaves out what was never near an access.
fn is_named(op: Op, piece: &Piece) -> bool {
    piece.foretold || op == Op::Write
}

/// Ranges that [`in_classes`] makes of the pieces, without a sort.
fn ranges(op: Op, pieces: &[Piece]) -> u64 {
    let mut count = 0;
    // Where the first range of a class begins and the last one ends.
    let mut ends: Vec<Option<(u64, u64)>> = vec![None; CLASSES];
    for piece in pieces.iter().filter(|piece| is_named(op, piece)) {
        let BlockRange { start, .. } = piece.range;
        match &mut ends[class(piece)] {
            Some((_, end)) if *end == start => *end = piece.range.end(),
            Some((_, end)) => (count, *end) = (count + 1, piece.range.end()),
            new => (count, *new) = (count + 1, Some((start, piece.range.end()))),
        }
    }
    let joined = |(before, after): ((u64, u64), (u64, u64))| before.1 == after.0;
    let ascending = || ends.iter().flatten().copied();
    let (nth, next) = (ascending(), ascending().skip(1));
    let joins = match op {
        Op::Write => nth.zip(next).filter(|&pair| joined(pair)).count(),
        Op::Read => nth.zip(next).filter(|&(a, b)| joined((b, a))).count(),
    };
    count - joins as u64
}

/// Pieces of equal class by address, the classes as the kind of operation asks for.
fn in_classes(op: Op, pieces: &[Piece]) -> Schedule {
    let mut order: Vec<(usize, BlockRange)> = pieces
        .iter()
        .filter(|piece| is_named(op, piece))
        .map(|piece| (class(piece), piece.range))
        .collect();
    match op {
        Op::Write => order.sort_unstable_by_key(|&(class, range)| (class, range.start)),
        Op::Read => order.sort_unstable_by_key(|&(class, range)| (Reverse(class), range.start)),
    }
    order.into_iter().map(|(_, range)| range).collect()
}

/// By density, the densest first for fetching and last for copying; densities that differ by less
/// than a factor of two are equal, so that neighbours stay together. Pieces are as small as the jumps
/// allow and are worth. Also the density itself.
pub(crate) fn by_density(
    round: &Round,
    blocks: u64,
    weights: &Weights,
    streams: &Streams,
    op: Op,
    config: &HeatConfig,
) -> (Schedule, Density) {
    let density = Density::new(round, blocks, weights, streams);
    let jump = config.jump_blocks;
    let most = (blocks / config.jump_share).max(FREE_JUMPS.saturating_mul(jump));
    let fit = |pieces: &[Piece]| ranges(op, pieces).saturating_mul(jump) <= most;
    let worth = LATER * round.chunk_blocks as f64 * jump as f64 / blocks.max(1) as f64;
    let pieces = Joined::new(density.pieces(), density.anywhere()).first(worth, fit);
    (in_classes(op, &pieces), density)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_counted_as_they_will_be() {
        let mut state = 1u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for round in 0..300 {
            let mut at = 0;
            let pieces: Vec<_> = (0..1 + draw(40))
                .map(|_| {
                    let range = BlockRange::new(at, 1 + draw(9));
                    at = range.end();
                    let density = (draw(2 + round % 7) as f64 * 1.3).exp2() * 1e-6;
                    ((draw(4) > 0).then_some(density), range)
                })
                .collect();
            let pieces = Joined::new(pieces, 1e-9).first(0.0, |_| true);
            for op in [Op::Read, Op::Write] {
                let made = in_classes(op, &pieces).ranges().len() as u64;
                assert_eq!(ranges(op, &pieces), made, "{op:?} {pieces:?}");
            }
        }
    }
}
