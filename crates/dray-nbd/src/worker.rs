//! The worker threads of one connection: they start when a request must wait, and they are bounded.
//!
//! Flushes have a thread of their own, so that a guest's flush never waits behind reads and writes
//! that wait for the network. All flushes that are there when it begins are answered by one.

use crate::job::Job;
use crate::limits::{CROWDED_LOOK, MAX_DEFERRED, MAX_DEFERRED_BYTES, MAX_WORKERS, WORKER_IDLE};
use crate::proto::Errno;
use crate::session::{Failure, Session};
use dray_image::working_for;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Image layers are shallow; the default of 2 MiB would be for nothing.
const STACK: usize = 512 << 10;

/// The workers of one connection.
pub(crate) struct Workers {
    shared: Arc<Shared>,
}

struct Shared {
    session: Arc<Session>,
    state: Mutex<State>,
    /// Something was queued, or the end has come.
    work: Condvar,
    flush_work: Condvar,
    /// A request was answered, or a thread ended.
    progress: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
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

impl State {
    fn has_room(&self, bytes: u64) -> bool {
        self.deferred < MAX_DEFERRED && self.bytes + bytes <= MAX_DEFERRED_BYTES
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finished(&self, requests: usize, bytes: u64, changes: bool) {
        let mut state = self.state();
        state.changing -= usize::from(changes);
        state.deferred -= requests;
        state.bytes -= bytes;
        drop(state);
        self.progress.notify_all();
    }
}

impl Workers {
    /// Those of a connection.
    pub(crate) fn new(session: Arc<Session>) -> Self {
        Self {
            shared: Arc::new(Shared {
                session,
                state: Mutex::default(),
                work: Condvar::new(),
                flush_work: Condvar::new(),
                progress: Condvar::new(),
            }),
        }
    }

    /// Whether a request that holds `bytes` may be handed over now.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        self.shared.state().has_room(bytes)
    }

