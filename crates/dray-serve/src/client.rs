//! Who is at the other end of a connection.

use dray_image::Origin;
use std::io;
use std::sync::Arc;

/// What is known of a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Client {
    /// The process at the other end of a unix socket; none over TCP, or when it cannot be known.
    pub process: Option<Process>,
    /// The user that it ran as when it connected; none over TCP, or when it cannot be known.
    pub user: Option<u32>,
}

/// A process. Its number alone may be another's tomorrow; with its start it is nobody else's until
/// the host boots again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// When it was started, in clock ticks since the host booted.
    pub started: u64,
}

impl Process {
    /// The process that has the number `pid` now.
    pub fn find(pid: u32) -> Option<Self> {
        Some(Self { pid, started: started(&stat(pid).ok()?)? })
    }

    /// Whether it has not ended; true when that cannot be known.
    fn runs(self) -> bool {
        match stat(self.pid) {
            Ok(stat) => started(&stat) == Some(self.started) && !is_zombie(&stat),
            Err(why) => !is_gone(&why),
        }
    }

    /// As images know it.
    pub fn origin(self) -> Origin {
        let id = (u128::from(self.pid) << 64) | u128::from(self.started);
        Origin::new(id, Arc::new(move || self.runs()))
    }
}

fn stat(pid: u32) -> io::Result<Vec<u8>> {
    std::fs::read(format!("/proc/{pid}/stat"))
}

/// Whether `/proc` says that there is no such process. One that ends while it is read is told by its number.
fn is_gone(why: &io::Error) -> bool {
    let ended = Some(rustix::io::Errno::SRCH.raw_os_error());
    why.kind() == io::ErrorKind::NotFound || why.raw_os_error() == ended
}

/// Whether a `/proc/PID/stat` is of a process that has ended and whose parent has not looked yet.
fn is_zombie(stat: &[u8]) -> bool {
    let bracket = stat.iter().rposition(|byte| *byte == b')');
    bracket.is_some_and(|bracket| matches!(stat.get(bracket + 2), Some(b'Z' | b'X')))
}

/// The start time in a `/proc/PID/stat`. A program may have given itself any name, with spaces and
/// brackets in it, so fields are counted from the last bracket.
fn started(stat: &[u8]) -> Option<u64> {
    /// Of the fields behind the name; `man proc` calls it the 22nd of all.
    const START: usize = 19;
    let bracket = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(&stat[bracket + 1..]).ok()?;
    fields.split_ascii_whitespace().nth(START)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn the_start_is_found_behind_any_name() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        for name in ["(qemu)", "(a b) 1 2 3)", "()) \u{ff} ("] {
            let stat = format!("77 {name}) {}", fields.join(" "));
            assert_eq!(started(stat.as_bytes()), Some(22), "{name}");
        }
        assert_eq!(started(b""), None);
        assert_eq!(started(b"77 (qemu) S 1 2"), None);
        assert_eq!(started(b"77 (qemu"), None);
    }

    #[test]
    fn this_process_is_found_and_stays_the_same() {
        let own = Process::find(std::process::id()).unwrap();
        assert_eq!(own.pid, std::process::id());
        assert_eq!(Process::find(own.pid), Some(own));
        assert_eq!(Process::find(0), None);
        assert!(own.runs() && own.origin() == own.origin());
    }

    #[test]
    fn a_process_has_ended_also_while_its_parent_has_not_looked_yet() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::find(child.id()).unwrap();
        let earlier = Process { started: process.started - 1, ..process };
        assert!(process.runs() && !earlier.runs(), "another one has its number");
        child.kill().unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while process.runs() {
            assert!(Instant::now() < deadline, "it has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(Process::find(child.id()), Some(process), "a zombie");
        child.wait().unwrap();
        assert!(!process.runs());
    }
}
