//! Open-file-description locks on single bytes, as QEMU takes them on its images.

#![allow(unsafe_code, reason = "fcntl with F_OFD_* has no safe wrapper")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

/// QEMU's lock bytes for "I write" and "nobody else may write".
pub const WRITE_BYTES: [i64; 2] = [101, 201];

fn region(byte: i64, kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

/// Whether somebody else holds the byte; takes nothing.
pub fn is_held(path: &Path, byte: i64) -> bool {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("open");
    let mut lock = region(byte, libc::F_WRLCK);
    // SAFETY: the descriptor is open and `lock` is a valid flock for the duration of the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    lock.l_type != libc::F_UNLCK as libc::c_short
}

/// Takes locks on both bytes, as a writer that shares the file with nobody does; they are held until the file is dropped.
pub fn hold(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    for byte in WRITE_BYTES {
        let lock = region(byte, libc::F_RDLCK);
        // SAFETY: as in `is_held`.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(file)
}
