//! [`Watch`]: does the guest wait for what its schedule brings first?
//!
//! The second guard of the Scheduling paper's section 4.2: during the migration the guest's accesses
//! are tested against the expected ones, and where they do not fit, blocks go in address order.
//!
//! What a guest waits for is what the next waits are about, so each demand is taken for a sample of
//! them. How much sooner address order would come to it than the schedule, counted from now on in
//! parts of a whole Backfill, is its *lag*: up to 1, below 0 where the schedule is the better one.
//! Blocks that are here do not count, whichever order has brought them: they wait no more.
//!
//! The schedule is given up when the sum of the lags is more than chance explains, three standard
//! deviations of a sum of independent ones, and one demand more that was not seen yet: for the blocks
//! that the schedule is best for. It is followed again when all that was seen speaks for it.

use dray_types::{BlockRange, BlockSet};

const DEVIATIONS: f64 = 3.0;

/// Holds demands against a schedule; see the module.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    sum: f64,
    squares: f64,
    failed: bool,
}

impl Watch {
    /// The guest waits for a block to which address order comes sooner than the schedule by `lag`, a
    /// part of the time of a whole Backfill; of all that wait it is at least `-gain`.
    pub fn note(&mut self, lag: f64, gain: f64) {
        self.sum += lag;
        self.squares += lag * lag;
        let most = if self.failed { 0.0 } else { DEVIATIONS * self.squares.sqrt() + gain };
        self.failed = self.sum > most;
    }

    /// False while the guest's accesses do not fit: go on in address order.
    pub fn holds(&self) -> bool {
        !self.failed
    }
}

/// How much later the schedule comes to a block than address order does, at one moment.
#[derive(Clone, Debug, Default)]
pub struct Lags {
    /// First block and lag of each stretch of the image, by first block.
    stretches: Vec<(u64, f64)>,
    gain: f64,
}

impl Lags {
    /// Of the blocks that wait, in the order of `pieces`, disjoint and the first to move first; what
    /// they leave out follows by address. `by_address` gives their numbers by address. Lags are parts
    /// of `total` blocks.
    pub(crate) fn new(
        waiting: &BlockSet,
        pieces: &[BlockRange],
        by_address: impl Iterator<Item = usize>,
        total: u64,
    ) -> Self {
        let (mut before, mut named) = (Vec::with_capacity(pieces.len()), 0);
        for &piece in pieces {
            before.push(named);
            named += waiting.count(piece);
        }
        let part =
            |schedule: u64, address: u64| (schedule as f64 - address as f64) / total.max(1) as f64;
        let mut stretches = Vec::with_capacity(pieces.len() * 2 + 1);
        let mut gain: f64 = 0.0;
        // Blocks that wait below `at`, and those of them that no piece names.
        let (mut at, mut address, mut rest) = (0, 0, 0);
        for nth in by_address {
            let piece = pieces[nth];
            if at < piece.start {
                stretches.push((at, part(named + rest, address)));
                let between = waiting.count(BlockRange::new(at, piece.start - at));
                (address, rest) = (address + between, rest + between);
            }
            let (lag, inside) = (part(before[nth], address), waiting.count(piece));
            stretches.push((piece.start, lag));
            // What no piece names never comes sooner than in address order.
            gain = if inside > 0 { gain.max(-lag) } else { gain };
            address += inside;
            at = piece.end();
        }
        stretches.push((at, part(named + rest, address)));
        Self { stretches, gain }
    }

    /// The most by which the schedule comes sooner to a block.
    pub fn gain(&self) -> f64 {
        self.gain
    }