    /// Waits until a request that holds `bytes` may be handed over; false when `is_over` before.
    pub(crate) fn wait_for_room(&self, bytes: u64, is_over: impl Fn() -> bool) -> bool {
        let mut state = self.shared.state();
        while !state.has_room(bytes) {
            if is_over() {
                return false;
            }
            let wait = self.shared.progress.wait_timeout(state, CROWDED_LOOK);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Hands `job` to a worker.
    ///
    /// # Errors
    /// There is no worker and none can be started.
    pub(crate) fn submit(&self, job: Job) -> io::Result<()> {
        let mut state = self.shared.state();
        state.deferred += 1;
        state.bytes += job.cost();
        state.changing += usize::from(job.changes());
        state.queue.push_back(job);
        if state.queue.len() > state.idle && state.threads < MAX_WORKERS {
            let shared = Arc::clone(&self.shared);
            match spawn("nbd-worker", move || work(&shared)) {
                Ok(()) => state.threads += 1,
                Err(error) if state.threads == 0 => return Err(error),
                Err(error) => tracing::warn!(%error, "cannot start another nbd worker"),
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
    pub(crate) fn flush(&self, cookie: u64) -> io::Result<()> {
        let mut state = self.shared.state();
        state.deferred += 1;
        state.flushes.push(cookie);
        state.asked = self.shared.session.client.answered();
        if !state.flusher {
            let shared = Arc::clone(&self.shared);
            spawn("nbd-flush", move || work_on_flushes(&shared))?;
            state.flusher = true;
        }
        drop(state);
        self.shared.flush_work.notify_one();
        Ok(())
    }

    /// Whether something that changes the image is queued or with a worker.
    pub(crate) fn are_changing(&self) -> bool {
        self.shared.state().changing > 0
    }

    /// Waits until every request handed over has been answered.
    pub(crate) fn drain(&self) {
        let mut state = self.shared.state();
        while state.deferred > 0 {
            state = self.shared.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Workers {
    /// Drops what has not begun: its client has gone, and a late write could undo a newer one of
    /// the client's next connection.
    pub(crate) fn abandon(&self) {
        let mut state = self.shared.state();
        state.ending = true;
        let unanswered = state.queue.len() + state.flushes.len();
        let bytes: u64 = state.queue.iter().map(Job::cost).sum();
        state.changing -= state.queue.iter().filter(|job| job.changes()).count();
        state.queue.clear();
        state.flushes.clear();
        state.deferred -= unanswered;
        state.bytes -= bytes;
        self.shared.work.notify_all();
        self.shared.flush_work.notify_all();
    }
}

impl Drop for Workers {
    /// Abandons what has not begun and waits for what has.
    fn drop(&mut self) {
        self.abandon();
        let mut state = self.shared.state();
        while state.threads > 0 || state.flusher {
            state = self.shared.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn(body).map(drop)
}

fn work(shared: &Shared) {
    while let Some(job) = next_job(shared) {
        let (outlet, cost, changes) = (job.outlet(), job.cost(), job.changes());
        let session = &shared.session;
        // A panic below fails this request, never another guest's I/O. A failed send needs no
        // handling: the writer stays broken and the connection's thread finds the end.
        let run = || working_for(&session.client, || job.run(session));
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            let _ = outlet.send(session, Err(panicked()));
        }
        shared.finished(1, cost, changes);
    }
}

fn panicked() -> Failure {
    Failure { errno: Errno::Io, why: "internal error; see the server's log".to_owned() }
}

/// The next job, or `None` when this thread shall end (it is no longer counted then).
fn next_job(shared: &Shared) -> Option<Job> {
    let mut state = shared.state();
    loop {
        if let Some(job) = state.queue.pop_front() {
            return Some(job);
        }
        let mut timed_out = false;
        if !state.ending {
            state.idle += 1;
            let wait = shared.work.wait_timeout(state, WORKER_IDLE);
            let (locked, timeout) = wait.unwrap_or_else(PoisonError::into_inner);
            state = locked;
            state.idle -= 1;
            timed_out = timeout.timed_out();
        }
        if state.queue.is_empty() && (state.ending || timed_out) {
            state.threads -= 1;
            drop(state);
            shared.progress.notify_all();
            return None;
        }
    }
}

fn work_on_flushes(shared: &Shared) {
    while let Some((cookies, asked)) = next_flushes(shared) {
        let session = &shared.session;
        session.client.flushes(asked);
        let flush = || working_for(&session.client, || session.image.flush());
        let outcome = catch_unwind(AssertUnwindSafe(flush));
        for cookie in &cookies {
            let outcome = match &outcome {
                Ok(Ok(())) => Ok(()),
                Ok(Err(error)) => Err(flush_failure(error)),
                Err(_) => Err(panicked()),
            };
            // See `work`: a failed send is found by the connection's thread.
            let _ = session.send_outcome(*cookie, outcome);
        }
        // Who leaves keeps failures to himself.
        if !session.is_closing() {
            session.client.has_answer();
        }
        shared.finished(cookies.len(), 0, false);
    }
}

fn flush_failure(error: &dray_image::Error) -> Failure {
    let errno = match error.kind {
        dray_image::ErrorKind::NoSpace => Errno::NoSpace,
        _ => Errno::Io,
    };
    Failure { errno, why: error.to_string() }
}

/// The flushes that are there, and how often flushes had been answered when the last of them came.
fn next_flushes(shared: &Shared) -> Option<(Vec<u64>, u64)> {
    let mut state = shared.state();
    loop {
        if !state.flushes.is_empty() {
            return Some((std::mem::take(&mut state.flushes), state.asked));
        }
        let mut timed_out = false;
        if !state.ending {
            let wait = shared.flush_work.wait_timeout(state, WORKER_IDLE);
            let (locked, timeout) = wait.unwrap_or_else(PoisonError::into_inner);
            state = locked;
            timed_out = timeout.timed_out();
        }
        if state.flushes.is_empty() && (state.ending || timed_out) {
            state.flusher = false;
            drop(state);
            shared.progress.notify_all();
            return None;
        }
    }
}
