//! Which relations hold between the sets of [`Blocks`], after every verb.
//!
//! * `todo`, `zeros`, `rest`, `unsure` and `mirror` are disjoint: a block waits in one place.
//! * A block in flight waits in none of them but `rest`: two versions of it are never under way at once.
//!   In `rest` a newer version may be left for Backfill.
//! * `held` and `again` are in flight, disjoint, and not in `rest`: a newer version waits in one place.
//! * `rest` has nothing that is chosen, and is empty as long as nobody has chosen.
//! * What is `sent` is `older` as well: the target has some version of it.
//!
//! `sent`, `older` and `overwritten` tell the past, so that a block of theirs may wait again. That a block
//! which is in none of the places, not in flight and not dirty, is equal at the target: the sets cannot
//! say it. The simulator compares the disks.

use super::Blocks;
use dray_types::{BlockSet, Why};

/// A set and its name.
type Named<'a> = (&'static str, &'a BlockSet);

/// The first block that is in both. Leaps over what only one of them has.
fn common(a: &BlockSet, b: &BlockSet) -> Option<u64> {
    let mut at = 0;
    loop {
        let one = a.next(at)?;
        at = b.next(one)?;
        if at == one {
            return Some(at);
        }
    }
}

fn disjoint(a: Named<'_>, b: Named<'_>) -> Result<(), Why> {
    match common(a.1, b.1) {
        Some(block) => Err(format!("block {block} is in {} and in {}", a.0, b.0).into()),
        None => Ok(()),
    }
}

fn within(a: Named<'_>, b: Named<'_>) -> Result<(), Why> {
    match a.1.runs().find(|&run| !b.1.contains_range(run)) {
        Some(run) => Err(format!("{run:?} is in {}, and not all of it in {}", a.0, b.0).into()),
        None => Ok(()),
    }
}

impl Blocks {
    /// Which of the relations of this module does not hold, if any. Looks at every run of every set, so
    /// that only tests and the simulator ask.
    pub(in crate::source) fn partition(&self) -> Result<(), Why> {
        let rest = ("rest", &self.rest);
        let flying = ("flying", &self.flying);
        let (held, again) = (("held", &self.held), ("again", &self.again));
        let places = [
            ("todo", self.todo.blocks()),
            ("zeros", &self.zeros),
            ("unsure", &self.unsure),
            ("mirror", &self.mirror),
        ];
        for (nth, &place) in places.iter().enumerate() {
            disjoint(place, rest)?;
            disjoint(place, flying)?;
            places[nth + 1..].iter().try_for_each(|&other| disjoint(place, other))?;
        }
        for waits in [held, again] {
            within(waits, flying)?;
            disjoint(waits, rest)?;
        }
        disjoint(held, again)?;
        match &self.chosen {
            Some(chosen) => disjoint(rest, ("chosen", chosen))?,
            None => within(rest, ("nothing", &BlockSet::new()))?,
        }
        within(("sent", &self.sent), ("older", &self.older))
    }

    /// How many blocks are in flight.
    pub(in crate::source) fn flying(&self) -> u64 {
        self.flying.len()
    }

    /// Whether a block that is not dirty may differ at the target.
    pub(in crate::source) fn may_differ(&self, block: u64) -> bool {
        let places = [self.todo.blocks(), &self.rest, &self.flying, &self.zeros, &self.unsure];
        places.iter().any(|place| place.contains(block))
    }
}
