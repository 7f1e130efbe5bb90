//! Described runs at the target: what is described is looked up in threads of their own, so that
//! data behind it on the stream does not wait for the disk.
//!
//! A run of which something is just on its way to here, because another image has it too, waits in
//! its thread until that has come ([`dray_provider::reuse::Wanted`]). So does one of which something similar
//! is: of what lacks then only some blocks will have to be sent ([`super::basis`]).

use super::basis::BlockJob;
use super::sink::Sink;
use dray_net::zeros::RunBuffer;
use dray_provider::reuse::{Lacking, PIECE_BYTES, Spot};
use dray_types::{BLOCK_SIZE, BlockRange};
use dray_wire::FrameHeader;
use dray_wire::frame::{PIECE_BLOCKS, PIECE_HASH_LEN, PieceHash, mask_bit};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Threads that look things up.
const THREADS: usize = 2;
/// Described runs that wait for each of them to be looked up, and again as many for what is on its
/// way; the engine of an honest source has fewer under way.
const WAITING: usize = 512;
/// How often it is looked whether what is on its way has come.
const LOOK: Duration = Duration::from_millis(3);

/// Where something similar is in so many places, no other one is waited for: with two of them nearly
/// all is found.
const ENOUGH: usize = 2;

/// What the threads do.
pub(super) enum Task {
    /// Looks for pieces.
    Pieces(Job),
    /// Looks for blocks.
    Blocks(BlockJob),
}

impl From<Job> for Task {
    fn from(job: Job) -> Self {
        Self::Pieces(job)
    }
}

impl From<BlockJob> for Task {
    fn from(job: BlockJob) -> Self {
        Self::Blocks(job)
    }
}

/// A described run.
pub(super) struct Job {
    pub(super) session: u64,
    pub(super) header: FrameHeader,
    /// The piece and its hash, for each that has one and was not found yet.
    open: Vec<(usize, PieceHash)>,
    /// The content, as far as it was found; empty before anything was.
    content: Vec<u8>,
    since: Instant,
    /// After the handover: all that is found is written, whatever is there.
    fills: bool,
    /// What lacks, as of the last look.
    lacks: Vec<Lacking>,
    /// Pieces that are in their own place already: nothing is written there. A bit each; none before
    /// the first look.
    in_place: Option<u16>,
    /// Pieces that lack and of which blocks may be here.
    pub(super) near: u16,
}

impl Job {
    pub(super) fn new(session: u64, header: &FrameHeader, hashes: &[u8], fills: bool) -> Self {
        let zeros = header.zero_pieces();
        let pieces = (header.range.len / PIECE_BLOCKS) as usize;
        let some = (0..pieces).filter(|piece| zeros >> piece & 1 == 0);
        let hashes = hashes.chunks_exact(PIECE_HASH_LEN);
        let hash = |bytes: &[u8]| PieceHash::try_from(bytes).unwrap_or_default();
        let open = some.zip(hashes).map(|(piece, bytes)| (piece, hash(bytes))).collect();
        let (content, lacks) = (Vec::new(), Vec::new());
        Self {
            session,
            header: *header,
            open,
            content,
            since: Instant::now(),
            fills,
            lacks,
            in_place: None,
            near: 0,
        }
    }

    /// Compares with what the image's file holds in the pieces' own places: a replica's, or what an
    /// earlier try has brought.
    fn look_in_place(&mut self, sink: &Sink, piece_of: &mut [u8]) {
        let FrameHeader { image, range, .. } = self.header;
        self.in_place = Some(0);
        let Some((reuse, asker)) = sink.reuse(image) else { return };
        let (fills, content, len) = (self.fills, &mut self.content, range.byte_len() as usize);
        let mut here = 0;
        self.open.retain(|(piece, hash)| {
            let place = sink.spot(image, range.start / PIECE_BLOCKS + *piece as u64);
            if let (Some(place), Some(same)) = (place, reuse.wanted.comes_to(asker, hash)) {
                reuse.alike(place, same);
            }
            let own = sink.own_place(image, range.start / PIECE_BLOCKS + *piece as u64);
            let is = own.is_some_and(|own| reuse.has(asker, own, hash, piece_of));
            if is && fills {
                content.resize(len, 0);
                content[piece * PIECE_BYTES..(piece + 1) * PIECE_BYTES].copy_from_slice(piece_of);
            } else {
                here |= u16::from(is) << piece;
            }
            !is
        });
        self.in_place = Some(here);
    }

