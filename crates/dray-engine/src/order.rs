//! Which block is next: a set of waiting blocks that gives them out in the order of a schedule.
//!
//! A schedule is a hint (I7): it is clipped to the image, the first mention of a block counts, and
//! whatever it leaves out follows in address order. So no schedule can make a block be forgotten or
//! sent twice; a bad one only costs time.
//!
//! Nothing here looks at blocks one by one. Each piece of the schedule has a place in the order and
//! a mark that says that blocks may wait in it. Putting blocks in marks their pieces (a search by
//! address each); looking for the next block takes marks off pieces in which nothing waits any
//! more. A mark is taken off at most once for each time it was put on, so an image with a hundred
//! thousand pieces costs the same for each run as one with ten.

use crate::watch::Lags;
use dray_types::{BlockRange, BlockSet, Schedule};
use std::collections::BTreeMap;

/// One part in so many of a round of scattered blocks may be spent on jumps.
const JUMP_SHARE: u64 = 64;
/// Orders that are taken over in the middle of a round may cost one jump more in so many.
const MORE_JUMPS: usize = 8;
/// So many more are few for any image: 160 ms.
const FEW_JUMPS: usize = 16;

/// Places in the order, and which of them may have something.
#[derive(Clone, Default, Debug)]
struct Pieces {
    /// Disjoint, the first to move first.
    ranges: Vec<BlockRange>,
    /// Their places in the order, sorted by address.
    by_address: Vec<u32>,
    /// A bit for each place: blocks may wait there.
    marks: Vec<u64>,
    /// No mark is in a word before this one.
    low: usize,
}

impl Pieces {
    fn new(schedule: &Schedule, whole: BlockRange) -> Self {
        let mut covered = Covered::default();
        let mut ranges = Vec::with_capacity(schedule.ranges().len());
        for &range in schedule.ranges() {
            covered.add(clip(range, whole), &mut ranges);
        }
        let mut by_address: Vec<u32> = (0..ranges.len() as u32).collect();
        by_address.sort_unstable_by_key(|&place| ranges[place as usize].start);
        let marks = vec![u64::MAX; ranges.len().div_ceil(64)];
        Self { ranges, by_address, marks, low: 0 }
    }

    /// Blocks were put into `range`.
    fn mark(&mut self, range: BlockRange) {
        let ranges = &self.ranges;
        let first = self.by_address.partition_point(|&p| ranges[p as usize].end() <= range.start);
        for &place in &self.by_address[first..] {
            let place = place as usize;
            if self.ranges[place].start >= range.end() {
                break;
            }
            self.marks[place / 64] |= 1 << (place % 64);
            self.low = self.low.min(place / 64);
        }
    }

    /// Pieces in which some of `blocks` are.
    fn left(&self, blocks: &BlockSet) -> usize {
        self.ranges.iter().filter(|&&range| blocks.intersects(range)).count()
    }

    /// The first run of `blocks` in the order of the pieces; none when no piece has any.
    fn next(&mut self, blocks: &BlockSet, max: u64) -> Option<(BlockRange, BlockRange)> {
        while let Some(word) = self.marks.get_mut(self.low) {
            if *word == 0 {
                self.low += 1;
                continue;
            }
            let bit = word.trailing_zeros() as usize;
            // The last word has more bits than there are pieces.
            if let Some(&piece) = self.ranges.get(self.low * 64 + bit) {
                let run =
                    blocks.next_run(piece.start, max).map_or(BlockRange::new(0, 0), |run| run);
                let run = run.intersect(piece);
                if !run.is_empty() {
                    return Some((run, piece));
                }
            }
            *word &= *word - 1;
        }
        None
    }
}

/// `range` without what lies outside `whole`; its end need not even be a number.
pub(crate) fn clip(range: BlockRange, whole: BlockRange) -> BlockRange {
    let end = range.start.saturating_add(range.len).min(whole.end());
    let start = range.start.max(whole.start);
    BlockRange::new(start, end.saturating_sub(start))
}

/// What earlier ranges have named, neighbours joined: each is joined once, so that even ranges that
/// all overlap cost no more than a search each.
#[derive(Default)]
struct Covered(BTreeMap<u64, u64>);

