//! The client: does what its script says, follows its image to the host that owns it, and writes
//! down what it was promised.

use crate::GREETING;
use crate::notes::Notes;
use dray_guest::nbd::{Client as Connection, FLUSH, Fault, Request, TRIM, WRITE, ZERO};
use dray_guest::note::Note;
use dray_guest::script::{Kind, LANES, SECTOR, Script};
use std::array::from_fn;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest a request may take: restarts and a handover lie in between, and emulation is slow.
const STALL: Duration = Duration::from_secs(60);
/// Time between two tries to connect.
const LOOK: Duration = Duration::from_millis(10);

struct Shared {
    name: String,
    script: Script,
    nbd: [PathBuf; 2],
    /// Which host has the image.
    at: AtomicUsize,
    stop: AtomicBool,
    /// Requests that each lane has done.
    done: [AtomicU64; LANES],
    pause: Duration,
    notes: Arc<Notes>,
    failed: Mutex<Option<String>>,
}

/// A client of one image.
pub struct Client {
    shared: Arc<Shared>,
    lanes: Vec<JoinHandle<()>>,
}

/// What a client works on and how.
pub struct Plan {
    /// The export.
    pub name: String,
    /// Its requests.
    pub script: Script,
    /// The hosts' sockets.
    pub nbd: [PathBuf; 2],
    /// Where it begins.
    pub at: usize,
    /// The first request of each lane.
    pub first: u64,
    /// Time between two requests of a lane.
    pub pause: Duration,
}

impl Client {
    /// Begins.
    pub fn start(plan: Plan, notes: &Arc<Notes>) -> Self {
        let shared = Arc::new(Shared {
            name: plan.name,
            script: plan.script,
            nbd: plan.nbd,
            at: AtomicUsize::new(plan.at),
            stop: AtomicBool::new(false),
            done: from_fn(|_| AtomicU64::new(plan.first)),
            pause: plan.pause,
            notes: Arc::clone(notes),
            failed: Mutex::new(None),
        });
        let lanes = (0..LANES).map(|nth| {
            let lane = Lane { shared: Arc::clone(&shared), nth, at: None, connection: None };
            std::thread::spawn(move || lane.run())
        });
        Self { lanes: lanes.collect(), shared }
    }

    /// The image's name.
    pub fn image(&self) -> &str {
        &self.shared.name
    }

    /// The image is at this host now.
    pub fn moved_to(&self, host: usize) {
        self.shared.at.store(host, Ordering::SeqCst);
    }

    /// Where it is.
    pub fn at(&self) -> usize {
        self.shared.at.load(Ordering::SeqCst)
    }

    /// What went wrong, if something did.
    pub fn complaint(&self) -> Option<String> {
        self.shared.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it; the number of requests that were done.
    pub fn stop(self) -> Result<u64, String> {
        self.shared.stop.store(true, Ordering::SeqCst);
        for lane in self.lanes {
            lane.join().map_err(|_| "a lane panicked")?;
        }
        let failed = self.shared.failed.lock().unwrap_or_else(PoisonError::into_inner).take();
        let done = self.shared.done.iter().map(|done| done.load(Ordering::SeqCst)).sum();
        failed.map_or(Ok(done), Err)
    }
}

struct Lane {
    shared: Arc<Shared>,
    nth: usize,
    /// Where it did its last request.
    at: Option<usize>,
    connection: Option<Connection>,
}

impl Lane {
    fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        while !shared.stop.load(Ordering::SeqCst) {
            let n = shared.done[self.nth].load(Ordering::SeqCst);
            if let Err(why) = self.step(n) {
                let mut failed = shared.failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.get_or_insert(format!("{} lane {}: {why}", shared.name, self.nth));
                return;
            }
            std::thread::sleep(shared.pause);
        }
    }

    fn step(&mut self, n: u64) -> Result<(), String> {
        let shared = Arc::clone(&self.shared);
        let (image, lane) = (shared.script.image, self.nth as u64);
        let op = shared.script.op(self.nth, n);
        let (kind, data) = match op.kind {
            Kind::Write => (WRITE, shared.script.bytes(self.nth, n)),
            Kind::Zero => (ZERO, Vec::new()),
            Kind::Trim => (TRIM, Vec::new()),
        };
        let (offset, len) = (op.first * SECTOR, (op.count * SECTOR) as u32);
        let request = Request { kind, forced: op.forced, offset, len, data: &data };
        if !self.answered(&request, n)? {
            return Ok(());
        }
        shared.done[self.nth].store(n + 1, Ordering::SeqCst);
        if op.forced {
            self.note(&Note::Forced { image, host: self.host(), lane, n })?;
        }
        if op.flush {
            let done = from_fn(|lane| shared.done[lane].load(Ordering::SeqCst));
            let flush = Request { kind: FLUSH, forced: false, offset: 0, len: 0, data: &[] };
            if self.answered(&flush, n + 1)? {
                self.note(&Note::Flushed { image, host: self.host(), done })?;
            }
        }
        Ok(())
    }

    fn host(&self) -> u64 {
        self.at.unwrap_or(0) as u64
    }

    fn note(&self, note: &Note) -> Result<(), String> {
        self.shared.notes.write(note).map_err(|why| format!("notes: {why}"))
    }

    /// Does a request, wherever the image is, until it is answered. `n` is the first request of this
    /// lane that may not be done yet. False: the client was stopped before.
    fn answered(&mut self, request: &Request<'_>, n: u64) -> Result<bool, String> {
        let shared = Arc::clone(&self.shared);
        let deadline = Instant::now() + STALL;
        let mut trouble = "it waits for an answer".to_owned();
        while Instant::now() < deadline {
            if shared.stop.load(Ordering::SeqCst) {
                return Ok(false);
            }
            let host = self.follow(n)?;
            let mut connection = match self.connection.take() {
                Some(connection) => connection,
                None => match Connection::connect(&shared.nbd[host], &shared.name, GREETING) {
                    Ok(connection) => connection,
                    Err(why) => {
                        trouble = why.to_string();
                        std::thread::sleep(LOOK);
                        continue;
                    }
                },
            };
            let wait = || {
                shared.at.load(Ordering::SeqCst) == host
                    && !shared.stop.load(Ordering::SeqCst)
                    && Instant::now() < deadline
            };
            match connection.request(request, &wait) {
                Ok(_) => {
                    self.connection = Some(connection);
                    return Ok(true);
                }
                Err(Fault::Lost) => {}
                // What waits at a source that lets go is failed; a VM would be stopped there.
                Err(Fault::Error(error)) => {
                    trouble = format!("error {error}");
                    std::thread::sleep(LOOK);
                }
            }
        }
        let Request { kind, offset, .. } = request;
        Err(format!("request {kind} at {offset} on host {} stalls: {trouble}", self.host()))
    }

    /// Where the image is; the lane goes there.
    fn follow(&mut self, n: u64) -> Result<usize, String> {
        let host = self.shared.at.load(Ordering::SeqCst);
        if self.at != Some(host) {
            self.connection = None;
            self.at = Some(host);
            let (image, lane) = (self.shared.script.image, self.nth as u64);
            self.note(&Note::Moved { image, host: host as u64, lane, n })?;
        }
        Ok(host)
    }
}
