//! [`Blocks`]: where each block of an image stands before handover, and how blocks move between the sets.
//!
//! At any moment a block either is equal at the target, or is in `todo`, `zeros`, `rest`, `unsure` or
//! `flying`, or is dirty in the tracker. The sets are private: what happens to blocks is a verb here, and
//! [`partition`] says which relations hold between the sets after each of them.

mod mirrored;
mod partition;

use crate::order::Waiting;
use dray_types::{BlockRange, BlockSet, Schedule};
use dray_wire::TargetImage;
use dray_wire::frame::{MAX_ZERO_BLOCKS, PIECE_BLOCKS};

/// Where the blocks of one image stand.
#[derive(Default, Debug)]
pub(super) struct Blocks {
    /// Blocks to be sent that are not in flight, in the order of Copy's schedule.
    todo: Waiting,
    /// Blocks that the target has in a replica of an earlier generation and that nobody has written
    /// since. They are equal there as long as they are not dirty, whatever becomes of the link.
    base: BlockSet,
    /// The target has some version of the whole image in its place: a replica.
    replica: bool,
    /// Blocks of which the target's file has some version in their place, of unknown age: a replica,
    /// or what an earlier try has brought. They are described before they are sent, whatever sampling
    /// says of other content.
    in_place: BlockSet,
    /// Blocks to be named as zeros.
    zeros: BlockSet,
    /// Blocks that are left for Backfill.
    rest: BlockSet,
    /// The blocks to copy; none when all are.
    chosen: Option<BlockSet>,
    /// Blocks written after they were copied, dirty in the tracker, to be sent as well.
    mirror: BlockSet,
    /// The same for blocks that were in flight when they were written; they wait as `held` do.
    again: BlockSet,
    /// Blocks that the target has acknowledged.
    sent: BlockSet,
    /// Blocks that were in flight when the link was lost.
    unsure: BlockSet,
    /// Blocks written again while they were in flight; they wait until that frame has landed, or
    /// the younger version could overtake the older one on another stream (I3).
    held: BlockSet,
    /// Blocks in flight.
    flying: BlockSet,
    /// Blocks of which the target has some version, perhaps an old one.
    older: BlockSet,
    /// Those of them that were sent again. The target's record of having them may be older than
    /// their data: after a power cut there it names the old version, so they are never trusted
    /// across sessions (I3).
    overwritten: BlockSet,
}

/// What the beginning of a migration finds out about an image.
pub(super) struct Found<'a> {
    /// The whole image.
    pub(super) whole: BlockRange,
    /// What holds data here.
    pub(super) data: BlockSet,
    /// What the target has.
    pub(super) target: TargetImage,
    /// What may have changed since the target received it.
    pub(super) suspect: Option<&'a BlockSet>,
}

/// All blocks of the pieces in which some of `blocks` are: only whole pieces can be described.
fn whole_pieces(blocks: &BlockSet, whole: BlockRange) -> BlockSet {
    let piece = |run: BlockRange| {
        let start = run.start / PIECE_BLOCKS * PIECE_BLOCKS;
        let end = run.end().next_multiple_of(PIECE_BLOCKS);
        BlockRange::new(start, end - start).intersect(whole)
    };
    blocks.runs().map(piece).collect()
}

/// What happens to them.
impl Blocks {
    /// The target has these in a replica, and some version of the others. Comes before [`Self::begin`].
    pub(super) fn share(&mut self, base: BlockSet) {
        self.base = base;
        self.replica = true;
    }

    /// Both sides are known: what has to be sent, follows from it.
    pub(super) fn begin(&mut self, found: Found<'_>) {
        let Found { whole, data, target, suspect } = found;
        let mut have = target.have.intersection(whole);
        self.base = self.base.intersection(whole);
        // What is sent over a replica's block is sent again after a lost link: the target's records say
        // nothing of the younger version that a power cut there may undo.
        self.older = have.clone();
        self.older.union_with(&self.base);
        if let Some(suspect) = suspect {
            self.suspect(suspect, &have);
            have.subtract(suspect);
        }
        if self.replica {
            // Whole regions count as changed after an unclean stop, and most of each has not.
            self.in_place.insert(whole);
        }
        // What is suspect goes again whatever the replica had: the target may have received it since.
        let compares = self.replica && self.base.is_empty();
        let mut unshared = if compares { whole_pieces(&data, whole) } else { data.clone() };
        unshared.subtract(&self.base);
        self.todo.union_with(&unshared);
        self.todo.subtract(&have);
        if !target.zeroed {
            self.zeros.insert(whole);
            for other in [&data, &have, &self.base, self.todo.blocks()] {
                self.zeros.subtract(other);
            }
        }
        self.sent = have;
    }

