//! A connection between two agents after its hello.

use crate::error::{NetError, NetErrorKind};
use crate::memory::{Memory, PeerMemory};
use crate::silence::{Silence, Watch};
use crate::socket::Socket;
use crate::stats::NetStats;
use dray_wire::StreamKind;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustls::{ClientConnection, ServerConnection, StreamOwned};
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_rustls::TlsStream;

/// Encrypted bytes that wait for the kernel at once: a quarter of a run, so that encrypting and
/// sending overlap, and calls into the kernel are few.
const WRITE_BUFFER: usize = 256 * 1024;

pub(crate) type Tls = TlsStream<Socket<tokio::net::TcpStream>>;

/// A connection whose peer is known and whose hello was answered.
#[derive(Debug)]
pub struct Stream {
    pub(crate) tls: Tls,
    pub(crate) peer: String,
    pub(crate) kind: StreamKind,
    pub(crate) version: u16,
    pub(crate) features: Vec<String>,
    pub(crate) memory: PeerMemory,
}

impl Stream {
    pub(crate) fn new(
        mut tls: Tls,
        peer: String,
        kind: StreamKind,
        version: u16,
        features: Vec<String>,
    ) -> Self {
        tls.get_mut().0.widen();
        let memory = Memory::default().of(&peer);
        Self { tls, peer, kind, version, features, memory }
    }

    /// The peer's name, as its certificate proved it.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// What the stream is for.
    pub fn kind(&self) -> StreamKind {
        self.kind
    }

    /// The protocol version both speak.
    pub fn version(&self) -> u16 {
        self.version
    }

    /// The optional things both can do.
    pub fn features(&self) -> &[String] {
        &self.features
    }

    /// Whether both can do, and want, what the word says.
    pub fn agreed(&self, word: &str) -> bool {
        self.features.iter().any(|known| known == word)
    }

    /// Has the stream share what `memory` has for its peer. Until this is called it has as much for itself.
    pub fn share(&mut self, memory: &Memory) {
        self.memory = memory.of(&self.peer);
    }

    /// The memory for what its peer sends and asks for.
    pub fn memory(&self) -> &PeerMemory {
        &self.memory
    }

    /// Counts this stream's bytes, the handshake included, into a migration's counters.
    pub fn count_into(&mut self, stats: &Arc<NetStats>) {
        let kind = self.kind;
        self.tls.get_mut().0.count_into(Arc::clone(stats), kind);
    }

    /// How long the peer may confirm nothing of what it is sent; 10 s if this is not called.
    pub fn limit_silence(&mut self, limit: Duration) {
        self.tls.get_mut().0.silence = Silence::new(limit);
    }

    /// Watches whether the peer confirms what tasks send it. Threads that block do so themselves.
    pub(crate) fn watch(&self) -> Result<Watch, NetError> {
        let socket = self.tls.get_ref().0;
        let watch = Watch::new(socket.tcp(), &socket.silence);
        watch.map_err(|why| NetError::new(NetErrorKind::Local, format!("watch a socket: {why}")))
    }

    /// The same connection for a thread that may block.
    ///
    /// # Errors
    /// `Local` when the socket cannot be made blocking.
    pub fn into_blocking(self) -> Result<BlockingStream, NetError> {
        let local = |why: io::Error| {
            NetError::new(NetErrorKind::Local, format!("make a socket blocking: {why}"))
        };
        let tls = match self.tls {
            TlsStream::Client(client) => {
                let (socket, mut tls) = client.into_inner();
                tls.set_buffer_limit(Some(WRITE_BUFFER));
                BlockingTls::Client(Box::new(StreamOwned::new(
                    tls,
                    socket.into_blocking().map_err(local)?,
                )))
            }
            TlsStream::Server(server) => {
                let (socket, mut tls) = server.into_inner();
                tls.set_buffer_limit(Some(WRITE_BUFFER));
                BlockingTls::Server(Box::new(StreamOwned::new(
                    tls,
                    socket.into_blocking().map_err(local)?,
                )))
            }
        };
        let closer = Closer(Arc::new(tls.tcp().try_clone().map_err(local)?));
        Ok(BlockingStream { tls, closer, peer: self.peer, memory: self.memory })
    }
}

#[derive(Debug)]
enum BlockingTls {
    Client(Box<StreamOwned<ClientConnection, Socket<TcpStream>>>),
    Server(Box<StreamOwned<ServerConnection, Socket<TcpStream>>>),
}

