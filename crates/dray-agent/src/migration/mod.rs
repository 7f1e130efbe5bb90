//! The owner loops: one thread per migration and side takes events, steps the engine and runs its
//! effects in order. Nothing else changes a migration's state, so nothing is locked.
//!
//! * [`intent`]: what was asked for, durably, before anything is done.
//! * [`log`]: the engine's records in the migration's journal.
//! * [`source`], [`target`]: the two loops. [`messages`]: what the shells tell each other.
//! * [`present`]: which blocks an owner has that did not have them all.
//! * [`slots`]: the migrations this agent knows, for the API and the listener.
//! * [`standing`]: what a migration's folder says of an image, for those who claim it.
//! * [`abort`]: where crash tests end the process.

pub mod abort;
pub mod intent;
pub mod intents;
pub mod log;
pub mod messages;
pub mod present;
pub mod slots;
pub mod source;
pub mod standing;
pub mod target;

use dray_engine::Time;
use dray_types::Epoch;
use std::io;
use std::sync::mpsc::Sender;
use std::time::Instant;

/// Where a loop says that its migration is void, and the epoch that it knew: when it is so durably and no
/// effect is run any more, or why it goes on.
pub type Voided = Sender<io::Result<Epoch>>;

/// Nanoseconds since the loop began, as the engine counts them.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that begins now.
    pub fn start() -> Self {
        // The engine takes zero for "never".
        Self(Instant::now())
    }

    /// The time.
    pub fn now(&self) -> Time {
        Time(self.0.elapsed().as_nanos() as u64 + 1)
    }
}
