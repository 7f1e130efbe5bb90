//! The [`Image`] trait: all that dray asks of a byte array, and all that a front end may ask of dray.

use crate::{Client, ErrorKind, Result};
use std::sync::Arc;

/// Fixed facts about an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Length in bytes, as exported. A growable image's file may be shorter: what lies past its
    /// end reads as zeros.
    pub len: u64,
    /// Smallest unit of a request in bytes (1 for files and devices, whatever way their I/O goes).
    pub min_block: u32,
    /// Unit in which requests are cheapest, in bytes.
    pub preferred_block: u32,
    /// Writes, zeroes and discards are refused.
    pub read_only: bool,
}

/// Whether a part of an image holds data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExtentKind {
    /// May hold anything.
    Data,
    /// Allocated, reads as zeros.
    Zero,
    /// Not allocated, reads as zeros.
    Hole,
}

/// A piece of an image whose kind is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Length in bytes.
    pub len: u64,
    /// What it holds.
    pub kind: ExtentKind,
}

/// Extents one after the other: neighbours of one kind are one, and there are no more than `max`.
pub(crate) struct Joined {
    found: Vec<Extent>,
    max: usize,
}

impl Joined {
    /// None yet; `max` is at least one.
    pub(crate) fn at_most(max: usize) -> Self {
        Self { found: Vec::new(), max: max.max(1) }
    }

    /// Appends these and returns how many bytes they are together; `None` when there are no more
    /// or no room is left: then what was found so far is the answer.
    pub(crate) fn extend(&mut self, pieces: &[Extent]) -> Option<u64> {
        let mut len = 0;
        for &piece in pieces {
            let full = self.found.len() >= self.max;
            match self.found.last_mut() {
                Some(last) if last.kind == piece.kind => last.len += piece.len,
                _ if full => return None,
                _ => self.found.push(piece),
            }
            len += piece.len;
        }
        (len > 0).then_some(len)
    }

    /// What was found.
    pub(crate) fn found(self) -> Vec<Extent> {
        self.found
    }
}

/// How zeros are to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ZeroMode {
    /// The space may be given back (a hole).
    MayUnmap,
    /// The space stays allocated where the file system can.
    KeepAllocated,
}

/// Outcome of a request that must not wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attempt {
    /// It is done, entirely.
    Done,
    /// It would have had to wait (for the disk, a gate or the network); nothing was done.
    WouldWait,
}

/// Writes that may be lost: the device failed to make them durable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WriteBackError {
    /// What the device said the last time.
    pub why: String,
    /// What kind of failure that was.
    pub kind: ErrorKind,
    /// How often that has happened since the image was opened.
    pub count: u64,
    /// Whether flushes have reported it to all clients whose writes it may concern. A flush while QEMU may stop
    /// the guest may be QEMU's own and does not count.
    pub told: bool,
    /// An earlier process met it and may have ended before it took back its notes of blocks that are lost.
    pub notes_in_doubt: bool,
}

/// A byte array that can be read, written and made durable.
///
/// Every call does all it was asked or fails: there are no short reads or writes. Calls may come
/// from any number of threads at once; overlapping writes have no defined order.
pub trait Image: Send + Sync {
    /// Length, block sizes and whether it may be written.
    fn geometry(&self) -> Geometry;

    /// Fills `buf` from byte `offset`.
    ///
    /// # Errors
    /// `OutOfRange` when the request leaves the image, else what the device reports.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()>;

    /// Writes all of `data` at byte `offset`; with `fua` it is durable on return.
    ///
    /// # Errors
    /// `OutOfRange`, `ReadOnly`, `NoSpace`, or what the device reports.
    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()>;

    /// Makes `len` bytes at `offset` read as zeros; with `fua` durable on return.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    fn zero(&self, offset: u64, len: u64, mode: ZeroMode, fua: bool) -> Result<()>;

    /// Gives the space of `len` bytes at `offset` back. Afterwards they read as zeros.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()>;

    /// A guest's flush: returns once everything completed before the call is durable.
    ///
    /// # Errors
    /// What the device reports, to this flush or to another one or a [`sync`](Self::sync) since the last flush
    /// of the same client: the system tells an error once, and dray must not swallow it. After an error the
    /// state of earlier writes is unknown.
    fn flush(&self) -> Result<()>;

    /// The same, with the time at which a file was changed.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    fn flush_with_time(&self) -> Result<()> {
        self.flush()
    }

    /// The same as a flush for dray's own sake, with the time at which a file was changed: an error is remembered until a [`flush`](Self::flush) has
    /// reported it to each client.
    ///
    /// # Errors
    /// What the device reports to this sync.
    fn sync(&self) -> Result<()>;

    /// Nobody is served from it any more: its clients are to come back to what is there now, if anything is.
    fn is_withdrawn(&self) -> bool {
        false
    }

    /// Looks at a client that has come to the image, or has gone: it is told of the writes that are lost while
    /// it is there, each time by its next [`flush`](Self::flush).
    fn look_at(&self, _client: &Arc<Client>) {}

    /// The last error of making writes durable, for the operator.
    fn write_back_error(&self) -> Option<WriteBackError> {
        None
    }

    /// Notes of blocks that an earlier process left and that may be lost are gone: those that are made from
    /// now on are right, also for the next process.
    fn notes_begin_anew(&self) {}

    /// What `len` bytes at `offset` hold, as at most `max` extents in order from `offset`; their
    /// lengths may sum to less than `len` when `max` is reached, never to more.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>>;

    /// Asks for `len` bytes at `offset` to be brought close; a hint.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    fn prefetch(&self, _offset: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    /// Begins to make `len` bytes at `offset` durable without waiting for it, so that a later
    /// flush has less to do; a hint.
    ///
    /// # Errors
    /// What the device reports.
    fn start_writeback(&self, _offset: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    /// Says that `len` bytes at `offset` will not be read again soon, so that copying a large
    /// image does not push everything else out of the page cache; a hint.
    ///
    /// # Errors
    /// What the device reports.
    fn forget_cached(&self, _offset: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    /// [`read_at`](Self::read_at), if that is possible without waiting.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    fn try_read_at(&self, _buf: &mut [u8], _offset: u64) -> Result<Attempt> {
        Ok(Attempt::WouldWait)
    }

    /// [`write_at`](Self::write_at) without `fua`, if that is possible without waiting for more
    /// than the page cache.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    fn try_write_at(&self, _data: &[u8], _offset: u64) -> Result<Attempt> {
        Ok(Attempt::WouldWait)
    }
}
