//! Where each block of an image stands before handover: the sets, and how blocks move between them.
//!
//! At any moment a block either is equal at the target, or is in `todo`, `rest`, in flight, in
//! `unsure` or dirty in the tracker. Two versions of a block are never in flight at once.

use super::ImageState;
use dray_types::{BlockRange, BlockSet};
use dray_wire::TargetImage;
use dray_wire::frame::mask_bit;

impl ImageState {
    /// Everything but the chosen blocks is left for Backfill.
    pub(super) fn leave(&mut self, chosen: &BlockSet, names_zeros: bool) {
        let mut cold = self.todo.blocks().clone();
        cold.subtract(chosen);
        self.todo.subtract(&cold);
        self.rest.union_with(&cold);
        if !names_zeros {
            let mut cold = self.zeros.clone();
            cold.subtract(chosen);
            self.zeros.subtract(&cold);
            self.rest.union_with(&cold);
        }
        self.chosen = Some(chosen.clone());
    }

    /// Other blocks are chosen: what waits and is not among them is left, what was left and is among
    /// them waits.
    pub(super) fn choose_again(&mut self, chosen: BlockSet) {
        let mut left = self.todo.blocks().clone();
        left.subtract(&chosen);
        self.todo.subtract(&left);
        let mut wanted = std::mem::take(&mut self.rest);
        left.union_with(&wanted);
        left.subtract(&chosen);
        wanted.subtract(&left);
        self.rest = left;
        self.wants(&wanted);
        self.chosen = Some(chosen);
    }

    /// Dirty blocks without those that nobody chose: these are left for Backfill.
    pub(super) fn without_cold(&mut self, mut blocks: BlockSet) -> BlockSet {
        let Some(chosen) = &self.chosen else { return blocks };
        let mut cold = blocks.clone();
        cold.subtract(chosen);
        blocks.subtract(&cold);
        self.zeros.subtract(&cold);
        self.rest.union_with(&cold);
        blocks
    }

    /// A run of data is sent.
    pub(super) fn count(&mut self, range: BlockRange) {
        self.blocks_sent += range.len;
        self.blocks_resent += self.sent.intersection(range).len();
    }

    /// A part of a run is sent: blocks that the mask names.
    pub(super) fn count_part(&mut self, range: BlockRange, part: &[u64; 4]) {
        let block = |nth: &u64| mask_bit(part, *nth);
        for nth in (0..range.len).filter(block) {
            self.count(BlockRange::new(range.start + nth, 1));
        }
    }

    /// A frame with these blocks is on its way.
    pub(super) fn launch(&mut self, range: BlockRange) {
        self.flying.insert(range);
        self.overwritten.union_with(&self.older.intersection(range));
    }

    /// The frame is no longer on its way: what waited for it may go.
    pub(super) fn land(&mut self, range: BlockRange) {
        self.flying.remove(range);
        let free = self.held.intersection(range);
        self.held.subtract(&free);
        self.todo.union_with(&free);
        if !self.again.is_empty() {
            // Not to `todo`: it would come before what was never sent, again and again.
            let free = self.again.intersection(range);
            self.again.subtract(&free);
            self.mirror.union_with(&free);
        }
    }

    /// These blocks must be sent as soon as no older version of them is in flight.
    pub(super) fn wants(&mut self, blocks: &BlockSet) {
        self.zeros.subtract(blocks);
        for run in blocks.runs() {
            self.held.union_with(&self.flying.intersection(run));
            self.todo.union_with(&self.flying.complement_in(run));
        }
    }
}

/// What has to be sent, from the target's first answer and the source's scan.
pub(super) fn begin(
    state: &mut ImageState,
    target: TargetImage,
    whole: BlockRange,
    suspect: Option<&BlockSet>,
) {
    let data = state.data.take().unwrap_or_default();
    let mut have = target.have.intersection(whole);
    state.base = state.base.intersection(whole);
    // What is sent over a replica's block is sent again after a lost link: the target's records say
    // nothing of the younger version that a power cut there may undo.
    state.older = have.clone();
    state.older.union_with(&state.base);
    if let Some(suspect) = suspect {
        // Changed or not since the target received them: they are sent again, holes included.
        for run in suspect.runs() {
            let doubtful = have.intersection(run);
            state.todo.union_with(&doubtful);
            state.in_place.union_with(&doubtful);
        }
        have.subtract(suspect);
    }
    if !state.base.is_empty() {
        // Whole regions count as changed after an unclean stop, and most of each has not.
        state.in_place.insert(whole);
    }
    // What is suspect goes again whatever the replica had: the target may have received it since.
    let mut unshared = data.clone();
    unshared.subtract(&state.base);
    state.todo.union_with(&unshared);
    state.todo.subtract(&have);
    if !target.zeroed {
        state.zeros.insert(whole);
        state.zeros.subtract(&data);
        state.zeros.subtract(&have);
        state.zeros.subtract(&state.base);
        state.zeros.subtract(state.todo.blocks());
    }
    state.sent = have;
}

/// What has to be sent again after a lost link: what was acknowledged and is gone (the target
/// restarted), and what was in flight unless it arrived for the first time.
pub(super) fn reopen(state: &mut ImageState, have: &BlockSet) {
    let mut lost = state.sent.clone();
    lost.subtract(have);
    state.sent.subtract(&lost);
    state.older.subtract(&lost);
    state.todo.union_with(&lost);
    state.todo.union_with(&state.overwritten);
    let mut unsure = std::mem::take(&mut state.unsure);
    for run in unsure.clone().runs() {
        state.sent.union_with(&have.intersection(run));
    }
    // Frames whose acknowledgement was lost too, whatever this side took them for.
    state.older.union_with(have);
    unsure.subtract(have);
    state.todo.union_with(&unsure);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[(u64, u64)]) -> BlockSet {
        ranges.iter().map(|&(start, len)| BlockRange::new(start, len)).collect()
    }

    #[test]
    fn a_newer_choice_moves_blocks_between_what_waits_and_what_is_left() {
        let mut state = ImageState::default();
        state.todo.union_with(&set(&[(0, 100)]));
        state.leave(&set(&[(0, 60)]), true);
        assert_eq!(state.rest, set(&[(60, 40)]));
        // Of 0 to 30 some is sent and some on its way; an old version of 70 to 75 is.
        state.todo.subtract(&set(&[(0, 30)]));
        state.flying = set(&[(20, 10), (70, 5)]);
        state.choose_again(set(&[(0, 40), (65, 20)]));
        assert_eq!(*state.todo.blocks(), set(&[(30, 10), (65, 5), (75, 10)]));
        assert_eq!(state.held, set(&[(70, 5)]), "it waits for the version under way");
        assert_eq!(state.rest, set(&[(40, 25), (85, 15)]));
        // Nothing is lost or doubled, whatever is chosen.
        state.choose_again(BlockSet::new());
        assert!(state.todo.is_empty());
        assert_eq!(state.rest, set(&[(30, 40), (75, 25)]));
    }
}