impl Covered {
    /// Appends the parts of `range` that are new to `out`.
    fn add(&mut self, range: BlockRange, out: &mut Vec<BlockRange>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end, mut at) = (range.start, range.end(), range.start);
        if let Some((&before, &stop)) = self.0.range(..=range.start).next_back()
            && stop >= range.start
        {
            start = before;
            at = stop;
            end = end.max(stop);
        }
        while at <= range.end()
            && let Some((&next, &stop)) = self.0.range(at..=range.end()).next()
        {
            if next > at {
                out.push(BlockRange::new(at, next - at));
            }
            self.0.remove(&next);
            at = stop;
            end = end.max(stop);
        }
        if at < range.end() {
            out.push(BlockRange::new(at, range.end() - at));
        }
        self.0.insert(start, end);
    }
}

/// Blocks of one image that wait to be moved, in the order of a schedule.
#[derive(Clone, Default, Debug)]
pub struct Waiting {
    blocks: BlockSet,
    pieces: Pieces,
    /// In a round whose jumps would cost too much: the blocks that go by address, before the rest.
    early: Option<BlockSet>,
    /// Blocks taken out, and put in at most, since the round began: for fairness between images.
    taken: u64,
    total: u64,
    /// Blocks come by address, whatever the schedule says.
    passed_over: bool,
    /// Where the last run that was sent ended, and the jumps since the round began: runs that did not
    /// follow their predecessor, with blocks that wait between them.
    sent_to: Option<u64>,
    jumps: usize,
}

impl Waiting {
    /// From now on blocks come in the order of `schedule`, an image of the blocks `whole`.
    pub fn set_order(&mut self, schedule: &Schedule, whole: BlockRange) {
        self.pieces = Pieces::new(schedule, whole);
    }

    /// The same with a newer order, unless it would cost too much: each that is taken over in the
    /// middle of a round may go back for blocks that it wants earlier than the one before it did. A
    /// newer one is taken over as long as the jumps that were made and those that it has left are not
    /// more than an eighth more than its own, or when it has fewer left than the older one.
    pub fn renew_order(&mut self, schedule: &Schedule, whole: BlockRange) {
        let newer = Pieces::new(schedule, whole);
        let all = newer.ranges.len();
        let most = all + all / MORE_JUMPS + FEW_JUMPS;
        // No order has more left than it has pieces: mostly there is nothing to be looked for.
        let fits = self.jumps + all <= most || {
            let left = newer.left(&self.blocks);
            self.jumps + left <= most || left < self.pieces.left(&self.blocks)
        };
        if fits {
            self.pieces = newer;
        }
    }

    /// Whether a schedule says more than address order.
    pub fn has_order(&self) -> bool {
        !self.pieces.ranges.is_empty()
    }

    /// Whether blocks come in the order of such a schedule.
    pub fn is_scheduled(&self) -> bool {
        self.has_order() && !self.passed_over
    }

    /// From now on the schedule is passed over for address order, or followed again.
    pub fn pass_over(&mut self, passed_over: bool) {
        self.passed_over = passed_over;
    }

    /// How much later or sooner than in address order the schedule comes to what waits.
    pub fn lags(&self) -> Lags {
        let pieces = &self.pieces;
        let by_address = pieces.by_address.iter().map(|&place| place as usize);
        Lags::new(&self.blocks, &pieces.ranges, by_address, self.total)
    }

    /// A new round begins with what waits now.
    pub fn begin_round(&mut self) {
        self.taken = 0;
        self.total = self.blocks.len();
        (self.sent_to, self.jumps) = (None, 0);
    }

