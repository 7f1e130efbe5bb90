//! Sockets at which QEMU listens for this agent only meanwhile.

use std::io;
use std::path::Path;

/// Removes such a socket; it may be gone already.
///
/// # Errors
/// What the system reports.
pub fn remove(socket: &Path) -> io::Result<()> {
    match std::fs::remove_file(socket) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => {
            Err(io::Error::new(why.kind(), format!("remove {}: {why}", socket.display())))
        }
        _ => Ok(()),
    }
}
