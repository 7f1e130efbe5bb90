//! Migrations in virtual time: the engine and the wire code of the agents on simulated disks, links
//! and guests, with everything that can go wrong.
//!
//! A seed decides a run completely: the images, the guest, the link, the faults. After every event
//! the checkers look at the invariants (safety), and once the faults stop every migration must end
//! (liveness). [`run()`] is one run, [`crash_everywhere`] repeats one run with a crash between any
//! two effects.
//!
//! * [`faults`]: what a run looks like and what goes wrong in it.
//! * `state`: what the agents are, and what they live among: disks, links, guests, VMs.
//! * `world`: all of that, time, events and crashes.
//! * `steps`: what an event does in the world. `steps::source` and `steps::target` carry out the engine's
//!   effects, `steps::check` looks at the invariants.
//! * [`replay`]: a block trace through the same engine, on disks without contents and without faults.

#![forbid(unsafe_code)]

mod disk;
pub mod faults;
pub mod replay;
mod rng;
pub mod run;
mod state;
mod steps;
mod world;

pub use faults::{Crash, CrashPoint, Side};
pub use run::{Outcome, crash_everywhere, run, soak};