    /// Looks for what was not found yet; what lacks then.
    fn look(&mut self, sink: &Sink, piece_of: &mut [u8]) -> Vec<Lacking> {
        if self.in_place.is_none() {
            self.look_in_place(sink, piece_of);
        }
        let FrameHeader { image, range, .. } = self.header;
        let Some((reuse, asker)) = sink.reuse(image) else { return Vec::new() };
        let (content, len) = (&mut self.content, range.byte_len() as usize);
        let first = range.start / PIECE_BLOCKS;
        self.open.retain(|(piece, hash)| {
            let Some(at) = reuse.find(asker, hash, piece_of) else { return true };
            if let Some(place) = sink.spot(image, first + *piece as u64) {
                reuse.alike(place, at);
            }
            content.resize(len, 0);
            content[piece * PIECE_BYTES..(piece + 1) * PIECE_BYTES].copy_from_slice(piece_of);
            false
        });
        let mut near_here = 0;
        let lacking = |(piece, hash): &(usize, PieceHash)| {
            let nth = first + *piece as u64;
            let place = sink.spot(image, nth)?;
            let all = reuse.similar(asker, place);
            let some = |spot: &&Spot| reuse.has_data(asker, **spot);
            // Blocks of what is coming are there already, and the others would be asked for twice.
            let whole = |spot: &&Spot| !reuse.wanted.comes_there(**spot) && some(spot);
            let enough = all.iter().filter(whole).take(ENOUGH).count() == ENOUGH;
            let own = sink.own_place(image, nth).is_some();
            near_here |= u16::from(own || all.iter().any(|spot| some(&spot))) << piece;
            let near = if enough { Vec::new() } else { all };
            Some(Lacking::new(asker, *hash, place, near))
        };
        let lacks = self.open.iter().filter_map(lacking).collect();
        self.near = near_here;
        lacks
    }

    /// The pieces that lack, a bit each.
    pub(super) fn lacking(&self) -> u16 {
        self.open.iter().fold(0, |all, (piece, _)| all | 1 << piece)
    }

    /// What lacks.
    pub(super) fn lacks(&self) -> impl Iterator<Item = &Lacking> {
        self.lacks.iter()
    }

