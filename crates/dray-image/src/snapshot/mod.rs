//! A disk's content at one moment, which can be read while the guest keeps writing.
//!
//! Before the first change of a block that the snapshot wants and that nobody has read yet, its old
//! content is kept aside. Which blocks these are is one map, `pending`: a block leaves it once, when
//! it is read or when it is kept, and nobody changes a block that is in it. So a reader reads
//! without any lock and then takes the block out: if it was still in, nobody had changed it before
//! the read was over; if not, its old content has been kept. The guest never waits for the reader,
//! and a change waits for another one only while that keeps one of the same blocks.
//!
//! Whatever goes wrong with keeping (no space, an I/O error) fails the snapshot, never the guest's
//! change. Without a snapshot a change pays for one load.

mod claims;

use crate::blockmap::AtomicBlockMap;
use crate::runs::{data_blocks, is_zero, read_run};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use crate::unpoisoned::lock;
use crate::{Error, ErrorKind, Image, Result};
use claims::Claims;
use dray_types::{BlockRange, BlockSet};

/// Blocks that are kept at once: 256 KiB of memory, and what another change of the same blocks waits
/// for.
const KEEP_BLOCKS: u64 = 64;

/// Where the old content of changed blocks is kept while a snapshot is read.
pub trait Spill: Send + Sync {
    /// Keeps `data`, as long as `run`. A block is kept at most once.
    ///
    /// # Errors
    /// When there is no room, or what the device reports; the snapshot then fails.
    fn keep(&self, run: BlockRange, data: &[u8]) -> Result<()>;

    /// Fills `buf`, as long as `run`, with what was kept; blocks that never were are zeros.
    ///
    /// # Errors
    /// What the device reports.
    fn read(&self, run: BlockRange, buf: &mut [u8]) -> Result<()>;

    /// Nobody needs what was kept for `run` any more.
    fn forget(&self, run: BlockRange);
}

/// What is known of one snapshot.
struct Held {
    spill: Box<dyn Spill>,
    claims: Claims,
    /// Blocks whose old content is in the spill, or is zeros.
    kept: AtomicBlockMap,
    kept_blocks: AtomicU64,
    /// Wanted blocks that were not read yet.
    unread: Mutex<BlockSet>,
    failed: AtomicBool,
    cause: Mutex<Option<Error>>,
}

/// The place in a disk where a snapshot is put.
pub struct Keeper {
    backing: Arc<dyn Image>,
    /// A snapshot is there, and its moment has come.
    armed: AtomicBool,
    /// Wanted blocks that were neither read nor kept.
    pending: AtomicBlockMap,
    current: Mutex<Option<Arc<Held>>>,
}

/// A snapshot whose moment has not come; dropping it ends it.
pub struct Prepared {
    keeper: Arc<Keeper>,
    held: Arc<Held>,
}

/// The content of a disk at one moment; dropping it ends the keeping.
pub struct Snapshot {
    prepared: Prepared,
}

impl Keeper {
    /// A place for snapshots of `backing`.
    pub fn new(backing: Arc<dyn Image>) -> Arc<Self> {
        let blocks = BlockRange::whole(backing.geometry().len).len;
        Arc::new(Self {
            backing,
            armed: AtomicBool::new(false),
            pending: AtomicBlockMap::new(blocks),
            current: Mutex::new(None),
        })
    }

    /// Whether a change of `range` must keep something first. One load without a snapshot.
    #[inline]
    pub fn is_wanted(&self, range: BlockRange) -> bool {
        self.armed.load(Ordering::SeqCst) && self.pending.intersects(range)
    }

    /// A change of `range` is about to be made: keeps what a snapshot still needs of it. Must be
    /// called by a change that counts as in flight.
    #[inline]
    pub fn before_change(&self, range: BlockRange) {
        if self.is_wanted(range) {
            self.keep(range);
        }
    }

    #[cold]
    fn keep(&self, range: BlockRange) {
        let Some(held) = lock(&self.current).clone() else { return };
        // The one this change was wanted for has ended, and the next one's moment comes after it.
        if !self.armed.load(Ordering::SeqCst) {
            return;
        }
        for run in self.pending.runs_in(range) {
            for piece in run.pieces(KEEP_BLOCKS) {
                // Without a claim there is no snapshot any more, and the map may be another one's.
                let Some(_mine) = held.claims.claim(piece) else { return };
                if let Err(why) = self.keep_piece(&held, piece) {
                    self.fail(&held, why);
                    return;
                }
            }
        }
    }