    /// Changed or not since the target received them: they are sent again, holes included.
    fn suspect(&mut self, suspect: &BlockSet, have: &BlockSet) {
        for run in suspect.runs() {
            let doubtful = have.intersection(run);
            self.todo.union_with(&doubtful);
            self.in_place.union_with(&doubtful);
        }
    }

    /// Everything but the chosen blocks is left for Backfill, zeros too unless they are named anyhow.
    pub(super) fn choose(&mut self, chosen: &BlockSet, names_zeros: bool) {
        let mut cold = self.todo.blocks().clone();
        if !names_zeros {
            cold.union_with(&self.zeros);
        }
        cold.subtract(chosen);
        self.leave(&cold);
        self.chosen = Some(chosen.clone());
    }

    /// Other blocks are chosen: what waits and is not among them is left, what was left and is among
    /// them waits.
    pub(super) fn choose_again(&mut self, chosen: BlockSet) {
        let mut wanted = std::mem::take(&mut self.rest);
        let mut cold = wanted.clone();
        cold.subtract(&chosen);
        wanted.subtract(&cold);
        self.rest = cold;
        let mut left = self.todo.blocks().clone();
        left.subtract(&chosen);
        self.leave(&left);
        self.wants(&wanted);
        self.chosen = Some(chosen);
    }

    /// These blocks are dirty: returns how many of them are sent. Those that nobody chose are left.
    pub(super) fn collect(&mut self, mut dirty: BlockSet) -> u64 {
        if let Some(chosen) = &self.chosen {
            let mut cold = dirty.clone();
            cold.subtract(chosen);
            dirty.subtract(&cold);
            self.leave(&cold);
        }
        self.wants(&dirty);
        dirty.len()
    }

    /// These blocks wait for Backfill and for nothing else.
    fn leave(&mut self, blocks: &BlockSet) {
        for run in blocks.runs() {
            // By what waits: the round counts what is taken out.
            let waits = self.todo.blocks().intersection(run);
            self.todo.subtract(&waits);
            for set in [&mut self.zeros, &mut self.unsure, &mut self.held] {
                set.remove(run);
            }
        }
        self.rest.union_with(blocks);
    }

    /// These blocks must be sent as soon as no older version of them is in flight.
    fn wants(&mut self, blocks: &BlockSet) {
        self.zeros.subtract(blocks);
        self.unsure.subtract(blocks);
        for run in blocks.runs() {
            self.held.union_with(&self.flying.intersection(run));
            self.todo.union_with(&self.flying.complement_in(run));
        }
    }

    /// A run that [`Self::next`] gave, or its beginning, is on its way.
    pub(super) fn launch(&mut self, range: BlockRange) {
        self.todo.send(range);
        self.fly(range);
    }

    /// A sample is on its way, if all of it waits; tells whether.
    pub(super) fn launch_sample(&mut self, range: BlockRange) -> bool {
        let waits = self.todo.blocks().contains_range(range);
        if waits {
            self.todo.remove(range);
            self.fly(range);
        }
        waits
    }

    /// The next zeros are on their way.
    pub(super) fn launch_zeros(&mut self) -> Option<BlockRange> {
        let range = self.zeros.next_run(0, MAX_ZERO_BLOCKS)?;
        self.zeros.remove(range);
        self.fly(range);
        Some(range)
    }

    fn fly(&mut self, range: BlockRange) {
        debug_assert!(!self.flying.intersects(range), "two versions of {range:?} are in flight");
        self.flying.insert(range);
        self.overwritten.union_with(&self.older.intersection(range));
    }

