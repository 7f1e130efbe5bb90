//! [`Trial`]: does what is known of the past order the next accesses better than address order?
//!
//! The first guard of the Scheduling paper's section 4.2. A schedule is made of the history so far,
//! then the accesses that follow are held against it. Take a copy of the whole image that lasts as
//! long as they do, and let each be written at any time of it with equal chance: a block at share
//! `p` of the schedule is then written after it was sent with chance `1 − p` (a block that is
//! fetched is read too early with chance `p`). The sum over the different places accessed, times
//! how much longer the jumps make the schedule, is its *regret*; address order has one of its own.
//!
//! A guest that turns to something else is noticed before a trial ends ([`Doubt`]): what it did before
//! is worth less then, and the next trial begins.

use crate::density::{Density, Weights};
use crate::op::Op;
use crate::positions::Positions;
use crate::spread::{Spread, spread};
use dray_types::{BlockRange, Schedule};
use std::collections::HashSet;

/// Accesses are told apart in places of 16 blocks, 64 KiB.
pub(crate) const PLACE_BLOCKS: u64 = 16;
/// Places a trial remembers; what comes later than that does not count.
pub(crate) const MAX_PLACES: usize = 14_000;

/// How much a schedule and address order would have had to send again or to fetch early; see the
/// module. Only the comparison of the two means anything.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Regret {
    /// In the schedule's order.
    pub scheduled: f64,
    /// In address order.
    pub sequential: f64,
}

impl Regret {
    /// Whether the schedule is at least as good as address order, or nothing is known.
    pub fn predicts(&self) -> bool {
        self.scheduled <= self.sequential
    }

    /// Adds newer evidence; what was known counts half.
    pub(crate) fn update(&mut self, newer: Self) {
        self.scheduled = self.scheduled / 2.0 + newer.scheduled;
        self.sequential = self.sequential / 2.0 + newer.sequential;
    }
}

/// Whether the accesses since the schedule was last no worse than address order were worse with it than
/// chance explains. Each that begins somewhere else is taken for a sample; those that go on where the last
/// one ended are not: they are one reader or writer.
#[derive(Clone, Copy, Debug, Default)]
struct Doubt {
    sum: f64,
    squares: f64,
}

/// Standard deviations of a sum of independent ones that are more than chance.
const DEVIATIONS: f64 = 4.0;

impl Doubt {
    /// The schedule was worse than address order by `lag`, a share of a copy.
    fn note(&mut self, lag: f64) {
        self.sum += lag;
        self.squares += lag * lag;
        if self.sum <= 0.0 {
            *self = Self::default();
        }
    }

    fn is_certain(&self) -> bool {
        self.sum > DEVIATIONS * self.squares.sqrt() + 1.0
    }
}

/// Long trials look at one place in four, chosen by its number: enough to tell, and a quarter of
/// the cost.
const SAMPLED: u64 = 4;
pub(crate) const LONG: u64 = 4096;

/// A schedule on trial.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    op: Op,
    sampled: u64,
    positions: Positions,
    places: HashSet<u64, Spread>,
    regret: Regret,
    doubt: Doubt,
    density: Option<Density>,
    evidence: Weights,
}

impl Trial {
    /// A trial of `schedule` that will last `operations` operations.
    pub(crate) fn new(
        op: Op,
        schedule: &Schedule,
        density: Option<Density>,
        blocks: u64,
        jump_blocks: u64,
        operations: u64,
    ) -> Self {
        Self {
            op,
            sampled: if operations < LONG { 1 } else { SAMPLED },
            positions: Positions::new(schedule, blocks, jump_blocks),
            places: HashSet::default(),
            regret: Regret::default(),
            doubt: Doubt::default(),
            density,
            evidence: Weights::none(),
        }
    }

    /// Counts an access; `goes_on` tells that another one ended where it begins.
    pub(crate) fn access(&mut self, range: BlockRange, goes_on: bool, blocks: u64) {
        if range.is_empty() {
            return;
        }
        for place in range.start / PLACE_BLOCKS..=(range.end() - 1) / PLACE_BLOCKS {
            if !spread(place).is_multiple_of(self.sampled)
                || self.places.len() >= MAX_PLACES
                || !self.places.insert(place)
            {
                continue;
            }
            let block = range.start.max(place * PLACE_BLOCKS);
            let regret = |p: f64| if self.op == Op::Read { p } else { 1.0 - p };
            let scheduled = regret(self.positions.share(block));
            let sequential = regret(block as f64 / blocks as f64);
            self.regret.scheduled += scheduled;
            self.regret.sequential += sequential;
            if !goes_on && block == range.start {
                self.doubt.note(scheduled - sequential);
            }
            if let Some(density) = &self.density {
                density.learn(block, &mut self.evidence);
            }
        }
    }

    /// Whether the guest does something else now than what the schedule was made for.
    pub(crate) fn is_beaten(&self) -> bool {
        self.doubt.is_certain()
    }

    pub(crate) fn end(self) -> (Regret, Weights) {
        let sampled = self.sampled as f64;
        let regret = Regret {
            scheduled: self.regret.scheduled * self.positions.longer() * sampled,
            sequential: self.regret.sequential * sampled,
        };
        (regret, self.evidence)
    }

    pub(crate) fn memory(&self) -> usize {
        self.positions.memory()
            + self.density.as_ref().map_or(0, Density::memory)
            + self.places.capacity() * (size_of::<u64>() + 1) * 8 / 7
    }
}
