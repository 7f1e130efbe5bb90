//! [`Trial`]: does what is known of the past order the next accesses better than address order?
//!
//! The first guard of the Scheduling paper's section 4.2. A schedule is made of the history so far,
//! then the accesses that follow are held against it. Take a copy of the whole image that lasts as
//! long as they do, and let each be written at any time of it with equal chance: a block at share
//! `p` of the schedule is then written after it was sent with chance `1 − p` (a block that is
//! fetched is read too early with chance `p`). The sum over the different places accessed, times
//! how much longer the jumps make the schedule, is its *regret*; address order has one of its own.

use crate::density::{Density, Weights};
use crate::heat::Op;
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

/// Long trials look at one place in four, chosen by its number: enough to tell, and a quarter of
/// the cost.
const SAMPLED: u64 = 4;
const LONG: u64 = 4096;

/// A schedule on trial.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    op: Op,
    sampled: u64,
    positions: Positions,
    places: HashSet<u64, Spread>,
    regret: Regret,
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
            density,
            evidence: Weights::none(),
        }
    }

    pub(crate) fn access(&mut self, range: BlockRange, blocks: u64) {
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
            self.regret.scheduled += regret(self.positions.share(block));
            self.regret.sequential += regret(block as f64 / blocks as f64);
            if let Some(density) = &self.density {
                density.learn(block, &mut self.evidence);
            }
        }
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