    fn keep_piece(&self, held: &Held, piece: BlockRange) -> Result<()> {
        // Another change may have kept some of them meanwhile, and then changed them.
        for run in self.pending.runs_in(piece) {
            let mut old = vec![0; run.byte_len() as usize];
            read_run(&*self.backing, run, &mut old)?;
            if !is_zero(&old) {
                held.spill.keep(run, &old)?;
            }
            // Who finds a block neither pending nor read by itself must find it kept.
            held.kept.set(run);
            let kept = self.pending.clear(run);
            held.kept_blocks.fetch_add(kept, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The snapshot is lost; changes pay nothing any more.
    fn fail(&self, held: &Held, why: Error) {
        lock(&held.cause).get_or_insert(why);
        // A reader that misses a block in the map must see why.
        held.failed.store(true, Ordering::SeqCst);
        self.pending.take(0, u64::MAX);
    }

    /// Makes place for a snapshot that will probably want `expected`: what is known long before the
    /// moment costs nothing at the moment.
    ///
    /// # Errors
    /// `InUse` when there is a snapshot already.
    pub fn prepare(
        self: &Arc<Self>,
        expected: &BlockSet,
        spill: Box<dyn Spill>,
    ) -> Result<Prepared> {
        let image = BlockRange::whole(self.backing.geometry().len);
        let held = Arc::new(Held {
            spill,
            claims: Claims::default(),
            kept: AtomicBlockMap::new(image.len),
            kept_blocks: AtomicU64::new(0),
            unread: Mutex::new(expected.intersection(image)),
            failed: AtomicBool::new(false),
            cause: Mutex::new(None),
        });
        let mut current = lock(&self.current);
        if current.is_some() {
            let why = "another one is being read";
            return Err(Error::new(ErrorKind::InUse, "taking a snapshot", why));
        }
        *current = Some(Arc::clone(&held));
        drop(current);
        let prepared = Prepared { keeper: Arc::clone(self), held };
        lock(&prepared.held.unread).runs().for_each(|run| _ = self.pending.set(run));
        Ok(prepared)
    }

    /// Bytes of memory in use.
    pub fn memory_bytes(&self) -> usize {
        let kept = lock(&self.current).as_ref().map_or(0, |held| held.kept.memory_bytes());
        self.pending.memory_bytes() + kept
    }
}

impl Prepared {
    /// [`arm`](Self::arm), if it was made for this place.
    ///
    /// # Errors
    /// `Invalid` when it was not.
    pub(crate) fn arm_for(self, keeper: &Arc<Keeper>, more: &BlockSet) -> Result<Snapshot> {
        if !Arc::ptr_eq(keeper, &self.keeper) {
            let why = "it was made ready for another disk";
            return Err(Error::new(ErrorKind::Invalid, "taking a snapshot", why));
        }
        Ok(self.arm(more))
    }

    /// This is the moment: no change is in flight. `more` is wanted beside what was expected.
    pub fn arm(self, more: &BlockSet) -> Snapshot {
        let image = BlockRange::whole(self.keeper.backing.geometry().len);
        let more = more.intersection(image);
        more.runs().for_each(|run| _ = self.keeper.pending.set(run));
        lock(&self.held.unread).union_with(&more);
        self.keeper.armed.store(true, Ordering::SeqCst);
        Snapshot { prepared: self }
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        self.keeper.armed.store(false, Ordering::SeqCst);
        self.held.claims.close();
        self.keeper.pending.take(0, u64::MAX);
        *lock(&self.keeper.current) = None;
    }
}

impl Snapshot {
    /// The wanted blocks that were not read yet.
    pub fn unread(&self) -> BlockSet {
        lock(&self.prepared.held.unread).clone()
    }

    /// Bytes that were kept aside so far because the guest changed them first.
    pub fn kept_bytes(&self) -> u64 {
        self.prepared.held.kept_blocks.load(Ordering::Relaxed) * dray_types::BLOCK_SIZE
    }

    /// Why the snapshot is lost, if it is.
    ///
    /// # Errors
    /// That.
    pub fn check(&self) -> Result<()> {
        let held = &self.prepared.held;
        if !held.failed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let cause = lock(&held.cause);
        let (kind, why) = cause
            .as_ref()
            .map_or((ErrorKind::Io, String::new()), |cause| (cause.kind, cause.to_string()));
        Err(Error::new(kind, "keeping what the guest overwrites", &why))
    }

    fn begin_reading(&self, run: BlockRange) -> Result<()> {
        let mut unread = lock(&self.prepared.held.unread);
        if !unread.contains_range(run) {
            let context = format!("reading blocks {} to {} of a snapshot", run.start, run.end());
            return Err(Error::new(ErrorKind::Invalid, context, "they cannot be read"));
        }
        unread.remove(run);
        Ok(())
    }

    /// Fills `buf`, as long as `run`, with what the blocks held at the moment. Each block can be
    /// read once.
    ///
    /// # Errors
    /// What the image or the spill reports, also when it was a guest's change that met it;
    /// `Invalid` for blocks that are not in [`unread`](Self::unread).
    pub fn read(&self, run: BlockRange, buf: &mut [u8]) -> Result<()> {
        self.begin_reading(run)?;
        let (keeper, held) = (&self.prepared.keeper, &self.prepared.held);
        if keeper.pending.intersects(run) {
            read_run(&*keeper.backing, run, buf)?;
        }
        let mut kept: BlockSet = [run].into_iter().collect();
        keeper.pending.take_in(run).into_iter().for_each(|unchanged| kept.remove(unchanged));
        self.check()?;
        for part in kept.runs() {
            if held.kept.count_in(part) != part.len {
                let context = format!("reading blocks {} to {}", part.start, part.end());
                return Err(Error::new(ErrorKind::Invalid, context, "they were not kept"));
            }
            let from = (part.start - run.start) * dray_types::BLOCK_SIZE;
            let place = from as usize..(from + part.byte_len()) as usize;
            held.spill.read(part, &mut buf[place])?;
            held.spill.forget(part);
        }
        Ok(())
    }

    /// The unread blocks of `range` that are known to have been zeros at the moment without being
    /// read; they count as read. `range` may be of any length.
    ///
    /// # Errors
    /// What the image reports.
    pub fn take_holes(&self, range: BlockRange) -> Result<BlockSet> {
        let (keeper, held) = (&self.prepared.keeper, &self.prepared.held);
        let image = BlockRange::whole(keeper.backing.geometry().len);
        let mut empty = lock(&held.unread).intersection(range.intersect(image));
        empty.subtract(&data_blocks(&*keeper.backing, range)?);
        let mut taken = BlockSet::new();
        for run in empty.runs() {
            // What was changed meanwhile is read from where it was kept.
            keeper.pending.take_in(run).into_iter().for_each(|run| taken.insert(run));
        }
        self.check()?;
        lock(&held.unread).subtract(&taken);
        Ok(taken)
    }
}
