//! [`Watched`]: demands are held against the schedule, and it is passed over where they do not fit.

use super::fetching::Backfill;
use crate::watch::{Lags, Watch};
use dray_types::ImageIndex;

/// Lags are found anew when so much of the image has moved, in 1/65,536: a 256th. To find them takes
/// time in proportion to the pieces of the schedule.
const STALE: u64 = 256;

/// What is known of one image.
#[derive(Clone, Default)]
pub(super) struct Watched {
    watch: Watch,
    /// The lags, and how far the round was when they were found.
    lags: Option<(u64, Lags)>,
}

impl Watched {
    /// There is another order. What the guest reads is as before.
    pub(super) fn forget_order(&mut self) {
        self.lags = None;
    }
}

impl Backfill {
    /// A guest waits for `block`. Demands that follow each other are one reader, whom Backfill follows
    /// in any order: only the first of them counts.
    pub(super) fn watch(&mut self, image: ImageIndex, block: u64) {
        let left = &mut self.left[image.ix()];
        // Of what is on its way the order has been decided.
        if !left.has_order() || !left.blocks().contains(block) || self.follow.knows(image, block) {
            return;
        }
        let watched = &mut self.watched[image.ix()];
        let progress = left.progress();
        let fresh = |&(then, _): &(u64, Lags)| progress.abs_diff(then) < STALE;
        if !watched.lags.as_ref().is_some_and(fresh) {
            watched.lags = Some((progress, left.lags()));
        }
        let Some((_, lags)) = &watched.lags else { return };
        watched.watch.note(lags.of(block), lags.gain());
        left.pass_over(!watched.watch.holds());
    }
}
