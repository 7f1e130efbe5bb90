//! Which block is next: the place where schedules plug in.

use dray_types::{BlockRange, BlockSet, ImageIndex};

/// Chooses the next run to move out of those that are waiting.
pub trait Order {
    /// The next run of at most `max` blocks out of `waiting`, or none when nothing waits.
    fn next(&mut self, image: ImageIndex, waiting: &BlockSet, max: u64) -> Option<BlockRange>;
}

/// Address order: what every block mover does, and the one to beat.
#[derive(Default, Debug)]
pub struct Sequential;

impl Order for Sequential {
    fn next(&mut self, _image: ImageIndex, waiting: &BlockSet, max: u64) -> Option<BlockRange> {
        waiting.next_run(0, max)
    }
}
