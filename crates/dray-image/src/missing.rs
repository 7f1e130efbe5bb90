//! Missing blocks at their owner: who waits for them, what overwrites them, and what is durable.
//!
//! A block goes from missing to present once and never back. On the way it is
//! [unrecorded](crate::unrecorded): its data is in the image but the present log does not say so
//! yet. Every block enters `unrecorded` before it leaves `missing`, so whoever sees it present also
//! sees that it must still be recorded.

use crate::blockmap::AtomicBlockMap;
use crate::needs::{Fetcher, Fill, PresentLog};
use crate::stripes::Stripes;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use crate::unpoisoned::lock;
use crate::unrecorded::Unrecorded;
use crate::waiters::Waiters;
use crate::{Attempt, Error, ErrorKind, Image, Result, ZeroMode};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};

const CHANGING: &str = "changing an image with missing blocks";

/// The blocks that a change touches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touched {
    /// Every block it touches.
    pub(crate) all: BlockRange,
    /// Those it overwrites entirely.
    pub(crate) whole: BlockRange,
}

impl Touched {
    /// A change of `len` bytes at `offset` in an image of `image_len` bytes; the image's last
    /// block is whole when all of it that exists is changed.
    pub(crate) fn new(offset: u64, len: u64, image_len: u64) -> Self {
        let reach = if offset + len == image_len {
            image_len.next_multiple_of(BLOCK_SIZE) - offset
        } else {
            len
        };
        Self { all: BlockRange::covering(offset, len), whole: BlockRange::inside(offset, reach) }
    }

    /// The blocks it touches in part: they must be there before.
    pub(crate) fn partly(self) -> [BlockRange; 2] {
        if self.whole.is_empty() {
            return [self.all, BlockRange::new(self.all.end(), 0)];
        }
        let head = BlockRange::new(self.all.start, self.whole.start - self.all.start);
        let tail = BlockRange::new(self.whole.end(), self.all.end() - self.whole.end());
        [head, tail]
    }
}

/// Where missing blocks come from and where it is written down that they came.
struct Source {
    fetcher: Arc<dyn Fetcher>,
    log: Option<Arc<dyn PresentLog>>,
}

/// The missing blocks of an image.
pub(crate) struct Missing {
    backing: Arc<dyn Image>,
    image_len: u64,
    missing: AtomicBlockMap,
    unrecorded: Unrecorded,
    source: Mutex<Option<Source>>,
    stripes: Stripes,
    waiters: Waiters,
    /// The operator told dray to fail what waits.
    failed: AtomicBool,
    /// Missing blocks that the guest overwrote before they came.
    cancelled: AtomicU64,
}

impl Missing {
    pub(crate) fn new(backing: Arc<dyn Image>) -> Self {
        let image_len = backing.geometry().len;
        let blocks = BlockRange::whole(image_len).len;
        Self {
            backing,
            image_len,
            missing: AtomicBlockMap::new(blocks),
            unrecorded: Unrecorded::new(blocks),
            source: Mutex::new(None),
            stripes: Stripes::default(),
            waiters: Waiters::default(),
            failed: AtomicBool::new(false),
            cancelled: AtomicU64::new(0),
        }
    }

    /// Where blocks come from, before any are known to be missing.
    pub(crate) fn set_fetcher(&self, fetcher: Arc<dyn Fetcher>) {
        *lock(&self.source) = Some(Source { fetcher, log: None });
    }

    /// From now on `missing` is to come. Blocks of `unrecorded` came to an earlier process, which
    /// noted them: nothing durable says so yet.
    pub(crate) fn begin(
        &self,
        missing: &BlockSet,
        unrecorded: &BlockSet,
        fetcher: Arc<dyn Fetcher>,
        log: Arc<dyn PresentLog>,
    ) {
        *lock(&self.source) = Some(Source { fetcher, log: Some(log) });
        let image = BlockRange::whole(self.image_len);
        let mut unrecorded = unrecorded.intersection(image);
        unrecorded.subtract(missing);
        if self.unrecorded.inherit(&unrecorded, self.backing.write_back_error()) {
            self.backing.notes_begin_anew();
        }
        missing.intersection(image).runs().for_each(|run| {
            self.missing.set(run);
        });
    }

