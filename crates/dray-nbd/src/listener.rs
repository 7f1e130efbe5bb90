//! Listening sockets: making them, accepting from them, waking whoever accepts.

use crate::channel::Socket;
use crate::tls::Tls;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, listen, shutdown,
    socket_with,
};
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Clients that may wait to be accepted; a multi-connection client opens a handful at once.
const BACKLOG: i32 = 128;

/// Out of file descriptors, accept fails at once, again and again; a pause keeps the processor
/// free for the connections that will give some back.
const PAUSE_WITHOUT_DESCRIPTORS: Duration = Duration::from_millis(100);

/// A listening socket.
pub(crate) struct Listener {
    socket: Listening,
    tls: Tls,
    stopped: AtomicBool,
}

enum Listening {
    Unix { socket: UnixListener, path: PathBuf, identity: (u64, u64) },
    Tcp(TcpListener),
}

/// What `listener` does about TLS.
pub(crate) fn tls(listener: &Listener) -> &Tls {
    &listener.tls
}

fn context(what: &str, path: &Path, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("{what} {}: {error}", path.display()))
}

impl Listener {
    pub(crate) fn unix(path: &Path, mode: u32, group: Option<u32>) -> io::Result<Self> {
        remove_stale(path)?;
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let addr = SocketAddrUnix::new(path).map_err(|e| context("cannot use socket", path, e))?;
        bind(&socket, &addr).map_err(|e| context("cannot bind socket", path, e))?;
        // Nobody can connect before `listen`, so there is no moment with other permissions.
        if group.is_some() {
            std::os::unix::fs::chown(path, None, group)
                .map_err(|e| context("cannot set the group of", path, e))?;
        }
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .map_err(|e| context("cannot set permissions of", path, e))?;
        listen(&socket, BACKLOG).map_err(|e| context("cannot listen on", path, e))?;
        let file = fs::symlink_metadata(path)?;
        let identity = (file.dev(), file.ino());
        let socket = Listening::Unix { socket: socket.into(), path: path.to_path_buf(), identity };
        Ok(Self { socket, tls: Tls::Off, stopped: AtomicBool::new(false) })
    }

    pub(crate) fn tcp(addr: SocketAddr, tls: Tls) -> io::Result<Self> {
        let socket = TcpListener::bind(addr)
            .map_err(|e| io::Error::new(e.kind(), format!("cannot listen on {addr}: {e}")))?;
        Ok(Self { socket: Listening::Tcp(socket), tls, stopped: AtomicBool::new(false) })
    }

    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        match &self.socket {
            Listening::Tcp(socket) => socket.local_addr().ok(),
            Listening::Unix { .. } => None,
        }
    }

    /// The next client, or `None` after [`stop`](Self::stop).
    pub(crate) fn accept(&self) -> Option<Socket> {
        loop {
            let accepted = match &self.socket {
                Listening::Unix { socket, .. } => socket.accept().map(|(s, _)| Socket::Unix(s)),
                Listening::Tcp(socket) => socket.accept().map(|(s, _)| Socket::Tcp(s)),
            };
            if self.stopped.load(Ordering::Acquire) {
                return None;
            }
            match accepted {
                Ok(socket) => return Some(socket),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an nbd client");
                    std::thread::sleep(PAUSE_WITHOUT_DESCRIPTORS);
                }
            }
        }
    }

    /// Accepts nobody any more and removes the socket's file, if it is still this one's.
    pub(crate) fn stop(&self) {
        if self.stopped.swap(true, Ordering::AcqRel) {
            return;
        }
        match &self.socket {
            Listening::Unix { socket, path, identity } => {
                // Wakes the accepting thread, which then sees the flag.
                let _ = shutdown(socket, Shutdown::Both);
                let ours = |file: fs::Metadata| (file.dev(), file.ino()) == *identity;
                if fs::symlink_metadata(path).is_ok_and(ours)
                    && let Err(error) = fs::remove_file(path)
                {
                    tracing::warn!(%error, path = %path.display(), "cannot remove nbd socket");
                }
            }
            Listening::Tcp(socket) => {
                let _ = shutdown(socket, Shutdown::Both);
            }
        }
    }
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
