//! Runs QEMU's tools behind a wall. They read files whose bytes a hostile guest may have written, so a
//! tool that is taken over must reach nothing but the descriptors that it was handed.
//!
//! A [`Tool`] is started in two steps. The agent starts its own program once more as a *launcher*
//! (`dray confine`, through `/proc/self/exe`), and sends it an *order* over a socket: which program, its
//! arguments, and the descriptors. The launcher puts up the wall round itself and becomes the
//! program. So nothing has to be done between `fork` and `exec`, and the agent stays as it is.
//!
//! The wall ([`wall`]), in the order in which it goes up:
//! * no descriptors but those that were handed over, no environment, a bound on memory and files;
//! * a user of its own that nobody else is, without groups or capabilities, when the agent is root;
//! * landlock: no path but the system's programs and libraries, for reading; no TCP, no signal out;
//! * the death of the agent is the tool's;
//! * seccomp: no system call but those that a tool needs. It cannot make a socket.
//!
//! What cannot be put up is an error, and the tool is not started: closed by default. What the tool may
//! do with what it was handed is the business of whoever hands it over.

#![forbid(unsafe_code)]

mod launcher;
mod order;
mod spawner;
mod tool;
mod wall;

pub use launcher::{ASKED, launch, launch_if_asked};
pub use spawner::launch_with;
pub use tool::{Finished, Tool};

/// The hidden command of `dray` that is the launcher.
pub const COMMAND: &str = "confine";
/// Number of the first descriptor that is handed to a tool: 0 to 2 are the usual ones, and 3 is for a
/// moment what becomes 1.
const FIRST: usize = 4;
