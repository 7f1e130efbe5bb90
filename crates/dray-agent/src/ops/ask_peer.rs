//! Asking a peer something outside any migration, and its answers in the API's words.

use crate::agent::Agent;
use dray_api::{ErrorKind, Refusal};
use dray_net::requests;
use dray_net::{NetError, NetErrorKind};
use dray_wire::request::{Reply, Request};
use std::time::Duration;

/// How long the target may take to make room.
const ASK_TIMEOUT: Duration = Duration::from_secs(30);

/// A failure of the network as the API tells it.
pub fn net_error(what: impl Into<String>, why: &NetError) -> Refusal {
    let kind = match why.kind {
        NetErrorKind::Certificate => ErrorKind::Denied,
        NetErrorKind::Version => ErrorKind::Unsupported,
        NetErrorKind::Refused(kind) => kind,
        _ => ErrorKind::Peer,
    };
    Refusal { hint: why.hint.clone(), ..Refusal::new(kind, what, &why.what) }
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
        let local = |why: Refusal| NetError::new(NetErrorKind::Local, why.to_string());
        let settings = self.session_settings(peer).map_err(local)?;
        let (identity, address) = (&*settings.identity, &settings.address);
        requests::ask(identity, &settings.peer, address, request, limit).await
    }
}
