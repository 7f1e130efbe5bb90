//! The threads that pack. With none of them the caller's thread packs, one piece at a time.

use super::packer::{Packer, Shared};
use crate::error::{Error, Kind, Result};
use crate::piece::Piece;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Pieces that a thread takes at a time, 4 MiB: they lie together in a pack and are read together.
const BATCH: usize = 64;

type Batch = Vec<(u64, Vec<u8>)>;
type Done = Result<Vec<(u64, Piece)>>;

struct Threads {
    jobs: Option<SyncSender<Batch>>,
    done: Receiver<Done>,
    batch: Batch,
    handles: Vec<JoinHandle<()>>,
}

enum Packing {
    Inline(Box<Packer>),
    Threads(Threads),
}

pub(super) struct Workers {
    shared: Arc<Shared>,
    way: Packing,
}

impl Workers {
    pub(super) fn start(shared: &Arc<Shared>, threads: usize) -> Self {
        let way = match threads {
            0 => Packing::Inline(Box::new(Packer::new(shared))),
            _ => Packing::Threads(start(shared, threads)),
        };
        Self { shared: shared.clone(), way }
    }

    pub(super) fn stored_bytes(&self) -> u64 {
        self.shared.stored_bytes()
    }

    pub(super) fn put(&mut self, ix: u64, bytes: &[u8]) -> Result<()> {
        match &mut self.way {
            Packing::Inline(packer) => packer.add(ix, bytes),
            Packing::Threads(threads) => {
                threads.batch.push((ix, bytes.to_vec()));
                if threads.batch.len() < BATCH { Ok(()) } else { threads.send() }
            }
        }
    }

    /// What is durable since the last call, without waiting.
    pub(super) fn take(&mut self) -> Result<Vec<(u64, Piece)>> {
        match &mut self.way {
            Packing::Inline(packer) => Ok(packer.take()),
            Packing::Threads(threads) => {
                let mut all = Vec::new();
                for done in threads.done.try_iter() {
                    all.append(&mut done?);
                }
                Ok(all)
            }
        }
    }

    /// Waits until everything that was put is durable; the next [`Workers::take`] gives it.
    pub(super) fn finish(&mut self) -> Result<()> {
        match &mut self.way {
            Packing::Inline(packer) => packer.flush(),
            Packing::Threads(threads) => {
                threads.send()?;
                threads.join()
            }
        }
    }
}

impl Threads {
    fn send(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        match &self.jobs {
            // A thread that failed has left its error in `done`; all may be gone.
            Some(jobs) => match jobs.send(batch) {
                Ok(()) => Ok(()),
                Err(_) => Err(self.first_error()),
            },
            None => Ok(()),
        }
    }

    fn first_error(&self) -> Error {
        let error = self.done.try_iter().find_map(Result::err);
        error.unwrap_or_else(|| Error::new(Kind::Unavailable, "the threads that write are gone"))
    }

    fn join(&mut self) -> Result<()> {
        self.jobs = None;
        for handle in self.handles.drain(..) {
            if handle.join().is_err() {
                return Err(Error::new(Kind::Invalid, "a thread that writes has failed"));
            }
        }
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Err(error) = self.join() {
            tracing::error!(%error, "a writer was given up");
        }
    }
}

fn start(shared: &Arc<Shared>, threads: usize) -> Threads {
    let (jobs, todo) = sync_channel::<Batch>(threads);
    let (results, done) = channel();
    let todo = Arc::new(Mutex::new(todo));
    let thread = |_| {
        let (packer, todo, results) = (Packer::new(shared), todo.clone(), results.clone());
        std::thread::spawn(move || work(packer, &todo, &results))
    };
    Threads {
        jobs: Some(jobs),
        done,
        batch: Vec::new(),
        handles: (0..threads).map(thread).collect(),
    }
}

/// Packs batches until there are no more, then flushes; ends at the first error.
fn work(mut packer: Packer, todo: &Mutex<Receiver<Batch>>, results: &Sender<Done>) {
    let mut pack = || loop {
        let batch = todo.lock().map(|todo| todo.recv());
        let Ok(Ok(batch)) = batch else { break packer.flush().map(|()| packer.take()) };
        for (ix, bytes) in &batch {
            packer.add(*ix, bytes)?;
        }
        let done = packer.take();
        if !done.is_empty() && results.send(Ok(done)).is_err() {
            break Ok(Vec::new());
        }
    };
    let last = pack();
    // Nobody listens any more when the writer was given up.
    let _ = results.send(last);
}
