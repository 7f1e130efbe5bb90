//! Unix sockets on which front ends and the API listen.

use rustix::fs::{AtFlags, CWD, Gid, chownat};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Clients that may wait to be accepted; a client with several connections opens a handful at once.
const BACKLOG: i32 = 128;

fn context(what: &str, path: &Path, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

/// Listens at `path`, with permissions `mode` and, if given, the group with that number. A socket that
/// nobody listens on any more is replaced. An agent that is not root cannot give a socket to a group
/// that it is no member of: the socket keeps its own group then.
///
/// # Errors
/// `AddrInUse` when somebody listens there, `AlreadyExists` when something that is no socket is there,
/// or what the system says.
pub fn listen_at(path: &Path, mode: u32, group: Option<u32>) -> io::Result<UnixListener> {
    remove_stale(path)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let addr = SocketAddrUnix::new(path).map_err(|e| context("cannot use socket", path, e))?;
    bind(&socket, &addr).map_err(|e| context("cannot bind socket", path, e))?;
    // Nobody can connect before `listen`, so there is no moment with other permissions.
    if let Some(group) = group {
        let given = chownat(CWD, path, None, Some(Gid::from_raw(group)), AtFlags::SYMLINK_NOFOLLOW);
        match given.map_err(io::Error::from) {
            Err(why) if why.kind() == io::ErrorKind::PermissionDenied => {
                tracing::info!(path = %path.display(), "the socket keeps this user's group");
            }
            given => given.map_err(|e| context("cannot set the group of", path, e))?,
        }
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(|e| context("cannot set permissions of", path, e))?;
    listen(&socket, BACKLOG).map_err(|e| context("cannot listen on", path, e))?;
    Ok(socket.into())
}

/// Removes a socket that nobody listens on; leaves everything else alone.
fn remove_stale(path: &Path) -> io::Result<()> {
    let Ok(file) = fs::symlink_metadata(path) else { return Ok(()) };
    if !file.file_type().is_socket() {
        let why = "it exists and is not a socket";
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!("cannot bind socket {}: {why}", path.display()),
        ));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("cannot bind socket {}: somebody is listening on it", path.display()),
        )),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(|e| context("cannot remove stale socket", path, e))
        }
        Err(error) => Err(context("cannot probe socket", path, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_has_its_permissions_and_nothing_else_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.sock");
        let listener = listen_at(&path, 0o660, None).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o660);
        let again = listen_at(&path, 0o600, None).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        listen_at(&path, 0o600, None).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "somebody's").unwrap();
        let there = listen_at(&path, 0o600, None).unwrap_err();
        assert_eq!(there.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"somebody's");
    }
}
