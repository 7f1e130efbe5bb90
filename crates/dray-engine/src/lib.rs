//! The migration engine: two pure state machines, one for each side, and what they share.
//!
//! [`Source`] and [`Target`] take an event and the time and answer with effects; they never read a
//! clock, open a socket, start a thread or draw a random number. The agent runs the effects on real
//! disks and links, the simulator on simulated ones, in both cases strictly in order: an effect that
//! makes a record durable has done so before the next effect begins. That order is what the
//! invariants rest on, so a crash between any two effects is a case both machines can recover from.
//!
//! * [`source`]: Copy, Sync, Handover, and serving what the target still misses.
//! * [`receiver`]: receiving, the promise, ownership, Backfill.
//! * [`record`]: what each side makes durable, and how a restart reads it.
//! * [`lineage`]: generations of an image, and what has changed since one of them.
//! * [`strategy`]: which blocks move in which phase; [`hotset`]: which of them are hot.
//! * [`reuse`]: whether to ask the target for content before sending it.
//! * [`order`]: which of them is next; [`refresh`]: when that is asked anew, and [`watch`] when not to trust
//!   it. [`window`]: how much may be under way.
//! * [`plan`]: what to copy before handover, and what will come of it.
//! * [`throttle`]: slowing a guest that writes too fast; [`pace`]: slowing the migration.

#![forbid(unsafe_code)]

mod basis;
mod capacity;
pub mod hotset;
pub mod lineage;
pub mod order;
pub mod pace;
pub mod plan;
pub mod receiver;
pub mod record;
pub mod refresh;
pub mod reuse;
pub mod source;
pub mod strategy;
pub mod throttle;
pub mod watch;
pub mod window;

pub use receiver::{BackfillControl, Target, TargetEffect, TargetEvent, TargetPlan};
pub use record::{SourceRecord, TargetRecord};
pub use source::{Source, SourceEffect, SourceEvent, SourcePlan};
pub use strategy::Tuning;

use serde::{Deserialize, Serialize};

/// Time as the shell tells it: nanoseconds since any fixed moment; never goes back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    /// Nanoseconds from `earlier` to this time.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// One millisecond in the units of [`Time`].
pub const MILLISECOND: u64 = 1_000_000;
/// One second in the units of [`Time`].
pub const SECOND: u64 = 1_000_000_000;

/// The phase a migration is in, as shown to people and programs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Phase {
    /// The first pass over the images.
    Copy,
    /// Re-sending what was written meanwhile, or waiting for the guest to stop.
    Sync,
    /// Ownership is passing.
    Handover,
    /// The target serves and fetches what it misses.
    Backfill,
    /// Over.
    Release,
}
