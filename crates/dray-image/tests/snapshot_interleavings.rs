//! A snapshot's reader and a guest's changes in every order of steps that a scheduler comes up with.
//!
//! As in `interleavings.rs` the sources are compiled a second time, against the scheduler's atomics,
//! locks and threads.

#![allow(dead_code, missing_docs, unreachable_pub)]

#[path = "../src/blockmap.rs"]
mod blockmap;
#[path = "../src/snapshot/mod.rs"]
mod snapshot;
#[path = "../src/unpoisoned.rs"]
mod unpoisoned;

mod sync {
    pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
    pub use std::sync::{Arc, OnceLock};
}

use dray_image::{Error, ErrorKind, Extent, ExtentKind, Geometry, Image, Result, ZeroMode, runs};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use shuttle::Runner;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::atomic::{AtomicU8, Ordering};
use shuttle::thread;
use snapshot::{Keeper, Snapshot, Spill};
use std::sync::Arc;

const SCHEDULES: usize = 4000;
const SWITCHES: usize = 3;
/// Stack of each simulated thread: a leaf of simulated atomics is built on it.
const STACK: usize = 1 << 20;
const BLOCKS: usize = 3;
const LEN: u64 = BLOCKS as u64 * BLOCK_SIZE;
/// What the blocks hold at the moment; the last is a hole.
const OLD: [u8; BLOCKS] = [7, 8, 0];

fn explore(test: impl Fn() + Send + Sync + Copy + 'static) {
    let config = || {
        let mut config = shuttle::Config::new();
        config.stack_size = STACK;
        config
    };
    Runner::new(RandomScheduler::new(SCHEDULES / 2), config()).run(test);
    Runner::new(PctScheduler::new(SWITCHES, SCHEDULES / 2), config()).run(test);
}

/// Blocks of one number each; a request touches them one after the other.
struct Numbers([AtomicU8; BLOCKS]);

impl Numbers {
    fn new(values: [u8; BLOCKS]) -> Arc<Self> {
        Arc::new(Self(values.map(AtomicU8::new)))
    }

    fn get(&self, nth: usize) -> u8 {
        self.0[nth].load(Ordering::SeqCst)
    }

    fn put(&self, nth: usize, value: u8) {
        self.0[nth].store(value, Ordering::SeqCst);
    }

    fn fill(&self, first: u64, buf: &mut [u8]) {
        for (nth, block) in (first as usize..).zip(buf.chunks_mut(BLOCK_SIZE as usize)) {
            let value = self.get(nth);
            block.fill(value);
            thread::yield_now();
        }
    }

    fn take(&self, first: u64, data: &[u8]) {
        for (nth, block) in (first as usize..).zip(data.chunks(BLOCK_SIZE as usize)) {
            self.put(nth, block[0]);
            thread::yield_now();
        }
    }
}

/// The image: a block is a hole as long as it holds zero.
struct Backing(Arc<Numbers>);

impl Image for Backing {
    fn geometry(&self) -> Geometry {
        Geometry { len: LEN, min_block: 1, preferred_block: 4096, read_only: false }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.0.fill(offset / BLOCK_SIZE, buf);
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64, _fua: bool) -> Result<()> {
        self.0.take(offset / BLOCK_SIZE, data);
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64, _: ZeroMode, _: bool) -> Result<()> {
        self.0.take(offset / BLOCK_SIZE, &vec![0; len as usize]);
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.zero(offset, len, ZeroMode::MayUnmap, fua)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.flush()
    }

    fn extents(&self, offset: u64, len: u64, _: usize) -> Result<Vec<Extent>> {
        let kind = |nth: u64| match self.0.get(nth as usize) {
            0 => ExtentKind::Hole,
            _ => ExtentKind::Data,
        };
        let blocks = offset / BLOCK_SIZE..(offset + len).div_ceil(BLOCK_SIZE);
        Ok(blocks.map(|nth| Extent { len: BLOCK_SIZE, kind: kind(nth) }).collect())
    }
}

/// Keeps numbers, or fails at the first one.
struct Aside {
    kept: Arc<Numbers>,
    fails: bool,
}

impl Spill for Aside {
    fn keep(&self, run: BlockRange, data: &[u8]) -> Result<()> {
        if self.fails {
            return Err(Error::new(ErrorKind::NoSpace, "keeping", "full"));
        }
        self.kept.take(run.start, data);
        Ok(())
    }

    fn read(&self, run: BlockRange, buf: &mut [u8]) -> Result<()> {
        self.kept.fill(run.start, buf);
        Ok(())
    }

