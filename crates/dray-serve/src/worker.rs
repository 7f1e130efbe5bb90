//! The worker threads of one connection: they start when a request must wait, and they are bounded.
//!
//! Flushes have a thread of their own, so that a guest's flush never waits behind reads and writes
//! that wait for the network. All flushes that are there when it begins are answered by one.

use crate::limits::{CROWDED_LOOK, MAX_DEFERRED, MAX_DEFERRED_BYTES, MAX_WORKERS, WORKER_IDLE};
use crate::share::Share;
use dray_image::{Client, Image, working_for};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

/// Image layers are shallow; the default of 2 MiB would be for nothing.
const STACK: usize = 512 << 10;

/// One client's use of one image, as its front end keeps it.
pub trait Session: Send + Sync + 'static {
    /// What it does for the client and may have to wait for.
    type Job: Job<Self>;

    /// The image.
    fn image(&self) -> &dyn Image;

    /// Whose use it is, as the image knows it.
    fn client(&self) -> &Arc<Client>;

    /// Whether the front end ends the connection: failures are not told any more.
    fn is_closing(&self) -> bool;

    /// Answers the flush that the client calls `cookie`. An answer that cannot be sent is found by whoever
    /// receives.
    fn flushed(&self, cookie: u64, outcome: Flushed<'_>);
}

/// What became of a flush; none when it panicked.
pub type Flushed<'a> = Option<Result<(), &'a dray_image::Error>>;

/// A request that may have to wait.
pub trait Job<S: ?Sized>: Send + 'static {
    /// Bytes of memory it holds or will hold.
    fn cost(&self) -> u64;

    /// Whether it changes the image.
    fn changes(&self) -> bool;

    /// Where its answer goes.
    type Outlet;

    /// That of this one.
    fn outlet(&self) -> Self::Outlet;

    /// Does it and answers it.
    fn run(self, session: &S);

    /// Answers one that has panicked.
    fn panicked(outlet: Self::Outlet, session: &S);
}

/// The workers of one connection.
pub struct Workers<S: Session> {
    shared: Arc<Shared<S>>,
}

struct Shared<S: Session> {
    session: Arc<S>,
    /// What its export has with all its connections.
    share: Arc<Share>,
    state: Mutex<State<S::Job>>,
    /// Something was queued, or the end has come.
    work: Condvar,
    flush_work: Condvar,
    /// A request was answered, or a thread ended.
    progress: Condvar,
}

struct State<J> {
    queue: VecDeque<J>,
    flushes: Vec<u64>,
    /// How often flushes had been answered when the last one came.
    asked: u64,
    idle: usize,
    threads: usize,
    flusher: bool,
    /// Requests queued or with a worker, and the bytes they hold.
    deferred: usize,
    bytes: u64,
    /// Those of them that change the image.
    changing: usize,
    ending: bool,
}

impl<J> Default for State<J> {
    fn default() -> Self {
        Self {
            queue: VecDeque::new(),
            flushes: Vec::new(),
            asked: 0,
            idle: 0,
            threads: 0,
            flusher: false,
            deferred: 0,
            bytes: 0,
            changing: 0,
            ending: false,
        }
    }
}

impl<J> State<J> {
    fn has_room(&self, bytes: u64) -> bool {
        self.deferred < MAX_DEFERRED && self.bytes + bytes <= MAX_DEFERRED_BYTES
    }
}

impl<S: Session> Shared<S> {
    fn state(&self) -> MutexGuard<'_, State<S::Job>> {
        self.state.lock()
    }

    fn has_room(&self, state: &State<S::Job>, bytes: u64) -> bool {
        state.has_room(bytes) && (state.deferred == 0 || self.share.has_room(bytes))
    }

    fn finished(&self, requests: usize, bytes: u64, changes: bool) {
        self.share.give_back(bytes);
        let mut state = self.state();
        state.changing -= usize::from(changes);
        state.deferred -= requests;
        state.bytes -= bytes;
        drop(state);
        self.progress.notify_all();
    }
}

impl<S: Session> Workers<S> {
    /// Those of a connection, with a share of what its export has.
    pub fn new(session: Arc<S>, share: Arc<Share>) -> Self {
        Self {
            shared: Arc::new(Shared {
                session,
                share,
                state: Mutex::default(),
                work: Condvar::new(),
                flush_work: Condvar::new(),
                progress: Condvar::new(),
            }),
        }
    }

    /// Whether a request that holds `bytes` may be handed over now.
    pub fn has_room(&self, bytes: u64) -> bool {
        self.shared.has_room(&self.shared.state(), bytes)
    }

    /// Waits until a request that holds `bytes` may be handed over; false when `is_over` before.
    pub fn wait_for_room(&self, bytes: u64, is_over: impl Fn() -> bool) -> bool {
        let mut state = self.shared.state();
        while !self.shared.has_room(&state, bytes) {
            if is_over() {
                return false;
            }
            self.shared.progress.wait_for(&mut state, CROWDED_LOOK);
        }
        true
    }