    /// What has to be written, cut where that ends and where data and zeros meet: none for zeros.
    pub(super) fn parts(&self) -> Vec<(BlockRange, Option<&[u8]>)> {
        let (range, lacking) = (self.header.range, self.lacking());
        let stays = lacking | self.in_place.unwrap_or(0);
        let kind = |at: u64| {
            let stays = stays >> (at / PIECE_BLOCKS) & 1 == 1;
            (!stays).then(|| mask_bit(&self.header.zero_mask, at))
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
    threads: Mutex<Vec<SyncSender<Task>>>,
}

impl Finder {
    /// Hands what was described under `tag` over. When too many wait to be looked up it `waits`, or
    /// not: behind it on the stream may be what a guest waits for. False when nobody looks it up.
    pub(super) fn look(
        &self,
        sink: &Arc<Sink>,
        tag: u64,
        waits: bool,
        task: impl FnOnce() -> Task,
    ) -> bool {
        let thread = {
            let mut threads = self.threads.lock();
            if threads.is_empty() {
                *threads = start(sink);
            }
            if threads.is_empty() {
                return false;
            }
            threads[tag as usize % threads.len()].clone()
        };
        if waits { thread.send(task()).is_ok() } else { thread.try_send(task()).is_ok() }
    }

    /// Ends the threads when they have done what waits.
    pub(super) fn end(&self) {
        self.threads.lock().clear();
    }
}

fn start(sink: &Arc<Sink>) -> Vec<SyncSender<Task>> {
    let one = |_| {
        let (jobs, queue) = sync_channel(WAITING);
        let sink = Arc::clone(sink);
        let thread = std::thread::Builder::new().name("dray-find".to_owned());
        let started = thread.spawn(move || work(&sink, &queue));
        started.is_ok().then_some(jobs)
    };
    (0..THREADS).filter_map(one).collect()
}

fn work(sink: &Sink, queue: &Receiver<Task>) {
    let mut memory = RunBuffer::new(PIECE_BLOCKS);
    let piece = memory.bytes(PIECE_BYTES);
    let mut waiting = Waiting(Vec::new());
    loop {
        let next = if waiting.0.is_empty() {
            queue.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            queue.recv_timeout(LOOK)
        };
        let first = match next {
            Ok(task) => Some(task),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => None,
        };
        for task in first.into_iter().chain(queue.try_iter().take(WAITING)) {
            match task {
                Task::Pieces(job) => waiting.0.push(job),
                // What they wait for is here, or nowhere.
                Task::Blocks(mut job) => {
                    job.look(sink, piece);
                    sink.blocks_found(&job);
                }
            }
        }
        waiting.try_all(|job, now| try_job(sink, job, now, piece));
    }
}

/// What waits until something that is on its way has come, in the order in which it came.
struct Waiting<J>(Vec<J>);

impl<J> Waiting<J> {
    /// Asks `answer` of each whether it is answered. Those that are too many have to be, the oldest
    /// first: else a source that describes without end could fill this host's memory (I7).
    fn try_all(&mut self, mut answer: impl FnMut(&mut J, bool) -> bool) {
        let mut over = self.0.len().saturating_sub(WAITING);
        self.0.retain_mut(|job| {
            let now = over > 0;
            over = over.saturating_sub(1);
            !answer(job, now)
        });
    }
}

/// Looks, and answers unless something of it is on its way and it need not be `now`; true when it is
/// answered.
fn try_job(sink: &Sink, job: &mut Job, now: bool, piece: &mut [u8]) -> bool {
    let wanted = sink.wanted();
    let waited = job.since.elapsed() >= dray_provider::reuse::PATIENCE;
    let late = now || waited || !sink.is_current(job.session);
    // Looking costs more than asking whether there is a reason to look again.
    if !late && wanted.comes(&job.lacks) {
        return false;
    }
    let (lacks, claimed) = wanted.claim_what_lacks(late, || job.look(sink, piece));
    job.lacks = lacks;
    if claimed {
        sink.found(job);
    }
    claimed
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::{Epoch, ImageIndex};
    use dray_wire::{Encoding, FrameKind};

    #[test]
    fn of_what_waits_too_long_a_list_the_oldest_is_answered() {
        let mut waiting = Waiting((0..WAITING as u64 + 3).collect());
        let mut answered = Vec::new();
        // A source describes what never comes.
        let mut try_all = |waiting: &mut Waiting<u64>| {
            waiting.try_all(|job, now| {
                answered.extend(now.then_some(*job));
                now
            });
        };
        try_all(&mut waiting);
        assert_eq!((waiting.0.len(), waiting.0[0]), (WAITING, 3));
        try_all(&mut waiting);
        waiting.0.push(7777);
        try_all(&mut waiting);
        assert_eq!(answered, [0, 1, 2, 3]);
        assert_eq!((waiting.0.len(), waiting.0.last()), (WAITING, Some(&7777)));
    }

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
        let mut job = Job::new(1, &header, &hashes, false);
        assert_eq!(job.lacking(), 0b0111);
        // All but the second piece is found.
        job.open.retain(|(piece, _)| *piece == 1);
        job.content = vec![5; 64 * 4096];
        let parts: Vec<_> =
            job.parts().iter().map(|(r, d)| (r.start, r.len, d.is_some())).collect();
        assert_eq!(parts, [(64, 14, true), (78, 2, false), (96, 16, true), (112, 16, false)]);
        assert_eq!(job.lacking(), 0b0010);
        job.in_place = Some(0b0100);
        let parts: Vec<_> = job.parts().iter().map(|(range, _)| range.start).collect();
        assert_eq!(parts, [64, 78, 112]);
    }
}
