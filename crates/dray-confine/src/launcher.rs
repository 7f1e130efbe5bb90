//! The launcher: takes an order, puts up the wall round itself, and becomes the program.

use crate::FIRST;
use crate::order::{self, Order};
use crate::wall;
use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// The exit code of a launcher that could not become the program.
const FAILED: u8 = 126;
/// An argument by which a program of tests knows that it is the launcher. To the test harness it is the name of
/// a test that is left out.
pub const ASKED: &str = "--skip=launches-a-confined-tool";

/// Takes the order that comes through standard input, and becomes the program that it names. Says on
/// standard error why, if it cannot, and how this process ends then.
pub fn launch() -> ExitCode {
    let Err(why) = obey();
    eprintln!("dray confine: {why}");
    ExitCode::from(FAILED)
}

/// The launcher in a program of tests: one of them does nothing but call this, and the others tell
/// [`launch_with`](crate::launch_with) that one's name, `--exact`, `--nocapture` and [`ASKED`].
pub fn launch_if_asked() {
    if std::env::args().any(|argument| argument == ASKED) {
        let _ = launch();
        std::process::exit(FAILED.into());
    }
}

fn obey() -> io::Result<Infallible> {
    close_others()?;
    let mut from = UnixStream::from(rustix::stdio::stdin().try_clone_to_owned()?);
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    let (order, mut handed) = order_of(&mut from)?;
    drop(from);
    if handed.is_empty() {
        return Err(io::Error::other("the order has no descriptor for the tool's output"));
    }
    rustix::stdio::dup2_stdout(handed.remove(0))?;
    for (nth, descriptor) in handed.into_iter().enumerate() {
        let number = descriptor.into_raw_fd();
        if number as usize != FIRST + nth {
            return Err(io::Error::other(format!("a descriptor has the number {number}")));
        }
    }
    become_it(&order)
}

/// The order, with descriptors whose numbers follow from their places.
fn order_of(from: &mut UnixStream) -> io::Result<(Order, Vec<OwnedFd>)> {
    // The socket must not lie among the numbers that are handed out.
    let high = rustix::io::fcntl_dupfd_cloexec(from.as_fd(), HIGH)?;
    *from = UnixStream::from(high);
    order::receive(from)
}

/// Above every number that is handed out.
const HIGH: RawFd = 512;

fn become_it(order: &Order) -> io::Result<Infallible> {
    wall::raise(&order.program, order.parent)?;
    let why =
        Command::new(&order.program).arg0(&order.name).args(&order.arguments).env_clear().exec();
    Err(io::Error::new(why.kind(), format!("start {}: {why}", order.program.display())))
}

/// Closes what this process has inherited beside standard input, output and error.
fn close_others() -> io::Result<()> {
    let listed: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&number: &RawFd| number > io::stderr().as_raw_fd())
        .collect();
    for number in listed {
        // The one through which they were listed is closed by now.
        let _ = nix::unistd::close(number);
    }
    Ok(())
}
