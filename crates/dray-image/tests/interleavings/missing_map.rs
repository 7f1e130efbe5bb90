//! The missing map: guests write and read, blocks arrive, syncs fail.

use crate::missing::{Missing, Touched};
use crate::needs::{Fetcher, Fill, PresentLog};
use crate::{Numbers, block, explore};
use dray_image::{Error, ErrorKind, Extent, Geometry, Image, Result, ZeroMode};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shuttle::thread;
use std::sync::Arc;

/// What the source has in every block, and what the guest writes.
const OLD: u64 = 7;
const NEW: u64 = 9;

struct Backing {
    live: Arc<Numbers>,
    durable: Numbers,
    /// The next flush fails, and what it should have made durable is lost.
    fails: AtomicBool,
    lost: Numbers,
}

impl Image for Backing {
    fn geometry(&self) -> Geometry {
        Geometry { len: 4 * BLOCK_SIZE, min_block: 1, preferred_block: 4096, read_only: false }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        buf[0] = self.live.get(offset / BLOCK_SIZE) as u8;
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64, _fua: bool) -> Result<()> {
        for (nth, data) in data.chunks(BLOCK_SIZE as usize).enumerate() {
            self.live.put(offset / BLOCK_SIZE + nth as u64, u64::from(data[0]));
        }
        Ok(())
    }

    fn zero(&self, _: u64, _: u64, _: ZeroMode, _: bool) -> Result<()> {
        Err(Error::new(ErrorKind::Io, "zeroing", "not here"))
    }

    fn discard(&self, _: u64, _: u64, _: bool) -> Result<()> {
        Err(Error::new(ErrorKind::Io, "discarding", "not here"))
    }

    fn flush(&self) -> Result<()> {
        let copy: Vec<u64> = (0..4).map(|number| self.live.get(number)).collect();
        if self.fails.swap(false, Ordering::SeqCst) {
            let lost = |(n, &value): (usize, &u64)| self.lost.put(n as u64, value);
            copy.iter().enumerate().for_each(lost);
            thread::yield_now();
            return Err(Error::new(ErrorKind::Io, "flushing", "the device failed"));
        }
        copy.into_iter().enumerate().for_each(|(n, value)| self.durable.put(n as u64, value));
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.flush()
    }

    fn extents(&self, _: u64, _: u64, _: usize) -> Result<Vec<Extent>> {
        Ok(Vec::new())
    }
}

/// Notes the block asked for; checks that no record comes before its data.
struct Source {
    asked: AtomicU64,
    backing: Arc<Backing>,
    recorded: Numbers,
    noted: shuttle::sync::Mutex<BlockSet>,
}

impl Fetcher for Source {
    fn demand(&self, range: BlockRange) {
        self.asked.fetch_add(range.len, Ordering::SeqCst);
    }

    fn peek(&self, _: u64, _: &mut [u8]) -> Result<()> {
        Ok(())
    }
}

impl PresentLog for Source {
    fn note(&self, run: BlockRange) -> Result<()> {
        self.noted.lock().unwrap().insert(run);
        Ok(())
    }

    fn record(&self, present: &BlockSet) -> Result<()> {
        for run in present.runs() {
            for number in run.start..run.end() {
                assert_ne!(self.backing.durable.get(number), 0, "recorded before its data");
                self.recorded.put(number, 1);
            }
        }
        Ok(())
    }

    fn forget_notes(&self) -> Result<()> {
        *self.noted.lock().unwrap() = BlockSet::new();
        Ok(())
    }
}

fn numbers() -> Numbers {
    Numbers(std::array::from_fn(|_| AtomicU64::new(0)))
}

fn incoming() -> (Arc<Missing>, Arc<Backing>, Arc<Source>) {
    let (durable, lost) = (numbers(), numbers());
    let fails = AtomicBool::new(false);
    let backing = Arc::new(Backing { live: Numbers::new(), durable, fails, lost });
    let source = Arc::new(Source {
        asked: AtomicU64::new(0),
        backing: Arc::clone(&backing),
        recorded: numbers(),
        noted: shuttle::sync::Mutex::new(BlockSet::new()),
    });
    let missing = Arc::new(Missing::new(Arc::clone(&backing) as _));
    let all: BlockSet = [BlockRange::new(0, 4)].into_iter().collect();
    missing.begin(&all, &BlockSet::new(), Arc::clone(&source) as _, Arc::clone(&source) as _);
    (missing, backing, source)
}

