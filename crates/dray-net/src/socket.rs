//! The socket under TLS: options, a read buffer, and the counting of every byte.
//!
//! TLS reads 4 KiB at a time; the buffer turns that into few large reads. It moves along when a
//! connection changes from tasks to a thread of its own, so that nothing read ahead is lost.

use crate::connections::Listed;
use crate::silence::{self, Silence};
use crate::stats::NetStats;
use dray_wire::StreamKind;
use rustix::net::sockopt;
use std::io::{self, IoSlice, Read, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes read from the kernel at once. Larger ones fall out of the second-level cache.
const READ_BUFFER: usize = 256 * 1024;
/// Bytes read at once before the peer has proved who it is: a handshake is smaller.
const EARLY_BUFFER: usize = 8 * 1024;
/// Unsent bytes the kernel may hold for a connection. What lies there goes out before anything
/// urgent, so it is small; one TLS write fills it again. The send buffer itself is left to the
/// kernel, which sizes it by the link's delay.
const NOT_SENT_LIMIT: u32 = 128 * 1024;
/// A host that is gone is noticed by the kernel after about 25 s of silence. The control stream is
/// quicker and decides; this only ends threads and tasks that nobody told. It says nothing while
/// something is sent, which [`silence`] does.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// Time between probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Probes without an answer.
const KEEPALIVE_PROBES: u32 = 3;

/// Sets what every connection between agents wants.
pub(crate) fn prepare(tcp: &tokio::net::TcpStream) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    sockopt::set_socket_keepalive(tcp, true)?;
    sockopt::set_tcp_keepidle(tcp, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(tcp, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(tcp, KEEPALIVE_PROBES)?;
    super::sockopt::set_not_sent_limit(tcp, NOT_SENT_LIMIT)
}

/// Counts of one connection: its own, and those of the migration once it belongs to one.
#[derive(Debug, Default)]
struct Count {
    sent: u64,
    received: u64,
    to: Option<(Arc<NetStats>, StreamKind)>,
}

impl Count {
    fn sent(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        if let Some((stats, kind)) = &self.to {
            stats.wire_sent(*kind, bytes as u64);
        }
    }

    fn received(&mut self, bytes: usize) {
        self.received += bytes as u64;
        if let Some((stats, kind)) = &self.to {
            stats.wire_received(*kind, bytes as u64);
        }
    }
}

/// A TCP connection with a read buffer and counts; `T` is tokio's or the standard library's.
#[derive(Debug)]
pub(crate) struct Socket<T> {
    tcp: T,
    /// Its place among all connections, once its peer is known.
    pub(crate) listed: Option<Listed>,
    buffer: Vec<u8>,
    /// Bytes of `buffer` that were read from the kernel but not yet handed on.
    ready: std::ops::Range<usize>,
    count: Count,
    pub(crate) silence: Silence,
    /// How long a peer that is there may take nothing; for ever if it is absent. Only a thread that blocks asks.
    pub(crate) patience: Option<Duration>,
    /// After this nothing is read or written. Only a thread that blocks asks.
    pub(crate) until: Option<Instant>,
}

impl<T> Socket<T> {
    /// Counts from now on, and what was counted before, into `stats`.
    pub(crate) fn count_into(&mut self, stats: Arc<NetStats>, kind: StreamKind) {
        stats.wire_sent(kind, self.count.sent);
        stats.wire_received(kind, self.count.received);
        self.count.to = Some((stats, kind));
    }

    /// Makes the read buffer large, for a peer that is known.
    pub(crate) fn widen(&mut self) {
        if self.buffer.len() < READ_BUFFER {
            self.buffer.resize(READ_BUFFER, 0);
        }
    }

    pub(crate) fn tcp(&self) -> &T {
        &self.tcp
    }

    /// Hands on bytes that are already here.
    fn take_ready(&mut self, wanted: usize) -> &[u8] {
        let count = wanted.min(self.ready.len());
        let start = self.ready.start;
        self.ready.start += count;
        &self.buffer[start..start + count]
    }
}

impl Socket<tokio::net::TcpStream> {
    pub(crate) fn new(tcp: tokio::net::TcpStream) -> Self {
        Self {
            tcp,
            listed: None,
            buffer: vec![0; EARLY_BUFFER],
            ready: 0..0,
            count: Count::default(),
            silence: Silence::default(),
            patience: None,
            until: None,
        }
    }

    /// The same connection for a thread that may block.
    pub(crate) fn into_blocking(self) -> io::Result<Socket<std::net::TcpStream>> {
        let tcp = self.tcp.into_std()?;
        tcp.set_nonblocking(false)?;
        tcp.set_write_timeout(Some(silence::LOOK))?;
        let Self { listed, buffer, ready, count, silence, patience, until, .. } = self;
        Ok(Socket { tcp, listed, buffer, ready, count, silence, patience, until })
    }
}

impl Socket<std::net::TcpStream> {
    fn check_time(&self) -> io::Result<()> {
        if self.until.is_some_and(|until| Instant::now() >= until) {
            let what = "the peer takes too long for this message";
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        Ok(())
    }

    /// Writes as much as the peer takes, and waits for it to take something.
    fn try_write(
        &mut self,
        write: impl Fn(&mut std::net::TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let begun = Instant::now();
        loop {
            self.check_time()?;
            match write(&mut self.tcp) {
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => {
                    self.silence.look(&self.tcp)?;
                    if self.patience.is_some_and(|patience| begun.elapsed() >= patience) {
                        let what = "the peer takes nothing of what it is sent";
                        return Err(io::Error::new(io::ErrorKind::TimedOut, what));
                    }
                }
                done => {
                    let count = done?;
                    self.count.sent(count);
                    return Ok(count);
                }
            }
        }
    }
}

impl Read for Socket<std::net::TcpStream> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.ready.is_empty() {
            self.check_time()?;
            let count = self.tcp.read(&mut self.buffer)?;
            self.count.received(count);
            self.ready = 0..count;
        }
        let bytes = self.take_ready(out.len());
        out[..bytes.len()].copy_from_slice(bytes);
        Ok(bytes.len())
    }
}

impl Write for Socket<std::net::TcpStream> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.try_write(|tcp| tcp.write(bytes))
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        self.try_write(|tcp| tcp.write_vectored(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsyncRead for Socket<tokio::net::TcpStream> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.ready.is_empty() {
            let mut buffer = ReadBuf::new(&mut this.buffer);
            ready!(Pin::new(&mut this.tcp).poll_read(cx, &mut buffer))?;
            let count = buffer.filled().len();
            this.count.received(count);
            this.ready = 0..count;
        }
        let bytes = this.take_ready(out.remaining());
        out.put_slice(bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket<tokio::net::TcpStream> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let count = ready!(Pin::new(&mut this.tcp).poll_write(cx, bytes))?;
        this.count.sent(count);
        Poll::Ready(Ok(count))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let count = ready!(Pin::new(&mut this.tcp).poll_write_vectored(cx, bytes))?;
        this.count.sent(count);
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}