    /// Blocks in flight have arrived.
    pub(super) fn arrived(&mut self, range: BlockRange) {
        self.land(range);
        self.fetched(range);
    }

    /// The target has asked for blocks after the handover and is given them.
    pub(super) fn fetched(&mut self, range: BlockRange) {
        self.sent.insert(range);
        self.older.insert(range);
    }

    /// Blocks in flight will not arrive: they wait again.
    pub(super) fn failed(&mut self, range: BlockRange) {
        self.land(range);
        self.mirror.remove(range);
        self.waits_again(&[range].into_iter().collect());
    }

    /// The link was lost with these blocks in flight. Zeros, and what may lie over another version, go
    /// again; of all others the target will say whether it has them.
    pub(super) fn lose_link(&mut self, range: BlockRange, zeros: bool) {
        self.land(range);
        if zeros || self.older.intersects(range) {
            return self.waits_again(&[range].into_iter().collect());
        }
        let mut unsure = self.rest.complement_in(range);
        unsure.subtract(&self.todo.blocks().intersection(range));
        self.unsure.union_with(&unsure);
    }

    /// The frame is no longer on its way: what waited for it may go.
    fn land(&mut self, range: BlockRange) {
        self.flying.remove(range);
        let free = self.held.intersection(range);
        self.held.subtract(&free);
        self.todo.union_with(&free);
        self.land_mirrored(range);
    }

    /// These blocks are sent again, unless they are left for Backfill by now.
    fn waits_again(&mut self, blocks: &BlockSet) {
        for run in blocks.runs() {
            self.todo.union_with(&self.rest.complement_in(run));
        }
    }

    /// A new session with a target that has `have`. What was acknowledged and is gone (the target
    /// restarted) is sent again, and so is what was in flight unless it arrived for the first time.
    pub(super) fn reopen(&mut self, have: &BlockSet) {
        let mut lost = self.sent.clone();
        lost.subtract(have);
        self.sent.subtract(&lost);
        self.older.subtract(&lost);
        let mut unsure = std::mem::take(&mut self.unsure);
        for run in unsure.runs() {
            self.sent.union_with(&have.intersection(run));
        }
        // Frames whose acknowledgement was lost too, whatever this side took them for.
        self.older.union_with(have);
        unsure.subtract(have);
        for blocks in [&lost, &self.overwritten.clone(), &unsure] {
            self.waits_again(blocks);
        }
    }

    /// The migration ends here: takes out what the tracker must know again.
    pub(super) fn put_back(&mut self) -> BlockSet {
        let mut blocks = self.todo.take();
        for set in [&mut self.rest, &mut self.unsure, &mut self.overwritten] {
            blocks.union_with(&std::mem::take(set));
        }
        blocks
    }
}

/// The order in which they go.
impl Blocks {
    /// From now on they go in another order; see [`Waiting::renew_order`].
    pub(super) fn renew_order(&mut self, schedule: &Schedule, whole: BlockRange) {
        self.todo.renew_order(schedule, whole);
    }

    /// Copy begins.
    pub(super) fn begin_round(&mut self) {
        self.todo.begin_round();
    }

    /// A round of Sync begins; see [`Waiting::begin_scattered_round`].
    pub(super) fn begin_scattered_round(&mut self, jump_blocks: u64) {
        self.todo.begin_scattered_round(jump_blocks);
    }

    /// The next run to be sent, at most `max` blocks of it.
    pub(super) fn next(&mut self, max: u64) -> Option<BlockRange> {
        self.todo.next(max)
    }
}

/// What is known of them.
impl Blocks {
    /// What waits to be sent.
    pub(super) fn todo(&self) -> &Waiting {
        &self.todo
    }

    /// What the target's file has some version of in its place.
    pub(super) fn in_place(&self) -> &BlockSet {
        &self.in_place
    }

    /// Blocks to be sent or named, neither mirrored nor held.
    pub(super) fn waiting(&self) -> u64 {
        self.todo.blocks().len() + self.zeros.len()
    }

    /// The same, with those that may have to be sent again.
    pub(super) fn waiting_or_unsure(&self) -> u64 {
        self.waiting() + self.unsure.len()
    }