    /// A new round of scattered blocks begins, where a jump takes the time of `jump_blocks` blocks.
    ///
    /// In a pass over a whole image a jump is paid for by the chunk behind it, here by a few blocks:
    /// a round in the order of the schedule would last longer by its jumps, and what is written
    /// meanwhile makes the next one longer in turn. So the last pieces of the schedule, which are
    /// what the schedule is for, keep their places as far as [`JUMP_SHARE`] of the round goes, two
    /// jumps each (over a piece and back to it); everything before them goes by address.
    pub fn begin_scattered_round(&mut self, jump_blocks: u64) {
        self.begin_round();
        self.early = None;
        if !self.is_scheduled() || jump_blocks == 0 {
            return;
        }
        let mut jumps = self.total / JUMP_SHARE / jump_blocks;
        let mut early = self.blocks.clone();
        for &piece in self.pieces.ranges.iter().rev() {
            if jumps < 2 {
                break;
            }
            if early.intersects(piece) {
                early.remove(piece);
                jumps -= 2;
            }
        }
        self.early = Some(early);
    }

    /// Share of the round that was taken, in 1/65,536.
    pub fn progress(&self) -> u64 {
        (self.taken << 16) / self.total.max(self.taken).max(1)
    }

    /// The blocks.
    pub fn blocks(&self) -> &BlockSet {
        &self.blocks
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Puts the blocks of `range` in.
    pub fn insert(&mut self, range: BlockRange) {
        if range.is_empty() {
            return;
        }
        self.blocks.insert(range);
        self.pieces.mark(range);
        if let Some(early) = &mut self.early {
            early.insert(range);
        }
        self.total += range.len;
    }

    /// Puts the blocks of `set` in.
    pub fn union_with(&mut self, set: &BlockSet) {
        set.runs().for_each(|run| self.insert(run));
    }

    /// Takes the blocks of `range` out: they move, or need not.
    pub fn remove(&mut self, range: BlockRange) {
        self.blocks.remove(range);
        if let Some(early) = &mut self.early {
            early.remove(range);
        }
        self.taken += range.len;
    }

    /// Takes out a run that [`Self::next`] gave, or its beginning: it is sent. Counts the jumps.
    pub fn send(&mut self, run: BlockRange) {
        if let Some(end) = self.sent_to.replace(run.end()) {
            let gap = BlockRange::new(end, run.start.saturating_sub(end));
            let follows = end <= run.start && !self.blocks.intersects(gap);
            self.jumps += usize::from(!follows);
        }
        self.remove(run);
    }

    /// Takes the blocks of `set` out.
    pub fn subtract(&mut self, set: &BlockSet) {
        set.runs().for_each(|run| self.remove(run));
    }

    /// Takes everything out.
    pub fn take(&mut self) -> BlockSet {
        self.early = None;
        std::mem::take(&mut self.blocks)
    }

    /// The next run of at most `max` blocks; it stays in until it is removed.
    pub fn next(&mut self, max: u64) -> Option<BlockRange> {
        self.next_in_piece(max).map(|(run, _)| run)
    }

    /// The next run and the piece of the schedule it lies in (the whole rest of the image when the
    /// schedule names none): where the blocks that follow it lie.
    pub fn next_in_piece(&mut self, max: u64) -> Option<(BlockRange, BlockRange)> {
        if let Some(run) = self.early.as_ref().and_then(|early| early.next_run(0, max)) {
            return Some((run, run));
        }
        if !self.passed_over
            && let Some(next) = self.pieces.next(&self.blocks, max)
        {
            return Some(next);
        }
        // No piece has any left, or none counts: what waits was not named.
        let run = self.blocks.next_run(0, max)?;
        Some((run, BlockRange::new(run.start, u64::MAX - run.start)))
    }
}

/// Out of several images the one to go on with: one after the other in address order, in step with
/// each other when there are schedules, so that what one image wants last comes last of all.
pub fn next_image<'a>(images: impl Iterator<Item = &'a Waiting> + Clone) -> Option<usize> {
    let some = images.clone().enumerate().filter(|(_, waiting)| !waiting.is_empty());
    if images.clone().any(Waiting::is_scheduled) {
        some.min_by_key(|(_, waiting)| waiting.progress()).map(|(ix, _)| ix)
    } else {
        some.map(|(ix, _)| ix).next()
    }
}

