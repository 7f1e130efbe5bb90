//! Frames with hashes, and frames with the blocks that the target does not have.

use super::{Failed, Worker, refused};
use crate::queue::SendJob;
use crate::zeros::{is_zero, squeeze_to, zero_mask};
use dray_types::{BLOCK_SIZE, MAX_RUN_BLOCKS};
use dray_wire::frame::{PIECE_BLOCKS, frame_hash};
use dray_wire::{Encoding, FrameHeader, FrameKind};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

impl Worker {
    /// Reads a run, keeps it if that is wanted, and sends its hashes.
    pub(super) fn describe(&mut self, job: &SendJob, keep: bool) -> Result<(), Failed> {
        check(job)?;
        self.read(job)?;
        self.send_hashes(job, FrameKind::Described, PIECE_BLOCKS, keep)
    }

    /// Sends the hashes of the blocks of what was described before, and kept if anything was.
    pub(super) fn describe_blocks(&mut self, job: &SendJob, of: Option<u64>) -> Result<(), Failed> {
        check(job)?;
        match of {
            Some(of) => self.take_kept(job, of)?,
            None => self.read(job)?,
        }
        self.send_hashes(job, FrameKind::DescribedBlocks, 1, of.is_some())
    }

    /// Sends a hash of each `unit` blocks of the run that was read and are not all zeros.
    fn send_hashes(
        &mut self,
        job: &SendJob,
        kind: FrameKind,
        unit: u64,
        keep: bool,
    ) -> Result<(), Failed> {
        let range = job.range;
        let bytes = self.run.bytes(range.byte_len() as usize);
        let zero_mask = zero_mask(bytes);
        let some = bytes.chunks_exact((unit * BLOCK_SIZE) as usize).filter(|part| !is_zero(part));
        let hashes: Vec<u8> = some.flat_map(|part| *blake3::hash(part).as_bytes()).collect();
        if keep {
            // Before the hashes go, or the answer could come first.
            self.setup.queue.kept.keep(job.tag, range, bytes.to_vec());
        }
        let payload = self.run.bytes(hashes.len());
        payload.copy_from_slice(&hashes);
        let header = FrameHeader {
            kind,
            encoding: Encoding::Raw,
            image: job.image,
            epoch: job.epoch,
            tag: job.tag,
            range,
            zero_mask,
            payload_len: hashes.len() as u32,
            hash: frame_hash(kind, job.image, range, &zero_mask, payload),
        };
        self.write(job, &header, Encoding::Raw, hashes.len())?;
        self.setup.stats.hash_bytes.fetch_add(hashes.len() as u64, Relaxed);
        Ok(())
    }

    /// Sends what the target lacks of a described run, as it was read then.
    pub(super) fn send_kept(&mut self, job: &SendJob, of: u64) -> Result<(), Failed> {
        let began = Instant::now();
        self.take_kept(job, of)?;
        self.send_content(job, began)
    }

    /// Sends the blocks that the target lacks of those that were described, as they were read then.
    pub(super) fn send_part(
        &mut self,
        job: &SendJob,
        of: u64,
        blocks: [u64; 4],
    ) -> Result<(), Failed> {
        let began = Instant::now();
        self.take_kept(job, of)?;
        let bytes = self.run.bytes(job.range.byte_len() as usize);
        let (mask, len) = squeeze_to(bytes, &blocks);
        self.send_squeezed(job, FrameKind::Part, mask, len, began)
    }

    fn take_kept(&mut self, job: &SendJob, of: u64) -> Result<(), Failed> {
        let bytes = self.run.bytes(job.range.byte_len() as usize);
        if self.setup.queue.kept.take(of, job.range, bytes) {
            return Ok(());
        }
        // What was written meanwhile is dirty, and goes again whatever is sent here.
        self.read(job)
    }
}

/// Whole pieces, not more than a run.
fn check(job: &SendJob) -> Result<(), Failed> {
    let len = job.range.len;
    if len == 0 || len > MAX_RUN_BLOCKS || !len.is_multiple_of(PIECE_BLOCKS) {
        return Err(refused(format!("a run of {len} blocks cannot be described")));
    }
    Ok(())
}
