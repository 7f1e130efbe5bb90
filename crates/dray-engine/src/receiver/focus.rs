//! [`Follow`]: where guests waited, and how far Backfill goes on behind them.
//!
//! Demands that follow each other are a *stream*: a guest that reads a file. What lies behind the last
//! of them comes next, twice as far each time. Several streams are known at once, as reads of several
//! files and single reads come mixed. Where no order knows anything better, a single demand is
//! followed as well.
//!
//! To follow costs a jump there and one back, so it may not go on for ever: all of it takes at most
//! one part in [`SHARE`] of the time that Backfill takes anyway.

use super::fetching::Backfill;
use crate::{MILLISECOND, SECOND};
use dray_types::{BlockRange, ImageIndex};
use std::collections::VecDeque;

/// How far Backfill goes on behind a single demand where nothing better is known, in blocks: 4 MiB,
/// the smallest chunk that heat counts.
const SINGLE: u64 = 1024;
/// How far once demands follow each other, in blocks: 1 MiB, twice as far each time, and 64 MiB at
/// most.
const LEAST: u64 = 256;
const MOST: u64 = 16_384;
/// Demands follow each other over a gap of so many blocks: 64 KiB.
const GAP: u64 = 16;
/// So many places are remembered.
const PLACES: usize = 16;
/// One part in so many of Backfill may be spent on jumps to follow demands.
const SHARE: u64 = 200;
/// So many jumps are few for any Backfill.
const FREE_JUMPS: u64 = 16;
/// What a jump is taken to cost until the source has said it, in nanoseconds: a hard disk's.
const JUMP: u64 = 10 * MILLISECOND;

/// Where a guest waited, and what is fetched behind it.
#[derive(Clone, Copy, Debug)]
struct DemandRange {
    image: ImageIndex,
    from: u64,
    until: u64,
}

impl DemandRange {
    /// Whether a demand at `start` follows the one that this is about.
    fn reaches(&self, image: ImageIndex, start: u64) -> bool {
        let near = self.from.saturating_sub(GAP)..=self.until.saturating_add(GAP);
        self.image == image && near.contains(&start)
    }
}

/// The places, the one of the last demand last; see the module.
pub(super) struct Follow {
    places: VecDeque<DemandRange>,
    /// Backfill goes on at the last of them.
    serves: bool,
    /// Jumps that were made to follow demands, and back.
    jumps: u64,
    /// What one takes, in nanoseconds.
    jump: u64,
}

impl Follow {
    pub(super) fn new() -> Self {
        Self { places: VecDeque::new(), serves: false, jumps: 0, jump: JUMP }
    }

    /// The source has measured what a jump takes, in nanoseconds (I7: longer than a second is none).
    pub(super) fn jump_takes(&mut self, nanos: u64) {
        self.jump = nanos.min(SECOND);
    }

    /// Whether there may be a jump to follow a demand and one back in a Backfill of so many bytes at so
    /// many a second; at a rate that nobody knows there may.
    fn affords(&self, bytes: u64, rate: f64) -> bool {
        let jumps = self.jumps + 2;
        if jumps <= FREE_JUMPS || rate <= 0.0 {
            return true;
        }
        let time = bytes as f64 / rate * SECOND as f64;
        (jumps * self.jump) as f64 <= time / SHARE as f64
    }

    /// Goes on at the place at `at`, if there is enough left of what jumps may take.
    fn go_to(&mut self, at: usize, bytes: u64, rate: f64) -> bool {
        if self.serves && at + 1 == self.places.len() {
            return true;
        }
        if !self.affords(bytes, rate) {
            return false;
        }
        self.jumps += 2;
        self.serves = true;
        let place = self.places.remove(at);
        self.places.extend(place);
        true
    }

    /// Whether a demand at `start` follows one before it.
    pub(super) fn knows(&self, image: ImageIndex, start: u64) -> bool {
        self.places.iter().any(|place| place.reaches(image, start))
    }

