//! Asking a peer something outside any migration, and its answers in the API's words.

use crate::agent::Agent;
use dray_api::{ApiError, ErrorKind};
use dray_net::requests;
use dray_net::{NetError, NetErrorKind};
use dray_wire::request::{Reply, Request};
use std::time::Duration;

/// How long the target may take to make room.
const ASK_TIMEOUT: Duration = Duration::from_secs(30);

/// What a system says of a full disk.
pub(super) const FULL: &str = "No space left";
/// What to do about it.
pub(super) const MAKE_ROOM: &str = "free space there, then try again";

/// A failure of the network as the API tells it.
pub fn net_error(what: impl Into<String>, why: &NetError) -> ApiError {
    let kind = match why.kind {
        NetErrorKind::Certificate => ErrorKind::Denied,
        NetErrorKind::Version => ErrorKind::Unsupported,
        NetErrorKind::Refused => refused_kind(&why.what),
        _ => ErrorKind::Peer,
    };
    // A peer's refusal is one text: `what and why; what to do`.
    let (text, hint) = match (&why.hint, why.what.rsplit_once("; ")) {
        (Some(hint), _) => (why.what.as_str(), Some(hint.as_str())),
        (None, Some((text, hint))) => (text, Some(hint)),
        (None, None) if why.what.contains(FULL) => (why.what.as_str(), Some(MAKE_ROOM)),
        (None, None) => (why.what.as_str(), None),
    };
    let error = ApiError::new(kind, what, text);
    match hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

/// What sort of refusal the target's words tell of.
pub(crate) fn refused_kind(why: &str) -> ErrorKind {
    let has = |words: &str| why.contains(words);
    if has("free and the images need") || has("is too small") || has(FULL) {
        ErrorKind::NoSpace
    } else if has("is not a name") || has("no qcow2 is made of one") {
        ErrorKind::Invalid
    } else if has("there is no device") {
        ErrorKind::NotFound
    } else if [
        "is in use",
        "is read-only",
        "an earlier try",
        "exists already",
        "exists here already",
        "is on its way here",
        "since it was compared",
        "when this was prepared",
    ]
    .into_iter()
    .any(has)
    {
        ErrorKind::Conflict
    } else if has("not a configured peer") || has("may not use") || has("pool") {
        ErrorKind::Denied
    } else {
        ErrorKind::Conflict
    }
}

impl Agent {
    /// Asks a peer something outside any migration.
    ///
    /// # Errors
    /// When the peer is not configured, or why it could not be asked.
    pub(crate) async fn ask(&self, peer: &str, request: &Request) -> Result<Reply, NetError> {
        self.ask_within(ASK_TIMEOUT, peer, request).await
    }

    /// The same with another limit to its patience.
    pub(crate) async fn ask_within(
        &self,
        limit: Duration,
        peer: &str,
        request: &Request,
    ) -> Result<Reply, NetError> {
        let local = |why: ApiError| NetError::new(NetErrorKind::Local, why.to_string());
        let settings = self.session_settings(peer).map_err(local)?;
        let (identity, address) = (&*settings.identity, &settings.address);
        requests::ask(identity, &settings.peer, address, request, limit).await
    }
}
