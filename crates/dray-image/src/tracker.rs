//! The tracker: which blocks the guest has written since tracking began. A disk has two of them:
//! one for a migration, which takes what is dirty, and one for the image's open generation.
//!
//! A block counts as dirty from before its write is issued until after it has completed. If a copy
//! takes it in between, the mark at the end makes it dirty again, so no write is missed whatever
//! the copy saw (I3). Before the first write into a region its intent is durable. While tracking
//! is off a write pays for one relaxed load and a fence.

use crate::Result;
use crate::blockmap::AtomicBlockMap;
use crate::needs::IntentLog;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard};
use crate::unpoisoned::{lock, wait};
use dray_types::{BLOCK_SIZE, BlockRange};
use std::collections::HashSet;
use std::mem::ManuallyDrop;

/// Bytes of a write-intent region: small enough that comparing the open ones by hash after a
/// crash takes seconds, large enough that opening them (a sync each) is rare.
pub const INTENT_REGION_BYTES: u64 = 64 << 20;
const REGION_BLOCKS: u64 = INTENT_REGION_BYTES / BLOCK_SIZE;

/// Dirty blocks, and regions whose intent is durable.
pub struct Tracker {
    on: AtomicBool,
    dirty: AtomicBlockMap,
    has_intent: AtomicBool,
    /// One bit for every region whose intent is durable.
    opened: Box<[AtomicU64]>,
    /// One bit for every open region that was written into since idle ones were last closed.
    recent: Box<[AtomicU64]>,
    opening: Mutex<Opening>,
    settled: Condvar,
}

#[derive(Default)]
struct Opening {
    log: Option<Arc<dyn IntentLog>>,
    /// Regions that a thread is making durable just now, without the lock.
    busy: HashSet<u64>,
    /// Counts sessions, so that what was opened for an earlier one does not count.
    session: u64,
}

/// A write in flight: its blocks become dirty again when this is dropped.
#[must_use = "the blocks are marked again when this is dropped, which must be after the write"]
pub struct Marked<'a> {
    tracker: &'a Tracker,
    range: BlockRange,
}

/// Dirty runs taken from the tracker: accepted, or put back when dropped.
#[must_use = "dropping it makes the runs dirty again"]
pub struct DirtyRuns {
    tracker: Arc<Tracker>,
    runs: Vec<BlockRange>,
}

impl DirtyRuns {
    /// The runs, in ascending order.
    pub fn runs(&self) -> &[BlockRange] {
        &self.runs
    }

    /// Keeps them clean: the caller answers for them from here on.
    pub fn accept(mut self) -> Vec<BlockRange> {
        std::mem::take(&mut self.runs)
    }
}

impl Drop for DirtyRuns {
    fn drop(&mut self) {
        for &run in &self.runs {
            self.tracker.mark(run);
        }
    }
}

impl Marked<'_> {
    /// The write has completed. If tracking began while it was in flight, its intent becomes
    /// durable now, before it is acknowledged.
    ///
    /// # Errors
    /// What the intent log reports.
    pub fn complete(self) -> Result<()> {
        // It is marked here, once.
        let this = ManuallyDrop::new(self);
        if this.mark() { this.tracker.open_all(this.range) } else { Ok(()) }
    }

    /// Marks the blocks, if tracking is on; tells whether it is.
    fn mark(&self) -> bool {
        // Pairs with the fences in `start`, `take` and `clear`: either the copy that follows one of
        // them reads what this write wrote, or this sees that tracking is on and that the blocks are
        // not dirty, and marks.
        fence(Ordering::SeqCst);
        let on = self.tracker.on.load(Ordering::Relaxed);
        if on {
            self.tracker.dirty.ensure(self.range);
        }
        on
    }
}

impl Drop for Marked<'_> {
    fn drop(&mut self) {
        self.mark();
    }
}

impl Tracker {
    /// A tracker, off, for an image of `blocks` blocks.
    pub fn new(blocks: u64) -> Arc<Self> {
        let regions = blocks.div_ceil(REGION_BLOCKS);
        Arc::new(Self {
            on: AtomicBool::new(false),
            dirty: AtomicBlockMap::new(blocks),
            has_intent: AtomicBool::new(false),
            opened: (0..regions.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            recent: (0..regions.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            opening: Mutex::new(Opening::default()),
            settled: Condvar::new(),
        })
    }

    fn opening(&self) -> MutexGuard<'_, Opening> {
        lock(&self.opening)
    }

    /// Turns tracking on with no region open. Nothing is dirty at the start, but a tracker that is
    /// on keeps what is dirty: only the intent log changes.
    pub fn start(&self, intent: Option<Arc<dyn IntentLog>>) {
        if !self.is_on() {
            self.stop();
        }
        let mut opening = self.opening();
        opening.session += 1;
        self.opened.iter().for_each(|word| word.store(0, Ordering::SeqCst));
        self.has_intent.store(intent.is_some(), Ordering::SeqCst);
        opening.log = intent;
        self.on.store(true, Ordering::SeqCst);
        drop(opening);
        fence(Ordering::SeqCst);
    }

    /// Turns tracking off and forgets what was dirty.
    pub fn stop(&self) {
        let mut opening = self.opening();
        self.on.store(false, Ordering::SeqCst);
        self.has_intent.store(false, Ordering::SeqCst);
        opening.log = None;
        opening.session += 1;
        self.opened.iter().for_each(|word| word.store(0, Ordering::SeqCst));
        self.dirty.take(0, u64::MAX);
    }

    /// True while tracking is on.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// A write to `range` is about to be issued; the result must live until it has completed.
    ///
    /// # Errors
    /// What the intent log reports.
    pub fn begin(&self, range: BlockRange) -> Result<Marked<'_>> {
        let marked = Marked { tracker: self, range };
        if self.on.load(Ordering::Relaxed) {
            self.dirty.ensure(range);
            self.open_all(range)?;
        }
        Ok(marked)
    }

