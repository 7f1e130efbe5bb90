//! The wall round this process. What is up stays up, also in the program that it becomes.

mod limits;
mod paths;
mod syscalls;
mod user;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::io;
use std::path::Path;

/// Puts up the wall for `program`, which ends with the process `parent`.
///
/// # Errors
/// What could not be put up: then nothing may run.
pub(crate) fn raise(program: &Path, parent: i32) -> io::Result<()> {
    let failed = |what: &'static str| {
        move |why: io::Error| io::Error::new(why.kind(), format!("cannot {what}: {why}"))
    };
    let alone = user::lower().map_err(failed("give up the agent's rights"))?;
    limits::set(alone).map_err(failed("limit what the tool uses"))?;
    paths::close(program).map_err(failed("close the file system to the tool"))?;
    // A change of the user would have forgotten it.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid().is_none_or(|now| now.as_raw_nonzero().get() != parent) {
        return Err(io::Error::other("the agent has ended"));
    }
    syscalls::close().map_err(failed("close the system's calls to the tool"))
}
