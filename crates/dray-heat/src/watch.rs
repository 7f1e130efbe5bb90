//! [`Watch`]: are a migration's accesses still where its schedule expects them?
//!
//! The second guard of the Scheduling paper's section 4.2. While blocks move, each access is held
//! against two orders: the schedule, and address order with as many blocks moved. A write counts
//! against an order that has already sent its place, a read against one that has not yet fetched
//! it; each place of 64 KiB counts once for each order. The schedule no longer holds when it is
//! worse by more than chance explains: `scheduled − sequential > 3 √(scheduled + sequential) + 16`,
//! three standard deviations of the difference of two counts and 1 MiB for the start.

use crate::heat::{Op, counted};
use crate::positions::Positions;
use crate::spread::Spread;
use crate::trial::{MAX_PLACES, PLACE_BLOCKS, Regret};
use dray_types::{BlockRange, Schedule};
use std::collections::HashMap;

const DEVIATIONS: f64 = 3.0;
const SLACK_PLACES: f64 = 16.0;

const BY_SCHEDULE: u8 = 1;
const BY_ADDRESS: u8 = 2;

/// Holds the accesses during a migration against its schedule; see the module.
#[derive(Clone, Debug)]
pub struct Watch {
    op: Op,
    blocks: u64,
    positions: Positions,
    counted: HashMap<u64, u8, Spread>,
    regret: Regret,
}

impl Watch {
    /// Watches `schedule` over an image of `blocks` blocks: `Op::Write` while it is copied,
    /// `Op::Read` while it is fetched.
    pub fn new(op: Op, schedule: &Schedule, blocks: u64) -> Self {
        Self {
            op,
            blocks: blocks.max(1),
            positions: Positions::new(schedule, blocks, 0),
            counted: HashMap::default(),
            regret: Regret::default(),
        }
    }

    /// The guest accessed `range` when `moved` blocks of the schedule had moved. Operations of the
    /// other kind do not count.
    pub fn observe(&mut self, op: Op, range: BlockRange, moved: u64) {
        let range = counted(range, self.blocks);
        if op != self.op || range.is_empty() {
            return;
        }
        let done = moved as f64 / self.blocks as f64;
        for place in range.start / PLACE_BLOCKS..=(range.end() - 1) / PLACE_BLOCKS {
            let block = range.start.max(place * PLACE_BLOCKS);
            let against = |p: f64| if op == Op::Write { p < done } else { p >= done };
            let mut marks = 0;
            if against(self.positions.share(block)) {
                marks |= BY_SCHEDULE;
            }
            if against(block as f64 / self.blocks as f64) {
                marks |= BY_ADDRESS;
            }
            self.count(place, marks);
        }
    }

    fn count(&mut self, place: u64, marks: u8) {
        if marks == 0 || self.counted.len() >= MAX_PLACES && !self.counted.contains_key(&place) {
            return;
        }
        let counted = self.counted.entry(place).or_default();
        let new = marks & !*counted;
        *counted |= marks;
        self.regret.scheduled += f64::from(new & BY_SCHEDULE != 0);
        self.regret.sequential += f64::from(new & BY_ADDRESS != 0);
    }

    /// Places that count against each order so far.
    pub fn regret(&self) -> Regret {
        self.regret
    }

    /// False once the accesses no longer match the schedule: go on in address order.
    pub fn holds(&self) -> bool {
        let Regret { scheduled, sequential } = self.regret;
        let chance = DEVIATIONS * (scheduled + sequential).sqrt() + SLACK_PLACES;
        scheduled - sequential <= chance
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Heat, HeatConfig};

    const BLOCKS: u64 = 1 << 20;

    /// Heat of a guest that writes in the second eighth of the image.
    fn heat() -> Heat {
        let mut heat = Heat::new(BLOCKS, HeatConfig::default());
        for i in 0..2000 {
            heat.access(Op::Write, BlockRange::new(BLOCKS / 8 + (i * 7919) % (BLOCKS / 8), 8));
        }
        heat
    }

    fn watched(place: impl Fn(u64) -> u64) -> Watch {
        let mut watch = Watch::new(Op::Write, &heat().copy_schedule(), BLOCKS);
        for i in 0..2000 {
            watch.observe(Op::Write, BlockRange::new(place(i), 8), i * BLOCKS / 2000);
            watch.observe(Op::Read, BlockRange::new(0, 8), i * BLOCKS / 2000);
        }
        watch
    }

    #[test]
    fn the_expected_writes_hold() {
        let watch = watched(|i| BLOCKS / 8 + (i * 104_729) % (BLOCKS / 8));
        assert!(watch.holds());
        assert!(watch.regret().scheduled < watch.regret().sequential / 4.0, "{watch:?}");
    }

    #[test]
    fn writes_turned_upside_down_are_noticed() {
        // The guest leaves its eighth for the last one, which the schedule sent in its first half
        // and address order sends last.
        let schedule = heat().copy_schedule();
        let end = BLOCKS - BLOCKS / 8;
        let mut watch = Watch::new(Op::Write, &schedule, BLOCKS);
        let mut noticed = None;
        for i in 0..2000 {
            let start = end + (i * 104_729) % (BLOCKS / 8);
            watch.observe(Op::Write, BlockRange::new(start, 8), i * BLOCKS / 2000);
            if noticed.is_none() && !watch.holds() {
                noticed = Some(i);
            }
        }
        assert!(noticed.is_some_and(|at| at > 10), "{noticed:?} {:?}", watch.regret());
    }

    #[test]
    fn uniform_accesses_do_not_look_like_a_failure() {
        let mut state = 7u64;
        let places: Vec<u64> = (0..2000)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 20) % (BLOCKS - 8)
            })
            .collect();
        let watch = watched(|i| places[i as usize]);
        assert!(watch.holds(), "{:?}", watch.regret());
        assert!(watch.regret().scheduled > 500.0);
    }

    #[test]
    fn blocks_outside_the_image_and_endless_ranges_are_harmless() {
        let mut watch = Watch::new(Op::Read, &Schedule::SEQUENTIAL, 100);
        watch.observe(Op::Read, BlockRange::new(u64::MAX - 1, u64::MAX), 5);
        watch.observe(Op::Read, BlockRange::new(90, u64::MAX - 90), 5);
        assert_eq!(watch.regret(), Regret { scheduled: 2.0, sequential: 2.0 });
    }
}
