//! The clients of an image that have gone, may come back, and are to be told of lost writes.
//!
//! Each is counted. Who comes and is told stands in for one of them: for one of its own process, if there is one.
//! The others are left for their own processes as long as these run. Nothing tells apart those whose process has
//! ended or is not known (it is on another host, or it came to an earlier agent): whoever comes is one of these.
//! That may be wrong, so one that has heard and was cut off all the same may come back in the place of another
//! one. It is counted too, and whoever may be it is taken for it first; nobody waits for it.

use crate::client::Origin;

/// How many are counted one by one; the rest are one together.
const MANY: usize = 1000;

/// A client that has come, as one that may have been there before.
pub(super) struct Seeker {
    /// Its process, if it is known.
    pub origin: Option<Origin>,
    /// How often clients had gone when it came.
    pub came: u64,
}

/// One that has gone.
struct Absent {
    /// Its process, if it is known.
    origin: Option<Origin>,
    /// How often clients had gone, itself included: it is none of those that came before.
    left: u64,
    /// It is to hear of a loss.
    is_owed: bool,
}

impl Absent {
    fn is_of(&self, process: &Option<Origin>) -> bool {
        self.origin.is_some() && self.origin == *process
    }

    /// Whether it may come by any process.
    fn may_be_any(&self) -> bool {
        self.origin.as_ref().is_none_or(|origin| !origin.runs())
    }
}

/// Those that have gone.
pub(super) struct Absentees {
    all: Vec<Absent>,
    departures: u64,
}

impl Absentees {
    /// Of an image that an earlier process may have served.
    pub(super) fn of_an_earlier_process() -> Self {
        Self { all: vec![Absent { origin: None, left: 0, is_owed: false }], departures: 0 }
    }

    /// How often clients have gone that may come back.
    pub(super) fn departures(&self) -> u64 {
        self.departures
    }

    /// Whether nobody has gone of whom something may be lost.
    pub(super) fn are_none(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether one of them is to hear of a loss.
    pub(super) fn are_owed(&self) -> bool {
        self.all.iter().any(|one| one.is_owed)
    }

    /// What they have written is durable.
    pub(super) fn clear(&mut self) {
        self.all.clear();
    }

    /// What they have written may be lost.
    pub(super) fn lose(&mut self) {
        self.all.iter_mut().for_each(|one| one.is_owed = true);
    }

    /// None of them need hear of anything.
    pub(super) fn forget(&mut self) {
        self.all.iter_mut().for_each(|one| one.is_owed = false);
    }

    /// A client goes. If it comes from the process of one that had gone before, it was that one, unless it
    /// [has returned](Self::returns) as one already.
    pub(super) fn leaves(&mut self, who: &Seeker, has_returned: bool, is_owed: bool) {
        self.departures += 1;
        let left = self.departures;
        let before =
            |one: &&mut Absent| !has_returned && one.left <= who.came && one.is_of(&who.origin);
        if let Some(one) = self.all.iter_mut().find(before) {
            *one = Absent { origin: one.origin.take(), left, is_owed: one.is_owed || is_owed };
            return;
        }
        self.make_room();
        self.all.push(Absent { origin: who.origin.clone(), left, is_owed });
    }

    /// Somebody is owed a loss of whom nothing is known.
    pub(super) fn leaves_somebody(&mut self) {
        self.leaves(&Seeker { origin: None, came: 0 }, false, true);
    }

    /// When there are too many the two newest are one, who comes by any process.
    fn make_room(&mut self) {
        if self.all.len() < MANY {
            return;
        }
        let newest = self.all.pop();
        if let (Some(newest), Some(last)) = (newest, self.all.last_mut()) {
            let is_owed = last.is_owed || newest.is_owed;
            *last = Absent { origin: None, left: newest.left, is_owed };
        }
    }

    /// Whether one that has come may be one of them.
    pub(super) fn may_be(&self, who: &Seeker) -> bool {
        self.find(who).is_some()
    }

    /// One that has come is told of a loss, and one of them that it may be is not waited for any more. False when
    /// it is none of them.
    pub(super) fn returns(&mut self, who: &Seeker) -> bool {
        let found = self.find(who);
        found.map(|place| self.all.remove(place)).is_some()
    }

    /// Which of them it is, as far as one can know. One of its own process comes before any other, and one that
    /// is owed nothing before one that is.
    fn find(&self, who: &Seeker) -> Option<usize> {
        let rank = |one: &Absent| match (one.is_of(&who.origin), one.may_be_any()) {
            _ if one.left > who.came => None,
            (false, false) => None,
            (is_own, _) => Some((!is_own, one.is_owed)),
        };
        let ranked = self.all.iter().enumerate();
        let found = ranked.filter_map(|(place, one)| Some((rank(one)?, place))).min();
        found.map(|(_, place)| place)
    }
}