    /// That of a block.
    pub fn of(&self, block: u64) -> f64 {
        let after = self.stretches.partition_point(|&(start, _)| start <= block);
        after.checked_sub(1).map_or(0.0, |at| self.stretches[at].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After how many demands the schedule is given up.
    fn given_up(mut lags: impl Iterator<Item = f64>) -> Option<usize> {
        let mut watch = Watch::default();
        lags.position(|lag| {
            watch.note(lag, 1.0);
            !watch.holds()
        })
    }

    #[test]
    fn demands_that_all_come_late_are_noticed() {
        assert_eq!(given_up(std::iter::repeat_n(1.0, 100)), Some(10));
        // Those of a schedule that begins with a sixteenth which nobody reads.
        assert!(given_up(std::iter::repeat_n(1.0 / 16.0, 100)).is_some_and(|n| n < 50));
        assert_eq!(given_up(std::iter::repeat_n(0.001, 500)), None, "little is lost");
    }

    #[test]
    fn what_few_demands_gain_may_outweigh_what_many_lose() {
        let lags = |n: usize| if n % 20 == 19 { -0.9 } else { 0.04 };
        assert_eq!(given_up((0..10_000).map(lags)), None);
    }

    #[test]
    fn chance_is_no_reason() {
        let mut seed = 7u64;
        let mut draw = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as f64 / (1u64 << 31) as f64 - 0.5
        };
        let runs = (0..200).filter(|_| given_up((0..1000).map(|_| draw())).is_some()).count();
        assert!(runs <= 6, "{runs}");
    }

    #[test]
    fn a_schedule_that_proves_right_is_followed_again() {
        let mut watch = Watch::default();
        (0..20).for_each(|_| watch.note(0.5, 1.0));
        assert!(!watch.holds());
        (0..19).for_each(|_| watch.note(-0.5, 1.0));
        assert!(!watch.holds());
        watch.note(-0.5, 1.0);
        assert!(watch.holds());
    }

    #[test]
    fn lags_are_those_of_what_waits() {
        let range = |(start, len)| BlockRange::new(start, len);
        let waiting: BlockSet = [(0, 20), (30, 70)].map(range).into_iter().collect();
        let pieces = [(80, 10), (25, 15)].map(range);
        let lags = Lags::new(&waiting, &pieces, [1, 0].into_iter(), 100);
        // 80..90 first, then 30..40, then the rest. By address 20 wait before 30, and 70 before 80.
        let of = |block| (lags.of(block) * 100.0).round();
        assert_eq!([0, 19, 30, 39, 40, 79].map(of), [20., 20., -10., -10., 10., 10.]);
        assert_eq!([80, 89, 90, 99].map(of), [-70., -70., 0., 0.]);
        assert_eq!(lags.gain(), 0.7);
        let none = Lags::new(&waiting, &[], std::iter::empty(), 100);
        assert_eq!([0, 99].map(|block| none.of(block)), [0.0, 0.0]);
    }

    #[test]
    fn each_lag_is_what_draining_both_orders_tells() {
        use crate::order::Waiting;
        use dray_types::Schedule;
        let pieces = [(700, 50), (100, 30), (400, 1), (120, 90)];
        let schedule: Schedule =
            pieces.map(|(start, len)| BlockRange::new(start, len)).into_iter().collect();
        let mut all = Waiting::default();
        all.set_order(&schedule, BlockRange::new(0, 1000));
        [(5, 200), (390, 100), (690, 300)]
            .iter()
            .for_each(|&(start, len)| all.insert(BlockRange::new(start, len)));
        all.begin_round();
        let lags = all.lags();
        let drained = |passed_over| {
            let mut all = all.clone();
            all.pass_over(passed_over);
            let mut blocks = Vec::new();
            while let Some(run) = all.next(1) {
                blocks.push(run.start);
                all.remove(run);
            }
            blocks
        };
        let (scheduled, by_address) = (drained(false), drained(true));
        assert!(by_address.is_sorted());
        for (nth, block) in by_address.iter().enumerate() {
            let at = scheduled.iter().position(|other| other == block).unwrap();
            let wanted = (at as f64 - nth as f64) / 600.0;
            assert!((lags.of(*block) - wanted).abs() < 1e-9, "{block}");
        }
    }
}
