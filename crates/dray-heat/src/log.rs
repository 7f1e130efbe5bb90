//! [`AccessLog`]: accesses on their way from the threads that serve the guest to [`Heat`].
//!
//! A bounded ring of atomic words, one word an access. Pushing claims a place with one atomic
//! addition and fills it with one compare-and-swap; it never waits, and an access that finds its
//! place still taken is dropped and counted. From then until the next drain the ring is closed, and a
//! push costs no more than to count it: what is not counted of a guest that is too fast for it hardly
//! costs the guest anything, and what is counted was made without a gap. A log has one ring, or one for
//! each thread (a lane), so that threads need not share the line that counts pushes.

use crate::heat::Heat;
use crate::op::Op;
use dray_types::BlockRange;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A place is zero when empty, else start (40 bits: images of up to 4 PiB), length (22 bits, at most
/// 16 GiB), operation (1 bit) and the mark of a taken place (1 bit).
const TAKEN: u64 = 1 << 63;
const READ: u64 = 1 << 62;
const LEN_BITS: u32 = 22;
const START_BITS: u32 = 40;
const MAX_LEN: u64 = (1 << LEN_BITS) - 1;
const MAX_START: u64 = (1 << START_BITS) - 1;

/// Atomics that different threads write lie on lines of their own.
#[repr(align(128))]
#[derive(Debug, Default)]
struct CacheLine(AtomicU64);

#[derive(Debug)]
struct Lane {
    places: Box<[AtomicU64]>,
    /// An access was dropped since the last drain: so are all others until the next one.
    closed: AtomicBool,
    /// Pushes so far: the next one takes this place, modulo the number of places.
    pushed: CacheLine,
    dropped: CacheLine,
    /// Pushes that a drain has looked at.
    drained: CacheLine,
}

/// A bounded log of accesses; see the module.
#[derive(Debug)]
pub struct AccessLog {
    lanes: Box<[Lane]>,
}

impl AccessLog {
    /// A log of one lane with room for at least `capacity` accesses between two drains.
    pub fn new(capacity: usize) -> Self {
        Self::with_lanes(1, capacity)
    }

    /// A log of `lanes` lanes (1 to 256), each with room for at least `capacity` accesses between
    /// two drains, at least 64; rounded up to a power of two. A place costs 8 bytes. Threads with
    /// a lane each do not slow one another down.
    pub fn with_lanes(lanes: usize, capacity: usize) -> Self {
        let places = capacity.clamp(64, 1 << 24).next_power_of_two();
        Self { lanes: (0..lanes.clamp(1, 256)).map(|_| Lane::new(places)).collect() }
    }

    /// Notes an access; false when it was dropped because its place has not been drained. Empty
    /// accesses are not noted.
    pub fn push(&self, op: Op, range: BlockRange) -> bool {
        self.push_in(0, op, range)
    }

    /// As [`Self::push`], in the lane of the caller: any number, a thread's or a connection's.
    pub fn push_in(&self, lane: usize, op: Op, range: BlockRange) -> bool {
        range.is_empty() || self.lanes[lane % self.lanes.len()].push(pack(op, range))
    }

    /// Gives the noted accesses to `take`, the oldest of each lane first, and makes room. An access
    /// whose push runs at the same moment may be given by a later drain. Two drains at once lose
    /// nothing, but share the accesses between them.
    pub fn drain(&self, mut take: impl FnMut(Op, BlockRange)) {
        for lane in &self.lanes {
            lane.drain(|word| {
                let (op, range) = unpack(word);
                take(op, range);
            });
        }
    }

    /// Gives the noted accesses to `heat`.
    pub fn drain_into(&self, heat: &mut Heat) {
        self.drain(|op, range| heat.access(op, range));
    }

    /// Accesses that wait for a drain in the fullest lane: drain when this nears the capacity. As many
    /// as fit when accesses were dropped.
    pub fn pending(&self) -> u64 {
        self.lanes.iter().map(Lane::pending).max().unwrap_or(0)
    }

    /// The share of its room that is taken in the fullest lane, at least 1 when accesses were dropped.
    pub fn used(&self) -> f64 {
        self.pending() as f64 / self.capacity() as f64
    }

    /// Number of accesses that fit into a lane between two drains.
    pub fn capacity(&self) -> usize {
        self.lanes[0].places.len()
    }

    /// Accesses dropped since the log was made.
    pub fn dropped(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.dropped.0.load(Ordering::Relaxed)).sum()
    }
}

