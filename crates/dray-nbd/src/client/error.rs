//! What can go wrong with another server.

use dray_types::text::harmless;
use std::io;
use std::path::Path;
use std::time::Duration;

/// Why a request to another NBD server had no success.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens at the socket.
    #[error("connect to nbd server at {path}: {why}")]
    Connect {
        /// The socket.
        path: String,
        /// What the system said.
        why: String,
    },
    /// The server turned the client away.
    #[error("nbd server refused {what}: {why}")]
    Refused {
        /// What was asked for.
        what: String,
        /// The server's reason, or its number.
        why: String,
    },
    /// [`status`](super::Client::status) was asked for a context that was not negotiated.
    #[error("metadata context '{0}' was not negotiated")]
    Context(String),
    /// The server does not offer the command.
    #[error("nbd server does not offer {0}")]
    NotOffered(&'static str),
    /// A range that is not in the export.
    #[error("{len} bytes at {offset} are not in an export of {end} bytes")]
    Outside {
        /// Where the range begins, in bytes.
        offset: u64,
        /// How long it is, in bytes.
        len: u64,
        /// The export's length in bytes.
        end: u64,
    },
    /// The server could not do it; the connection goes on.
    #[error("nbd server failed: {why}")]
    Server {
        /// The error number, Linux's.
        errno: u32,
        /// Its words.
        why: String,
    },
    /// A request had no reply for this long; the connection has been ended.
    #[error("nbd server has not answered for {0:?}")]
    TooSlow(Duration),
    /// The server broke the protocol; the connection has been ended.
    #[error("nbd server broke the protocol: {0}")]
    Protocol(&'static str),
    /// The connection has ended.
    #[error("connection to nbd server ended: {0}")]
    Broken(String),
}

impl ClientError {
    pub(crate) fn connect(path: &Path, error: io::Error) -> Self {
        Self::Connect { path: path.display().to_string(), why: error.to_string() }
    }

    pub(crate) fn server(errno: u32, text: &[u8]) -> Self {
        let why = match std::str::from_utf8(text) {
            Ok(text) if !text.is_empty() => harmless(text),
            _ => io::Error::from_raw_os_error(errno.cast_signed()).to_string(),
        };
        Self::Server { errno, why }
    }

    /// Whether the connection is of no further use.
    #[must_use]
    pub fn ends_connection(&self) -> bool {
        matches!(self, Self::TooSlow(_) | Self::Protocol(_) | Self::Broken(_))
    }
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_is_harmless() {
        let text = ClientError::server(5, "\x1b[2J".repeat(1000).as_bytes()).to_string();
        assert!(text.len() < 2048 && !text.contains(char::is_control), "{text:?}");
    }
}
