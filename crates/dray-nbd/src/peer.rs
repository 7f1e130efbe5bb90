//! Who is at the other end of a connection.

use crate::channel::Socket;
use rustix::net::sockopt::socket_peercred;

/// What is known of a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Client {
    /// The process at the other end of a unix socket; none over TCP, or when it cannot be known.
    pub process: Option<Process>,
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
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        Some(Self { pid, started: started(&stat)? })
    }
}

impl Client {
    /// Who has connected through `socket`.
    pub(crate) fn of(socket: &Socket) -> Self {
        let Socket::Unix(stream) = socket else { return Self::default() };
        let peer = socket_peercred(stream).ok();
        let pid = peer.and_then(|peer| u32::try_from(peer.pid.as_raw_nonzero().get()).ok());
        Self { process: pid.and_then(Process::find) }
    }
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
    }
}
