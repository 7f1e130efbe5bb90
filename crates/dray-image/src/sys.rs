//! The system calls that `std` and `rustix` have no safe form for. Nothing here knows about images.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

const BLKROSET: libc::c_ulong = 0x125d;
const BLKROGET: libc::c_ulong = 0x125e;

fn check(result: libc::c_int) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Size of a page of memory in bytes, a power of two.
pub(crate) fn page_size() -> u64 {
    // SAFETY: no memory is passed.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(65_536)
}

/// Sets or clears the read-only flag of a block device.
pub(crate) fn set_device_read_only(device: &File, read_only: bool) -> io::Result<()> {
    let value = libc::c_int::from(read_only);
    // SAFETY: BLKROSET reads one int through the pointer, which outlives the call.
    check(unsafe { libc::ioctl(device.as_raw_fd(), BLKROSET as _, &raw const value) })
}

/// Whether the read-only flag of a block device is set.
pub(crate) fn device_is_read_only(device: &File) -> io::Result<bool> {
    let mut value: libc::c_int = 0;
    // SAFETY: BLKROGET writes one int through the pointer, which outlives the call.
    check(unsafe { libc::ioctl(device.as_raw_fd(), BLKROGET as _, &raw mut value) })?;
    Ok(value != 0)
}

/// Starts writing `len` bytes at `offset` back to the device without waiting for it.
pub(crate) fn start_writeback(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let (offset, len) = (offset as libc::off64_t, len as libc::off64_t);
    // SAFETY: no memory is passed.
    check(unsafe {
        libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE)
    })
}

/// Kinds of byte-range lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lock {
    Shared,
    Exclusive,
    Unlock,
}

fn describe(lock: Lock, start: u64, len: u64) -> libc::flock {
    let kind = match lock {
        Lock::Shared => libc::F_RDLCK,
        Lock::Exclusive => libc::F_WRLCK,
        Lock::Unlock => libc::F_UNLCK,
    };
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start as libc::off_t,
        l_len: len as libc::off_t,
        // OFD locks demand zero.
        l_pid: 0,
    }
}

/// Whether someone else holds a lock on bytes `start .. start + len` that conflicts with `lock`.
/// Sets nothing.
pub(crate) fn ofd_is_locked(file: &File, lock: Lock, start: u64, len: u64) -> io::Result<bool> {
    let mut answer = describe(lock, start, len);
    // SAFETY: F_OFD_GETLK reads and writes one flock through the pointer, which outlives the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut answer) })?;
    Ok(i32::from(answer.l_type) != libc::F_UNLCK)
}

/// Sets or clears an open-file-description lock without waiting.
pub(crate) fn ofd_set(file: &File, lock: Lock, start: u64, len: u64) -> io::Result<()> {
    let wanted = describe(lock, start, len);
    // SAFETY: F_OFD_SETLK reads one flock through the pointer, which outlives the call.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const wanted) })
}
