//! Failures of this host as errors of the API and as refusals to peers.

use crate::pool::PathError;
use crate::registry::NotTaken;
use dray_api::{ApiResult, ErrorKind, Refusal};
use std::fmt::Display;

/// What a peer gets, or why not.
pub type Answer<T> = Result<T, Refusal>;

/// How a full file system says so.
pub const FULL: &str = "No space left";
/// What to do about that.
pub const MAKE_ROOM: &str = "free space there, then try again";
/// The peer says in its own words what it wanted.
const WHAT: &str = "cannot answer a peer's request";

/// A failure of the file system.
pub fn io_error(what: impl Into<String>, why: impl Display) -> Refusal {
    let why = why.to_string();
    if why.contains(FULL) {
        return Refusal::new(ErrorKind::NoSpace, what, why).hint(MAKE_ROOM);
    }
    Refusal::new(ErrorKind::Io, what, why)
}

/// A path, name or pool that is not used.
pub fn path_error(what: impl Into<String>, why: PathError) -> Refusal {
    Refusal { hint: why.hint, ..Refusal::new(why.kind, what, why.why) }
}

/// Why an image takes no part in something.
pub fn not_taken(what: impl Into<String>, why: NotTaken) -> Refusal {
    match why {
        NotTaken::Refused { why, hint } => Refusal::new(ErrorKind::Conflict, what, why).hint(hint),
        NotTaken::Failed(why) => io_error(what, why),
    }
}

/// A random id.
///
/// # Errors
/// When the system has no randomness to give.
pub fn random_id() -> ApiResult<u128> {
    let random = crate::lineage::random_id();
    random.map_err(|why| Refusal::new(ErrorKind::Internal, "cannot make an id", why))
}

fn refusal(kind: ErrorKind, why: impl Display) -> Refusal {
    Refusal::new(kind, WHAT, why)
}

/// To a peer: something else is using it, or it is in a state in which this cannot be done.
pub fn conflict(why: impl Display) -> Refusal {
    refusal(ErrorKind::Conflict, why)
}

/// To a peer: what the question names is not here.
pub fn absent(why: impl Display) -> Refusal {
    refusal(ErrorKind::NotFound, why)
}

/// To a peer: the question makes no sense.
pub fn invalid(why: impl Display) -> Refusal {
    refusal(ErrorKind::Invalid, why)
}

/// To a peer: it may not ask for this.
pub fn denied(why: impl Display) -> Refusal {
    refusal(ErrorKind::Denied, why)
}

/// To a peer: there is no room for it.
pub fn no_room(why: impl Display) -> Refusal {
    refusal(ErrorKind::NoSpace, why)
}

/// To a peer: what this host cannot do, as its system reports it.
pub fn failed(why: impl Display) -> Refusal {
    io_error(WHAT, why)
}

/// To a peer: a path or a pool that is not used.
pub fn of_path(why: PathError) -> Refusal {
    path_error(WHAT, why)
}

/// To a peer of which the configuration does not know.
pub fn unknown_peer() -> Refusal {
    denied("the peer is not configured here")
}
