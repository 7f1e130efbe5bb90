//! Listeners: binding sockets, accepting clients, a thread for each, and the way out.

use crate::channel::{Channel, Socket};
use crate::connection::transmit;
use crate::dialogue::Agreed;
use crate::inbound::Inbound;
use crate::limits::{MAX_CONNECTIONS, NEGOTIATION_TIME, SHUTDOWN_GRACE};
use crate::listener::{self, Listener};
use crate::negotiation::negotiate;
use crate::peer::client_of;
use crate::roster::{Roster, RosterEntry};
use crate::session::Session;
use crate::tls::{GuestList, Tls};
use crate::writer::Writer;
use dray_serve::limits::OPEN_PATIENCE;
use dray_serve::{Access, Attachment, Attachments, ClientLink, Door, Exports, FrontEnd, Process};
use parking_lot::Mutex;
use rustls::ServerConfig;
use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// An NBD server: one set of exports, served on any number of sockets.
#[derive(Clone)]
pub struct Server {
    attachments: Arc<Attachments>,
}

/// One listening socket with its connections. Dropping it is [`shutdown`](Self::shutdown).
pub struct ServerHandle {
    listener: Arc<Listener>,
    roster: Arc<Roster>,
    attachments: Arc<Attachments>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

impl Server {
    /// A server of `exports` without other front ends; it serves nobody until it is bound.
    pub fn new(exports: Arc<dyn Exports>) -> Self {
        Self::of(Attachments::new(exports))
    }

    /// A server whose clients are counted with those of other front ends.
    pub fn of(attachments: Arc<Attachments>) -> Self {
        Self { attachments }
    }

    /// Serves on a unix socket at `path` with permissions `mode` (usually 0o660) and, if given,
    /// the group with that number. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// Somebody listens there, something that is no socket is there, or the system refuses.
    pub fn bind_unix(
        &self,
        path: &Path,
        mode: u32,
        group: Option<u32>,
    ) -> io::Result<ServerHandle> {
        self.serve(Listener::unix(path, mode, group)?, None)
    }

    /// Serves on a TCP address.
    ///
    /// # Errors
    /// The system refuses.
    pub fn bind_tcp(&self, addr: SocketAddr, tls: Tls) -> io::Result<ServerHandle> {
        self.serve(Listener::tcp(addr, tls)?, None)
    }

    /// Serves on a TCP address with TLS, to each client what `guests` says.
    ///
    /// # Errors
    /// The system refuses.
    pub fn bind_guests(
        &self,
        addr: SocketAddr,
        tls: Arc<ServerConfig>,
        guests: Arc<dyn GuestList>,
    ) -> io::Result<ServerHandle> {
        self.serve(Listener::tcp(addr, Tls::Required(tls))?, Some(guests))
    }

    /// Serves the one client at the other end of `socket`: a program that was handed its half of a pair.
    ///
    /// # Errors
    /// The system refuses.
    pub fn serve_connected(&self, socket: UnixStream) -> io::Result<ServerHandle> {
        self.serve(Listener::connected(socket), None)
    }

    /// Connections that now use the export `name`, over all sockets. A connection counts until the
    /// last of its requests has ended, even when the client is gone.
    pub fn connections(&self, name: &str) -> usize {
        self.attachments.count(name)
    }

    fn serve(
        &self,
        listener: Listener,
        guests: Option<Arc<dyn GuestList>>,
    ) -> io::Result<ServerHandle> {
        let listener = Arc::new(listener);
        let roster = Arc::new(Roster::default());
        let service = Service {
            listener: Arc::clone(&listener),
            roster: Arc::clone(&roster),
            attachments: Arc::clone(&self.attachments),
            guests,
        };
        let accepting =
            thread::Builder::new().name("nbd-accept".to_owned()).spawn(move || service.accept())?;
        Ok(ServerHandle {
            listener,
            roster,
            attachments: Arc::clone(&self.attachments),
            accepting: Mutex::new(Some(accepting)),
        })
    }
}

impl ServerHandle {
    /// The TCP address that was bound, with its port; `None` for a unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.listener.local_addr()
    }

    /// Connections of this socket, also those that have not chosen an export.
    pub fn open_connections(&self) -> usize {
        self.roster.len()
    }

    /// Connections that now use the export `name`, over all sockets of the server.
    pub fn connections(&self, name: &str) -> usize {
        self.attachments.count(name)
    }

    /// Ends this socket's connections to the export `name`: requests under way are finished, later
    /// ones dropped. Returns how many connections had to be cut after `grace`, their requests
    /// still under way. Clients may come back unless `Exports::open` refuses them, and then send
    /// again what was not answered.
    pub fn disconnect(&self, name: &str, grace: Duration) -> usize {
        self.roster.disconnect(name, grace, || self.attachments.wake())
    }

