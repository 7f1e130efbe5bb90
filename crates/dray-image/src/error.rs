//! The one error type of this crate: a kind to decide on, what was being done, and the cause.

use std::io;

/// What kind of failure it was; callers decide on this, people read the rest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// The request lies (partly) outside the image.
    OutOfRange,
    /// A write, zero or discard on an image that may not be written.
    ReadOnly,
    /// No space left on the device below.
    NoSpace,
    /// The device below reported an error.
    Io,
    /// Another program holds the image's locks.
    InUse,
    /// No such image.
    NotFound,
    /// The image, file or journal is not what it should be.
    Invalid,
    /// The operator told dray to fail stalled requests, or the image's owner is another host.
    Unavailable,
}

/// A failed operation on an image or journal.
#[derive(Debug, thiserror::Error)]
#[error("{context}: {source}")]
pub struct Error {
    /// What kind of failure it was.
    pub kind: ErrorKind,
    /// What was being done to what.
    pub context: String,
    /// The cause.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error that is not caused by another one; `why` says why, in lower case.
    pub fn new(kind: ErrorKind, context: impl Into<String>, why: &str) -> Self {
        Self::with_source(kind, context, why)
    }

    /// An error caused by `source`.
    pub fn with_source(
        kind: ErrorKind,
        context: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { kind, context: context.into(), source: source.into() }
    }

    /// An error caused by the system; the kind follows from its code.
    pub fn io(context: impl Into<String>, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
                ErrorKind::ReadOnly
            }
            _ => ErrorKind::Io,
        };
        Self { kind, context: context.into(), source: source.into() }
    }

    /// True of a guest's flush that has done all it should and fails only to tell the guest what an
    /// earlier process has lost.
    pub fn is_earlier_loss(&self) -> bool {
        self.source.is::<EarlierLoss>()
    }
}

/// What an earlier process has lost.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct EarlierLoss(pub(crate) String);