    /// Hands `job` to a worker.
    ///
    /// # Errors
    /// There is no worker and none can be started.
    pub fn submit(&self, job: S::Job) -> io::Result<()> {
        let mut state = self.shared.state();
        state.deferred += 1;
        state.bytes += job.cost();
        self.shared.share.take(job.cost());
        state.changing += usize::from(job.changes());
        state.queue.push_back(job);
        if state.queue.len() > state.idle
            && state.threads < MAX_WORKERS
            && let Some(place) = self.shared.share.thread(state.threads == 0)
        {
            let shared = Arc::clone(&self.shared);
            let body = move || {
                let _place = place;
                work(&shared);
            };
            match spawn("image-worker", body) {
                Ok(()) => state.threads += 1,
                Err(error) if state.threads == 0 => return Err(error),
                Err(error) => tracing::warn!(%error, "cannot start another worker"),
            }
        }
        drop(state);
        self.shared.work.notify_one();
        Ok(())
    }

    /// Hands the flush `cookie` to the flush thread.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn flush(&self, cookie: u64) -> io::Result<()> {
        let mut state = self.shared.state();
        state.deferred += 1;
        state.flushes.push(cookie);
        state.asked = self.shared.session.client().answered();
        if !state.flusher {
            let shared = Arc::clone(&self.shared);
            spawn("image-flush", move || work_on_flushes(&shared))?;
            state.flusher = true;
        }
        drop(state);
        self.shared.flush_work.notify_one();
        Ok(())
    }

    /// Whether something that changes the image is queued or with a worker.
    pub fn are_changing(&self) -> bool {
        self.shared.state().changing > 0
    }

    /// Waits until every request handed over has been answered.
    pub fn drain(&self) {
        let mut state = self.shared.state();
        while state.deferred > 0 {
            self.shared.progress.wait(&mut state);
        }
    }
}

impl<S: Session> Workers<S> {
    /// Drops what has not begun: its client has gone, and a late write could undo a newer one of
    /// the client's next connection.
    pub fn abandon(&self) {
        let mut state = self.shared.state();
        state.ending = true;
        let unanswered = state.queue.len() + state.flushes.len();
        let bytes: u64 = state.queue.iter().map(Job::cost).sum();
        state.changing -= state.queue.iter().filter(|job| job.changes()).count();
        state.queue.clear();
        state.flushes.clear();
        state.deferred -= unanswered;
        state.bytes -= bytes;
        self.shared.share.give_back(bytes);
        self.shared.work.notify_all();
        self.shared.flush_work.notify_all();
    }
}

impl<S: Session> Drop for Workers<S> {
    /// Abandons what has not begun and waits for what has.
    fn drop(&mut self) {
        self.abandon();
        let mut state = self.shared.state();
        while state.threads > 0 || state.flusher {
            self.shared.progress.wait(&mut state);
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn(body).map(drop)
}

fn work<S: Session>(shared: &Shared<S>) {
    while let Some(job) = next_job(shared) {
        let (outlet, cost, changes) = (job.outlet(), job.cost(), job.changes());
        let session = &*shared.session;
        // A panic below fails this request, never another guest's I/O.
        let run = || working_for(session.client(), || job.run(session));
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            S::Job::panicked(outlet, session);
        }
        shared.finished(1, cost, changes);
    }
}

/// The next job, or `None` when this thread shall end (it is no longer counted then).
fn next_job<S: Session>(shared: &Shared<S>) -> Option<S::Job> {
    let mut state = shared.state();
    loop {
        if let Some(job) = state.queue.pop_front() {
            return Some(job);
        }
        let mut timed_out = false;
        if !state.ending {
            state.idle += 1;
            timed_out = shared.work.wait_for(&mut state, WORKER_IDLE).timed_out();
            state.idle -= 1;
        }
        if state.queue.is_empty() && (state.ending || timed_out) {
            state.threads -= 1;
            drop(state);
            shared.progress.notify_all();
            return None;
        }
    }
}

fn work_on_flushes<S: Session>(shared: &Shared<S>) {
    while let Some((cookies, asked)) = next_flushes(shared) {
        let session = &shared.session;
        session.client().flushes(asked);
        let flush = || working_for(session.client(), || session.image().flush());
        let outcome = catch_unwind(AssertUnwindSafe(flush)).ok();
        for cookie in &cookies {
            let outcome = outcome.as_ref().map(|outcome| outcome.as_ref().copied());
            session.flushed(*cookie, outcome);
        }
        // Who leaves keeps failures to himself.
        if !session.is_closing() {
            session.client().has_answer();
        }
        shared.finished(cookies.len(), 0, false);
    }
}

/// The flushes that are there, and how often flushes had been answered when the last of them came.
fn next_flushes<S: Session>(shared: &Shared<S>) -> Option<(Vec<u64>, u64)> {
    let mut state = shared.state();
    loop {
        if !state.flushes.is_empty() {
            return Some((std::mem::take(&mut state.flushes), state.asked));
        }
        let mut timed_out = false;
        if !state.ending {
            timed_out = shared.flush_work.wait_for(&mut state, WORKER_IDLE).timed_out();
        }
        if state.flushes.is_empty() && (state.ending || timed_out) {
            state.flusher = false;
            drop(state);
            shared.progress.notify_all();
            return None;
        }
    }
}
