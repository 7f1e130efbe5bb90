//! Listening sockets: making them, accepting from them, waking whoever accepts.

use crate::channel::Socket;
use crate::tls::Tls;
use dray_serve::socket::listen_at;
use parking_lot::Mutex;
use rustix::net::{Shutdown, shutdown};
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

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
    Unix {
        socket: UnixListener,
        path: PathBuf,
        identity: (u64, u64),
    },
    Tcp(TcpListener),
    /// One client that has come already, and nobody after it.
    Connected(Mutex<Option<UnixStream>>),
}

/// What `listener` does about TLS.
pub(crate) fn tls(listener: &Listener) -> &Tls {
    &listener.tls
}

impl Listener {
    pub(crate) fn unix(path: &Path, mode: u32, group: Option<u32>) -> io::Result<Self> {
        let socket = listen_at(path, mode, group)?;
        let file = fs::symlink_metadata(path)?;
        let identity = (file.dev(), file.ino());
        let socket = Listening::Unix { socket, path: path.to_path_buf(), identity };
        Ok(Self { socket, tls: Tls::Off, stopped: AtomicBool::new(false) })
    }

    pub(crate) fn tcp(addr: SocketAddr, tls: Tls) -> io::Result<Self> {
        let socket = TcpListener::bind(addr)
            .map_err(|e| io::Error::new(e.kind(), format!("cannot listen on {addr}: {e}")))?;
        Ok(Self { socket: Listening::Tcp(socket), tls, stopped: AtomicBool::new(false) })
    }

    pub(crate) fn connected(client: UnixStream) -> Self {
        let socket = Listening::Connected(Mutex::new(Some(client)));
        Self { socket, tls: Tls::Off, stopped: AtomicBool::new(false) }
    }

    pub(crate) fn local_addr(&self) -> Option<SocketAddr> {
        match &self.socket {
            Listening::Tcp(socket) => socket.local_addr().ok(),
            Listening::Unix { .. } | Listening::Connected(_) => None,
        }
    }

    /// The next client, or `None` after [`stop`](Self::stop).
    pub(crate) fn accept(&self) -> Option<Socket> {
        loop {
            let accepted = match &self.socket {
                Listening::Unix { socket, .. } => socket.accept().map(|(s, _)| Socket::Unix(s)),
                Listening::Tcp(socket) => socket.accept().map(|(s, _)| Socket::Tcp(s)),
                Listening::Connected(client) => Ok(Socket::Unix(client.lock().take()?)),
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
            // Whoever has come is in the roster.
            Listening::Connected(_) => {}
        }
    }
}
