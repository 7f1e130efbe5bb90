//! The way of a guest's request through a [`Disk`].

use super::Disk;
use crate::client;
use crate::image::Joined;
use crate::missing::Touched;
use crate::stats::Counter;
use crate::{
    Attempt, Client, Error, ErrorKind, Extent, ExtentKind, Geometry, Image, Result, WriteBackError,
    ZeroMode,
};
use dray_heat::Op;
use dray_types::{BLOCK_SIZE, BlockRange};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Disk {
    fn check(&self, what: &str, offset: u64, len: u64) -> Result<()> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        let context = format!("{what} {len} bytes at {offset}");
        let why = format!("the disk ends at {}", self.len);
        Err(Error::new(ErrorKind::OutOfRange, context, &why))
    }

    /// Counts a request that had to wait since `began`.
    fn waited(&self, counter: Counter, began: Instant) {
        self.counters.add(counter, 1);
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.counters.add(Counter::RemoteWaitNanos, nanos);
    }

    /// The whole path of a change: gate, tracker, missing map, image. `apply` changes the image,
    /// durably when it is told to.
    fn change(
        &self,
        offset: u64,
        len: u64,
        fua: bool,
        apply: impl FnOnce(bool) -> Result<()>,
    ) -> Result<()> {
        if len == 0 {
            return if fua { self.flush() } else { Ok(()) };
        }
        let touched = Touched::new(offset, len, self.len);
        if self.brake.is_on() {
            self.brake.wait(self.new_dirty(touched));
        }
        let began = self.meter.is_on().then(Instant::now);
        let _pass = self.gate.enter_as(client::process, client::is_there)?;
        // Right before the change: what comes first may take long.
        let apply = |durable| self.check_client().and_then(|()| apply(durable));
        let noted = self.history.begin(touched.all)?;
        let marked = self.tracker.begin(touched.all)?;
        self.keeper.before_change(touched.all);
        if self.missing.is_over() {
            apply(fua)?;
        } else {
            self.change_with_missing(touched, || apply(false))?;
            if fua {
                self.missing.checkpoint()?;
            }
        }
        marked.complete()?;
        noted.complete()?;
        self.witness.tell(touched.all);
        self.timed(began);
        Ok(())
    }

    /// Nothing is written for a client that has gone while somebody else may take the image.
    fn check_client(&self) -> Result<()> {
        if self.unlocked.load(Ordering::SeqCst) && !client::is_there() {
            let why = "its client has disconnected, and another program may have the image";
            return Err(Error::new(ErrorKind::Unavailable, "changing an image", why));
        }
        Ok(())
    }

    fn timed(&self, began: Option<Instant>) {
        if let Some(began) = began {
            self.meter.add(began.elapsed());
        }
    }

    /// Bytes that a change makes dirty and that are clean.
    fn new_dirty(&self, touched: Touched) -> u64 {
        self.tracker.clean_in(touched.all) * BLOCK_SIZE
    }

    fn change_with_missing(
        &self,
        touched: Touched,
        apply: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if self.missing.has_all(touched.all) {
            self.missing.check_usable()?;
            return apply();
        }
        let began = Instant::now();
        if self.missing.overwrite(touched, apply)? {
            self.waited(Counter::RemoteWrites, began);
        }
        Ok(())
    }

    fn wait_for(&self, range: BlockRange) -> Result<()> {
        if self.missing.has_all(range) {
            return Ok(());
        }
        let began = Instant::now();
        if self.missing.wait(range)? {
            self.waited(Counter::RemoteReads, began);
        }
        Ok(())
    }

    fn count_read(&self, offset: u64, len: u64) {
        self.counters.add(Counter::Reads, 1);
        self.counters.add(Counter::ReadBytes, len);
        self.note(Op::Read, offset, len);
    }

    fn count_write(&self, offset: u64, len: u64) {
        self.counters.add(Counter::Writes, 1);
        self.counters.add(Counter::WriteBytes, len);
        self.note(Op::Write, offset, len);
    }

    fn count_zero(&self, offset: u64, len: u64) {
        self.counters.add(Counter::Zeroes, 1);
        self.note(Op::Write, offset, len);
    }
}

impl Image for Disk {
    fn geometry(&self) -> Geometry {
        let geometry = self.backing.geometry();
        Geometry { read_only: geometry.read_only && !self.told_writable(), ..geometry }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        self.check("reading", offset, buf.len() as u64)?;
        let elsewhere = self.gate.enter_read(client::is_there)?;
        self.count_read(offset, buf.len() as u64);
        if elsewhere {
            return self.missing.fetcher()?.peek(offset, buf);
        }
        let range = BlockRange::covering(offset, buf.len() as u64);
        self.wait_for(range)?;
        self.backing.read_at(buf, offset)?;
        self.missing.check_read(range)
    }