impl BlockingTls {
    fn socket(&self) -> &Socket<TcpStream> {
        match self {
            Self::Client(stream) => &stream.sock,
            Self::Server(stream) => &stream.sock,
        }
    }

    fn tcp(&self) -> &TcpStream {
        self.socket().tcp()
    }
}

/// Closes a connection from outside the thread that uses it, which then sees an error.
#[derive(Debug, Clone)]
pub struct Closer(Arc<TcpStream>);

impl Closer {
    /// Closes both directions at once.
    pub fn close(&self) {
        // It fails only when the connection is already gone.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// A connection for one thread that reads or writes it.
#[derive(Debug)]
pub struct BlockingStream {
    tls: BlockingTls,
    closer: Closer,
    peer: String,
    memory: PeerMemory,
}

/// Runs the same expression on the client's or the server's side of TLS.
macro_rules! either {
    ($tls:expr, $stream:ident => $body:expr) => {
        match $tls {
            BlockingTls::Client($stream) => $body,
            BlockingTls::Server($stream) => $body,
        }
    };
}

impl BlockingStream {
    /// A handle that closes the connection from another thread.
    pub fn closer(&self) -> Closer {
        self.closer.clone()
    }

    /// The peer's name.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// How long nothing may come before a read fails, and the peer take nothing before a write fails; for ever if
    /// this is not called.
    ///
    /// # Errors
    /// `Local` when the socket does not take it.
    pub fn limit_waits(&mut self, limit: Duration) -> Result<(), NetError> {
        either!(&mut self.tls, stream => stream.sock.patience = Some(limit));
        let set = self.tls.tcp().set_read_timeout(Some(limit));
        set.map_err(|why| NetError::new(NetErrorKind::Local, format!("limit a socket: {why}")))
    }

    /// The memory for what its peer sends and asks for.
    pub fn memory(&self) -> &PeerMemory {
        &self.memory
    }

    /// When all of what is being read or written has to be there; any time if there is none. After it every read and
    /// write fails, also where the peer does a little now and then.
    pub fn end_by(&mut self, until: Option<Instant>) {
        either!(&mut self.tls, stream => stream.sock.until = until);
    }

    /// Writes all bytes of both slices, in as few TLS records as they fit in.
    ///
    /// # Errors
    /// What the socket says.
    pub fn write_both(&mut self, first: &[u8], second: &[u8]) -> io::Result<()> {
        let mut done = 0;
        let total = first.len() + second.len();
        while done < total {
            let head = &first[done.min(first.len())..];
            let tail = &second[done.saturating_sub(first.len())..];
            let parts = [IoSlice::new(head), IoSlice::new(tail)];
            let count = either!(&mut self.tls, stream => stream.write_vectored(&parts))?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            done += count;
        }
        self.flush()
    }

    /// Sends what is still held by TLS.
    ///
    /// # Errors
    /// What the socket says.
    pub fn flush(&mut self) -> io::Result<()> {
        either!(&mut self.tls, stream => stream.flush())
    }

    /// Reads exactly as many bytes as fit, or `false` when the peer closed in order before the
    /// first of them.
    ///
    /// # Errors
    /// What the socket says; `UnexpectedEof` when the peer closed in between.
    pub fn read_all_or_end(&mut self, out: &mut [u8]) -> io::Result<bool> {
        let mut done = 0;
        while done < out.len() {
            match either!(&mut self.tls, stream => stream.read(&mut out[done..])) {
                Ok(0) if done == 0 => return Ok(false),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Sees, without waiting, whether the connection of a side that only writes is still there, and
    /// the peer confirms what it was sent.
    ///
    /// # Errors
    /// When the peer has closed it or is silent, or what the socket says.
    pub fn look(&self) -> io::Result<()> {
        self.tls.socket().silence.look(self.tls.tcp())?;
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(self.tls.tcp(), &mut [0; 1], flags) {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(why) => Err(why.into()),
        }
    }

    /// Says in order that nothing more comes.
    ///
    /// # Errors
    /// What the socket says.
    pub fn finish(&mut self) -> io::Result<()> {
        either!(&mut self.tls, stream => {
            stream.conn.send_close_notify();
            stream.flush()?;
            stream.sock.tcp().shutdown(Shutdown::Write)
        })
    }
}
