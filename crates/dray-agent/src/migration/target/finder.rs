//! Described runs at the target: what is described is looked up in threads of their own, so that
//! data behind it on the stream does not wait for the disk.
//!
//! A run of which something is just on its way to here, because another image has it too, waits in
//! its thread until that has come ([`crate::reuse::Wanted`]).

use super::sink::Sink;
use crate::reuse::{PIECE_BYTES, Reuse};
use dray_types::{BLOCK_SIZE, BlockRange};
use dray_wire::FrameHeader;
use dray_wire::frame::{PIECE_BLOCKS, PIECE_HASH_LEN, PieceHash, mask_bit};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Threads that look things up.
const THREADS: usize = 2;
/// Described runs that wait for each of them; the engine of an honest source has fewer under way.
const WAITING: usize = 512;
/// How often it is looked whether what is on its way has come.
const LOOK: Duration = Duration::from_millis(3);

/// A described run.
pub(super) struct Job {
    pub(super) session: u64,
    pub(super) header: FrameHeader,
    /// The piece and its hash, for each that has one and was not found yet.
    open: Vec<(usize, PieceHash)>,
    /// The content, as far as it was found; empty before anything was.
    content: Vec<u8>,
    since: Instant,
}

impl Job {
    fn new(session: u64, header: &FrameHeader, hashes: &[u8]) -> Self {
        let zeros = header.zero_pieces();
        let pieces = (header.range.len / PIECE_BLOCKS) as usize;
        let some = (0..pieces).filter(|piece| zeros >> piece & 1 == 0);
        let hashes = hashes.chunks_exact(PIECE_HASH_LEN);
        let hash = |bytes: &[u8]| PieceHash::try_from(bytes).unwrap_or_default();
        let open = some.zip(hashes).map(|(piece, bytes)| (piece, hash(bytes))).collect();
        Self { session, header: *header, open, content: Vec::new(), since: Instant::now() }
    }

    /// Looks for what was not found yet.
    fn look(&mut self, reuse: &Reuse, peer: &str, piece_of: &mut [u8]) {
        let (content, len) = (&mut self.content, self.header.range.byte_len() as usize);
        self.open.retain(|(piece, hash)| {
            if !reuse.find(peer, hash, piece_of) {
                return true;
            }
            content.resize(len, 0);
            content[piece * PIECE_BYTES..(piece + 1) * PIECE_BYTES].copy_from_slice(piece_of);
            false
        });
    }

    /// The pieces that lack, a bit each.
    pub(super) fn lacking(&self) -> u16 {
        self.open.iter().fold(0, |all, (piece, _)| all | 1 << piece)
    }

    /// What lacks: first block and hash.
    pub(super) fn lacks(&self) -> impl Iterator<Item = (u64, PieceHash)> + '_ {
        let start = self.header.range.start;
        self.open.iter().map(move |(piece, hash)| (start + *piece as u64 * PIECE_BLOCKS, *hash))
    }

    /// What was found, cut where something lacks and where data and zeros meet: none for zeros.
    pub(super) fn parts(&self) -> Vec<(BlockRange, Option<&[u8]>)> {
        let (range, lacking) = (self.header.range, self.lacking());
        let kind = |at: u64| {
            let lacks = lacking >> (at / PIECE_BLOCKS) & 1 == 1;
            (!lacks).then(|| mask_bit(&self.header.zero_mask, at))
        };
        let mut parts = Vec::new();
        let mut at = 0;
        while at < range.len {
            let (start, is) = (at, kind(at));
            while at < range.len && kind(at) == is {
                at += 1;
            }
            let bytes = (start * BLOCK_SIZE) as usize..(at * BLOCK_SIZE) as usize;
            let part = BlockRange::new(range.start + start, at - start);
            match is {
                Some(true) => parts.push((part, None)),
                Some(false) => parts.push((part, Some(&self.content[bytes]))),
                None => {}
            }
        }
        parts
    }
}

/// The threads, once something was described.
#[derive(Default)]
pub(super) struct Finder {
    threads: Mutex<Vec<SyncSender<Job>>>,
}

impl Finder {
    /// Hands a description over; waits when too many do. False when nobody can look it up.
    pub(super) fn describe(
        &self,
        sink: &Arc<Sink>,
        session: u64,
        header: &FrameHeader,
        hashes: &[u8],
    ) -> bool {
        let thread = {
            let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
            if threads.is_empty() {
                *threads = start(sink);
            }
            if threads.is_empty() {
                return false;
            }
            threads[header.tag as usize % threads.len()].clone()
        };
        thread.send(Job::new(session, header, hashes)).is_ok()
    }

    /// Ends the threads when they have done what waits.
    pub(super) fn end(&self) {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

fn start(sink: &Arc<Sink>) -> Vec<SyncSender<Job>> {
    let one = |_| {
        let (jobs, queue) = sync_channel(WAITING);
        let sink = Arc::clone(sink);
        let thread = std::thread::Builder::new().name("dray-find".to_owned());
        let started = thread.spawn(move || work(&sink, &queue));
        started.is_ok().then_some(jobs)
    };
    (0..THREADS).filter_map(one).collect()
}

fn work(sink: &Arc<Sink>, queue: &Receiver<Job>) {
    let mut piece = crate::net::zeros::RunBuffer::new(PIECE_BLOCKS);
    let mut waiting: Vec<Job> = Vec::new();
    loop {
        let next = if waiting.is_empty() {
            queue.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            queue.recv_timeout(LOOK)
        };
        match next {
            Ok(job) => waiting.push(job),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {}
        }
        waiting.extend(queue.try_iter());
        waiting.retain_mut(|job| !try_job(sink, job, piece.bytes(PIECE_BYTES)));
    }
}

/// Looks, and answers unless something of it is on its way; true when it is answered.
fn try_job(sink: &Sink, job: &mut Job, piece: &mut [u8]) -> bool {
    let (reuse, peer) = sink.reuse();
    job.look(reuse, peer, piece);
    let open: Vec<_> = job.open.iter().map(|(_, hash)| *hash).collect();
    let late = job.since.elapsed() >= crate::reuse::PATIENCE || !sink.is_current(job.session);
    if !open.is_empty() && !reuse.wanted.claim(&open, late) {
        return false;
    }
    sink.found(job);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::{Epoch, ImageIndex};
    use dray_wire::{Encoding, FrameKind};

    #[test]
    fn what_was_found_is_cut_where_something_lacks_and_at_zeros() {
        let header = FrameHeader {
            kind: FrameKind::Described,
            encoding: Encoding::Raw,
            image: ImageIndex(0),
            epoch: Epoch(1),
            tag: 1,
            range: BlockRange::new(64, 64),
            // The last two blocks of the first piece, and all of the fourth.
            zero_mask: [0xffff_0000_0000_c000, 0, 0, 0],
            payload_len: 96,
            hash: 0,
        };
        let hashes: Vec<u8> = (1..=3u8).flat_map(|nth| [nth; 32]).collect();
        let mut job = Job::new(1, &header, &hashes);
        assert_eq!(job.lacking(), 0b0111);
        // All but the second piece is found.
        job.open.retain(|(piece, _)| *piece == 1);
        job.content = vec![5; 64 * 4096];
        let parts: Vec<_> =
            job.parts().iter().map(|(r, d)| (r.start, r.len, d.is_some())).collect();
        assert_eq!(parts, [(64, 14, true), (78, 2, false), (96, 16, true), (112, 16, false)]);
        assert_eq!(job.lacks().collect::<Vec<_>>(), [(80, [2; 32])]);
    }
}
