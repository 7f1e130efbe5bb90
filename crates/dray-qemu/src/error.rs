//! The one error type of this crate.

use dray_types::text::harmless;
use std::error::Error as StdError;
use std::fmt;

/// What went wrong, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The socket could not be connected.
    Connect,
    /// The peer does not speak QMP.
    NotQmp,
    /// QEMU is older than this crate supports.
    TooOld,
    /// QEMU closed the connection, or ended.
    Closed,
    /// No answer, or no event, in time.
    Timeout,
    /// QEMU answered with an error.
    Command,
    /// QEMU answered with something not understood.
    Protocol,
    /// The VM, disk or node is not there.
    NotFound,
    /// What was asked for is not safe or not supported for this VM.
    Refused,
    /// Two VMs, or a VM and what was expected of it, do not fit.
    Mismatch,
    /// A job or migration ended in failure.
    Failed,
    /// A step failed and undoing it failed as well: the VM needs attention.
    NotUndone,
}

impl ErrorKind {
    /// Whether a step that failed like this may have been done all the same, or may be done later: QEMU has
    /// not said.
    #[must_use]
    pub fn is_unknown(self) -> bool {
        matches!(self, Self::Closed | Self::Timeout | Self::NotUndone)
    }
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error: its kind, what failed, and why.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    context: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error without another below it. What it quotes may be a QEMU's that a guest has taken over.
    pub fn new(kind: ErrorKind, context: impl Into<String>) -> Self {
        Self { kind, context: harmless(context), source: None }
    }

    /// An error caused by `source`.
    pub fn with_source(
        kind: ErrorKind,
        context: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self { kind, context: context.into(), source: Some(source.into()) }
    }

    /// The same kind of error, saying what was being done.
    #[must_use]
    pub fn during(self, what: impl Into<String>) -> Self {
        Self { kind: self.kind, context: what.into(), source: Some(Box::new(self)) }
    }

    /// What went wrong, for programs.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

/// A step failed and so did undoing it. Over a connection that has closed nothing can be undone: whether QEMU has
/// ended, and what became of the step, is not known then.
pub(crate) fn not_undone(error: Error, what: &str, undo: Error) -> Error {
    match (error.kind(), undo.kind()) {
        (ErrorKind::Closed, _) => error,
        (_, ErrorKind::Closed) => Error::with_source(ErrorKind::Closed, error.to_string(), undo),
        _ => {
            let why = format!("{error}; and {what}");
            Error::with_source(ErrorKind::NotUndone, why, undo)
        }
    }
}

impl fmt::Display for Error {
    /// The whole chain of reasons: `what failed: why`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|s| &**s as &(dyn StdError + 'static))
    }
}
