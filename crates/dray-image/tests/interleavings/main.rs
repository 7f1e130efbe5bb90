//! Gate, tracker and missing map in every order of steps that a scheduler comes up with.
//!
//! The sources are compiled here a second time, against the scheduler's atomics, locks and
//! threads. A failing schedule is printed with what it takes to replay it.

#![allow(dead_code, missing_docs, unreachable_pub)]

#[path = "../../src/blockmap.rs"]
mod blockmap;
#[path = "../../src/gate.rs"]
mod gate;
#[path = "../../src/missing.rs"]
mod missing;
#[path = "../../src/stripes.rs"]
mod stripes;
#[path = "../../src/tracker.rs"]
mod tracker;
#[path = "../../src/unpoisoned.rs"]
mod unpoisoned;
#[path = "../../src/unrecorded.rs"]
mod unrecorded;
#[path = "../../src/waiters.rs"]
mod waiters;

mod missing_map;

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

mod needs {
    pub use dray_image::{Fetcher, Fill, IntentLog, PresentLog};
}

use needs::IntentLog;
// The sources take these from the crate.
use dray_image::{Attempt, Error, ErrorKind, Image, Result, WriteBackError, ZeroMode};
use dray_types::{BlockRange, BlockSet};
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
                        let pass = gate.enter(|| true).unwrap();
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
                    if write {
                        gate.enter(|| true).map(drop).is_ok()
                    } else {
                        gate.enter_read(|| true).is_ok()
                    }
                })
            })
            .collect();
        gate.park(gate.quiesce(FOREVER).unwrap());
        assert!(gate.is_parked() && gate.try_enter().is_none());
        assert!(gate.fail());
        gate.unpark();
        let _outcomes: Vec<bool> = io.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(gate.enter(|| true).is_ok());
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

/// So many threads, each of which writes the block of its number.
fn writers<L: Send + Sync + 'static>(
    count: u64,
    tracker: &Arc<tracker::Tracker>,
    log: &Arc<L>,
    write: fn(&Arc<tracker::Tracker>, &L, u64),
) -> Vec<thread::JoinHandle<()>> {
    let begin = |number| {
        let (tracker, log) = (Arc::clone(tracker), Arc::clone(log));
        thread::spawn(move || write(&tracker, &log, number))
    };
    (0..count).map(begin).collect()
}

#[test]
fn nobody_writes_into_a_region_before_its_intent_is_durable() {
    explore(|| {
        let tracker = tracker::Tracker::new(64);
        let log = Arc::new(Intents::default());
        tracker.start(Some(Arc::clone(&log) as _));
        let writers = writers(3, &tracker, &log, |tracker, log, number| {
            let marked = tracker.begin(block(number)).unwrap();
            assert!(log.durable.load(Ordering::SeqCst), "written too early");
            marked.complete().unwrap();
        });
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
        let writers = writers(2, &tracker, &log, |tracker, log, number| {
            let marked = match tracker.try_begin(block(number)) {
                Some(marked) => marked,
                None => tracker.begin(block(number)).unwrap(),
            };
            // The write is under way: a crash from here on must know of it.
            let durable = log.0.lock().unwrap();
            assert!(durable.0 || durable.1.contains(number), "block {number} is forgotten");
            drop(durable);
            marked.complete().unwrap();
        });
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
                        0 => Some(gate.enter(|| true).unwrap()),
                        1 => gate.enter_read(|| true).map(|_| None).unwrap(),
                        _ => gate.enter_flush(|| true).map(|_| None).unwrap(),
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

/// A write that was in flight when tracking began anew is in the new log before anyone relies on it.
#[test]
fn when_tracking_has_begun_the_log_knows_of_every_write_that_is_under_way() {
    for was_on in [false, true] {
        explore(move || {
            let (gate, tracker) = (gate::Gate::new(), tracker::Tracker::new(64));
            let log = Arc::new(Intents::default());
            let begun = Arc::new(AtomicBool::new(false));
            if was_on {
                tracker.start(Some(Arc::new(Intents::default()) as _));
            }
            let writers: Vec<_> = (0..2)
                .map(|number| {
                    let (gate, tracker) = (Arc::clone(&gate), Arc::clone(&tracker));
                    let (log, begun) = (Arc::clone(&log), Arc::clone(&begun));
                    thread::spawn(move || {
                        for _ in 0..2 {
                            let pass = gate.enter(|| true).unwrap();
                            let marked = tracker.begin(block(number)).unwrap();
                            thread::yield_now();
                            // It reaches the disk now, and a crash comes.
                            let relied_on = begun.load(Ordering::SeqCst);
                            let known = log.durable.load(Ordering::SeqCst);
                            assert!(!relied_on || known, "under way and unknown");
                            marked.complete().unwrap();
                            drop(pass);
                        }
                    })
                })
                .collect();
            for _ in 0..2 {
                tracker.start(Some(Arc::clone(&log) as _));
                gate.drain(FOREVER).unwrap();
                begun.store(true, Ordering::SeqCst);
            }
            writers.into_iter().for_each(|thread| thread.join().unwrap());
            drop(gate.quiesce(Duration::ZERO).unwrap());
        });
    }
}