#[test]
fn a_guests_write_wins_over_the_fill_and_is_recorded_before_its_flush_returns() {
    explore(|| {
        let (missing, backing, source) = incoming();
        let touched = Touched::new(BLOCK_SIZE, BLOCK_SIZE, 4 * BLOCK_SIZE);
        let writer = thread::spawn({
            let (missing, backing, source) =
                (Arc::clone(&missing), Arc::clone(&backing), Arc::clone(&source));
            move || {
                let data = [NEW as u8; BLOCK_SIZE as usize];
                missing.overwrite(touched, || backing.write_at(&data, BLOCK_SIZE, false)).unwrap();
                missing.checkpoint().unwrap();
                assert_eq!(backing.durable.get(1), NEW, "flushed and not durable");
                assert_eq!(source.recorded.get(1), 1, "flushed and not recorded");
            }
        });
        let reader = thread::spawn({
            let (missing, backing) = (Arc::clone(&missing), Arc::clone(&backing));
            move || {
                missing.wait(BlockRange::new(1, 2)).unwrap();
                let (one, two) = (backing.live.get(1), backing.live.get(2));
                assert!((one == OLD || one == NEW) && two == OLD, "read {one} {two}");
            }
        });
        let flusher = thread::spawn({
            let missing = Arc::clone(&missing);
            move || missing.checkpoint().unwrap()
        });
        let old = [OLD as u8; 4 * BLOCK_SIZE as usize];
        missing.fill(BlockRange::new(0, 4), Fill::Data(&old)).unwrap();
        [writer, reader, flusher].into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(backing.live.get(1), NEW, "a fill replaced what the guest wrote");
        missing.checkpoint().unwrap();
        assert!(missing.is_over());
        assert!((0..4).all(|number| source.recorded.get(number) == 1));
    });
}

#[test]
fn told_to_fail_a_waiting_read_ends_whatever_else_happens() {
    explore(|| {
        let (missing, _, source) = incoming();
        let reader = thread::spawn({
            let missing = Arc::clone(&missing);
            move || missing.wait(block(2))
        });
        missing.set_failed(true);
        if let Ok(waited) = reader.join().unwrap() {
            panic!("read a missing block, waited: {waited}");
        }
        assert!(source.asked.load(Ordering::SeqCst) <= 1);
        assert!(missing.waiting().is_empty());
    });
}

#[test]
fn what_a_failed_sync_may_have_lost_is_not_believed_afterwards() {
    explore(|| {
        let (missing, backing, source) = incoming();
        let writers: Vec<_> = (0..2)
            .map(|number| {
                let (missing, backing) = (Arc::clone(&missing), Arc::clone(&backing));
                thread::spawn(move || {
                    let at = number * BLOCK_SIZE;
                    let touched = Touched::new(at, BLOCK_SIZE, 4 * BLOCK_SIZE);
                    let data = [NEW as u8; BLOCK_SIZE as usize];
                    missing.overwrite(touched, || backing.write_at(&data, at, false)).is_ok()
                })
            })
            .collect();
        backing.fails.store(true, Ordering::SeqCst);
        missing.flush().unwrap_err();
        missing.checkpoint().unwrap_err();
        let done: Vec<bool> = writers.into_iter().map(|thread| thread.join().unwrap()).collect();
        let noted = source.noted.lock().unwrap();
        for (number, done) in (0..).zip(done) {
            let lost = backing.lost.get(number) == NEW;
            assert!(!lost || !noted.contains(number), "block {number} is lost and believed");
            assert_eq!(source.recorded.get(number), 0, "recorded after a failed sync");
            assert!(done || !noted.contains(number), "refused and noted");
        }
    });
}
