//! What the next process of an image tells of a loss, and which notes of blocks it believes.

use super::*;
use crate::needs::PresentLog;
use crate::unrecorded::Unrecorded;
use dray_types::{BlockRange, BlockSet};

/// Which blocks are present.
#[derive(Default)]
struct Present {
    recorded: Mutex<BlockSet>,
    noted: Mutex<BlockSet>,
    stuck: AtomicBool,
}

impl PresentLog for Present {
    fn record(&self, present: &BlockSet) -> Result<()> {
        self.recorded.lock().union_with(present);
        self.noted.lock().subtract(present);
        Ok(())
    }

    fn note(&self, run: BlockRange) -> Result<()> {
        self.noted.lock().insert(run);
        Ok(())
    }

    fn forget_notes(&self) -> Result<()> {
        if self.stuck.load(Ordering::SeqCst) {
            return lost();
        }
        *self.noted.lock() = BlockSet::new();
        Ok(())
    }
}

/// A process that serves an image to which blocks come.
struct Process<'a> {
    back: WriteBack,
    unrecorded: Unrecorded,
    present: &'a Present,
}

impl<'a> Process<'a> {
    fn start(losses: &Arc<Written>, present: &'a Present) -> Self {
        let (back, unrecorded) = (WriteBack::default(), Unrecorded::new(8));
        back.keep(Arc::clone(losses) as _, &Past::owing(losses.0.lock().clone()));
        if unrecorded.inherit(&present.noted.lock(), back.error()) {
            back.notes_begin_anew();
        }
        Self { back, unrecorded, present }
    }

    fn add(&self, block: u64) -> Result<()> {
        self.unrecorded.add(Some(self.present), BlockRange::new(block, 1))
    }

    fn flush(&self, sync: fn() -> Result<()>) -> Result<()> {
        let sync = || self.back.guest(Path::new("disk"), sync);
        self.unrecorded.record("flushing", Some(self.present), |_| sync())
    }
}

fn blocks(blocks: &[u64]) -> BlockSet {
    blocks.iter().map(|&block| BlockRange::new(block, 1)).collect()
}

#[test]
fn a_restart_tells_a_loss_once_and_the_image_is_usable() {
    let (losses, present) = (Arc::new(Written::default()), Present::default());
    let start = || Process::start(&losses, &present);
    let first = start();
    first.add(1).unwrap();
    first.flush(lost).unwrap_err();
    first.add(2).unwrap_err();
    let second = start();
    second.add(3).unwrap();
    let told = second.flush(|| Ok(())).unwrap_err();
    assert!(told.is_earlier_loss() && told.to_string().contains("the pool is full"), "{told}");
    assert_eq!(*present.recorded.lock(), blocks(&[3]), "it was durable");
    second.unrecorded.check_usable("writing").unwrap();
    second.add(4).unwrap();
    second.flush(|| Ok(())).unwrap();
    assert_eq!(*present.recorded.lock(), blocks(&[3, 4]));
    assert!(losses.0.lock().is_none());
    start().flush(|| Ok(())).unwrap();
    // What fails now is no earlier loss, whatever there was before.
    second.flush(lost).unwrap_err();
    let third = start();
    third.back.own(Path::new("disk"), lost).unwrap_err();
    assert!(!third.flush(|| Ok(())).unwrap_err().is_earlier_loss());
    third.add(5).unwrap_err();
}

/// The guest has not flushed yet when its host's agent is restarted a second time.
#[test]
fn right_notes_of_a_later_process_are_believed_before_the_guest_was_told() {
    let (losses, present) = (Arc::new(Written::default()), Present::default());
    let start = || Process::start(&losses, &present);
    start().flush(lost).unwrap_err();
    start().add(1).unwrap();
    let third = start();
    assert!(third.back.error().is_some_and(|loss| !loss.told));
    third.unrecorded.check_usable("writing").unwrap();
    assert!(third.flush(|| Ok(())).unwrap_err().is_earlier_loss());
    assert_eq!(*present.recorded.lock(), blocks(&[1]));
}

#[test]
fn notes_that_a_failed_sync_has_left_behind_are_not_believed() {
    let (losses, present) = (Arc::new(Written::default()), Present::default());
    let start = || Process::start(&losses, &present);
    let first = start();
    first.add(1).unwrap();
    present.stuck.store(true, Ordering::SeqCst);
    first.flush(lost).unwrap_err();
    present.stuck.store(false, Ordering::SeqCst);
    let second = start();
    second.add(2).unwrap_err();
    let own = || second.back.own(Path::new("disk"), || Ok(()));
    second.unrecorded.record("a checkpoint", Some(&present), |_| own()).unwrap_err();
    assert_eq!(*present.noted.lock(), BlockSet::new());
    let third = start();
    third.add(2).unwrap();
    third.flush(|| Ok(())).unwrap_err();
    third.flush(|| Ok(())).unwrap();
    assert_eq!(*present.recorded.lock(), blocks(&[2]));
}

#[test]
fn notes_of_a_process_that_lost_nothing_are_believed() {
    let (losses, present) = (Arc::new(Written::default()), Present::default());
    let start = || Process::start(&losses, &present);
    start().flush(lost).unwrap_err();
    let second = start();
    second.flush(|| Ok(())).unwrap_err();
    second.add(1).unwrap();
    // Killed: what it told may not have been heard.
    let third = start();
    third.add(2).unwrap();
    let told = third.flush(|| Ok(())).unwrap_err();
    assert_eq!(told.to_string().matches(EARLIER).count(), 1, "{told}");
    third.flush(|| Ok(())).unwrap();
    assert_eq!(*present.recorded.lock(), blocks(&[1, 2]));
    assert!(losses.0.lock().is_none());
}
