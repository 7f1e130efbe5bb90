//! What can go wrong with a repository, in kinds that a caller can act on.

use std::fmt;

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// The kind of an [`Error`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// There is no such object, backup or repository.
    NotFound,
    /// Bytes are there and are not what was written: fall back, or restore another backup.
    Damaged,
    /// The repository is encrypted and this is not its key, or none was given.
    WrongKey,
    /// The store refuses: the credentials are wrong, or they do not allow it.
    Denied,
    /// The store did not answer, or answered with an error. Another try may help.
    Unavailable,
    /// It is there already.
    Exists,
    /// A collector ended this writer's session, because it had not been renewed in time.
    Fenced,
    /// The repository is of a version that this program does not know.
    Unsupported,
    /// The caller asked for something that makes no sense.
    Invalid,
}

/// An error: its kind, what failed and why.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    what: String,
    piece: Option<u64>,
    cause: Option<Cause>,
}

impl Error {
    /// An error of `kind`; `what` is lower case and names the thing.
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), piece: None, cause: None }
    }

    /// [`Kind::Damaged`].
    pub fn damaged(what: impl Into<String>) -> Self {
        Self::new(Kind::Damaged, what)
    }

    /// [`Kind::Invalid`].
    pub fn invalid(what: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, what)
    }

    /// [`Kind::Unavailable`], because of `cause`.
    pub fn unavailable(what: impl Into<String>, cause: impl Into<Cause>) -> Self {
        Self { cause: Some(cause.into()), ..Self::new(Kind::Unavailable, what) }
    }

    /// The same error, about one piece of an image.
    pub fn at_piece(self, piece: u64) -> Self {
        Self { piece: Some(piece), ..self }
    }

    /// What a caller can act on.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether it says nothing of what is stored: only that the store does not give it now.
    pub(crate) fn is_of_store(&self) -> bool {
        matches!(self.kind, Kind::Unavailable | Kind::Denied)
    }

    /// The piece that the error is about, if it is about one piece only.
    pub fn piece(&self) -> Option<u64> {
        self.piece
    }

    /// The same failure for another one who waits for it.
    pub(crate) fn copy(&self) -> Self {
        Self { kind: self.kind, what: self.to_string(), piece: None, cause: None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(piece) = self.piece {
            write!(f, "piece {piece}: ")?;
        }
        f.write_str(&self.what)?;
        match &self.cause {
            Some(cause) => write!(f, ": {cause}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as &(dyn std::error::Error + 'static))
    }
}
