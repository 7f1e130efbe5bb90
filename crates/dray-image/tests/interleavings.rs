//! Gate, tracker and missing map in every order of steps that a scheduler comes up with.
//!
//! The sources are compiled here a second time, against the scheduler's atomics, locks and
//! threads. A failing schedule is printed with what it takes to replay it.

#![allow(dead_code, missing_docs, unreachable_pub)]

#[path = "../src/blockmap.rs"]
mod blockmap;
#[path = "../src/gate.rs"]
mod gate;
#[path = "../src/missing.rs"]
mod missing;
#[path = "../src/stripes.rs"]
mod stripes;
#[path = "../src/tracker.rs"]
mod tracker;
#[path = "../src/unrecorded.rs"]
mod unrecorded;
#[path = "../src/waiters.rs"]
mod waiters;

mod sync {
    pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
    pub use shuttle::thread;
    pub use std::sync::{Arc, OnceLock};

    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Another shard at every call, so that counters are spread.
    pub fn shard(count: usize) -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % count
    }
}

mod disk {
    pub use dray_image::{Fetcher, Fill, IntentLog, PresentLog};
}

use disk::{Fetcher, Fill, IntentLog, PresentLog};
use dray_image::{Attempt, Error, ErrorKind, Extent, Geometry, Image, Result, ZeroMode};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use missing::{Missing, Touched};
use shuttle::Runner;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use shuttle::thread;
use std::sync::Arc;
use std::time::Duration;

/// Schedules tried by each test, half at random and half with few, well-placed switches.
const SCHEDULES: usize = 3000;
/// Switches in the second half: enough for every known bug of this kind.
const SWITCHES: usize = 3;
/// Stack of each simulated thread: a leaf of simulated atomics is built on it.
const STACK: usize = 1 << 20;
/// Time does not pass here.
const FOREVER: Duration = Duration::from_secs(3600);

fn explore(test: impl Fn() + Send + Sync + Copy + 'static) {
    let config = || {
        let mut config = shuttle::Config::new();
        config.stack_size = STACK;
        config
    };
    let random = RandomScheduler::new(SCHEDULES / 2);
    Runner::new(random, config()).run(test);
    Runner::new(PctScheduler::new(SWITCHES, SCHEDULES / 2), config()).run(test);
}

fn block(number: u64) -> BlockRange {
    BlockRange::new(number, 1)
}

