//! Collects the guest's writes for the strategy `mirror`, which sends them at once; neighbouring
//! writes are joined until the loop takes them. Nothing depends on this list: the blocks are dirty,
//! and a round of Sync sends those that are left out here or for which the engine has no room.

use super::{Input, SourceLoop};
use dray_engine::SourceEvent;
use dray_image::{Disk, WriteWitness};
use dray_types::{BlockRange, BlockSet, ImageIndex};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// Blocks of an image that may wait for the loop: as many as the engine would queue. The set stays
/// small, so that joining costs the guest's thread little.
const MOST: u64 = dray_engine::strategy::MIRROR_WINDOW / dray_types::BLOCK_SIZE;

/// What waits for the loop.
struct Waiting {
    inputs: Sender<Input>,
    written: Mutex<Vec<BlockSet>>,
}

impl Waiting {
    fn written(&self) -> MutexGuard<'_, Vec<BlockSet>> {
        self.written.lock()
    }
}

struct Witness {
    waiting: Arc<Waiting>,
    image: usize,
}

impl WriteWitness for Witness {
    fn written(&self, range: BlockRange) {
        let mut written = self.waiting.written();
        // The loop was told of what is there already.
        let first = written.iter().all(BlockSet::is_empty);
        if written[self.image].len() < MOST {
            written[self.image].insert(range);
        }
        drop(written);
        if first {
            // A loop that has ended no longer cares.
            let _ = self.waiting.inputs.send(Input::Written);
        }
    }
}

/// The disks that tell; none any more once this is dropped.
pub struct Mirror {
    waiting: Arc<Waiting>,
    disks: Vec<Arc<Disk>>,
}

impl Mirror {
    /// These disks tell from now on.
    pub fn new(inputs: Sender<Input>, disks: impl Iterator<Item = (usize, Arc<Disk>)>) -> Self {
        let disks: Vec<_> = disks.collect();
        let images = disks.last().map_or(0, |(image, _)| image + 1);
        let written = Mutex::new(vec![BlockSet::new(); images]);
        let waiting = Arc::new(Waiting { inputs, written });
        let tell = |(image, disk): (usize, Arc<Disk>)| {
            let witness = Witness { waiting: Arc::clone(&waiting), image };
            disk.set_write_witness(Some(Arc::new(witness)));
            disk
        };
        let disks = disks.into_iter().map(tell).collect();
        Self { waiting, disks }
    }

    fn take(&self) -> Vec<BlockSet> {
        let mut written = self.waiting.written();
        written.iter_mut().map(std::mem::take).collect()
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.disks.iter().for_each(|disk| disk.set_write_witness(None));
    }
}

impl SourceLoop {
    /// The disks tell of what is written, if the strategy sends it on.
    pub(super) fn mirror_if_wanted(&mut self) {
        let options = self.slot.intent().options;
        let wanted = options.is_some_and(|options| options.strategy.traits().mirrors);
        // The one before first: it silences the same disks.
        self.mirror = None;
        let inputs = self.slot.inputs.clone();
        self.mirror = wanted.then(|| Mirror::new(inputs, self.images.disks()));
    }

    /// Tells the engine what was written since the last time.
    pub(super) fn written(&mut self) {
        let Some(mirror) = &self.mirror else { return };
        for (image, set) in mirror.take().into_iter().enumerate() {
            for range in set.runs() {
                self.step(SourceEvent::Written { image: ImageIndex(image as u16), range });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_joined_and_the_loop_is_woken_once() {
        let (inputs, woken) = std::sync::mpsc::channel();
        let written = Mutex::new(vec![BlockSet::new(); 2]);
        let waiting = Arc::new(Waiting { inputs, written });
        let mirror = Mirror { waiting: Arc::clone(&waiting), disks: Vec::new() };
        let witness = |image| Witness { waiting: Arc::clone(&waiting), image };
        witness(0).written(BlockRange::new(5, 2));
        witness(1).written(BlockRange::new(9, 1));
        witness(0).written(BlockRange::new(6, 4));
        assert_eq!(woken.try_iter().count(), 1);
        let taken: Vec<Vec<_>> = mirror.take().iter().map(|set| set.runs().collect()).collect();
        assert_eq!(taken, [vec![BlockRange::new(5, 5)], vec![BlockRange::new(9, 1)]]);
        (0..).take(3 * MOST as usize).for_each(|n| witness(1).written(BlockRange::new(2 * n, 1)));
        assert_eq!(woken.try_iter().count(), 1);
        assert_eq!(mirror.take()[1].len(), MOST, "the rest is left to a round of Sync");
    }
}
