//! Errors between agents, with texts and hints for the operator.

use dray_types::{ErrorKind, Refusal};
use dray_wire::WireError;
use std::fmt;

/// What kind of failure it was: what a program may decide on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NetErrorKind {
    /// No connection: nobody listens, no route, unknown host name.
    Unreachable,
    /// A certificate of either side was not accepted, or cannot be used.
    Certificate,
    /// The peer understood and said no, for a reason of this kind.
    Refused(ErrorKind),
    /// The peer has had a session of the same migration with this number, and wants a higher one.
    Overtaken(u64),
    /// No protocol version in common.
    Version,
    /// Bytes that the protocol does not allow.
    Protocol,
    /// No answer in time.
    Timeout,
    /// The connection was there and broke.
    Broken,
    /// The peer closed the connection in order.
    Closed,
    /// Something on this host: a socket, a file, a thread.
    Local,
}

/// What to do about two agents without a protocol version in common.
pub(crate) const UPGRADE: &str = "upgrade the older agent";

/// A failure between two agents: `what failed: why; hint`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NetError {
    /// For programs.
    pub kind: NetErrorKind,
    /// What failed and why.
    pub what: String,
    /// What the operator can do about it.
    pub hint: Option<String>,
}

impl NetError {
    /// An error without a hint.
    pub fn new(kind: NetErrorKind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), hint: None }
    }

    /// A peer's refusal, in its words.
    pub fn refused(Refusal { kind, why, hint, .. }: Refusal) -> Self {
        Self { kind: NetErrorKind::Refused(kind), what: why, hint }
    }

    /// The same error with a hint.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The same error with what was being done in front.
    pub fn doing(mut self, doing: impl fmt::Display) -> Self {
        self.what = format!("{doing}: {}", self.what);
        self
    }
}

impl fmt::Display for NetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        match &self.hint {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for NetError {}

impl From<WireError> for NetError {
    fn from(error: WireError) -> Self {
        let text = error.to_string();
        match error {
            WireError::Version { .. } => Self::new(NetErrorKind::Version, text).hint(UPGRADE),
            _ => Self::new(NetErrorKind::Protocol, text),
        }
    }
}
