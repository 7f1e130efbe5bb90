//! Many pieces in an order that the caller chooses, several reads at once.
//!
//! Pieces that are asked for one after the other and lie near each other in a pack are read with
//! one request. A failure is told per piece: the others go on.

use super::{Reader, fetch, unpack};
use crate::error::{Error, Kind, Result};
use crate::piece::{Hash, Piece, piece_len};
use crate::place::PackSlice;
use std::ops::{ControlFlow, Range};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// Longest range of a pack that is read at once.
const MOST_AT_ONCE: u64 = 4 << 20;
/// Unwanted bytes that are read to save a request.
const MOST_BETWEEN: u64 = 64 << 10;

/// The content of a piece.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// All zeros.
    Zero,
    /// These bytes; as many as the piece has.
    Data(Vec<u8>),
}

/// How a stream is read.
#[derive(Clone, Copy, Debug)]
pub struct StreamOptions {
    /// Requests at a time; at least one. Each holds up to 4 MiB, and as much waits for the caller.
    pub parallel: usize,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self { parallel: 4 }
    }
}

struct Wanted {
    ix: u64,
    hash: Hash,
    place: PackSlice,
    len: usize,
}

type Done = Vec<(u64, Result<Content>)>;

impl Reader {
    /// Reads the pieces of `ranges` and gives each to `sink`, on this thread, until that breaks.
    /// They come in the order asked for, except that requests which are under way together may
    /// overtake each other; every piece comes exactly once for each time it is named.
    ///
    /// Errors go to the sink, about the piece that they concern: [`Kind::Damaged`] and
    /// [`Kind::NotFound`] for what another provider must give, [`Kind::Unavailable`] when the store
    /// does not answer.
    pub fn stream(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        options: StreamOptions,
        mut sink: impl FnMut(u64, Result<Content>) -> ControlFlow<()>,
    ) {
        let parallel = options.parallel.max(1);
        let (jobs, todo) = sync_channel::<Vec<Wanted>>(parallel);
        let (results, done) = sync_channel::<Done>(parallel * 2);
        let todo = Mutex::new(todo);
        std::thread::scope(|scope| {
            for _ in 0..parallel {
                let (todo, results) = (&todo, results.clone());
                scope.spawn(move || self.work(todo, &results));
            }
            drop(results);
            let pieces = ranges.into_iter().flatten();
            // Both ends go before the threads are joined, or they would wait for each other.
            feed(self, pieces, jobs, done, parallel, &mut sink);
        });
    }

    fn work(&self, todo: &Mutex<Receiver<Vec<Wanted>>>, results: &SyncSender<Done>) {
        loop {
            let job = todo.lock().map(|todo| todo.recv());
            let Ok(Ok(job)) = job else { return };
            if results.send(self.read_together(&job)).is_err() {
                return;
            }
        }
    }

    /// Reads pieces of one pack with one request; where that ends early, each with its own.
    fn read_together(&self, job: &[Wanted]) -> Done {
        let (Some(first), Some(last)) = (job.first(), job.last()) else { return Vec::new() };
        let start = u64::from(first.place.offset);
        let len = (last.place.end() - start) as usize;
        match self.core.store.get_range(&first.place.pack.name(), start, len) {
            Ok(bytes) => job.iter().map(|wanted| self.cut(wanted, &bytes, start)).collect(),
            Err(e) if e.kind() == Kind::Damaged && job.len() > 1 => {
                job.iter().map(|wanted| (wanted.ix, self.read_alone(wanted))).collect()
            }
            Err(e) => job.iter().map(|w| (w.ix, Err(e.copy().at_piece(w.ix)))).collect(),
        }
    }

    fn cut(&self, wanted: &Wanted, bytes: &[u8], start: u64) -> (u64, Result<Content>) {
        let Wanted { ix, hash, place, len } = wanted;
        let at = (u64::from(place.offset) - start) as usize;
        let stored = match bytes.get(at..at + place.stored as usize) {
            Some(stored) => stored.to_vec(),
            None => {
                return (*ix, Err(Error::damaged("the store sent too few bytes").at_piece(*ix)));
            }
        };
        let content = unpack(&self.core, place, stored, hash, *len);
        (*ix, content.map(Content::Data).map_err(|e| e.at_piece(*ix)))
    }

    fn read_alone(&self, wanted: &Wanted) -> Result<Content> {
        let Wanted { ix, hash, place, len } = wanted;
        fetch(&self.core, place, hash, *len).map(Content::Data).map_err(|e| e.at_piece(*ix))
    }
}

/// Plans jobs and passes results on, never more than twice `parallel` jobs ahead of the sink.
fn feed(
    reader: &Reader,
    pieces: impl Iterator<Item = u64>,
    jobs: SyncSender<Vec<Wanted>>,
    done: Receiver<Done>,
    parallel: usize,
    sink: &mut dyn FnMut(u64, Result<Content>) -> ControlFlow<()>,
) {
    let mut under_way = 0;
    let mut job: Vec<Wanted> = Vec::new();
    let mut start = |job: &mut Vec<Wanted>, sink: &mut dyn FnMut(_, _) -> ControlFlow<()>| {
        if job.is_empty() {
            return ControlFlow::Continue(());
        }
        // A job in each thread and one waiting for each: sending never blocks.
        while under_way >= parallel * 2 {
            under_way -= 1;
            pass_on(&done, sink)?;
        }
        under_way += 1;
        if jobs.send(std::mem::take(job)).is_err() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    for ix in pieces {
        let flow = match reader.piece(ix) {
            Ok(Piece::Zero) => sink(ix, Ok(Content::Zero)),
            Err(error) => sink(ix, Err(error)),
            Ok(Piece::Data { hash, place }) => {
                let full = job.last().is_some_and(|last| !near(&job[0].place, &last.place, &place));
                let flow = if full { start(&mut job, sink) } else { ControlFlow::Continue(()) };
                let len = piece_len(reader.manifest.info().bytes, ix);
                job.push(Wanted { ix, hash, place, len });
                flow
            }
        };
        if flow.is_break() {
            return;
        }
    }
    if start(&mut job, sink).is_break() {
        return;
    }
    drop(jobs);
    while pass_on(&done, sink).is_continue() {}
}

/// Waits for one job and gives its pieces to the sink; breaks when there is none any more.
fn pass_on(
    done: &Receiver<Done>,
    sink: &mut dyn FnMut(u64, Result<Content>) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let Ok(pieces) = done.recv() else { return ControlFlow::Break(()) };
    pieces.into_iter().try_for_each(|(ix, content)| sink(ix, content))
}

/// Whether `next` may be read together with a job from `first` to `last`.
fn near(first: &PackSlice, last: &PackSlice, next: &PackSlice) -> bool {
    let start = u64::from(next.offset);
    next.pack == last.pack
        && start >= last.end()
        && start - last.end() <= MOST_BETWEEN
        && next.end() - u64::from(first.offset) <= MOST_AT_ONCE
}
