//! The gate every guest request passes: it counts the changes in flight and can hold them back.
//!
//! A gate is closed for as long as there is a cause, and each cause ends by itself: who ends one
//! never opens what another keeps closed. The causes and who sets and clears them:
//!
//! | cause | begins | ends | waits |
//! |---|---|---|---|
//! | quiesced | [`quiesce`](Gate::quiesce), while neither quiesced nor parked nor incoming | the [`Quiesced`] is dropped or parked | changes |
//! | incoming | [`expect`](Gate::expect) | [`take_over`](Gate::take_over) | changes |
//! | unstarted | [`await_start`](Gate::await_start) | [`start`](Gate::start), [`expect`](Gate::expect) | changes; the first one is told of |
//! | parked | [`park`](Gate::park) | [`unpark`](Gate::unpark) | changes, reads |
//! | reserved | [`reserve`](Gate::reserve) | [`unreserve`](Gate::unreserve) | changes, but for those of one process |
//! | shut | [`shut`](Gate::shut), [`Quiesced::keep`] | [`unshut`](Gate::unshut) | everything |
//!
//! Whoever waits for one of the last five can be told to fail instead ([`fail`](Gate::fail)), until
//! [`unfail`](Gate::unfail) or until the cause ends.
//!
//! Nothing is locked on the way through. A change announces itself in a counter and then looks at
//! the gate's state; who closes the gate sets the state and then looks at the counters. One of the
//! two sees the other, so a [`Quiesced`] exists only while no change is in flight (I1, I3).

use crate::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, shard};
use crate::unpoisoned::{lock, wait_for};
use crate::{Error, ErrorKind, Result};
use std::time::{Duration, Instant};

/// Counters, so that threads do not fight over one cache line.
const SHARDS: usize = 16;

/// Everything passes.
const OPEN: u8 = 0;
/// Somebody holds a [`Quiesced`]: changes wait.
const QUIESCED: u8 = 1;
/// Another host will hand the image over: changes wait, a flush is answered.
const INCOMING: u8 = 1 << 1;
/// This host owns the image, and its guest may still go on elsewhere: changes wait.
const UNSTARTED: u8 = 1 << 6;
/// One process may change the image: changes of all others wait.
const RESERVED: u8 = 1 << 7;
/// Another host owns the image: changes and reads wait, a flush is answered.
const PARKED: u8 = 1 << 2;
/// Nobody vouches for the image: changes, reads and flushes wait.
const SHUT: u8 = 1 << 3;
/// What would have to wait for one of the causes above but the first fails.
const FAILED: u8 = 1 << 4;
/// Somebody waits for the changes that were in flight when it came; nothing waits for that.
const DRAINING: u8 = 1 << 5;

/// What keeps reads out.
const NO_READS: u8 = PARKED | SHUT;
/// What a request can wait for so long that somebody may tell it to fail.
const LASTING: u8 = INCOMING | UNSTARTED | RESERVED | PARKED | SHUT;

/// How often who waits asks whether anybody still wants it.
const LOOK: Duration = Duration::from_secs(1);

/// Told that a change waits.
pub type ChangeWaits = Box<dyn Fn() + Send + Sync>;

#[repr(align(128))]
struct Shard {
    /// By the phase in which they began.
    in_flight: [AtomicU64; 2],
}

/// Counts changes in flight; can hold changes, or everything, back.
pub struct Gate {
    state: AtomicU8,
    /// Which of two counters changes that begin are counted in.
    phase: AtomicUsize,
    shards: [Shard; SHARDS],
    /// Held by who drains.
    draining: Mutex<()>,
    /// Held while the state changes, so that waiting for a change of it cannot miss one.
    lock: Mutex<()>,
    changed: Condvar,
    /// Told once that a change waits for the guest's start.
    first_change: Mutex<Option<ChangeWaits>>,
    /// Whom it is reserved for; none is nobody.
    holder: Mutex<Option<u128>>,
}

/// A change in flight; dropping it ends it.
#[must_use = "the change counts as in flight only while this lives"]
pub struct Pass<'a> {
    gate: &'a Gate,
    shard: usize,
    phase: usize,
}

/// Proof that no guest change is in flight and none begins; dropping it lets them go on, unless it
/// was told to [`keep`](Quiesced::keep) the gate closed.
#[must_use = "dropping it lets writes proceed"]
pub struct Quiesced {
    gate: Arc<Gate>,
    /// What its end sets, beside that the gate is no longer quiesced.
    leaves: u8,
}

impl std::fmt::Debug for Quiesced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Quiesced")
    }
}