    fn open_all(&self, range: BlockRange) -> Result<()> {
        if !self.has_intent.load(Ordering::SeqCst) {
            return Ok(());
        }
        regions(range).filter(|&region| !self.is_used(region)).try_for_each(|r| self.open(r))
    }

    /// Whether `region` is open; then it is in use from here on.
    fn is_used(&self, region: u64) -> bool {
        let (word, bit) = ((region / 64) as usize, 1 << (region % 64));
        if self.recent[word].load(Ordering::Relaxed) & bit == 0 {
            self.recent[word].fetch_or(bit, Ordering::SeqCst);
        }
        self.is_open(region)
    }

    /// Closes the open regions that nobody has written into since the last call and returns them:
    /// the next write opens them again. Every write that found one of them open is in
    /// [`snapshot`](Self::snapshot) from here on, though it may not have completed. The intent log
    /// must not take an opening in before a durable record says what was written in them.
    pub fn close_idle(&self) -> Vec<u64> {
        let mut closed = Vec::new();
        for (nth, (opened, recent)) in (0..).zip(self.opened.iter().zip(&self.recent)) {
            let used = recent.swap(0, Ordering::SeqCst);
            let idle = opened.load(Ordering::SeqCst) & !used;
            let mut bits = opened.fetch_and(!idle, Ordering::SeqCst) & idle;
            while bits != 0 {
                closed.push(nth * 64 + u64::from(bits.trailing_zeros()));
                bits &= bits - 1;
            }
        }
        fence(Ordering::SeqCst);
        closed
    }

    /// [`begin`](Self::begin), if no intent has to be made durable first.
    pub fn try_begin(&self, range: BlockRange) -> Option<Marked<'_>> {
        if self.on.load(Ordering::Relaxed) {
            let needs_intent = self.has_intent.load(Ordering::SeqCst)
                && regions(range).any(|region| !self.is_used(region));
            if needs_intent {
                return None;
            }
            self.dirty.ensure(range);
            // A region that was closed meanwhile may have been closed without these blocks.
            if self.has_intent.load(Ordering::SeqCst)
                && regions(range).any(|region| !self.is_open(region))
            {
                return None;
            }
        }
        Some(Marked { tracker: self, range })
    }

    fn is_open(&self, region: u64) -> bool {
        let word = &self.opened[(region / 64) as usize];
        word.load(Ordering::SeqCst) & (1 << (region % 64)) != 0
    }

    /// Makes the intent of `region` durable, or waits for the thread that does.
    fn open(&self, region: u64) -> Result<()> {
        let mut opening = self.opening();
        while opening.busy.contains(&region) {
            opening = wait(&self.settled, opening);
        }
        let Some(log) = opening.log.clone().filter(|_| !self.is_open(region)) else {
            return Ok(());
        };
        let session = opening.session;
        opening.busy.insert(region);
        drop(opening);
        let result = log.open_region(region);
        let mut opening = self.opening();
        opening.busy.remove(&region);
        if result.is_ok() && opening.session == session {
            let word = &self.opened[(region / 64) as usize];
            word.fetch_or(1 << (region % 64), Ordering::SeqCst);
        }
        drop(opening);
        self.settled.notify_all();
        result
    }

    /// How many blocks of `range` are not dirty; none while tracking is off.
    pub fn clean_in(&self, range: BlockRange) -> u64 {
        if self.is_on() { range.len.saturating_sub(self.dirty.count_in(range)) } else { 0 }
    }

    /// Makes `range` dirty while tracking is on.
    pub fn mark(&self, range: BlockRange) {
        if self.on.load(Ordering::SeqCst) {
            self.dirty.set(range);
        }
    }

    /// Makes `range` clean; to be called before it is read for a copy.
    pub fn clear(&self, range: BlockRange) {
        self.dirty.clear(range);
        fence(Ordering::SeqCst);
    }

    /// Takes at most `max` dirty blocks at or after block `from`.
    pub fn take(self: &Arc<Self>, from: u64, max: u64) -> DirtyRuns {
        let runs = self.dirty.take(from, max);
        fence(Ordering::SeqCst);
        DirtyRuns { tracker: Arc::clone(self), runs }
    }

    /// Number of dirty blocks; exact while the guest is quiesced.
    pub fn count(&self) -> u64 {
        self.dirty.count()
    }

    /// The dirty blocks.
    pub fn snapshot(&self) -> dray_types::BlockSet {
        self.dirty.snapshot()
    }

    /// Bytes of memory in use.
    pub fn memory_bytes(&self) -> usize {
        self.dirty.memory_bytes() + size_of_val(&*self.opened) + size_of_val(&*self.recent)
    }
}

/// The intent regions that a range touches.
fn regions(range: BlockRange) -> impl Iterator<Item = u64> {
    let end = if range.is_empty() { range.start } else { range.end() };
    range.start / REGION_BLOCKS..end.div_ceil(REGION_BLOCKS)
}
