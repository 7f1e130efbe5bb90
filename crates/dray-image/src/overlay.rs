//! [`Overlay`]: an image whose blocks are in a file of its own once they were written, and before
//! that in another image below, which is only read.
//!
//! A block goes from below to here once and never back, whole: of a block that is written in part
//! the rest is read from below first. What is here is the truth whatever is below, so the blocks can
//! be merged down ([`Overlay::merge`]) as often as that is broken off, while guests write.
//!
//! What is durable follows the rule of an owner with missing blocks (I2): a flush is answered after
//! the data sync and then a durable record of every block that came here before it.

use crate::blockmap::AtomicBlockMap;
use crate::image::Joined;
use crate::missing::Touched;
use crate::needs::PresentLog;
use crate::runs::copy_run;
use crate::stripes::Stripes;
use crate::sync::Arc;
use crate::unrecorded::Unrecorded;
use crate::{
    Attempt, Client, Error, ErrorKind, Extent, Geometry, Image, Result, WriteBackError, ZeroMode,
};
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};

const CHANGING: &str = "changing an overlay";
/// Blocks merged down by one request: 1 MiB.
const MERGE_BLOCKS: u64 = 256;

/// Blocks in a file over an image below.
pub struct Overlay {
    below: Arc<dyn Image>,
    file: Arc<dyn Image>,
    len: u64,
    here: AtomicBlockMap,
    /// Here, and the log does not say so yet.
    unrecorded: Unrecorded,
    /// Here, and perhaps not below.
    unmerged: AtomicBlockMap,
    log: Arc<dyn PresentLog>,
    stripes: Stripes,
}

impl Overlay {
    /// An overlay in `file`, which is as long as what is seen, with the blocks `here` in it. `log`
    /// knows them, and is told only of those that come, and of `unrecorded`: these are here only by
    /// a note, of an earlier process, and the next flush records them before it is answered.
    ///
    /// # Errors
    /// `Invalid` when the image below has another length.
    pub fn new(
        below: Arc<dyn Image>,
        file: Arc<dyn Image>,
        here: &BlockSet,
        unrecorded: &BlockSet,
        log: Arc<dyn PresentLog>,
    ) -> Result<Self> {
        let (len, there) = (file.geometry().len, below.geometry().len);
        if len != there {
            let why = format!("the overlay has {len} bytes, and the image below has {there}");
            return Err(Error::new(ErrorKind::Invalid, "opening an overlay", &why));
        }
        let whole = BlockRange::whole(len);
        let map = || AtomicBlockMap::new(whole.len);
        let (known, unmerged, noted) = (map(), map(), Unrecorded::new(whole.len));
        let unrecorded = unrecorded.intersection(whole);
        for run in here.intersection(whole).runs().chain(unrecorded.runs()) {
            known.set(run);
            unmerged.set(run);
        }
        if noted.inherit(&unrecorded, file.write_back_error()) {
            file.notes_begin_anew();
        }
        Ok(Self {
            below,
            file,
            len,
            here: known,
            unrecorded: noted,
            unmerged,
            log,
            stripes: Stripes::default(),
        })
    }

    /// Number of blocks that are here.
    pub fn here_count(&self) -> u64 {
        self.here.count()
    }

    /// Number of blocks that may not be below; exact while nobody writes.
    pub fn unmerged_count(&self) -> u64 {
        self.unmerged.count()
    }

    /// Takes every block that is here for unmerged again: what was merged may be lost below.
    pub fn unmerge(&self) {
        self.here.snapshot().runs().for_each(|run| {
            self.unmerged.set(run);
        });
    }

    /// Writes at most a megabyte of what is unmerged, at or after block `from`, to the image below.
    /// Returns what was written, none when nothing is left there. What a guest writes meanwhile is
    /// unmerged again. Not durable below until that is flushed.
    ///
    /// # Errors
    /// What either image reports; the blocks then stay unmerged.
    pub fn merge(&self, from: u64) -> Result<Option<BlockRange>> {
        self.unrecorded.check_usable("merging an overlay")?;
        let Some(run) = self.unmerged.next_run(from, MERGE_BLOCKS) else { return Ok(None) };
        // Cleared before it is read: a write that completes later marks it again.
        self.unmerged.clear(run);
        let merged = copy_run(&*self.file, &*self.below, run);
        if merged.is_err() {
            self.unmerged.set(run);
        }
        merged.map(|()| Some(run))
    }

    fn has_all(&self, range: BlockRange) -> bool {
        self.here.count_in(range) == range.len
    }

    /// Pieces of a byte range that are entirely here (`true`) or entirely below.
    fn pieces(&self, offset: u64, len: u64) -> Vec<(u64, u64, bool)> {
        let end = offset + len;
        let (mut at, mut pieces) = (offset, Vec::new());
        for run in self.here.runs_in(BlockRange::covering(offset, len)) {
            let from = run.byte_offset().max(offset);
            let to = (run.byte_offset() + run.byte_len()).min(end);
            if from > at {
                pieces.push((at, from, false));
            }
            pieces.push((from, to, true));
            at = to;
        }
        if at < end {
            pieces.push((at, end, false));
        }
        pieces
    }

    /// Brings the blocks of `range` that are below into the file, without counting them as here.
    fn copy_up(&self, range: BlockRange) -> Result<()> {
        for number in range.start..range.end() {
            let block = BlockRange::new(number, 1);
            if self.here.intersects(block) {
                continue;
            }
            let offset = block.byte_offset();
            let mut buf = vec![0; BLOCK_SIZE.min(self.len - offset) as usize];
            self.below.read_at(&mut buf, offset)?;
            self.file.write_at(&buf, offset, false)?;
        }
        Ok(())
    }