#[test]
fn while_quiesced_nothing_is_in_flight_and_nothing_begins() {
    explore(|| {
        let gate = gate::Gate::new();
        let in_flight = Arc::new(AtomicUsize::new(0));
        let writers: Vec<_> = (0..2)
            .map(|_| {
                let (gate, in_flight) = (Arc::clone(&gate), Arc::clone(&in_flight));
                thread::spawn(move || {
                    for _ in 0..2 {
                        let pass = gate.enter().unwrap();
                        in_flight.fetch_add(1, Ordering::SeqCst);
                        thread::yield_now();
                        in_flight.fetch_sub(1, Ordering::SeqCst);
                        drop(pass);
                    }
                })
            })
            .collect();
        for _ in 0..2 {
            let quiesced = gate.quiesce(FOREVER).unwrap();
            for _ in 0..3 {
                assert_eq!(in_flight.load(Ordering::SeqCst), 0, "a write in flight");
                thread::yield_now();
            }
            drop(quiesced);
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
}

#[test]
fn what_waits_at_a_parked_gate_goes_on_or_fails_and_is_never_forgotten() {
    explore(|| {
        let gate = gate::Gate::new();
        let io: Vec<_> = [true, false]
            .into_iter()
            .map(|write| {
                let gate = Arc::clone(&gate);
                thread::spawn(move || {
                    if write { gate.enter().map(drop).is_ok() } else { gate.enter_read().is_ok() }
                })
            })
            .collect();
        gate.park(gate.quiesce(FOREVER).unwrap());
        assert!(gate.is_parked() && gate.try_enter().is_none());
        assert!(gate.fail());
        gate.unpark();
        let _outcomes: Vec<bool> = io.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(gate.enter().is_ok());
    });
}

/// A disk of a few blocks, each one number.
struct Numbers([AtomicU64; 4]);

impl Numbers {
    fn new() -> Arc<Self> {
        Arc::new(Self(std::array::from_fn(|_| AtomicU64::new(0))))
    }

    fn get(&self, block: u64) -> u64 {
        self.0[block as usize].load(Ordering::SeqCst)
    }

    fn put(&self, block: u64, value: u64) {
        self.0[block as usize].store(value, Ordering::SeqCst);
    }
}

/// Writers write while a copier copies what it takes; whatever is clean in the end is equal.
fn copy_race(tracking_starts_late: bool) {
    let tracker = tracker::Tracker::new(64);
    let (source, target) = (Numbers::new(), Numbers::new());
    if !tracking_starts_late {
        tracker.start(None);
    }
    let writers: Vec<_> = (1..3u64)
        .map(|value| {
            let (tracker, source) = (Arc::clone(&tracker), Arc::clone(&source));
            thread::spawn(move || {
                for number in [0, value] {
                    let marked = tracker.begin(block(number)).unwrap();
                    thread::yield_now();
                    source.put(number, value);
                    marked.complete().unwrap();
                }
            })
        })
        .collect();
    if tracking_starts_late {
        tracker.start(None);
    }
    for number in 0..4 {
        tracker.clear(block(number));
        target.put(number, source.get(number));
    }
    for lost in [true, false] {
        let taken = tracker.take(0, 2);
        for run in taken.runs() {
            (run.start..run.end()).for_each(|number| target.put(number, source.get(number)));
        }
        if !lost {
            taken.accept();
        }
    }
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    let dirty = tracker.snapshot();
    assert_eq!(tracker.count(), dirty.len());
    for number in 0..4 {
        let equal = source.get(number) == target.get(number);
        assert!(equal || dirty.contains(number), "block {number} differs and is clean");
    }
}

#[test]
fn a_clean_block_is_equal() {
    explore(|| copy_race(false));
}

#[test]
fn a_write_in_flight_when_tracking_starts_is_not_missed() {
    explore(|| copy_race(true));
}

#[derive(Default)]
struct Intents {
    calls: AtomicUsize,
    durable: AtomicBool,
}

impl IntentLog for Intents {
    fn open_region(&self, _region: u64) -> Result<()> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        thread::yield_now();
        self.durable.store(true, Ordering::SeqCst);
        Ok(())
    }
}

#[test]
fn nobody_writes_into_a_region_before_its_intent_is_durable() {
    explore(|| {
        let tracker = tracker::Tracker::new(64);
        let log = Arc::new(Intents::default());
        tracker.start(Some(Arc::clone(&log) as _));
        let writers: Vec<_> = (0..3)
            .map(|number| {
                let (tracker, log) = (Arc::clone(&tracker), Arc::clone(&log));
                thread::spawn(move || {
                    let marked = tracker.begin(block(number)).unwrap();
                    assert!(log.durable.load(Ordering::SeqCst), "written too early");
                    marked.complete().unwrap();
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        assert_eq!(log.calls.load(Ordering::SeqCst), 1);
    });
}

/// What is durable of one region: open, and a set of blocks that were written.
#[derive(Default)]
struct Durable(shuttle::sync::Mutex<(bool, BlockSet)>);

impl IntentLog for Durable {
    fn open_region(&self, _region: u64) -> Result<()> {
        self.0.lock().unwrap().0 = true;
        Ok(())
    }
}

#[test]
fn a_write_is_named_or_its_region_is_open_whoever_closes_it_meanwhile() {
    explore(|| {
        let tracker = tracker::Tracker::new(64);
        let log = Arc::new(Durable::default());
        tracker.start(Some(Arc::clone(&log) as _));
        let writers: Vec<_> = (0..2)
            .map(|number| {
                let (tracker, log) = (Arc::clone(&tracker), Arc::clone(&log));
                thread::spawn(move || {
                    let marked = match tracker.try_begin(block(number)) {
                        Some(marked) => marked,
                        None => tracker.begin(block(number)).unwrap(),
                    };
                    // The write is under way: a crash from here on must know of it.
                    let durable = log.0.lock().unwrap();
                    assert!(durable.0 || durable.1.contains(number), "block {number} is forgotten");
                    drop(durable);
                    marked.complete().unwrap();
                })
            })
            .collect();
        let closer = {
            let (tracker, log) = (Arc::clone(&tracker), Arc::clone(&log));
            thread::spawn(move || {
                for _ in 0..3 {
                    let mut durable = log.0.lock().unwrap();
                    let closed = tracker.close_idle();
                    durable.1 = tracker.snapshot();
                    durable.0 &= closed.is_empty();
                }
            })
        };
        writers.into_iter().chain([closer]).for_each(|thread| thread.join().unwrap());
    });
}

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

#[test]
fn a_gate_that_is_shut_lets_nothing_pass_whoever_lets_go_of_it() {
    explore(|| {
        let gate = gate::Gate::new();
        let shut = Arc::new(AtomicBool::new(false));
        let io: Vec<_> = (0..3)
            .map(|kind| {
                let (gate, shut) = (Arc::clone(&gate), Arc::clone(&shut));
                thread::spawn(move || {
                    let before = shut.load(Ordering::SeqCst);
                    let pass = match kind {
                        0 => Some(gate.enter().unwrap()),
                        1 => gate.enter_read().map(|_| None).unwrap(),
                        _ => gate.enter_flush().map(|_| None).unwrap(),
                    };
                    let after = shut.load(Ordering::SeqCst);
                    assert!(!before || !after, "passed a gate that was shut all the time");
                    drop(pass);
                })
            })
            .collect();
        let mut quiesced = gate.quiesce(FOREVER).unwrap();
        quiesced.keep();
        drop(quiesced);
        shut.store(true, Ordering::SeqCst);
        gate.unpark();
        drop(gate.quiesce(FOREVER).unwrap());
        assert!(gate.try_enter().is_none());
        shut.store(false, Ordering::SeqCst);
        gate.unshut();
        io.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(gate.try_enter().is_some());
    });
}
