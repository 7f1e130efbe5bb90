//! [`Disk`]: the stack that a guest's disk is served from, always the same: gate, tracker, missing
//! map, backing image.
//!
//! It is what a front end exports (it is an [`Image`]) and what a migration steers. It decides
//! nothing: when to copy, hand over or fetch is the engine's business.

use crate::{Error, ErrorKind, Extent, Geometry, Image, Result, ZeroMode};
use dray_types::{BlockRange, BlockSet};
use std::sync::Arc;
use std::time::Duration;

/// Gets blocks that this host does not have from the one that has them.
pub trait Fetcher: Send + Sync {
    /// Someone waits for these blocks: fetch them before others. Never blocks; the arrival shows
    /// through [`Disk::fill`].
    fn demand(&self, range: BlockRange);

    /// Reads from the owner before handover, when this host owns nothing yet. May block.
    ///
    /// # Errors
    /// When the owner cannot be asked or answers with an error.
    fn peek(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
}

/// Remembers which blocks arrived or were overwritten since this host became the owner (I2).
pub trait PresentLog: Send + Sync {
    /// Adds `present`; durable on return. Called only after the blocks' data is durable.
    ///
    /// # Errors
    /// When it cannot be made durable; the guest's flush then fails.
    fn record(&self, present: &BlockSet) -> Result<()>;
}

/// Remembers which regions were written into since tracking began.
pub trait IntentLog: Send + Sync {
    /// Adds region number `region`; durable on return. Called before the first write into it.
    ///
    /// # Errors
    /// When it cannot be made durable; the guest's write then fails. A log that would rather give
    /// the migration up than fail the write notes that and returns `Ok`.
    fn open_region(&self, region: u64) -> Result<()>;
}

/// What arrived for a run of missing blocks.
#[derive(Clone, Copy, Debug)]
pub enum Fill<'a> {
    /// Their content; as long as the run (what lies past the image's end is ignored).
    Data(&'a [u8]),
    /// They are all zeros.
    Zero,
}

/// Counters of a disk since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskStats {
    /// Guest reads.
    pub reads: u64,
    /// Guest writes.
    pub writes: u64,
    /// Guest zeroes and discards.
    pub zeroes: u64,
    /// Guest flushes.
    pub flushes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Reads that had to wait for a missing block.
    pub remote_reads: u64,
    /// Writes, zeroes and discards that had to wait for a partly overwritten missing block.
    pub remote_writes: u64,
    /// Nanoseconds that reads and writes waited for missing blocks, summed.
    pub remote_wait_nanos: u64,
    /// Missing blocks that arrived.
    pub filled_blocks: u64,
    /// Missing blocks that the guest overwrote before they were fetched.
    pub cancelled_blocks: u64,
}

/// Proof that no guest write is in flight and none begins; dropping it resumes the guest's writes.
#[derive(Debug)]
#[must_use = "dropping it lets writes go on"]
pub struct Quiesced(());

/// Dirty runs taken from the tracker: accepted, or put back when dropped.
#[must_use = "dropping it makes the runs dirty again"]
pub struct DirtyRuns {
    runs: Vec<BlockRange>,
}

impl DirtyRuns {
    /// The runs, in ascending order.
    pub fn runs(&self) -> &[BlockRange] {
        &self.runs
    }

    /// Keeps them clean: the caller answers for them from here on.
    pub fn accept(self) -> Vec<BlockRange> {
        self.runs
    }
}

/// A guest's disk.
pub struct Disk {
    backing: Arc<dyn Image>,
}

impl Disk {
    /// A disk over `backing`, open to the guest, not tracked, with nothing missing.
    pub fn new(backing: Arc<dyn Image>) -> Arc<Self> {
        Arc::new(Self { backing })
    }

    /// The image below; the copier reads (at the source) and writes (at the target) here.
    pub fn backing(&self) -> &Arc<dyn Image> {
        &self.backing
    }

    /// Holds new guest writes, zeroes and discards back and waits until none is in flight.
    ///
    /// # Errors
    /// `Unavailable` when that takes longer than `timeout`; writes then go on.
    pub fn quiesce(&self, _timeout: Duration) -> Result<Quiesced> {
        Ok(Quiesced(()))
    }

    /// After handover, at the source: all guest I/O waits, a flush is answered at once (I5).
    pub fn park(&self, _quiesced: Quiesced) {}

    /// Ends [`park`](Self::park) or [`fail_parked`](Self::fail_parked): waiting I/O goes on.
    pub fn unpark(&self) {}

    /// Fails waiting I/O, and new I/O that would have to wait, with `Unavailable`.
    pub fn fail_parked(&self) {}

    /// Tracks writes from now on; nothing is dirty at the start.
    pub fn start_tracking(&self, _intent: Option<Arc<dyn IntentLog>>) {}

    /// Ends tracking and forgets what is dirty.
    pub fn stop_tracking(&self) {}

    /// Makes `range` dirty (a copy of it was lost).
    pub fn mark_dirty(&self, _range: BlockRange) {}

    /// Makes `range` clean; to be called just before it is read for a copy.
    pub fn clear_dirty(&self, _range: BlockRange) {}

    /// Takes at most `max_blocks` dirty blocks at or after `from_block` and makes them clean.
    pub fn take_dirty(&self, _from_block: u64, _max_blocks: u64) -> DirtyRuns {
        DirtyRuns { runs: Vec::new() }
    }

    /// Number of dirty blocks.
    pub fn dirty_count(&self) -> u64 {
        0
    }

    /// Before handover, at the target: reads come from the owner, flush is answered, everything
    /// else is refused.
    pub fn begin_incoming(&self, _fetcher: Arc<dyn Fetcher>) {}

    /// After the commit, at the target: this host owns the image, `missing` is still to come.
    pub fn serve_with_missing(
        &self,
        _missing: BlockSet,
        _fetcher: Arc<dyn Fetcher>,
        _log: Arc<dyn PresentLog>,
    ) {
    }

    /// Writes what arrived for `range` into those of its blocks that are still missing and wakes
    /// who waits for them; returns how many there were.
    ///
    /// # Errors
    /// What the image reports; the blocks then stay missing.
    pub fn fill(&self, _range: BlockRange, _fill: Fill<'_>) -> Result<u64> {
        Err(Error::new(ErrorKind::Unavailable, "filling missing blocks", "nothing is missing"))
    }

    /// The first run of at most `max_blocks` missing blocks at or after `from_block`.
    pub fn next_missing(&self, _from_block: u64, _max_blocks: u64) -> Option<BlockRange> {
        None
    }

    /// Number of missing blocks.
    pub fn missing_count(&self) -> u64 {
        0
    }

    /// The missing blocks.
    pub fn missing_snapshot(&self) -> BlockSet {
        BlockSet::new()
    }

    /// Makes everything written or filled so far durable, then the record that it is present (I2).
    ///
    /// # Errors
    /// What the image or the log reports.
    pub fn checkpoint(&self) -> Result<()> {
        self.backing.flush()
    }

    /// Counters since the disk was made.
    pub fn stats(&self) -> DiskStats {
        DiskStats::default()
    }
}

impl Image for Disk {
    fn geometry(&self) -> Geometry {
        self.backing.geometry()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.backing.read_at(buf, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        self.backing.write_at(data, offset, fua)
    }

    fn zero(&self, offset: u64, len: u64, mode: ZeroMode, fua: bool) -> Result<()> {
        self.backing.zero(offset, len, mode, fua)
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.backing.discard(offset, len, fua)
    }

    fn flush(&self) -> Result<()> {
        self.backing.flush()
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        self.backing.extents(offset, len, max)
    }
}