    /// A guest waited at a place, for what ends at `end`; `first` blocks are fetched behind a single
    /// demand.
    fn note(&mut self, image: ImageIndex, start: u64, end: u64, first: u64) {
        let known = self.places.iter().rposition(|place| place.reaches(image, start));
        self.serves &= known.is_some_and(|at| at + 1 == self.places.len());
        let span = match known.and_then(|at| self.places.remove(at)) {
            Some(before) => ((before.until - before.from) * 2).clamp(LEAST, MOST),
            None => first,
        };
        if self.places.len() == PLACES {
            self.places.pop_front();
        }
        self.places.push_back(DemandRange { image, from: end, until: end.saturating_add(span) });
    }
}

impl Backfill {
    /// A guest waited for blocks from `start` to `end`: what it reads next is likely what lies behind.
    ///
    /// Where a schedule says what the guest reads, one demand says nothing more and the schedule goes
    /// on; only demands that follow each other, as of a guest that reads a file, are followed. Where
    /// nothing is known each demand is. In address order as such none is.
    pub(super) fn focus_on(&mut self, image: ImageIndex, start: u64, end: u64) {
        if self.ordered {
            let first = if self.left[image.ix()].has_order() { 0 } else { SINGLE };
            self.follow.note(image, start, end, first);
        }
    }

    /// The next place behind a demand; the newest first.
    pub(super) fn followed(&mut self) -> Option<(ImageIndex, BlockRange)> {
        let left = |place: &DemandRange| {
            let next = self.left[place.image.ix()].blocks().next(place.from);
            next.filter(|&block| block < place.until)
        };
        let mut newest = self.follow.places.iter().enumerate().rev();
        let found = newest.find_map(|(at, place)| Some((at, *place, left(place)?)));
        self.follow.serves &= found.is_some();
        let (at, place, block) = found?;
        let (bytes, rate) = (self.bytes, self.window.capacity());
        let goes = self.follow.go_to(at, bytes, rate);
        goes.then(|| (place.image, BlockRange::new(block, place.until - block)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: ImageIndex = ImageIndex(0);
    const GIB: u64 = 1 << 30;
    /// A hundred seconds for a GiB.
    const RATE: f64 = GIB as f64 / 100.0;

    /// Of so many single demands far from each other, how many are followed.
    fn followed(follow: &mut Follow, demands: u64) -> usize {
        let one = |n: &u64| {
            follow.note(IMAGE, n * 10_000, n * 10_000 + 16, SINGLE);
            follow.go_to(follow.places.len() - 1, GIB, RATE)
        };
        (0..demands).filter(one).count()
    }

    #[test]
    fn jumps_take_a_bounded_share_of_the_time() {
        // A two-hundredth of 100 s are 50 jumps of 10 ms.
        assert_eq!(followed(&mut Follow::new(), 1000), 25);
        let mut flash = Follow::new();
        flash.jump_takes(0);
        assert_eq!(followed(&mut flash, 1000), 1000);
        let mut slow = Follow::new();
        slow.jump_takes(u64::MAX);
        assert_eq!(followed(&mut slow, 1000), 8, "the free ones");
    }

    #[test]
    fn a_stream_that_goes_on_costs_no_more_jumps() {
        let mut follow = Follow::new();
        follow.note(IMAGE, 0, 16, 0);
        for n in 1..100 {
            follow.note(IMAGE, n * 16, n * 16 + 16, 0);
            assert!(follow.go_to(0, GIB, RATE));
        }
        assert_eq!((follow.jumps, follow.places.len()), (2, 1));
        assert_eq!(follow.places[0].until, 1600 + MOST);
    }

    #[test]
    fn streams_are_told_apart_from_what_comes_between() {
        let mut follow = Follow::new();
        for n in 0..8 {
            follow.note(IMAGE, n * 4, n * 4 + 4, 0);
            follow.note(IMAGE, (1 << 30) + n * 4, (1 << 30) + n * 4 + 4, 0);
            follow.note(IMAGE, (1 << 40) + n * n * 1_000_003, (1 << 40) + n * n * 1_000_003 + 1, 0);
        }
        let ahead: Vec<_> = follow.places.iter().map(|place| place.until - place.from).collect();
        assert_eq!(ahead.iter().filter(|&&blocks| blocks == MOST).count(), 2);
        assert_eq!(ahead.iter().filter(|&&blocks| blocks == 0).count(), 8);
        (0..100).for_each(|n| follow.note(IMAGE, n << 32, (n << 32) + 1, 0));
        assert_eq!(follow.places.len(), PLACES);
    }
}
