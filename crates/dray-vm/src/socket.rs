//! Sockets at which a QEMU listens for this agent only meanwhile. Each is in a directory of its own in the
//! run directory, which belongs to the user that the QEMU runs as.
//!
//! That user may put there whatever it likes. The agent connects to nothing but a socket of that user, and
//! speaks only to the process it means: other QEMUs may run as the same user.

use crate::own::connect_now;
use dray_host::process::QemuProcess;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Uid, chownat, fstat, open};
use std::fs::DirBuilder;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Name of the socket in its directory.
const NAME: &str = "sock";

/// A directory that belongs to one QEMU's user.
#[derive(Debug)]
pub struct Meeting {
    dir: PathBuf,
}

impl Meeting {
    /// The one called `name` in the run directory. It need not exist.
    pub fn at(run_dir: &Path, name: &str) -> Self {
        Self { dir: run_dir.join(name) }
    }

    /// The path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.join(NAME)
    }

    /// Makes the directory, empty, for this QEMU; for the agent's own user where its user is not known.
    ///
    /// # Errors
    /// What the system reports.
    pub fn make(&self, qemu: Option<&QemuProcess>) -> io::Result<()> {
        self.remove()?;
        DirBuilder::new().mode(0o700).create(&self.dir).map_err(|why| self.failed("make", &why))?;
        let Some(user) = qemu.and_then(QemuProcess::user).filter(|user| !is_own(*user)) else {
            return Ok(());
        };
        let user = Some(Uid::from_raw(user));
        chownat(CWD, &self.dir, user, None, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|why| self.failed("give away", &why.into()))
    }

    /// Connects to its socket, at which `qemu` listens.
    ///
    /// # Errors
    /// That nobody listens there, or somebody else does.
    pub fn connect(&self, qemu: Option<&QemuProcess>) -> io::Result<UnixStream> {
        let path = self.socket();
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = open(&path, flags, Mode::empty())
            .map_err(|why| self.failed("connect to the socket in", &why.into()))?;
        let stat = fstat(&found)?;
        let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
        if !is_socket || qemu.is_some_and(|qemu| qemu.user() != Some(stat.st_uid)) {
            let why = format!("{} is no socket of the vm's user", path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        // The very one that was looked at. Nobody waits for a QEMU that has no room for clients.
        let found = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
        let stream = connect_now(&found)
            .map_err(|why| self.failed("connect to the socket in", &why.into()))?;
        if is_from(&stream, qemu) {
            return Ok(stream);
        }
        let why = format!("another process than the vm's QEMU listens on {}", path.display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
    }

    /// Removes the directory with all that is in it; it may be gone already.
    ///
    /// # Errors
    /// What the system reports.
    pub fn remove(&self) -> io::Result<()> {
        match std::fs::remove_dir_all(&self.dir) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => Err(self.failed("remove", &why)),
            _ => Ok(()),
        }
    }

    fn failed(&self, what: &str, why: &io::Error) -> io::Error {
        io::Error::new(why.kind(), format!("{what} {}: {why}", self.dir.display()))
    }
}

fn is_own(user: u32) -> bool {
    user == rustix::process::geteuid().as_raw()
}

/// Whether `pid` is this QEMU, where that can be told. Between processes of the agent's own user there is no
/// wall, and the monitor may belong to a manager there.
pub fn is_process(qemu: Option<&QemuProcess>, pid: i32) -> bool {
    qemu.is_none_or(|qemu| qemu.pid == pid || qemu.user().is_some_and(is_own))
}

fn is_from(stream: &UnixStream, qemu: Option<&QemuProcess>) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(stream);
    peer.is_ok_and(|peer| is_process(qemu, peer.pid.as_raw_nonzero().get()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};

    const NOBODY: u32 = 65534;

    /// A process of a user who is not this one; none where this one may not start it.
    fn stranger() -> Option<(Child, QemuProcess)> {
        let child = Command::new("sleep").arg("60").uid(NOBODY).spawn().ok()?;
        let pid = child.id() as i32;
        Some((child, QemuProcess::find(Path::new("/run/vm.qmp"), pid).unwrap()))
    }

    #[test]
    fn a_meeting_is_private_to_the_user_of_its_qemu() {
        let Some((mut child, qemu)) = stranger() else { return println!("SKIP: not root") };
        let dir = tempfile::tempdir().unwrap();
        let meeting = Meeting::at(dir.path(), "incoming-1");
        meeting.make(Some(&qemu)).unwrap();
        let made = dir.path().join("incoming-1").metadata().unwrap();
        assert_eq!((made.uid(), made.mode() & 0o777), (NOBODY, 0o700));
        std::fs::write(meeting.socket(), "left over").unwrap();
        meeting.make(None).unwrap();
        assert_ne!(dir.path().join("incoming-1").metadata().unwrap().uid(), NOBODY);
        assert!(!meeting.socket().exists());
        meeting.remove().unwrap();
        meeting.remove().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Whoever owns the directory leads the agent to no socket that is not its own.
    #[test]
    fn a_link_to_a_socket_of_root_is_not_followed() {
        let Some((mut child, qemu)) = stranger() else { return println!("SKIP: not root") };
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root.sock");
        let listener = UnixListener::bind(&root).unwrap();
        let meeting = Meeting::at(dir.path(), "incoming-1");
        meeting.make(Some(&qemu)).unwrap();
        symlink(&root, meeting.socket()).unwrap();
        meeting.connect(Some(&qemu)).unwrap_err();
        std::fs::remove_file(meeting.socket()).unwrap();
        std::fs::hard_link(&root, meeting.socket()).unwrap();
        let why = meeting.connect(Some(&qemu)).unwrap_err();
        assert!(why.to_string().contains("no socket of the vm's user"), "{why}");
        // Of that user, but another process listens.
        chownat(CWD, &root, Some(Uid::from_raw(NOBODY)), None, AtFlags::empty()).unwrap();
        let why = meeting.connect(Some(&qemu)).unwrap_err();
        assert!(why.to_string().contains("another process"), "{why}");
        drop(listener);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn what_this_user_runs_is_met() {
        let dir = tempfile::tempdir().unwrap();
        let meeting = Meeting::at(dir.path(), "incoming-1");
        let own = QemuProcess::find(Path::new("/run/vm.qmp"), std::process::id() as i32).unwrap();
        meeting.make(Some(&own)).unwrap();
        let _listener = UnixListener::bind(meeting.socket()).unwrap();
        meeting.connect(Some(&own)).unwrap();
        meeting.connect(None).unwrap();
    }
}
