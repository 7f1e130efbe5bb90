//! TLS over a socket, for one receiving thread and any number of senders.
//!
//! The TLS state has one lock, held only while bytes are turned into other bytes. Nobody holds it
//! while waiting for the network, so a reply goes out while the receiver waits for requests.

use crate::channel::{Channel, Socket};
use dray_serve::Access;
use parking_lot::{Mutex, MutexGuard};
use rustls::pki_types::CertificateDer;
use rustls::{ServerConfig, ServerConnection};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Ciphertext received at a time: four of TLS's longest records.
const RECEIVE: usize = 64 << 10;
/// Plaintext turned into ciphertext under one hold of the lock.
const SEND_PIECE: usize = 128 << 10;

/// What a listener does about TLS.
#[derive(Clone, Debug)]
pub enum Tls {
    /// There is none; a client that asks is told so.
    Off,
    /// A client may ask for it.
    Optional(Arc<ServerConfig>),
    /// Without it a client gets nothing, not even a list.
    Required(Arc<ServerConfig>),
}

/// What a client may do with the export of a name, now.
pub type Leave = Arc<dyn Fn(&str) -> Access + Send + Sync>;

/// Says what clients with a certificate may open.
pub trait GuestList: Send + Sync {
    /// What the client that has shown these `certificates`, its own first, may do. This is asked once for each
    /// connection, and what it answers is asked again when something may have changed.
    fn leave(&self, certificates: &[CertificateDer<'_>]) -> Leave;
}

/// A TLS session after its handshake. Lock order: `outgoing`, then `session`.
pub(crate) struct TlsChannel {
    socket: Socket,
    session: Mutex<ServerConnection>,
    incoming: Mutex<Incoming>,
    outgoing: Mutex<Vec<u8>>,
}

struct Incoming {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

fn tls_error(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Blocking reads and writes as rustls wants them for the handshake.
struct Raw<'a> {
    socket: &'a Socket,
    /// Of the whole handshake: bytes that drip in one by one do not stretch it.
    deadline: Instant,
}

impl Read for Raw<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.socket.receive_within(Some(left))?;
        self.socket.receive(&mut [IoSliceMut::new(into)])
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.socket.send(&mut [IoSlice::new(from)])?;
        Ok(from.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl TlsChannel {
    /// Shakes hands on `socket`; also the client's certificates, if it has shown any.
    pub(crate) fn accept(
        socket: Socket,
        config: Arc<ServerConfig>,
        deadline: Instant,
    ) -> io::Result<(Self, Vec<CertificateDer<'static>>)> {
        let mut session = ServerConnection::new(config).map_err(tls_error)?;
        session.set_buffer_limit(Some(2 * SEND_PIECE));
        let mut raw = Raw { socket: &socket, deadline };
        while session.is_handshaking() {
            session.complete_io(&mut raw)?;
        }
        while session.wants_write() {
            session.write_tls(&mut raw)?;
        }
        let shown = session.peer_certificates().unwrap_or_default();
        let certificates = shown.iter().map(|one| one.clone().into_owned()).collect();
        let channel = Self {
            socket,
            session: Mutex::new(session),
            incoming: Mutex::new(Incoming { bytes: vec![0; RECEIVE], start: 0, end: 0 }),
            outgoing: Mutex::new(Vec::new()),
        };
        Ok((channel, certificates))
    }

    /// Receives plaintext, with `ciphertext` to get more of what it is made from, if it can.
    fn receive_from(
        &self,
        into: &mut [IoSliceMut<'_>],
        ciphertext: impl Fn(&mut [IoSliceMut<'_>]) -> io::Result<Option<usize>>,
    ) -> io::Result<Option<usize>> {
        let mut incoming = lock(&self.incoming);
        loop {
            let (result, pending) = {
                let mut session = lock(&self.session);
                let result = incoming.decrypt(&mut session, into);
                (result, session.wants_write())
            };
            if pending {
                self.send_pending()?;
            }
            if let Some(received) = result? {
                return Ok(Some(received));
            }
            incoming.start = 0;
            incoming.end = 0;
            match ciphertext(&mut [IoSliceMut::new(&mut incoming.bytes)])? {
                Some(0) => return Ok(Some(0)),
                None => return Ok(None),
                Some(got) => incoming.end = got,
            }
        }
    }

    /// Sends what the session itself has to say: answers to key updates, alerts.
    fn send_pending(&self) -> io::Result<()> {
        let mut out = lock(&self.outgoing);
        collect(&mut lock(&self.session), &mut out)?;
        send_and_clear(&self.socket, &mut out)
    }
}

fn collect(session: &mut ServerConnection, out: &mut Vec<u8>) -> io::Result<()> {
    while session.wants_write() {
        session.write_tls(out)?;
    }
    Ok(())
}

fn send_and_clear(socket: &Socket, out: &mut Vec<u8>) -> io::Result<()> {
    let result = socket.send(&mut [IoSlice::new(out)]);
    out.clear();
    result
}

impl Incoming {
    /// Decrypts what is here into `into`; `None` when more ciphertext is needed first.
    fn decrypt(
        &mut self,
        session: &mut ServerConnection,
        into: &mut [IoSliceMut<'_>],
    ) -> io::Result<Option<usize>> {
        loop {
            match session.reader().read_vectored(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Some(0)),
                other => return other.map(Some),
            }
            if self.start == self.end {
                return Ok(None);
            }
            let mut rest = &self.bytes[self.start..self.end];
            self.start += session.read_tls(&mut rest)?;
            session.process_new_packets().map_err(tls_error)?;
        }
    }
}

impl Channel for TlsChannel {
    fn receive(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let received = self.receive_from(into, |part| self.socket.receive(part).map(Some))?;
        received.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    fn receive_now(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
        self.receive_from(into, |part| self.socket.receive_now(part))
    }

    fn send(&self, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        let mut out = lock(&self.outgoing);
        for part in parts {
            for piece in part.chunks(SEND_PIECE) {
                let mut session = lock(&self.session);
                session.writer().write_all(piece)?;
                collect(&mut session, &mut out)?;
                drop(session);
                if out.len() >= SEND_PIECE {
                    send_and_clear(&self.socket, &mut out)?;
                }
            }
        }
        send_and_clear(&self.socket, &mut out)
    }

    fn receive_within(&self, limit: Option<Duration>) -> io::Result<()> {
        self.socket.receive_within(limit)
    }

    fn has_hung_up(&self) -> bool {
        self.socket.has_hung_up()
    }

    fn cut(&self) {
        self.socket.cut();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    #[test]
    fn bytes_that_drip_in_do_not_stretch_a_handshake() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let drip = thread::spawn(move || {
            // The start of a record of 16 KiB, byte by byte.
            for byte in [22, 3, 1, 64, 0].into_iter().chain(std::iter::repeat(1)) {
                if client.write_all(&[byte]).is_err() {
                    break;
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let key = rcgen::generate_simple_self_signed(vec!["a".to_owned()]).unwrap();
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![key.cert.der().clone()],
                rustls::pki_types::PrivatePkcs8KeyDer::from(key.signing_key.serialize_der()).into(),
            )
            .unwrap();
        let begin = Instant::now();
        let deadline = begin + Duration::from_millis(300);
        let ended = TlsChannel::accept(Socket::Tcp(server), Arc::new(config), deadline);
        assert!(
            ended.is_err() && begin.elapsed() < Duration::from_secs(5),
            "{:?}",
            begin.elapsed()
        );
        drip.join().unwrap();
    }
}
