//! The connections of this host to others, so that one whose peer is not trusted any more can be cut off.

use parking_lot::Mutex;
use rustix::net::Shutdown;
use rustls::pki_types::CertificateDer;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Who opened a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opened {
    /// This host.
    Here,
    /// The peer.
    There,
}

/// The other end of a connection.
#[derive(Debug)]
pub struct OtherEnd {
    /// Its name: as the configuration writes it, or as this host has called it.
    pub peer: String,
    /// Who opened the connection.
    pub opened: Opened,
    /// The certificates with which it proved its name, its own first.
    pub(crate) certificates: Vec<CertificateDer<'static>>,
}

/// All connections. Clones are the same ones.
#[derive(Clone, Default)]
pub(crate) struct Connections(Arc<Mutex<All>>);

#[derive(Default)]
struct All {
    next: u64,
    open: HashMap<u64, (Arc<OtherEnd>, OwnedFd)>,
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connections({})", self.0.lock().open.len())
    }
}

/// A connection's place among all; it is free when this is dropped.
#[derive(Debug)]
pub(crate) struct Listed {
    all: Connections,
    id: u64,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.all.0.lock().open.remove(&self.id);
    }
}

impl Connections {
    /// Notes a connection until what this returns is dropped.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn list(&self, socket: impl AsFd, other: Arc<OtherEnd>) -> io::Result<Listed> {
        let handle = socket.as_fd().try_clone_to_owned()?;
        let id = {
            let mut all = self.0.lock();
            all.next += 1;
            let id = all.next;
            all.open.insert(id, (other, handle));
            id
        };
        Ok(Listed { all: self.clone(), id })
    }

    /// Ends the connections that `which` chooses, in both directions and at once. Returns how many.
    pub(crate) fn cut(&self, which: impl Fn(&OtherEnd) -> bool) -> usize {
        let all = self.0.lock();
        let chosen = all.open.values().filter(|(other, _)| which(other));
        // It fails only when the connection is already gone.
        let cut = |(_, socket): &&(_, OwnedFd)| {
            let _ = rustix::net::shutdown(socket, Shutdown::Both);
        };
        chosen.inspect(cut).count()
    }
}