    /// Runs `change`, which changes what `touched` says in the file.
    fn change<T>(&self, touched: Touched, change: impl FnOnce() -> Result<T>) -> Result<T> {
        self.unrecorded.check_usable(CHANGING)?;
        let done = if self.has_all(touched.all) { change() } else { self.bring(touched, change) };
        // Whatever came of it: what is in the file may differ from what is below.
        for run in self.here.runs_in(touched.all) {
            self.unmerged.set(run);
        }
        done
    }

    fn bring<T>(&self, touched: Touched, change: impl FnOnce() -> Result<T>) -> Result<T> {
        let _held = self.stripes.lock(touched.all);
        for part in touched.partly() {
            self.copy_up(part)?;
        }
        let done = change()?;
        self.arrived(touched.all)?;
        Ok(done)
    }

    /// The blocks of `range` are in the file; its stripes are held.
    fn arrived(&self, range: BlockRange) -> Result<()> {
        let mut at = range.start;
        for run in self.here.runs_in(range).into_iter().chain([BlockRange::new(range.end(), 0)]) {
            if run.start > at {
                let new = BlockRange::new(at, run.start - at);
                self.unrecorded.add(Some(&*self.log), new)?;
                self.here.set(new);
            }
            at = run.end();
        }
        Ok(())
    }

    /// Makes the file durable by `sync`, then the record of every block that came here before (I2).
    fn checkpoint(&self, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        self.unrecorded.record("flushing an overlay", Some(&*self.log), |_| sync())
    }

    fn recorded(&self, fua: bool) -> Result<()> {
        if fua { self.sync() } else { Ok(()) }
    }

    fn check(&self, what: &str, offset: u64, len: u64) -> Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        let context = format!("{what} {len} bytes at {offset}");
        let why = format!("the image ends at {}", self.len);
        Err(Error::new(ErrorKind::OutOfRange, context, &why))
    }
}

impl Image for Overlay {
    fn geometry(&self) -> Geometry {
        Geometry { len: self.len, read_only: false, ..self.file.geometry() }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.check("reading", offset, buf.len() as u64)?;
        for (from, to, here) in self.pieces(offset, buf.len() as u64) {
            let part = &mut buf[(from - offset) as usize..(to - offset) as usize];
            if here { self.file.read_at(part, from)? } else { self.below.read_at(part, from)? }
        }
        self.unrecorded.check_read(BlockRange::covering(offset, buf.len() as u64))
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        let len = data.len() as u64;
        self.check("writing", offset, len)?;
        if len > 0 {
            let touched = Touched::new(offset, len, self.len);
            self.change(touched, || self.file.write_at(data, offset, false))?;
        }
        self.recorded(fua)
    }

    fn zero(&self, offset: u64, len: u64, mode: ZeroMode, fua: bool) -> Result<()> {
        self.check("zeroing", offset, len)?;
        if len > 0 {
            let touched = Touched::new(offset, len, self.len);
            self.change(touched, || self.file.zero(offset, len, mode, false))?;
        }
        self.recorded(fua)
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.check("discarding", offset, len)?;
        if len > 0 {
            let touched = Touched::new(offset, len, self.len);
            self.change(touched, || self.file.discard(offset, len, false))?;
        }
        self.recorded(fua)
    }

    fn flush(&self) -> Result<()> {
        self.checkpoint(|| self.file.flush())
    }

    fn sync(&self) -> Result<()> {
        self.checkpoint(|| self.file.sync())
    }

    fn look_at(&self, client: &Arc<Client>) {
        self.file.look_at(client);
    }

    fn write_back_error(&self) -> Option<WriteBackError> {
        self.file.write_back_error()
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        self.check("mapping", offset, len)?;
        let mut joined = Joined::at_most(max);
        for (from, to, here) in self.pieces(offset, len) {
            self.unrecorded.check_read(BlockRange::covering(from, to - from))?;
            let image = if here { &self.file } else { &self.below };
            let mut at = from;
            while at < to {
                match joined.extend(&image.extents(at, to - at, max)?) {
                    Some(len) => at += len,
                    None => return Ok(joined.found()),
                }
            }
        }
        Ok(joined.found())
    }

    fn start_writeback(&self, offset: u64, len: u64) -> Result<()> {
        self.file.start_writeback(offset, len)
    }

    fn forget_cached(&self, offset: u64, len: u64) -> Result<()> {
        self.file.forget_cached(offset, len)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<Attempt> {
        let len = buf.len() as u64;
        self.check("reading", offset, len)?;
        if len == 0 || !self.has_all(BlockRange::covering(offset, len)) {
            return Ok(Attempt::WouldWait);
        }
        let attempt = self.file.try_read_at(buf, offset)?;
        self.unrecorded.check_read(BlockRange::covering(offset, len))?;
        Ok(attempt)
    }

    fn try_write_at(&self, data: &[u8], offset: u64) -> Result<Attempt> {
        let len = data.len() as u64;
        self.check("writing", offset, len)?;
        let touched = Touched::new(offset, len, self.len);
        // A block that comes here is noted, which is a write of its own: not for this way.
        if len == 0 || !self.has_all(touched.all) {
            return Ok(Attempt::WouldWait);
        }
        self.unrecorded.check_usable(CHANGING)?;
        let attempt = self.file.try_write_at(data, offset)?;
        if attempt == Attempt::Done {
            self.unmerged.set(touched.all);
        }
        Ok(attempt)
    }
}