    fn forget(&self, run: BlockRange) {
        self.kept.take(run.start, &vec![0; run.byte_len() as usize]);
    }
}

struct Stage {
    live: Arc<Numbers>,
    image: Arc<Backing>,
    keeper: Arc<Keeper>,
}

fn all() -> BlockSet {
    [BlockRange::new(0, BLOCKS as u64)].into_iter().collect()
}

fn stage() -> Stage {
    let live = Numbers::new(OLD);
    let image = Arc::new(Backing(Arc::clone(&live)));
    Stage { live, keeper: Keeper::new(Arc::clone(&image) as _), image }
}

impl Stage {
    fn snapshot(&self, wanted: &BlockSet, fails: bool) -> Snapshot {
        let kept = Numbers::new([0; BLOCKS]);
        let prepared = self.keeper.prepare(wanted, Box::new(Aside { kept, fails })).unwrap();
        prepared.arm(&BlockSet::new())
    }

    /// A guest that writes each run with its number, one after the other.
    fn guest(&self, writes: &'static [(u64, u64, u8)]) -> thread::JoinHandle<()> {
        let (keeper, image) = (Arc::clone(&self.keeper), Arc::clone(&self.image));
        thread::spawn(move || {
            for &(start, len, value) in writes {
                let run = BlockRange::new(start, len);
                keeper.before_change(run);
                let data = vec![value; run.byte_len() as usize];
                image.write_at(&data, run.byte_offset(), false).unwrap();
            }
        })
    }
}

/// Reads everything as a backup does: holes, then runs of up to two blocks.
fn read_all(snapshot: &Snapshot) -> Result<Vec<u8>> {
    let mut seen = vec![0; BLOCKS];
    snapshot.take_holes(BlockRange::new(0, BLOCKS as u64))?;
    let unread = snapshot.unread();
    for run in unread.runs_up_to(2) {
        let mut buf = vec![0; run.byte_len() as usize];
        snapshot.read(run, &mut buf)?;
        for (nth, block) in (run.start as usize..).zip(buf.chunks(BLOCK_SIZE as usize)) {
            seen[nth] = block[0];
        }
    }
    Ok(seen)
}

#[test]
fn a_reader_sees_the_moment_whoever_writes_and_the_guests_writes_stay() {
    explore(|| {
        let stage = stage();
        let snapshot = stage.snapshot(&all(), false);
        // The second writes a block that the first writes as well, and one more.
        let guests = [stage.guest(&[(0, 1, 21), (2, 1, 22)]), stage.guest(&[(0, 2, 23)])];
        assert_eq!(read_all(&snapshot).unwrap(), OLD);
        guests.into_iter().for_each(|guest| guest.join().unwrap());
        assert!(snapshot.unread().is_empty());
        assert!([21, 23].contains(&stage.live.get(0)));
        assert_eq!((stage.live.get(1), stage.live.get(2)), (23, 22));
    });
}

#[test]
fn what_cannot_be_kept_fails_the_snapshot_or_came_too_late_to_matter() {
    explore(|| {
        let stage = stage();
        let snapshot = stage.snapshot(&all(), true);
        let guests = [stage.guest(&[(0, 1, 21)]), stage.guest(&[(1, 1, 22)])];
        match read_all(&snapshot) {
            Ok(seen) => assert_eq!(seen, OLD),
            Err(why) => assert_eq!(why.kind, ErrorKind::NoSpace, "{why}"),
        }
        guests.into_iter().for_each(|guest| guest.join().unwrap());
        assert_eq!((stage.live.get(0), stage.live.get(1)), (21, 22), "a guest's write was lost");
    });
}

#[test]
fn a_snapshot_that_ends_in_the_middle_of_a_write_leaves_nothing_to_the_next() {
    explore(|| {
        let stage = stage();
        let first = stage.snapshot(&all(), false);
        let guest = stage.guest(&[(0, 2, 21)]);
        drop(first);
        // The next is made ready while the write is under way, and its moment comes after it.
        let kept = Numbers::new([0; BLOCKS]);
        let next = stage.keeper.prepare(&all(), Box::new(Aside { kept, fails: false })).unwrap();
        guest.join().unwrap();
        let next = next.arm(&BlockSet::new());
        let guest = stage.guest(&[(1, 1, 23)]);
        assert_eq!(read_all(&next).unwrap(), [21, 21, 0]);
        guest.join().unwrap();
        assert_eq!(stage.live.get(1), 23);
    });
}
