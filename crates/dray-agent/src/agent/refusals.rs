//! Why a peer does not get what it asks for.

use crate::ops::{io_error, path_error};
use dray_api::{ErrorKind, Refusal};
use dray_host::pool::PathError;
use std::fmt::Display;

/// What a peer gets, or why not.
pub(crate) type Answer<T> = Result<T, Refusal>;

/// The peer says in its own words what it wanted.
const WHAT: &str = "cannot do what a peer asks for";

fn refusal(kind: ErrorKind, why: impl Display) -> Refusal {
    Refusal::new(kind, WHAT, why)
}

/// Something else is using it, or it is in a state in which this cannot be done.
pub(crate) fn conflict(why: impl Display) -> Refusal {
    refusal(ErrorKind::Conflict, why)
}

/// The question makes no sense.
pub(crate) fn invalid(why: impl Display) -> Refusal {
    refusal(ErrorKind::Invalid, why)
}

/// The peer may not ask for this.
pub(crate) fn denied(why: impl Display) -> Refusal {
    refusal(ErrorKind::Denied, why)
}

/// There is no room for it.
pub(crate) fn no_room(why: impl Display) -> Refusal {
    refusal(ErrorKind::NoSpace, why)
}

/// What this host cannot do, as its system reports it.
pub(crate) fn failed(why: impl Display) -> Refusal {
    io_error(WHAT, why)
}

/// A path or a pool that is not used.
pub(crate) fn of_path(why: PathError) -> Refusal {
    path_error(WHAT, why)
}

/// A peer of which the configuration does not know.
pub(crate) fn unknown_peer() -> Refusal {
    denied("the peer is not configured here")
}