fn unavailable(what: &str) -> Error {
    let why = "another host owns it, or dray was told to fail waiting requests";
    Error::new(ErrorKind::Unavailable, what, why)
}

impl Gate {
    fn beginning(state: u8) -> Arc<Self> {
        Arc::new(Self {
            state: AtomicU8::new(state),
            phase: AtomicUsize::new(0),
            shards: std::array::from_fn(|_| Shard {
                in_flight: std::array::from_fn(|_| AtomicU64::new(0)),
            }),
            draining: Mutex::new(()),
            lock: Mutex::new(()),
            changed: Condvar::new(),
            first_change: Mutex::new(None),
            holder: Mutex::new(None),
        })
    }

    /// An open gate.
    pub fn new() -> Arc<Self> {
        Self::beginning(OPEN)
    }

    /// A gate that nothing passes before [`unshut`](Self::unshut).
    pub fn new_shut() -> Arc<Self> {
        Self::beginning(SHUT)
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        lock(&self.lock)
    }

    fn state(&self) -> u8 {
        self.state.load(Ordering::SeqCst)
    }

    /// Ends the causes `ends` and begins the causes `begins`, in one step.
    fn change(&self, ends: u8, begins: u8) {
        let held = self.lock();
        self.change_locked(ends, begins);
        drop(held);
        self.changed.notify_all();
    }

    /// [`change`](Self::change) by whoever holds the lock and wakes who waits.
    fn change_locked(&self, ends: u8, begins: u8) {
        let mut state = self.state() & !ends | begins;
        if state & LASTING == 0 {
            // Nothing is left that the word was about.
            state &= !FAILED;
        }
        self.state.store(state, Ordering::SeqCst);
    }

    /// Waits while the gate is closed for one of the causes `causes` and somebody wants that.
    fn wait_for(&self, causes: u8, is_wanted: &impl Fn() -> bool) -> Result<()> {
        self.wait_while(|state| state & causes, is_wanted)
    }

