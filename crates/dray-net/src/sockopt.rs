//! The socket options that no safe wrapper offers.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// Limits how many bytes the kernel takes before it has sent what it holds (`TCP_NOTSENT_LOWAT`).
pub(crate) fn set_not_sent_limit(socket: impl AsFd, bytes: u32) -> io::Result<()> {
    // SAFETY: the descriptor is open for the whole call, because `socket` is; the kernel reads
    // exactly the four bytes of `bytes` that the pointer and length describe.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const bytes).cast(),
            size_of::<u32>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the kernel says of bytes that it has sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Confirmed {
    /// Some are not confirmed yet. Those that wait for a peer that is slow to read are not sent.
    pub(crate) waits: bool,
    /// How long ago the peer has confirmed anything.
    pub(crate) heard: Duration,
}

/// Asks how far the peer has confirmed what it was sent (`TCP_INFO`).
pub(crate) fn confirmed(socket: impl AsFd) -> io::Result<Confirmed> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open for the whole call, because `socket` is; the kernel writes at
    // most `len` bytes, which is the size of what the pointer leads to.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it consists of integers, for which zeros are as good as what the kernel writes.
    let info = unsafe { info.assume_init() };
    let heard = Duration::from_millis(info.tcpi_last_ack_recv.into());
    Ok(Confirmed { waits: info.tcpi_unacked > 0, heard })
}
