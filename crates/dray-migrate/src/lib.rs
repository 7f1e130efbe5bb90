//! Moving images and VMs: the owner loops, one thread per migration and side, take events, step the engine and run
//! its effects in order. Nothing else changes a migration's state, so nothing is locked.
//!
//! * [`source`], [`receiver`]: the two loops. [`messages`]: what the shells tell each other.
//! * [`guest`]: the part of a migration that belongs to the guest.
//! * [`forecast`]: what the planner is told of images and links; [`links`]: how fast links were.
//! * What is durable of them, and what a restart and a claim make of that: [`dray_host::migration`].
//! * `log`: a migration's steps in the log, in words.
//! * [`shown`]: what both sides show in the same words.
//! * [`slots`]: the migrations this agent knows, for the API and the listener.

pub mod forecast;
pub mod guest;
mod hashes;
mod lines;
pub mod links;
mod log;
pub mod messages;
pub mod receiver;
pub mod shown;
pub mod slots;
pub mod source;
#[cfg(test)]
mod world;

use dray_engine::Time;
use dray_types::{Epoch, ErrorKind};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Where a loop says that its migration is void, and the epoch that it knew: when it is so durably and no
/// effect is run any more, or why it goes on.
pub type Voided = Sender<io::Result<Epoch>>;

/// Nanoseconds since the loop began, as the engine counts them.
#[derive(Clone, Debug)]
pub struct Clock(Ticks);

#[derive(Clone, Debug)]
enum Ticks {
    Since(Instant),
    Given(Arc<AtomicU64>),
}

impl Clock {
    /// A clock that begins now.
    pub fn start() -> Self {
        Self(Ticks::Since(Instant::now()))
    }

    /// A clock that shows the nanoseconds that it is given.
    pub fn given(nanos: Arc<AtomicU64>) -> Self {
        Self(Ticks::Given(nanos))
    }

    /// The time.
    pub fn now(&self) -> Time {
        let nanos = match &self.0 {
            Ticks::Since(began) => began.elapsed().as_nanos() as u64,
            Ticks::Given(nanos) => nanos.load(Ordering::SeqCst),
        };
        // The engine takes zero for "never".
        Time(nanos + 1)
    }

    /// Time that has passed since `then`.
    pub fn since(&self, then: Time) -> Duration {
        Duration::from_nanos(self.now().0.saturating_sub(then.0))
    }
}

/// Where loops have done what may take long: each piece of work in a thread of its own, or at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Threads {
    /// In threads.
    Own,
    /// Before [`begin`](Threads::begin) returns: no thread is there.
    None,
}

/// Which sort of failure an error of this host's system is.
fn io_kind(why: &io::Error) -> ErrorKind {
    match why.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
        _ => ErrorKind::Io,
    }
}

impl Threads {
    /// Begins `work`.
    ///
    /// # Errors
    /// When there can be no thread: an error like any other, not the end of the loop.
    pub fn begin(self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        match self {
            Self::None => {
                work();
                Ok(())
            }
            Self::Own => std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop),
        }
    }
}
