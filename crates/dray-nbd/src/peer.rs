//! Who is at the other end of a connection.

use crate::channel::Socket;
use dray_serve::{Client, Process};
use rustix::net::sockopt::socket_peercred;

/// Who has connected through `socket`. Over TCP it cannot be known.
pub(crate) fn client_of(socket: &Socket) -> Client {
    let Socket::Unix(stream) = socket else { return Client::default() };
    let peer = socket_peercred(stream).ok();
    let pid = peer.and_then(|peer| u32::try_from(peer.pid.as_raw_nonzero().get()).ok());
    Client { process: pid.and_then(Process::find), user: peer.map(|peer| peer.uid.as_raw()) }
}