    /// Whether blocks are to be sent or named.
    pub(super) fn waits(&self) -> bool {
        !self.todo.is_empty() || !self.zeros.is_empty()
    }

    /// Whether zeros are to be named.
    pub(super) fn has_zeros(&self) -> bool {
        !self.zeros.is_empty()
    }

    /// Whether nothing is left to send, now or when what is in flight has landed.
    pub(super) fn all_sent(&self) -> bool {
        !self.waits() && self.unsure.is_empty() && self.held.is_empty() && self.mirror.is_empty()
    }

    /// Blocks that the target has acknowledged.
    pub(super) fn sent(&self) -> u64 {
        self.sent.len()
    }

    /// Those of `range`.
    pub(super) fn sent_of(&self, range: BlockRange) -> u64 {
        self.sent.count(range)
    }

    /// Blocks that the target has in a replica.
    pub(super) fn shared(&self) -> u64 {
        self.base.len()
    }

    /// Blocks that are left for Backfill.
    pub(super) fn left(&self) -> u64 {
        self.rest.len()
    }

    /// Every block that is not known to be equal at the target, while nothing is in flight and no write
    /// is dirty.
    pub(super) fn missing(&self) -> BlockSet {
        let mut missing = self.todo.blocks().clone();
        for set in [&self.zeros, &self.rest, &self.unsure, &self.held] {
            missing.union_with(set);
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[(u64, u64)]) -> BlockSet {
        ranges.iter().map(|&(start, len)| BlockRange::new(start, len)).collect()
    }

    #[test]
    fn a_newer_choice_moves_blocks_between_what_waits_and_what_is_left() {
        let mut state = Blocks::default();
        state.todo.union_with(&set(&[(0, 100)]));
        state.choose(&set(&[(0, 60)]), true);
        assert_eq!(state.rest, set(&[(60, 40)]));
        // Of 0 to 30 some is sent and some on its way; an old version of 70 to 75 is.
        state.todo.subtract(&set(&[(0, 30)]));
        state.flying = set(&[(20, 10), (70, 5)]);
        assert_eq!(state.partition(), Ok(()));
        state.choose_again(set(&[(0, 40), (65, 20)]));
        assert_eq!(*state.todo.blocks(), set(&[(30, 10), (65, 5), (75, 10)]));
        assert_eq!(state.held, set(&[(70, 5)]), "it waits for the version under way");
        assert_eq!(state.rest, set(&[(40, 25), (85, 15)]));
        assert_eq!(state.partition(), Ok(()));
        // Nothing is lost or doubled, whatever is chosen.
        state.choose_again(BlockSet::new());
        assert!(state.todo.is_empty());
        assert_eq!(state.rest, set(&[(30, 40), (75, 25)]));
    }

    #[test]
    fn a_block_waits_in_one_place_after_a_lost_link_and_a_newer_choice() {
        let mut state = Blocks::default();
        state.todo.union_with(&set(&[(0, 100)]));
        state.choose(&set(&[(0, 60)]), true);
        state.launch(BlockRange::new(0, 10));
        state.arrived(BlockRange::new(0, 10));
        state.launch(BlockRange::new(10, 20));
        // Written while it was in flight, and then the link is gone; more is found to be dirty.
        assert_eq!(state.collect(set(&[(12, 2)])), 2);
        state.lose_link(BlockRange::new(10, 20), false);
        assert_eq!(state.partition(), Ok(()));
        assert_eq!(state.collect(set(&[(20, 1)])), 1);
        assert_eq!(state.unsure, set(&[(10, 2), (14, 6), (21, 9)]));
        // What was sent is written again, and nobody wants it before the handover any more.
        state.choose_again(set(&[(10, 50)]));
        assert_eq!(state.collect(set(&[(4, 4)])), 0);
        state.reopen(&BlockSet::new());
        assert_eq!(state.partition(), Ok(()));
        assert_eq!(state.rest, set(&[(4, 4), (60, 40)]), "what is lost of it is left as well");
        assert_eq!(*state.todo.blocks(), set(&[(0, 4), (8, 52)]));
    }
}
