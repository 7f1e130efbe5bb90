//! Starts launchers from one thread that never ends: a tool ends with the *thread* that started it.

use crate::COMMAND;
use std::io;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

/// The program that this process is, whatever lies at its path by now.
const OWN_PROGRAM: &str = "/proc/self/exe";

static ARGUMENTS: OnceLock<Vec<String>> = OnceLock::new();
static SPAWNER: OnceLock<Sender<Job>> = OnceLock::new();

struct Job {
    command: Command,
    done: Sender<io::Result<Child>>,
}

/// Says with which arguments this process's program is the launcher, where it is not `dray`: a
/// program of tests. What was said first holds.
pub fn launch_with(arguments: &[&str]) {
    ARGUMENTS.get_or_init(|| arguments.iter().map(|&word| word.to_owned()).collect());
}

/// This process's program as a launcher, without an environment.
pub(crate) fn launcher() -> Command {
    let mut command = Command::new(OWN_PROGRAM);
    command.args(ARGUMENTS.get_or_init(|| vec![COMMAND.to_owned()])).env_clear();
    command
}

/// Starts `command`. It may ask to end with this process.
pub(crate) fn spawn(command: Command) -> io::Result<Child> {
    let (done, result) = channel();
    let gone = || io::Error::other("the thread that starts tools has ended");
    spawner()?.send(Job { command, done }).map_err(|_| gone())?;
    result.recv().map_err(|_| gone())?
}

fn spawner() -> io::Result<&'static Sender<Job>> {
    if let Some(spawner) = SPAWNER.get() {
        return Ok(spawner);
    }
    let (jobs, coming) = channel::<Job>();
    std::thread::Builder::new().name("spawner".to_owned()).spawn(move || {
        for mut job in coming {
            // Nobody may wait for it any more; the child then ends for want of an order.
            let _ = job.done.send(job.command.spawn());
        }
    })?;
    // One that another thread was faster to make is used; this one ends, and has started nothing.
    Ok(SPAWNER.get_or_init(|| jobs))
}
