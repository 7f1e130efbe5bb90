//! Whose request a thread does, whether anybody still waits for its answer, and what became of the client.
//!
//! A request may wait at a closed gate for as long as a migration takes. When its client has gone meanwhile a
//! change must never be done: the guest has written elsewhere since, and was told that this is durable.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Tells whether a client is still there.
pub type IsThere = Arc<dyn Fn() -> bool + Send + Sync>;

/// The process at the other end of a client's connection, as far as it is one of this host: it is the same one
/// when it comes again, and when it has ended it cannot.
#[derive(Clone)]
pub struct Origin {
    id: u128,
    runs: IsRunning,
}

/// Tells whether a process has not ended yet.
pub type IsRunning = Arc<dyn Fn() -> bool + Send + Sync>;

impl Origin {
    /// The process `id`, a number that no other one ever has, as long as `runs` says so.
    pub fn new(id: u128, runs: IsRunning) -> Self {
        Self { id, runs }
    }

    /// The number of the process.
    pub(crate) fn id(&self) -> u128 {
        self.id
    }

    /// Whether it may still come again.
    pub(crate) fn runs(&self) -> bool {
        (self.runs)()
    }
}

impl PartialEq for Origin {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

/// How a client has gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Departure {
    /// It has said goodbye: it has heard what it wanted to hear.
    Goodbye,
    /// Its connection was lost, with the answers that were under way. It may come back.
    CutOff,
}

/// Whoever is served an image: one connection.
pub struct Client {
    is_there: IsThere,
    /// None when nothing is known of it.
    origin: Option<Origin>,
    wrote: AtomicBool,
    departure: OnceLock<Departure>,
    /// How often flushes of its were answered; one answer may be for several.
    answered: AtomicU64,
    /// What that was when the newest of the flushes that are under way came.
    asked: AtomicU64,
}

impl Client {
    /// A client that is there as long as `is_there` says so, and of which nothing else is known.
    pub fn new(is_there: IsThere) -> Arc<Self> {
        Self::of(None, is_there)
    }

    /// A client of the process `origin`.
    pub fn of(origin: Option<Origin>, is_there: IsThere) -> Arc<Self> {
        Arc::new(Self {
            is_there,
            origin,
            wrote: AtomicBool::new(false),
            departure: OnceLock::new(),
            answered: AtomicU64::new(0),
            asked: AtomicU64::new(0),
        })
    }

    /// The process that it belongs to, if that is known.
    pub(crate) fn origin(&self) -> Option<&Origin> {
        self.origin.as_ref()
    }

    /// It is about to change the image.
    pub fn writes(&self) {
        if !self.wrote() {
            self.wrote.store(true, Ordering::SeqCst);
        }
    }

    /// Whether it may have changed the image.
    pub(crate) fn wrote(&self) -> bool {
        self.wrote.load(Ordering::SeqCst)
    }

    /// It has gone, unless it had before.
    pub fn departs(&self, how: Departure) {
        // The first one stays.
        let _ = self.departure.set(how);
    }

    /// How it has gone, if it has.
    pub(crate) fn departure(&self) -> Option<Departure> {
        self.departure.get().copied()
    }

    /// How often flushes of its were answered.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::SeqCst)
    }

    /// Flushes of its begin; the newest of them came when flushes had been answered `asked` times.
    pub fn flushes(&self, asked: u64) {
        self.asked.store(asked, Ordering::SeqCst);
    }

    /// What the flushes under way came to has been sent to it.
    pub fn has_answer(&self) {
        self.answered.fetch_add(1, Ordering::SeqCst);
    }

    /// How often flushes had been answered when the newest of those that are under way came.
    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }
}

thread_local! {
    static CLIENT: RefCell<Option<Arc<Client>>> = const { RefCell::new(None) };
}

/// Puts back what was there before, also when the work panics.
struct Before(Option<Arc<Client>>);

impl Drop for Before {
    fn drop(&mut self) {
        CLIENT.with(|client| *client.borrow_mut() = self.0.take());
    }
}

/// Does `work` on this thread for a client: what waits in it for the disk to be opened fails when the client
/// has gone, and does nothing. A flush in it is the client's.
pub fn working_for<T>(client: &Arc<Client>, work: impl FnOnce() -> T) -> T {
    let before = CLIENT.with(|current| current.replace(Some(Arc::clone(client))));
    let _before = Before(before);
    work()
}

/// Whether the client that this thread works for is still there; true when it works for none.
pub(crate) fn is_there() -> bool {
    CLIENT.with(|client| client.borrow().as_ref().is_none_or(|client| (client.is_there)()))
}

/// The process of the client that this thread works for, if it is known.
pub(crate) fn process() -> Option<u128> {
    CLIENT.with(|client| client.borrow().as_ref()?.origin().map(Origin::id))
}

/// The client that this thread works for, if it works for one.
pub(crate) fn current() -> Option<Arc<Client>> {
    CLIENT.with(|client| client.borrow().clone())
}