impl Lane {
    fn new(places: usize) -> Self {
        Self {
            places: (0..places).map(|_| AtomicU64::new(0)).collect(),
            closed: AtomicBool::new(false),
            pushed: CacheLine::default(),
            dropped: CacheLine::default(),
            drained: CacheLine::default(),
        }
    }

    fn push(&self, word: u64) -> bool {
        let noted = !self.closed.load(Ordering::Relaxed) && self.fill(word);
        if !noted {
            self.dropped.0.fetch_add(1, Ordering::Relaxed);
        }
        noted
    }

    /// Takes the next place, if it is empty; else the lane is closed. Beside a drain that may be a moment
    /// too late, and the lane is closed until the drain after it.
    fn fill(&self, word: u64) -> bool {
        let at = self.pushed.0.fetch_add(1, Ordering::Relaxed) as usize & (self.places.len() - 1);
        // The word is the whole message: nothing else is published with it, so relaxed is enough.
        let filled =
            self.places[at].compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !filled {
            self.closed.store(true, Ordering::Relaxed);
        }
        filled
    }

    fn drain(&self, mut take: impl FnMut(u64)) {
        let pushed = self.pushed.0.load(Ordering::Relaxed);
        let drained = self.drained.0.swap(pushed, Ordering::Relaxed);
        let places = self.places.len() as u64;
        for at in drained.min(pushed).max(pushed.saturating_sub(places))..pushed {
            let word = self.places[(at & (places - 1)) as usize].swap(0, Ordering::Relaxed);
            if word != 0 {
                take(word);
            }
        }
        self.closed.store(false, Ordering::Relaxed);
    }

    fn pending(&self) -> u64 {
        if self.closed.load(Ordering::Relaxed) {
            return self.places.len() as u64;
        }
        let drained = self.drained.0.load(Ordering::Relaxed);
        self.pushed.0.load(Ordering::Relaxed).saturating_sub(drained)
    }
}

fn pack(op: Op, range: BlockRange) -> u64 {
    let op = if op == Op::Read { READ } else { 0 };
    TAKEN | op | range.len.min(MAX_LEN) << START_BITS | range.start.min(MAX_START)
}

fn unpack(word: u64) -> (Op, BlockRange) {
    let op = if word & READ != 0 { Op::Read } else { Op::Write };
    (op, BlockRange::new(word & MAX_START, word >> START_BITS & MAX_LEN))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(log: &AccessLog) -> Vec<(Op, BlockRange)> {
        let mut all = Vec::new();
        log.drain(|op, range| all.push((op, range)));
        all
    }

    #[test]
    fn accesses_come_out_as_they_went_in() {
        let log = AccessLog::new(64);
        let accesses = [
            (Op::Write, BlockRange::new(0, 1)),
            (Op::Read, BlockRange::new(MAX_START, MAX_LEN)),
            (Op::Write, BlockRange::new(1 << 33, 8192)),
        ];
        for (op, range) in accesses {
            assert!(log.push(op, range));
        }
        assert!(log.push(Op::Read, BlockRange::new(5, 0)));
        assert_eq!(log.pending(), 3);
        assert_eq!(drained(&log), accesses);
        assert_eq!((log.pending(), drained(&log).len()), (0, 0));
    }

    #[test]
    fn a_full_log_drops_and_counts_and_works_again_after_a_drain() {
        let log = AccessLog::new(1);
        let pushes = log.capacity() as u64 + 10;
        let noted = (0..pushes).filter(|&b| log.push(Op::Write, BlockRange::new(b, 1))).count();
        assert_eq!((noted, log.dropped()), (log.capacity(), 10));
        assert_eq!(drained(&log).len(), log.capacity());
        for lap in 0..5 {
            for block in 0..log.capacity() as u64 {
                assert!(log.push(Op::Read, BlockRange::new(block, 1)), "lap {lap}");
            }
            assert_eq!(drained(&log).len(), log.capacity());
        }
        assert_eq!(log.dropped(), 10);
    }
}