/// The image that is least far, whatever the schedules: all go in step with each other.
pub(crate) fn next_in_step<'a>(images: impl Iterator<Item = &'a Waiting>) -> Option<usize> {
    let some = images.enumerate().filter(|(_, waiting)| !waiting.is_empty());
    some.min_by_key(|(_, waiting)| waiting.progress()).map(|(ix, _)| ix)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: BlockRange = BlockRange::new(0, 1000);

    fn range((start, len): (u64, u64)) -> BlockRange {
        BlockRange::new(start, len)
    }

    fn waiting(ranges: &[(u64, u64)], schedule: &[(u64, u64)]) -> Waiting {
        let mut waiting = Waiting::default();
        waiting.set_order(&schedule.iter().map(|&r| range(r)).collect(), WHOLE);
        ranges.iter().for_each(|&r| waiting.insert(range(r)));
        waiting
    }

    fn drain(waiting: &mut Waiting, max: u64) -> Vec<(u64, u64)> {
        let mut runs = Vec::new();
        while let Some(run) = waiting.next(max) {
            waiting.remove(run);
            runs.push((run.start, run.len));
        }
        runs
    }

    #[test]
    fn without_a_schedule_blocks_come_by_address() {
        let mut all = waiting(&[(500, 10), (3, 2)], &[]);
        assert_eq!(drain(&mut all, 8), [(3, 2), (500, 8), (508, 2)]);
    }

    #[test]
    fn the_schedule_first_and_then_what_it_left_out() {
        let mut all = waiting(&[(0, 1000)], &[(900, 50), (100, 50), (920, 60)]);
        let order = [(900, 50), (100, 50), (950, 30), (0, 100), (150, 750), (980, 20)];
        assert_eq!(drain(&mut all, 1000), order);
    }

    #[test]
    fn what_comes_back_takes_its_own_place() {
        let mut all = waiting(&[(0, 1000)], &[(900, 50), (100, 50)]);
        all.remove(range((900, 50)));
        assert_eq!(all.next(8), Some(range((100, 8))));
        all.insert(range((910, 1)));
        assert_eq!(all.next(8), Some(range((910, 1))));
    }

    #[test]
    fn a_schedule_that_makes_no_sense_is_only_a_hint() {
        let odd = [(u64::MAX - 1, 5), (990, u64::MAX), (2000, 4), (995, 1), (0, 0)];
        let mut all = waiting(&[(0, 1000)], &odd);
        assert_eq!(drain(&mut all, 2000), [(990, 10), (0, 990)]);
    }

    /// An order of pieces of ten blocks that begin at these tens.
    fn tens(tens: impl IntoIterator<Item = u64>) -> Schedule {
        tens.into_iter().map(|ten| BlockRange::new(ten * 10, 10)).collect()
    }

    /// Sends a piece of ten blocks.
    fn send(all: &mut Waiting) -> u64 {
        let run = all.next(10).unwrap();
        all.send(run);
        run.start / 10
    }

    #[test]
    fn orders_that_go_back_and_forth_are_not_all_taken_over() {
        // Each newer one wants first what the one before it wanted last.
        let mut all = waiting(&[(0, 1000)], &[]);
        let up = tens((0..100).step_by(2).chain((1..100).step_by(2)));
        let down = tens((0..100).rev());
        all.set_order(&up, WHOLE);
        all.begin_round();
        let (mut sent, mut ended, mut jumps) = (0, None, 0);
        while let Some(run) = all.next(1) {
            jumps += usize::from(ended != Some(run.start));
            ended = Some(run.end());
            all.send(run);
            sent += 1;
            all.renew_order(if sent % 2 == 0 { &up } else { &down }, WHOLE);
        }
        assert_eq!(sent, 1000);
        // Hundreds if each were taken over.
        assert!(all.jumps <= 100 + 100 / MORE_JUMPS + FEW_JUMPS, "{}", all.jumps);
        // Runs over what was sent before are none.
        assert!((all.jumps..all.jumps + 10).contains(&jumps), "{jumps}");
    }

    #[test]
    fn a_newer_order_counts_while_jumps_are_left_or_when_it_has_fewer() {
        let mut all = waiting(&[(0, 1000)], &[]);
        all.set_order(&tens((0..100).rev()), WHOLE);
        all.begin_round();
        (0..50).for_each(|_| assert!(send(&mut all) >= 50));
        assert_eq!(all.jumps, 49);
        // 49 were made, and 50 would follow.
        let newer = tens((50..100).rev().chain((0..50).step_by(2)).chain((1..50).step_by(2)));
        all.renew_order(&newer, WHOLE);
        assert_eq!([send(&mut all), send(&mut all)], [0, 2]);
        // One piece, and with it fewer jumps than any order has.
        all.renew_order(&[range((0, 1000))].into_iter().collect(), WHOLE);
        assert_eq!([send(&mut all), send(&mut all)], [1, 3]);
        // An order as short allows no more of them, and has as many left.
        all.renew_order(&[range((400, 100)), range((0, 400))].into_iter().collect(), WHOLE);
        assert_eq!([send(&mut all), send(&mut all)], [4, 5]);
        all.begin_round();
        all.renew_order(&[range((400, 100)), range((0, 400))].into_iter().collect(), WHOLE);
        assert_eq!(send(&mut all), 40);
    }

    #[test]
    fn a_scattered_round_goes_by_address_but_for_the_end_of_the_schedule() {
        let pieces: Vec<_> = [0, 6, 2, 8, 4].map(|n| (n * 100, 100)).into();
        let dirty: Vec<_> = (0..10).map(|n| (n * 100 + 10, 64)).collect();
        let starts = |jump| {
            let mut all = waiting(&dirty, &pieces);
            all.begin_scattered_round(jump);
            let runs = drain(&mut all, 1000);
            runs.iter().map(|&(start, _)| start / 100).collect::<Vec<_>>()
        };
        // 640 blocks: a 64th of the round are ten jumps of one block, two for each piece.
        assert_eq!(starts(0), [0, 6, 2, 8, 4, 1, 3, 5, 7, 9], "free");
        assert_eq!(starts(1), [1, 3, 5, 7, 9, 0, 6, 2, 8, 4]);
        assert_eq!(starts(3), [0, 1, 2, 3, 5, 6, 7, 8, 9, 4]);
        assert_eq!(starts(6), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn a_scattered_round_forgets_nothing_that_comes_and_goes() {
        let mut all = waiting(&[(0, 10), (500, 10)], &[(0, 100), (500, 100)]);
        all.begin_scattered_round(1000);
        all.insert(range((505, 20)));
        all.remove(range((2, 3)));
        assert_eq!(drain(&mut all, 1000), [(0, 2), (5, 5), (500, 25)]);
        all.insert(range((7, 1)));
        assert_eq!(all.take(), [range((7, 1))].into_iter().collect());
        assert_eq!(all.next(8), None);
    }

    #[test]
    fn each_block_once_whatever_the_schedule() {
        let mut seed = 7u64;
        let mut draw = |limit: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % limit
        };
        for _ in 0..300 {
            let named: Vec<_> = (0..draw(40)).map(|_| (draw(1100), draw(300))).collect();
            let put: Vec<_> = (0..1 + draw(9)).map(|_| (draw(900), 1 + draw(100))).collect();
            let mut all = waiting(&put, &named);
            let expected = all.blocks().clone();
            let mut seen = BlockSet::new();
            for run in drain(&mut all, 16) {
                assert!(!seen.intersects(range(run)), "{run:?} twice: {named:?}");
                seen.insert(range(run));
            }
            assert_eq!(seen, expected, "{named:?}");
        }
    }

    #[test]
    fn images_with_schedules_go_in_step() {
        let mut images = [waiting(&[(0, 100)], &[]), waiting(&[(0, 200)], &[(50, 1)])];
        images.iter_mut().for_each(Waiting::begin_round);
        let mut taken = [0; 2];
        for _ in 0..15 {
            let ix = next_image(images.iter()).unwrap();
            let run = images[ix].next(10).unwrap();
            images[ix].remove(run);
            taken[ix] += run.len;
        }
        assert!(taken[0] >= 40 && taken[1] >= 80, "{taken:?}");
        images[1].set_order(&Schedule::SEQUENTIAL, WHOLE);
        assert_eq!(next_image(images.iter()), Some(0), "address order: one after the other");
    }
}
