//! The gate every guest request passes: it counts the changes in flight and can hold them back.
//!
//! Nothing is locked on the way through. A change announces itself in a counter and then looks at
//! the gate's state; who closes the gate sets the state and then looks at the counters. One of the
//! two sees the other, so a [`Quiesced`] exists only while no change is in flight (I1, I3).

use crate::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, shard};
use crate::{Error, ErrorKind, Result};
use std::time::{Duration, Instant};

/// Counters, so that threads do not fight over one cache line.
const SHARDS: usize = 16;

/// Everything passes.
const OPEN: u8 = 0;
/// Changes wait, reads pass.
const CLOSED: u8 = 1;
/// Changes and reads wait.
const PARKED: u8 = 2;
/// Changes and reads fail.
const FAILED: u8 = 3;

#[repr(align(128))]
struct Shard {
    in_flight: AtomicU64,
}

/// Counts changes in flight; can hold changes, or everything, back.
pub struct Gate {
    state: AtomicU8,
    shards: [Shard; SHARDS],
    /// Held while the state changes, so that waiting for a change of it cannot miss one.
    lock: Mutex<()>,
    changed: Condvar,
}

/// A change in flight; dropping it ends it.
#[must_use = "the change counts as in flight only while this lives"]
pub struct Pass<'a> {
    gate: &'a Gate,
    shard: usize,
}

/// Proof that no guest change is in flight and none begins; dropping it lets them go on.
#[must_use = "dropping it lets writes go on"]
pub struct Quiesced {
    gate: Arc<Gate>,
    armed: bool,
}

impl std::fmt::Debug for Quiesced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Quiesced")
    }
}

fn unavailable(what: &str) -> Error {
    let why = "its owner is another host, or was told to fail what waits";
    Error::new(ErrorKind::Unavailable, what, why)
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            state: AtomicU8::new(OPEN),
            shards: std::array::from_fn(|_| Shard { in_flight: AtomicU64::new(0) }),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }
}

impl Gate {
    /// An open gate.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn set(&self, state: u8) {
        let held = self.lock();
        self.state.store(state, Ordering::SeqCst);
        drop(held);
        self.changed.notify_all();
    }

    /// Waits while the gate is in one of the states that `waits` names.
    fn wait_while(&self, waits: impl Fn(u8) -> bool) -> Result<()> {
        let mut held = self.lock();
        loop {
            match self.state.load(Ordering::SeqCst) {
                FAILED => return Err(unavailable("waiting for the image")),
                state if waits(state) => {
                    held = self.changed.wait(held).unwrap_or_else(|poisoned| poisoned.into_inner());
                }
                _ => return Ok(()),
            }
        }
    }

    /// Lets a change begin, if the gate is open.
    pub fn try_enter(&self) -> Option<Pass<'_>> {
        let shard = shard(SHARDS);
        self.shards[shard].in_flight.fetch_add(1, Ordering::SeqCst);
        let pass = Pass { gate: self, shard };
        (self.state.load(Ordering::SeqCst) == OPEN).then_some(pass)
    }

    /// Lets a change begin, as soon as the gate is open.
    ///
    /// # Errors
    /// `Unavailable` when the gate was told to fail what waits.
    pub fn enter(&self) -> Result<Pass<'_>> {
        loop {
            if let Some(pass) = self.try_enter() {
                return Ok(pass);
            }
            self.wait_while(|state| state != OPEN)?;
        }
    }

    /// True when reads pass.
    pub fn reads_pass(&self) -> bool {
        self.state.load(Ordering::Acquire) < PARKED
    }

    /// Returns when reads pass.
    ///
    /// # Errors
    /// `Unavailable` when the gate was told to fail what waits.
    pub fn enter_read(&self) -> Result<()> {
        if self.reads_pass() {
            return Ok(());
        }
        self.wait_while(|state| state >= PARKED)
    }

    fn idle(&self) -> bool {
        self.shards.iter().all(|shard| shard.in_flight.load(Ordering::SeqCst) == 0)
    }

    /// Holds new changes back and waits until none is in flight.
    ///
    /// # Errors
    /// `Unavailable` when that takes longer than `timeout` (changes then go on), or when the gate
    /// is closed already.
    pub fn quiesce(self: &Arc<Self>, timeout: Duration) -> Result<Quiesced> {
        const WHAT: &str = "waiting for the guest's writes to complete";
        let deadline = Instant::now() + timeout;
        let mut held = self.lock();
        if self.state.load(Ordering::SeqCst) != OPEN {
            return Err(Error::new(ErrorKind::Unavailable, WHAT, "they are held back already"));
        }
        self.state.store(CLOSED, Ordering::SeqCst);
        let quiesced = Quiesced { gate: Arc::clone(self), armed: true };
        while !self.idle() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(held);
                let why = format!("some are still in flight after {} ms", timeout.as_millis());
                return Err(Error::new(ErrorKind::Unavailable, WHAT, &why));
            }
            held = match self.changed.wait_timeout(held, left) {
                Ok((held, _)) => held,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        drop(held);
        Ok(quiesced)
    }

    /// Lets nothing pass from now on, reads included.
    pub fn park(&self, mut quiesced: Quiesced) {
        quiesced.armed = false;
        self.set(PARKED);
    }

    /// True between [`park`](Self::park) and [`open`](Self::open).
    pub fn is_parked(&self) -> bool {
        !self.reads_pass()
    }

    /// Opens a parked or failed gate; what waits goes on. Does nothing to a gate that is merely
    /// quiesced: only dropping its [`Quiesced`] opens that.
    pub fn open(&self) {
        if self.is_parked() {
            self.set(OPEN);
        }
    }

    /// Fails what waits at a parked gate and everything that comes; false when it is not parked.
    pub fn fail(&self) -> bool {
        let parked = self.is_parked();
        if parked {
            self.set(FAILED);
        }
        parked
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let before = self.gate.shards[self.shard].in_flight.fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "a change left the gate twice");
        if before == 1 && self.gate.state.load(Ordering::SeqCst) == CLOSED {
            // Whoever quiesces holds the lock between looking at the counters and waiting.
            drop(self.gate.lock());
            self.gate.changed.notify_all();
        }
    }
}

impl Quiesced {
    /// Whether it is `gate` that nothing passes.
    pub fn is_of(&self, gate: &Gate) -> bool {
        std::ptr::eq(&raw const *self.gate, gate)
    }
}

impl Drop for Quiesced {
    fn drop(&mut self) {
        if self.armed {
            self.gate.set(OPEN);
        }
    }
}
