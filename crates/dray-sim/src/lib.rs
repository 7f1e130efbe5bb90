//! Migrations in virtual time: the engine and the wire code of the agents on simulated disks, links
//! and guests, with everything that can go wrong.
//!
//! A seed decides a run completely: the images, the guest, the link, the faults. After every event
//! the checkers look at the invariants (safety), and once the faults stop every migration must end
//! (liveness). [`run()`] is one run, [`crash_everywhere`] repeats one run with a crash between any
//! two effects.
//!
//! * [`faults`]: what a run looks like and what goes wrong in it.
//! * `world`: time, events, crashes; `source` and `target` carry out the engine's effects.
//! * [`replay`]: a block trace through the same engine, on disks without contents and without faults.
//! * `replica`: targets that have an earlier generation of the image.
//! * `disk`, `link`, `guest`, `vm`: what the agents live among. `check`: the invariants.

#![forbid(unsafe_code)]

mod basis;
mod check;
mod disk;
pub mod faults;
mod guest;
mod journal;
mod link;
mod ops;
pub mod replay;
mod replica;
mod reuse;
mod rng;
pub mod run;
mod source;
mod target;
mod vm;
mod wire;
mod world;

pub use faults::{Crash, CrashPoint, Side};
pub use run::{Outcome, crash_everywhere, run, soak};