    /// Stops accepting, finishes requests under way, closes every connection and removes the
    /// socket's file. Connections whose requests do not end within ten seconds are cut; returns
    /// their number.
    ///
    /// What has not begun is dropped without an answer, and so is what fails from now on: a client
    /// would pass an error on to its guest, but what is not answered it sends again to the next
    /// server.
    pub fn shutdown(&self) -> usize {
        self.shutdown_within(SHUTDOWN_GRACE)
    }

    /// [`shutdown`](Self::shutdown) with another grace time.
    pub fn shutdown_within(&self, grace: Duration) -> usize {
        self.listener.stop();
        let cut = self.roster.close(grace, || self.attachments.wake());
        let thread = self.accepting.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the nbd listener's thread panicked");
        }
        cut
    }
}

impl FrontEnd for ServerHandle {
    fn shut(&self, grace: Duration) -> usize {
        self.shutdown_within(grace)
    }

    fn look_again(&self, grace: Duration) -> usize {
        self.roster.end_without_leave(grace, || self.attachments.wake())
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// What the accepting thread and its connections need.
#[derive(Clone)]
struct Service {
    listener: Arc<Listener>,
    roster: Arc<Roster>,
    attachments: Arc<Attachments>,
    /// What each client may open; all may open everything where there is none.
    guests: Option<Arc<dyn GuestList>>,
}

impl Service {
    fn accept(&self) {
        while let Some(socket) = self.listener.accept() {
            let socket = Arc::new(socket);
            let Some(place) = self.roster.enter(&socket, MAX_CONNECTIONS) else { continue };
            let service = self.clone();
            let thread = thread::Builder::new().name("nbd-connection".to_owned());
            if let Err(error) = thread.spawn(move || service.connection(&socket, &place)) {
                tracing::warn!(%error, "nbd client refused: cannot start a thread");
            }
        }
    }

    fn connection(&self, socket: &Arc<Socket>, place: &RosterEntry) {
        let end = catch_unwind(AssertUnwindSafe(|| self.talk(socket, place)));
        socket.cut();
        match end {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "nbd connection ended"),
            Err(_) => tracing::error!("an nbd connection's thread panicked; connection closed"),
        }
    }

    /// Notes what the connection uses. Asks again whether it may: an export that was withdrawn and
    /// disconnected since it was opened, or is another image by now, must not keep this connection.
    fn enter(&self, place: &RosterEntry, line: &ClientLink, agreed: &Agreed) -> Option<Attachment> {
        let does = if agreed.rules.read_only { Access::Read } else { Access::Write };
        if !place.uses(&agreed.name, does) {
            return None;
        }
        let attachment = self.attachments.attach(&agreed.name, line, NEGOTIATION_TIME)?;
        let now = self.attachments.exports().open(&agreed.name, &line.client).ok()?;
        std::ptr::addr_eq(Arc::as_ptr(&now), Arc::as_ptr(&agreed.image)).then_some(attachment)
    }

    fn talk(&self, socket: &Arc<Socket>, place: &RosterEntry) -> io::Result<()> {
        socket.tune()?;
        let mut inbound = Inbound::new(Arc::clone(socket) as Arc<dyn Channel>);
        let tls = listener::tls(&self.listener);
        let closing = Arc::clone(&place.closing);
        let gone = Arc::clone(socket);
        let has_gone = Arc::new(move || gone.has_hung_up());
        let cut = Arc::clone(socket);
        let cut = Arc::new(move || cut.cut());
        let line = ClientLink { client: client_of(socket), closing, has_gone, cut };
        let pause = |time| self.attachments.pause(time, &line);
        let exports = self.attachments.exports();
        let door = Door::new(exports, line.client, OPEN_PATIENCE, &pause);
        let is_closing = || line.is_closing();
        let enter = |agreed: &Agreed| self.enter(place, &line, agreed);
        let tls = (tls, self.guests.as_ref());
        let Some((agreed, attachment)) = negotiate(
            &mut inbound,
            door,
            tls,
            is_closing,
            |leave| place.has_proved_itself(leave),
            enter,
        )?
        else {
            return Ok(());
        };
        tracing::debug!(export = agreed.name, "nbd client attached");
        let session = Arc::new(Session {
            image: agreed.image,
            client: inbound.client(line.client.process.map(Process::origin)),
            rules: agreed.rules,
            writer: Writer::new(Arc::clone(inbound.channel())),
            buffers: crate::buffer::Buffers::default(),
            closing: Arc::clone(&place.closing),
        });
        let share = self.attachments.share(&agreed.name);
        transmit(inbound, session, share, |changing| attachment.ends(changing))
    }
}