    fn write_at(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        let len = data.len() as u64;
        self.check("writing", offset, len)?;
        self.change(offset, len, fua, |fua| self.backing.write_at(data, offset, fua))?;
        self.count_write(offset, len);
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64, mode: ZeroMode, fua: bool) -> Result<()> {
        self.check("zeroing", offset, len)?;
        self.change(offset, len, fua, |fua| self.backing.zero(offset, len, mode, fua))?;
        self.count_zero(offset, len);
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64, fua: bool) -> Result<()> {
        self.check("discarding", offset, len)?;
        self.change(offset, len, fua, |fua| self.backing.discard(offset, len, fua))?;
        self.count_zero(offset, len);
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.counters.add(Counter::Flushes, 1);
        if self.gate.enter_flush(client::is_there)? {
            return Ok(());
        }
        self.missing.flush()
    }

    fn sync(&self) -> Result<()> {
        self.checkpoint()
    }

    fn is_withdrawn(&self) -> bool {
        self.withdrawn.load(Ordering::SeqCst)
    }

    fn look_at(&self, client: &Arc<Client>) {
        self.backing.look_at(client);
    }

    fn write_back_error(&self) -> Option<WriteBackError> {
        self.backing.write_back_error()
    }

    fn extents(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        self.check("mapping", offset, len)?;
        if self.gate.enter_read(client::is_there)? {
            let all = Extent { len, kind: ExtentKind::Data };
            return Ok(if len == 0 || max == 0 { Vec::new() } else { vec![all] });
        }
        if max == 0 || self.missing.is_over() {
            return self.backing.extents(offset, len, max);
        }
        self.extents_with_missing(offset, len, max)
    }

    fn prefetch(&self, offset: u64, len: u64) -> Result<()> {
        self.check("prefetching", offset, len)?;
        let here =
            self.gate.reads_pass() && self.missing.has_all(BlockRange::covering(offset, len));
        if here { self.backing.prefetch(offset, len) } else { Ok(()) }
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> Result<Attempt> {
        let len = buf.len();
        self.check("reading", offset, len as u64)?;
        let range = BlockRange::covering(offset, len as u64);
        let here = self.gate.reads_pass() && self.missing.has_all(range);
        if !here {
            return Ok(Attempt::WouldWait);
        }
        let attempt = self.backing.try_read_at(buf, offset)?;
        if attempt == Attempt::Done {
            self.missing.check_read(range)?;
            self.count_read(offset, len as u64);
        }
        Ok(attempt)
    }

    fn try_write_at(&self, data: &[u8], offset: u64) -> Result<Attempt> {
        let len = data.len() as u64;
        self.check("writing", offset, len)?;
        if len == 0 {
            return Ok(Attempt::Done);
        }
        let touched = Touched::new(offset, len, self.len);
        // Nobody here can tell whether the client is still there.
        let waits = self.unlocked.load(Ordering::Relaxed)
            || self.brake.is_on() && self.new_dirty(touched) > 0;
        if waits {
            return Ok(Attempt::WouldWait);
        }
        let began = self.meter.is_on().then(Instant::now);
        let Some(_pass) = self.gate.try_enter() else { return Ok(Attempt::WouldWait) };
        if self.keeper.is_wanted(touched.all) {
            return Ok(Attempt::WouldWait);
        }
        let (Some(noted), Some(marked)) =
            (self.history.try_begin(touched.all), self.tracker.try_begin(touched.all))
        else {
            return Ok(Attempt::WouldWait);
        };
        let write = || self.backing.try_write_at(data, offset);
        let attempt = if self.missing.is_over() {
            write()?
        } else {
            self.missing.try_overwrite(touched, write)?
        };
        if attempt == Attempt::Done {
            self.count_write(offset, len);
            marked.complete()?;
            noted.complete()?;
            self.witness.tell(touched.all);
            self.timed(began);
        }
        Ok(attempt)
    }
}

impl Disk {
    /// Missing blocks may hold anything, whatever the image has in their place.
    fn extents_with_missing(&self, offset: u64, len: u64, max: usize) -> Result<Vec<Extent>> {
        let mut joined = Joined::at_most(max);
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let missing = self.missing.map().next_run(at / BLOCK_SIZE, u64::MAX);
            let (from, to) = missing.map_or((end, end), |run| {
                let to = run.byte_offset() + run.byte_len();
                (run.byte_offset().clamp(at, end), to.min(end))
            });
            let pieces = if from > at {
                let pieces = self.backing.extents(at, from - at, max)?;
                self.missing.check_read(BlockRange::covering(at, from - at))?;
                pieces
            } else {
                vec![Extent { len: to - at, kind: ExtentKind::Data }]
            };
            match joined.extend(&pieces) {
                Some(len) => at += len,
                None => break,
            }
        }
        Ok(joined.found())
    }
}
