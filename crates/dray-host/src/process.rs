//! The identity of a process of this host, which differs from that of a later process with the same
//! number, and from one of an earlier boot.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A QEMU process: not its successor on the same socket.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QemuProcess {
    /// Its QMP socket.
    pub socket: PathBuf,
    /// The process at the other end of it.
    pub pid: i32,
    /// When that started, in clock ticks since the host's boot.
    pub started: u64,
    /// The boot of the host, as the kernel names it.
    pub boot: String,
}

/// When a process started, in clock ticks since the host's boot; none when there is no such process, or when
/// it has ended and its parent has not asked how.
pub(crate) fn started(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything; what follows it begins with the state, and of that the 20th
    // field is the start.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok())?
}

/// The user with whose rights the process of this number opens files.
pub(crate) fn user_of(pid: i32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    // Real, effective, saved, and that of the file system.
    users.split_whitespace().nth(3)?.parse().ok()
}

/// Whether there are walls for what this user runs: root, and who the agent runs as, could do without dray what
/// they do with it.
pub fn has_walls(user: u32) -> bool {
    user != 0 && user != rustix::process::geteuid().as_raw()
}

/// The boot of this host.
pub(crate) fn boot() -> Option<String> {
    Some(std::fs::read_to_string(BOOT_ID).ok()?.trim().to_owned())
}

impl QemuProcess {
    /// The process `pid` behind the socket; none where the system does not tell.
    pub fn find(socket: &Path, pid: i32) -> Option<Self> {
        Some(Self { socket: socket.to_owned(), pid, started: started(pid)?, boot: boot()? })
    }

    /// Whether it still runs.
    pub fn runs(&self) -> bool {
        started(self.pid) == Some(self.started) && self.is_of_this_boot()
    }

    /// Whether the host has not been booted since it was found.
    pub(crate) fn is_of_this_boot(&self) -> bool {
        boot().is_some_and(|boot| boot == self.boot)
    }

    /// The user with whose rights it opens files; none when it has ended.
    pub fn user(&self) -> Option<u32> {
        let user = user_of(self.pid)?;
        self.runs().then_some(user)
    }

    /// Whether it is the same one, whatever its socket is called.
    pub fn is_process(&self, other: &Self) -> bool {
        (self.pid, self.started, &self.boot) == (other.pid, other.started, &other.boot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_is_known_until_it_ends() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let found = QemuProcess::find(Path::new("/run/vm.qmp"), child.id() as i32).unwrap();
        assert!(found.runs());
        assert_eq!(found.user(), Some(rustix::process::geteuid().as_raw()));
        let before = QemuProcess { boot: "another boot".to_owned(), ..found.clone() };
        assert!(!before.runs() && !before.is_process(&found), "its number is another's by now");
        let moved = QemuProcess { socket: "/run/other.qmp".into(), ..found.clone() };
        assert!(moved.is_process(&found));
        child.kill().unwrap();
        // Nobody has asked how it ended: it holds nothing any more all the same.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while found.runs() {
            assert!(std::time::Instant::now() < deadline, "it has ended");
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!found.runs() && found.user().is_none());
    }
}
