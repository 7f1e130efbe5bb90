//! From a snapshot to a backup: reads what is wanted in the order of addresses, at the pace that the
//! operator allows.

use super::moment::{PIECE_BLOCKS, disk_error};
use crate::jobs::Job;
use dray_api::{ApiResult, ErrorKind, Refusal};
use dray_backup::{PIECE_BYTES, Writer};
use dray_host::abort;
use dray_image::Snapshot;
use dray_net::bucket::Class;
use dray_net::pace::Pacer;
use dray_provider::destination::failed;
use dray_types::{BLOCK_SIZE, BlockRange, BlockSet};
use std::ops::Range;
use std::time::Duration;

/// Blocks looked through for holes at once: 1 GiB.
const LOOK: u64 = 1 << 18;
/// Blocks read at once: 1 MiB.
const READ: u64 = 256;

/// Longest time until an operator who ends a slow backup is heard.
const LOOK_UP: Duration = Duration::from_millis(100);

/// Writes one image.
pub struct ImageWriter<'a> {
    /// What is being done, for errors.
    pub what: &'a str,
    /// The image's length in bytes.
    pub len: u64,
    /// The writer of the repository.
    pub writer: &'a mut Writer,
    /// The operator's limit, of what is read.
    pub pacer: &'a Pacer,
    /// The job that counts the progress and can be cancelled.
    pub job: &'a Job,
    /// The image's place in the job.
    pub nth: usize,
}

/// The pieces of which blocks of `range` are; it begins at a piece.
fn pieces(range: BlockRange) -> Range<u64> {
    range.start / PIECE_BLOCKS..range.end().div_ceil(PIECE_BLOCKS)
}

impl ImageWriter<'_> {
    /// Reads the whole snapshot and gives it to the writer.
    ///
    /// # Errors
    /// `Cancelled`, what the snapshot is lost to, or what the repository reports.
    pub fn run(&mut self, snapshot: &Snapshot) -> ApiResult<()> {
        let todo = snapshot.unread();
        self.job.change(self.nth, |shown| shown.bytes_total = todo.len() * BLOCK_SIZE);
        for look in BlockRange::whole(self.len).pieces(LOOK) {
            let todo = todo.intersection(look);
            if todo.is_empty() {
                continue;
            }
            let holes = snapshot.take_holes(look).map_err(|why| disk_error(self.what, &why))?;
            let mut data = todo.clone();
            data.subtract(&holes);
            let data = super::moment::whole_pieces(&data);
            let mut empty = todo.clone();
            empty.subtract(&data);
            for run in empty.runs() {
                self.writer.zero(pieces(run)).map_err(|why| failed(self.what, &why))?;
                self.done(run.len);
            }
            for run in data.runs() {
                for part in run.pieces(READ) {
                    self.copy(snapshot, part, &holes)?;
                }
            }
        }
        Ok(())
    }

    /// Copies some whole pieces; of these the `holes` are zeros.
    fn copy(&mut self, snapshot: &Snapshot, part: BlockRange, holes: &BlockSet) -> ApiResult<()> {
        self.wait_for_turn(part.byte_len())?;
        abort::step("Backup-Copy");
        let mut buf = vec![0; part.byte_len() as usize];
        let mut read: BlockSet =
            [part.intersect(BlockRange::whole(self.len))].into_iter().collect();
        read.subtract(holes);
        for run in read.runs() {
            let from = ((run.start - part.start) * BLOCK_SIZE) as usize;
            let place = from..from + run.byte_len() as usize;
            snapshot.read(run, &mut buf[place]).map_err(|why| disk_error(self.what, &why))?;
        }
        let end = ((self.len - part.byte_offset()) as usize).min(buf.len());
        for (ix, piece) in pieces(part).zip(buf[..end].chunks(PIECE_BYTES)) {
            self.writer.put(ix, piece).map_err(|why| failed(self.what, &why))?;
        }
        let stored = self.writer.written().stored_bytes;
        self.job.change(self.nth, |shown| shown.stored_bytes = stored);
        self.done(part.len);
        Ok(())
    }

    /// Waits until `bytes` more may be read, or the operator ends it.
    fn wait_for_turn(&self, bytes: u64) -> ApiResult<()> {
        loop {
            if self.job.is_cancelled() {
                let why = "the operator cancelled it";
                return Err(Refusal::new(ErrorKind::Cancelled, self.what, why));
            }
            let wait = self.pacer.ready_in(Class::Bulk);
            if wait.is_zero() {
                self.pacer.charge(bytes);
                return Ok(());
            }
            std::thread::sleep(wait.min(LOOK_UP));
        }
    }

    fn done(&self, blocks: u64) {
        self.job.change(self.nth, |shown| {
            shown.bytes_done = (shown.bytes_done + blocks * BLOCK_SIZE).min(shown.bytes_total);
        });
    }
}