    pub(crate) fn fetcher(&self) -> Result<Arc<dyn Fetcher>> {
        let fetcher = lock(&self.source).as_ref().map(|source| Arc::clone(&source.fetcher));
        fetcher.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "fetching blocks", "there is no source to ask")
        })
    }

    /// Whether it is noted somewhere what comes.
    pub(crate) fn is_logged(&self) -> bool {
        self.log().is_some()
    }

    fn log(&self) -> Option<Arc<dyn PresentLog>> {
        lock(&self.source).as_ref().and_then(|source| source.log.clone())
    }

    /// True when nothing is missing and nothing is left to record: requests pass untouched.
    pub(crate) fn is_over(&self) -> bool {
        self.missing.is_empty() && self.unrecorded.is_empty()
    }

    pub(crate) fn map(&self) -> &AtomicBlockMap {
        &self.missing
    }

    /// True when no block of `range` is missing.
    pub(crate) fn has_all(&self, range: BlockRange) -> bool {
        self.missing.is_empty() || !self.missing.intersects(range)
    }

    /// Whether blocks may be changed, missing or not.
    pub(crate) fn check_usable(&self) -> Result<()> {
        self.unrecorded.check_usable(CHANGING)
    }

    /// Whether what was just read of `range` is what is in the image.
    ///
    /// # Errors
    /// That nobody knows, because a sync has failed.
    pub(crate) fn check_read(&self, range: BlockRange) -> Result<()> {
        self.unrecorded.check_read(range)
    }

    /// What is being waited for.
    pub(crate) fn waiting(&self) -> Vec<BlockRange> {
        self.waiters.ranges()
    }

    /// Waits until every block of `range` is there, asking for what is not once. True when it had
    /// to wait.
    pub(crate) fn wait(&self, range: BlockRange) -> Result<bool> {
        if self.has_all(range) {
            return Ok(false);
        }
        let place = self.waiters.register(range);
        let mut asked = false;
        while !self.has_all(range) {
            if self.failed.load(Ordering::SeqCst) {
                let context = format!("waiting for blocks {} to {}", range.start, range.end());
                let why = "they are not on this host, and dray was told to fail waiting requests";
                return Err(Error::new(ErrorKind::Unavailable, context, why));
            }
            if !asked {
                asked = true;
                let fetcher = self.fetcher()?;
                self.missing.runs_in(range).into_iter().for_each(|run| fetcher.demand(run));
                continue;
            }
            place.sleep();
        }
        Ok(true)
    }

    /// Runs `change`, which overwrites what `touched` says. True when it had to wait for a block.
    pub(crate) fn overwrite(
        &self,
        touched: Touched,
        change: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        self.check_usable()?;
        if self.has_all(touched.all) {
            return change().map(|()| false);
        }
        let mut waited = false;
        for part in touched.partly() {
            waited |= self.wait(part)?;
        }
        let _held = self.stripes.lock(touched.whole);
        change()?;
        let cancelled = self.arrived(touched.whole)?;
        self.cancelled.fetch_add(cancelled, Ordering::Relaxed);
        Ok(waited)
    }

    /// [`overwrite`](Self::overwrite), if that is possible without waiting.
    pub(crate) fn try_overwrite(
        &self,
        touched: Touched,
        change: impl FnOnce() -> Result<Attempt>,
    ) -> Result<Attempt> {
        self.check_usable()?;
        if self.has_all(touched.all) {
            return change();
        }
        if touched.partly().into_iter().any(|part| !self.has_all(part)) {
            return Ok(Attempt::WouldWait);
        }
        let Some(_held) = self.stripes.try_lock(touched.whole) else {
            return Ok(Attempt::WouldWait);
        };
        let attempt = change()?;
        if attempt == Attempt::Done {
            let cancelled = self.arrived(touched.whole)?;
            self.cancelled.fetch_add(cancelled, Ordering::Relaxed);
        }
        Ok(attempt)
    }

    /// The data of `range` is in the image; its stripes are held. Returns how many of its blocks
    /// were missing.
    fn arrived(&self, range: BlockRange) -> Result<u64> {
        let runs = self.missing.runs_in(range);
        if runs.is_empty() {
            return Ok(0);
        }
        let log = self.log();
        for &run in &runs {
            self.unrecorded.add(log.as_deref(), run)?;
            self.missing.clear(run);
            self.waiters.wake(run);
        }
        Ok(runs.iter().map(|run| run.len).sum())
    }

    pub(crate) fn fill(&self, range: BlockRange, fill: Fill<'_>) -> Result<u64> {
        if let Fill::Data(data) = fill
            && data.len() as u64 != range.byte_len()
        {
            let context = format!("filling blocks {} to {}", range.start, range.end());
            let why = format!("{} bytes arrived instead of {}", data.len(), range.byte_len());
            return Err(Error::new(ErrorKind::Invalid, context, &why));
        }
        let _held = self.stripes.lock(range);
        for run in self.missing.runs_in(range) {
            let offset = run.byte_offset();
            let len = run.byte_len().min(self.image_len - offset);
            match fill {
                Fill::Zero => self.backing.zero(offset, len, ZeroMode::MayUnmap, false)?,
                Fill::Data(data) => {
                    let from = (offset - range.byte_offset()) as usize;
                    self.backing.write_at(&data[from..from + len as usize], offset, false)?;
                }
            }
        }
        self.arrived(range)
    }

    /// A guest's flush: makes the image durable, then the record of every block that became present
    /// before (I2).
    pub(crate) fn flush(&self) -> Result<()> {
        self.record_after(|records| match records {
            true => self.backing.flush_with_time(),
            false => self.backing.flush(),
        })
    }

    /// The same for dray's own sake.
    pub(crate) fn checkpoint(&self) -> Result<()> {
        self.record_after(|_| self.backing.sync())
    }

    fn record_after(&self, sync: impl FnOnce(bool) -> Result<()>) -> Result<()> {
        if self.is_over() {
            return sync(false);
        }
        let log = self.log();
        self.unrecorded.record("flushing an image with missing blocks", log.as_deref(), sync)
    }

    pub(crate) fn set_failed(&self, failed: bool) {
        self.failed.store(failed, Ordering::SeqCst);
        self.waiters.wake_all();
    }

    pub(crate) fn cancelled_blocks(&self) -> u64 {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.missing.memory_bytes() + self.unrecorded.memory_bytes()
    }
}
