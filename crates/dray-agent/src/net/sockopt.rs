//! The one socket option that no safe wrapper offers.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

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
