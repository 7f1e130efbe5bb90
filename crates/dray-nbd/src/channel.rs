//! A byte stream to one client: a unix or TCP socket, bare; TLS over it is in `crate::tls`.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recvmsg, sendmsg,
    shutdown, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Both directions of a connection. One thread receives; senders take turns (see
/// `crate::writer`).
pub(crate) trait Channel: Send + Sync {
    /// Receives at least one byte into `into`, or zero at the end of the stream.
    fn receive(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Receives what is here, if anything is; the default says that nobody can know.
    fn receive_now(&self, _into: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
        Ok(None)
    }

    /// Sends all of `parts`.
    fn send(&self, parts: &mut [IoSlice<'_>]) -> io::Result<()>;

    /// Lets `receive` fail after this long without a byte; `None` waits for ever.
    fn receive_within(&self, limit: Option<Duration>) -> io::Result<()>;

    /// Whether the other end has closed or failed, whatever it sent before; the default says that
    /// nobody can know.
    fn has_hung_up(&self) -> bool {
        false
    }

    /// Ends both directions at once, also for a thread that waits in either.
    fn cut(&self);

    /// The socket, if the stream is nothing but that; the default says that it is more.
    fn bare(&self) -> io::Result<Option<Socket>> {
        Ok(None)
    }
}

/// A connected socket.
#[derive(Debug)]
pub(crate) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Socket {
    /// Sets what makes NBD's pattern of small requests and long replies fast.
    pub(crate) fn tune(&self) -> io::Result<()> {
        match self {
            Self::Unix(_) => {
                let size = crate::limits::UNIX_SEND_BUFFER;
                // Only root may go over the system's limit; others get as much as it allows.
                if sockopt::set_socket_send_buffer_size_force(self, size).is_err() {
                    sockopt::set_socket_send_buffer_size(self, size)?;
                }
            }
            Self::Tcp(stream) => {
                stream.set_nodelay(true)?;
                sockopt::set_socket_keepalive(self, true)?;
            }
        }
        Ok(())
    }

    /// Where a client comes from, over TCP.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(stream) => stream.peer_addr().ok().map(|address| address.ip().to_canonical()),
        }
    }

    fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
        })
    }

    /// The receiver finds the end of the stream; replies still go out.
    pub(crate) fn stop_receiving(&self) {
        // Fails only when the peer has already gone, which is as good.
        let _ = shutdown(self, Shutdown::Read);
    }
}

impl Channel for Socket {
    fn receive(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        loop {
            match rustix::io::readv(self, into) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                other => return Ok(other?),
            }
        }
    }

    fn receive_now(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
        let mut control = RecvAncillaryBuffer::default();
        match recvmsg(self, into, &mut control, RecvFlags::DONTWAIT) {
            Ok(message) => Ok(Some(message.bytes)),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn send(&self, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        let mut control = SendAncillaryBuffer::default();
        // Empty parts at the front would make "nothing left" look like "nothing sent".
        IoSlice::advance_slices(&mut parts, 0);
        while !parts.is_empty() {
            // Without NOSIGNAL a client that has gone would kill the process.
            match sendmsg(self, parts, &mut control, SendFlags::NOSIGNAL) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(sent) => IoSlice::advance_slices(&mut parts, sent),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn receive_within(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(limit),
            Self::Tcp(stream) => stream.set_read_timeout(limit),
        }
    }

    fn has_hung_up(&self) -> bool {
        const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut sockets = [PollFd::new(self, gone)];
        poll(&mut sockets, Some(&AT_ONCE)).is_ok() && sockets[0].revents().intersects(gone)
    }

    fn cut(&self) {
        let _ = shutdown(self, Shutdown::Both);
    }

    fn bare(&self) -> io::Result<Option<Socket>> {
        self.try_clone().map(Some)
    }
}
