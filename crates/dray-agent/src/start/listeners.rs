//! The agent's sockets. One that cannot be had (somebody else has the address, the address is not there yet)
//! is tried again: it costs those who would come that way and nobody else.

use crate::agent::Agent;
use crate::api::{Server, group_named, rights};
use dray_api::{AccessLevel, Command, READERS_SOCKET};
use dray_config::{Config, may_read, may_write};
use dray_nbd::{GuestList, Leave, Server as Nbd};
use dray_net::tls::{Identity, dns_names};
use dray_net::{ListenSettings, Listener};
use dray_serve::Access;
use rustls::pki_types::CertificateDer;
use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Pause between two tries.
const AGAIN: Duration = Duration::from_secs(1);

/// The clients of `nbd.tcp`, as the configuration has them now.
struct Guests {
    config: Arc<Config>,
    identity: Arc<Identity>,
}

impl GuestList for Guests {
    fn leave(&self, certificates: &[CertificateDer<'_>]) -> Leave {
        let (config, identity) = (Arc::clone(&self.config), Arc::clone(&self.identity));
        let names = certificates.first().map(dns_names).unwrap_or_default();
        let certificates: Vec<_> =
            certificates.iter().map(|one| one.clone().into_owned()).collect();
        Arc::new(move |export: &str| {
            if !identity.trusts_client(&certificates) {
                return Access::Nothing;
            }
            let clients = config.nbd_clients.now();
            if may_write(&clients, &names, export) {
                Access::Write
            } else if may_read(&clients, &names, export) {
                Access::Read
            } else {
                Access::Nothing
            }
        })
    }
}

impl Agent {
    fn cannot_listen(&self, key: &str, who: &str, why: impl Display, hint: &str) {
        self.troubles.note(key, format!("{who} cannot connect"), why, hint);
    }

    /// NBD, on no socket yet.
    fn nbd(&self) -> Nbd {
        Nbd::of(Arc::clone(&self.attachments))
    }

    /// Lets this host's guests in; later when it cannot be done now.
    pub(super) fn let_guests_in(self: &Arc<Self>) {
        let agent = Arc::clone(self);
        let bind = move || {
            const KEY: &str = "listener.guests";
            let group = agent.config.guests.as_deref().and_then(group_named);
            let bound = agent.nbd().bind_unix(&agent.nbd_socket(), 0o660, group);
            let hint = "does another agent use this run_dir?";
            let handle = bound
                .inspect_err(|why| agent.cannot_listen(KEY, "this host's guests", why, hint))?;
            agent.troubles.clear(KEY);
            agent.front_ends.open(handle);
            agent.readiness.guests_can_come();
            Ok(())
        };
        try_again(bind);
    }

    /// Lets clients of other hosts in, who prove by a certificate of the same authority who they are.
    pub(super) fn let_remote_guests_in(self: &Arc<Self>, address: SocketAddr) {
        let agent = Arc::clone(self);
        let bind = move || {
            const KEY: &str = "listener.remote-guests";
            let bound = agent.identity.lasting_server().map_err(io::Error::other);
            let (config, identity) = (Arc::clone(&agent.config), Arc::clone(&agent.identity));
            let guests = Arc::new(Guests { config, identity });
            let bound = bound.and_then(|tls| agent.nbd().bind_guests(address, tls, guests));
            let who = "guests on other hosts (nbd.tcp)";
            let handle = bound.inspect_err(|why| agent.cannot_listen(KEY, who, why, ""))?;
            agent.troubles.clear(KEY);
            agent.front_ends.open(handle);
            Ok(())
        };
        try_again(bind);
    }

    /// Answers operators.
    pub(super) async fn serve_operators(self: Arc<Self>) {
        let group = self.config.group.clone();
        self.serve_api("api.sock", "listener.operators", group, AccessLevel::Operator).await;
    }

    /// Answers those who may only look, if the configuration names any.
    pub(super) async fn serve_readers(self: Arc<Self>) {
        if let Some(group) = self.config.readers.clone() {
            let (socket, key) = (READERS_SOCKET, "listener.readers");
            self.serve_api(socket, key, Some(group), AccessLevel::Reader).await;
        }
    }

    async fn serve_api(
        self: Arc<Self>,
        socket: &str,
        key: &str,
        group: Option<String>,
        level: AccessLevel,
    ) {
        let path = self.config.run_dir.join(socket);
        let group = group.as_deref().and_then(group_named);
        let server = loop {
            match Server::bind(&path, group, level) {
                Ok(server) => break server,
                Err(why) => self.cannot_listen(key, "the dray command", why, ""),
            }
            tokio::time::sleep(AGAIN).await;
        };
        self.troubles.clear(key);
        let config = Arc::clone(&self.config);
        let may = move |command: &Command, level| rights::check(command, level, &config);
        server.serve(self, may).await;
    }

    /// Answers peers.
    pub(super) async fn serve_peers(self: Arc<Self>) {
        const KEY: &str = "listener.peers";
        let listener = loop {
            match Listener::bind(self.config.listen, ListenSettings::default()).await {
                Ok(listener) => break listener,
                Err(why) => {
                    let hint = why.hint.clone().unwrap_or_default();
                    self.cannot_listen(KEY, "other agents", &why.what, &hint);
                }
            }
            tokio::time::sleep(AGAIN).await;
        };
        self.troubles.clear(KEY);
        let listener = listener.share(&self.memory);
        self.listen(listener).await;
    }
}

/// Does it now, or tries again in the background until it is done.
fn try_again(bind: impl Fn() -> io::Result<()> + Send + 'static) {
    if bind().is_ok() {
        return;
    }
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(AGAIN).await;
            if bind().is_ok() {
                return;
            }
        }
    });
}