    /// Waits while one of the causes of the gate's state `stops` it and somebody wants that. Whether anybody does is
    /// asked after each wait, also after the last one.
    fn wait_while(&self, stops: impl Fn(u8) -> u8, is_wanted: &impl Fn() -> bool) -> Result<()> {
        const WHAT: &str = "waiting for the image";
        loop {
            let held = self.lock();
            let state = self.state();
            let causes = stops(state);
            if causes == 0 {
                return Ok(());
            }
            if state & FAILED != 0 && causes & LASTING != 0 {
                return Err(unavailable(WHAT));
            }
            // Also of one that has waited for something else until now.
            let untold = causes & UNSTARTED != 0;
            let tell = lock(&self.first_change).take_if(|_| untold);
            if let Some(tell) = tell {
                drop(held);
                tell();
                continue;
            }
            drop(self.changed.wait_timeout(held, LOOK));
            if !is_wanted() {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    WHAT,
                    "its client has disconnected",
                ));
            }
        }
    }

    /// Counts a change as in flight; whether it may begin is asked after that.
    fn announce(&self) -> Pass<'_> {
        let (shard, phase) = (shard(SHARDS), self.phase.load(Ordering::Relaxed));
        self.shards[shard].in_flight[phase].fetch_add(1, Ordering::SeqCst);
        Pass { gate: self, shard, phase }
    }

    /// Lets a change begin, if the gate is open.
    pub fn try_enter(&self) -> Option<Pass<'_>> {
        let pass = self.announce();
        (self.state() & !DRAINING == OPEN).then_some(pass)
    }

    /// Lets a change of `process` begin, if nothing keeps it back but that the gate is reserved, for it.
    fn try_enter_reserved(&self, process: Option<u128>) -> Option<Pass<'_>> {
        let pass = self.announce();
        let reserved = self.state() & !(DRAINING | FAILED) == RESERVED;
        (reserved && self.is_holder(process)).then_some(pass)
    }

    fn is_holder(&self, process: Option<u128>) -> bool {
        process.is_some() && *lock(&self.holder) == process
    }

    /// What of `state` a change of `process` waits for.
    fn stops(&self, state: u8, process: Option<u128>) -> u8 {
        let causes = state & (QUIESCED | LASTING);
        let passes = causes & RESERVED != 0 && self.is_holder(process);
        if passes { causes & !RESERVED } else { causes }
    }

    /// Lets a change begin, as soon as the gate is open, if it `is_wanted` then. Of what need not wait nobody is
    /// asked.
    ///
    /// # Errors
    /// `Unavailable` when the gate was told to fail what waits, or when nobody wants the change any more.
    pub fn enter(&self, is_wanted: impl Fn() -> bool) -> Result<Pass<'_>> {
        self.enter_as(|| None, is_wanted)
    }

    /// The same for a change of the process that `who` names, which is asked only of what has to wait.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn enter_as(
        &self,
        who: impl FnOnce() -> Option<u128>,
        is_wanted: impl Fn() -> bool,
    ) -> Result<Pass<'_>> {
        if let Some(pass) = self.try_enter() {
            return Ok(pass);
        }
        let process = who();
        loop {
            if let Some(pass) = self.try_enter().or_else(|| self.try_enter_reserved(process)) {
                return Ok(pass);
            }
            self.wait_while(|state| self.stops(state, process), &is_wanted)?;
        }
    }

    /// True when nothing is held back.
    pub fn is_open(&self) -> bool {
        self.state.load(Ordering::Acquire) & !DRAINING == OPEN
    }

    /// True unless changes of everybody wait for a cause that may last.
    pub fn takes_changes(&self) -> bool {
        self.state.load(Ordering::Acquire) & LASTING & !RESERVED == 0
    }

    /// True when the image's reads pass here: for a look that does not wait.
    pub fn reads_pass(&self) -> bool {
        self.state.load(Ordering::Acquire) & (NO_READS | INCOMING) == 0
    }

    /// Returns when reads pass; true when they go to the owner, another host.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn enter_read(&self, is_wanted: impl Fn() -> bool) -> Result<bool> {
        loop {
            let state = self.state.load(Ordering::Acquire);
            if state & NO_READS == 0 {
                return Ok(state & INCOMING != 0);
            }
            self.wait_for(NO_READS, &is_wanted)?;
        }
    }

    /// Returns when a flush passes; true when it need not do anything: everything was durable before
    /// the image was parked, and nothing is written to one that is incoming.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn enter_flush(&self, is_wanted: impl Fn() -> bool) -> Result<bool> {
        loop {
            let state = self.state.load(Ordering::Acquire);
            if state & SHUT == 0 {
                return Ok(state & (PARKED | INCOMING) != 0);
            }
            self.wait_for(SHUT, &is_wanted)?;
        }
    }

    /// True when no change is in flight that began in `phase`.
    fn idle_in(&self, phase: usize) -> bool {
        self.shards.iter().all(|shard| shard.in_flight[phase].load(Ordering::SeqCst) == 0)
    }

    fn idle(&self) -> bool {
        self.idle_in(0) && self.idle_in(1)
    }

    /// Returns when every change has ended that had begun before the call; others go on and begin
    /// meanwhile.
    ///
    /// # Errors
    /// `Unavailable` when that takes longer than `timeout`.
    pub fn drain(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let _one = lock(&self.draining);
        self.change(OPEN, DRAINING);
        let phase = self.phase.load(Ordering::SeqCst);
        // Who read the phase before it changed the last time may have come late.
        let late = self.wait_idle(1 - phase, deadline);
        let drained = late.and_then(|()| {
            self.phase.store(1 - phase, Ordering::SeqCst);
            // Who still counts itself in the old phase after this was seen idle begins later.
            self.wait_idle(phase, deadline)
        });
        self.change(DRAINING, OPEN);
        drained
    }

    fn wait_idle(&self, phase: usize, deadline: Instant) -> Result<()> {
        let mut held = self.lock();
        while !self.idle_in(phase) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = "they take too long; is the disk slow or stuck?";
                let what = "waiting for the guest's writes in flight";
                return Err(Error::new(ErrorKind::Unavailable, what, why));
            }
            held = wait_for(&self.changed, held, left);
        }
        Ok(())
    }

    /// Holds new changes back and waits until none is in flight. A gate that is shut can be quiesced
    /// and stays shut.
    ///
    /// # Errors
    /// `Unavailable` when that takes longer than `timeout` (changes then go on), or when the gate
    /// is quiesced, parked or incoming.
    pub fn quiesce(self: &Arc<Self>, timeout: Duration) -> Result<Quiesced> {
        const WHAT: &str = "waiting for the guest's writes to complete";
        let deadline = Instant::now() + timeout;
        let mut held = self.lock();
        if self.state() & (QUIESCED | PARKED | INCOMING) != 0 {
            return Err(Error::new(ErrorKind::Unavailable, WHAT, "they are held back already"));
        }
        self.change_locked(OPEN, QUIESCED);
        let quiesced = Quiesced { gate: Arc::clone(self), leaves: OPEN };
        while !self.idle() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(held);
                let why = format!("some are still in flight after {} ms", timeout.as_millis());
                return Err(Error::new(ErrorKind::Unavailable, WHAT, &why));
            }
            held = wait_for(&self.changed, held, left);
        }
        drop(held);
        Ok(quiesced)
    }

    /// Lets nothing but a flush pass from now on, whatever became of the guard otherwise.
    pub fn park(&self, mut quiesced: Quiesced) {
        debug_assert!(quiesced.is_of(self), "parked with the proof of another gate");
        if quiesced.is_of(self) {
            quiesced.leaves = PARKED;
        } else {
            self.change(OPEN, PARKED);
        }
    }

    /// Parks the gate whatever it is otherwise, and cannot fail. Changes in flight go on: who needs to
    /// know that there are none has quiesced it, and keeps the proof as long as he likes.
    pub fn park_now(&self) {
        self.change(OPEN, PARKED);
    }

    /// True between [`park`](Self::park) and [`unpark`](Self::unpark).
    pub fn is_parked(&self) -> bool {
        self.state() & PARKED != 0
    }

    /// Ends [`park`](Self::park) and [`fail`](Self::fail). Does nothing to a gate that is closed for
    /// another cause.
    pub fn unpark(&self) {
        self.change(PARKED | FAILED, OPEN);
    }

    /// From now on changes wait but for those of the process `holder`; of nobody's with none. Whoever needs that
    /// no other change is in flight has it quiesced meanwhile.
    pub fn reserve(&self, holder: Option<u128>) {
        *lock(&self.holder) = holder;
        self.change(OPEN, RESERVED);
    }

    /// Ends [`reserve`](Self::reserve). Does nothing to a gate that is closed for another cause.
    pub fn unreserve(&self) {
        self.change(RESERVED, OPEN);
        *lock(&self.holder) = None;
    }

    /// Lets nothing pass from now on, whatever the gate is otherwise. What is in flight goes on, and
    /// what was told to fail waits.
    pub fn shut(&self) {
        self.change(FAILED, SHUT);
    }

    /// True between [`shut`](Self::shut) and [`unshut`](Self::unshut).
    pub fn is_shut(&self) -> bool {
        self.state() & SHUT != 0
    }

    /// Ends [`shut`](Self::shut); the gate is what it would be without.
    pub fn unshut(&self) {
        self.change(SHUT, OPEN);
    }

    /// Another host owns the image and hands it over later: from now on changes wait. What was told
    /// to fail waits.
    pub fn expect(&self) {
        self.change(FAILED | UNSTARTED, INCOMING);
    }

    /// The image is this host's, or is about to be, and its guest is not to change it before
    /// [`start`](Self::start): changes wait, and the first one that comes tells `first_change`.
    pub fn await_start(&self, first_change: ChangeWaits) {
        *lock(&self.first_change) = Some(first_change);
        self.change(OPEN, UNSTARTED);
    }

    /// Ends [`await_start`](Self::await_start).
    pub fn start(&self) {
        self.change(UNSTARTED, OPEN);
        *lock(&self.first_change) = None;
    }

    /// True between [`expect`](Self::expect) and [`take_over`](Self::take_over).
    pub fn is_incoming(&self) -> bool {
        self.state.load(Ordering::Acquire) & INCOMING != 0
    }

    /// Ends [`expect`](Self::expect).
    pub fn take_over(&self) {
        self.change(INCOMING, OPEN);
    }

    /// Fails what waits for anything but a [`Quiesced`], and what comes and would have to wait for
    /// it; false when there is nothing of the kind.
    pub fn fail(&self) -> bool {
        let held = self.lock();
        let lasts = self.state() & LASTING != 0;
        if lasts {
            self.change_locked(OPEN, FAILED);
        }
        drop(held);
        self.changed.notify_all();
        lasts
    }

    /// Ends [`fail`](Self::fail): what comes waits again. Opens nothing.
    pub fn unfail(&self) {
        self.change(FAILED, OPEN);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let shard = &self.gate.shards[self.shard];
        let before = shard.in_flight[self.phase].fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "a change left the gate twice");
        if before == 1 && self.gate.state() & (QUIESCED | DRAINING) != 0 {
            // Whoever quiesces or drains holds the lock between looking at the counters and waiting.
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

    /// From now on its end leaves the gate shut: of an image with which something cannot be taken
    /// back any more, whatever fails on the way.
    pub fn keep(&mut self) {
        self.leaves = SHUT;
    }
}

impl Drop for Quiesced {
    fn drop(&mut self) {
        self.gate.change(QUIESCED, self.leaves);
    }
}
