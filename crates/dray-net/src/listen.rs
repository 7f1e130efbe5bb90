//! Accepting connections: TLS, the peer's name, its hello, and the answer.
//!
//! A peer without a good certificate gets a TLS alert; one with a good certificate but no place in
//! the configuration is told so in words, and so is one that speaks another version. Everything
//! before the answer is limited in time, size and number (I7).

use crate::AGENT;
use crate::connections::{Opened, OtherEnd};
use crate::error::{NetError, NetErrorKind, UPGRADE};
use crate::greeting::{Greetings, Place};
use crate::memory::Memory;
use crate::socket::{self, Socket};
use crate::stream::{Stream, Tls};
use crate::tls::{self, Identity};
use dray_types::{ErrorKind, Refusal};
use dray_wire::hello::{self, PREFACE_LEN, Preface};
use dray_wire::{Hello, HelloReply, StreamKind, WireError};
use rustls::pki_types::CertificateDer;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsStream};

/// Longest time to write the answer to a hello.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Pause after the kernel could not accept, so that a lack of descriptors is not a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Limits of a listener.
#[derive(Clone, Copy, Debug)]
pub struct ListenSettings {
    /// Handshakes at once. Each costs some ten KiB and a few hundred µs of CPU; when there are more, the oldest
    /// is dropped.
    pub handshakes: usize,
    /// Handshakes at once from one address; more are dropped at once.
    pub of_address: usize,
    /// Time a connection has until all of its hello is read, however its bytes come.
    pub handshake: Duration,
}

impl Default for ListenSettings {
    fn default() -> Self {
        Self { handshakes: 512, of_address: 128, handshake: Duration::from_secs(10) }
    }
}

/// A connection that proved who it is and said what it wants; it must be answered.
#[derive(Debug)]
pub struct Incoming {
    /// The peer's name: one that the listener was told to know.
    pub peer: String,
    /// What the stream is for.
    pub kind: StreamKind,
    /// What the peer says of itself and the stream.
    pub hello: Hello,
    /// Where it comes from, for logs.
    pub remote: SocketAddr,
    version: u16,
    tls: Tls,
    memory: Memory,
}

impl Incoming {
    /// Accepts the stream, agreeing to these of the offered features.
    ///
    /// # Errors
    /// `Broken` or `Timeout` when the answer could not be sent.
    pub async fn welcome(mut self, features: Vec<String>) -> Result<Stream, NetError> {
        let reply = HelloReply::Welcome {
            agent: AGENT.to_owned(),
            version: self.version,
            features: features.clone(),
        };
        answer(&mut self.tls, &reply.encode(self.kind)).await?;
        let mut stream = Stream::new(self.tls, self.peer, self.kind, self.version, features);
        stream.share(&self.memory);
        Ok(stream)
    }

    /// Refuses the stream and closes it.
    pub async fn refuse(mut self, why: Refusal) {
        refuse(&mut self.tls, self.kind, why).await;
    }

    /// Refuses the stream because `newest` is a later session, and closes it.
    pub async fn overtaken(mut self, newest: u64) {
        hang_up(&mut self.tls, self.kind, &HelloReply::Overtaken { newest }).await;
    }
}

async fn answer(tls: &mut Tls, bytes: &[u8]) -> Result<(), NetError> {
    let write = async {
        tls.write_all(bytes).await?;
        tls.flush().await
    };
    match timeout(ANSWER_LIMIT, write).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(why)) => Err(tls::translate(why, "the peer")),
        Err(_) => Err(NetError::new(NetErrorKind::Timeout, "the peer does not read the answer")),
    }
}

async fn refuse(tls: &mut Tls, kind: StreamKind, why: Refusal) {
    // It fits into a hello's body.
    hang_up(tls, kind, &HelloReply::Refused(why.harmless())).await;
}

async fn hang_up(tls: &mut Tls, kind: StreamKind, reply: &HelloReply) {
    // The peer may be gone already; there is nobody else to tell.
    if answer(tls, &reply.encode(kind)).await.is_ok() {
        let _ = timeout(ANSWER_LIMIT, tls.shutdown()).await;
    }
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    settings: ListenSettings,
    greetings: Arc<Greetings>,
    memory: Memory,
}

/// What every accepted connection needs.
struct Door<K> {
    identity: Identity,
    known: K,
    settings: ListenSettings,
    memory: Memory,
}

impl Listener {
    /// Listens at `address`.
    ///
    /// # Errors
    /// `Local` when the address is in use or not this host's.
    pub async fn bind(address: SocketAddr, settings: ListenSettings) -> Result<Self, NetError> {
        let tcp = TcpListener::bind(address).await.map_err(|why| {
            NetError::new(NetErrorKind::Local, format!("listen on {address}: {why}")).hint(
                "check that no other dray agent is running, and that [agent] listen is an address \
                 of this host",
            )
        })?;
        let greetings = Greetings::new(settings.handshakes, settings.of_address);
        Ok(Self { tcp, settings, greetings, memory: Memory::default() })
    }

    /// Has its streams share `memory` with others of this host.
    pub fn share(mut self, memory: &Memory) -> Self {
        self.memory = memory.clone();
        self
    }

    /// The address it listens at.
    ///
    /// # Errors
    /// `Local` when the socket has none.
    pub fn local_addr(&self) -> Result<SocketAddr, NetError> {
        let local = |why| NetError::new(NetErrorKind::Local, format!("listening address: {why}"));
        self.tcp.local_addr().map_err(local)
    }

    /// Accepts for ever. `known` says which configured peer a certificate's name is, as the
    /// configuration writes it; `handle` gets every connection whose hello was read, in a task of its own.
    pub async fn run<K, H, F>(self, identity: Identity, known: K, handle: H)
    where
        K: Fn(&str) -> Option<String> + Send + Sync + 'static,
        H: Fn(Incoming) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let door = Arc::new(Door { identity, known, settings: self.settings, memory: self.memory });
        let handle = Arc::new(handle);
        loop {
            let (tcp, remote) = match self.tcp.accept().await {
                Ok(accepted) => accepted,
                Err(why) => {
                    tracing::warn!("accept a connection: {why}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Some(place) = self.greetings.begin(remote.ip()) else {
                tracing::debug!(
                    "dropped a connection from {remote}: too many handshakes from there"
                );
                continue;
            };
            let (door, handle) = (Arc::clone(&door), Arc::clone(&handle));
            tokio::spawn(async move {
                match door.admit(tcp, remote, place).await {
                    Ok(incoming) => handle(incoming).await,
                    // Who only asks how far it is says nothing.
                    Err(why) if matches!(why.kind, NetErrorKind::Closed | NetErrorKind::Broken) => {
                        tracing::debug!("a connection from {remote} came to nothing: {why}");
                    }
                    Err(why) => tracing::info!("refused a connection from {remote}: {why}"),
                }
            });
        }
    }
}

impl<K: Fn(&str) -> Option<String>> Door<K> {
    /// Takes a connection through TLS and hello; its place is free when that is over.
    async fn admit(
        &self,
        tcp: TcpStream,
        remote: SocketAddr,
        mut place: Place,
    ) -> Result<Incoming, NetError> {
        let greeted = timeout(self.settings.handshake, self.greet(tcp, remote));
        let greeted = tokio::select! {
            greeted = greeted => greeted,
            () = place.gone() => {
                let what = "its handshake was the oldest of too many";
                return Err(NetError::new(NetErrorKind::Timeout, what));
            }
        };
        match greeted {
            Ok(result) => result,
            Err(_) => {
                let seconds = self.settings.handshake.as_secs();
                let what = format!("its hello was not complete within {seconds} s");
                Err(NetError::new(NetErrorKind::Timeout, what))
            }
        }
    }

    async fn greet(&self, tcp: TcpStream, remote: SocketAddr) -> Result<Incoming, NetError> {
        let broken = |why| NetError::new(NetErrorKind::Local, format!("set up the socket: {why}"));
        socket::prepare(&tcp).map_err(broken)?;
        let acceptor = TlsAcceptor::from(self.identity.server()?);
        let tls = acceptor.accept(Socket::new(tcp)).await;
        let mut tls = TlsStream::from(tls.map_err(|why| tls::translate(why, "the peer"))?);
        let certificates = peer_certificates(&tls);
        let names = certificates.first().map(tls::dns_names).unwrap_or_default();
        let (preface, hello) = match read_hello(&mut tls).await {
            Ok(read) => read,
            Err(Unread::Wire(why)) => {
                let refused = match why {
                    WireError::Version { .. } => {
                        refusal(ErrorKind::Unsupported, &why).hint(UPGRADE)
                    }
                    _ => refusal(ErrorKind::Invalid, &why),
                };
                refuse(&mut tls, StreamKind::Request, refused).await;
                return Err(why.into());
            }
            Err(Unread::Net(why)) => return Err(why),
        };
        let Some(peer) = names.iter().find_map(|name| (self.known)(name)) else {
            let why = unknown_peer(&names);
            refuse(&mut tls, preface.kind, why.clone()).await;
            return Err(NetError::refused(why));
        };
        let other = OtherEnd { peer: peer.clone(), opened: Opened::There, certificates };
        self.identity.list(tls.get_mut().0, other)?;
        let Preface { kind, version, .. } = preface;
        let memory = self.memory.clone();
        Ok(Incoming { peer, kind, hello, remote, version, tls, memory })
    }
}

/// Why a stream is not accepted.
fn refusal(kind: ErrorKind, why: impl fmt::Display) -> Refusal {
    Refusal::new(kind, "cannot accept the stream", why)
}

fn unknown_peer(names: &[String]) -> Refusal {
    let who = match names {
        [] => "your certificate has no DNS name".to_owned(),
        names => format!("'{}' is not a configured peer", names.join("', '")),
    };
    refusal(ErrorKind::Denied, who)
        .hint("add a [[peer]] with this name to the other host's dray.toml")
}

/// The certificates with which the peer has proved who it is, its own first.
pub(crate) fn peer_certificates(tls: &Tls) -> Vec<CertificateDer<'static>> {
    let shown = tls.get_ref().1.peer_certificates().unwrap_or_default();
    shown.iter().map(|one| one.clone().into_owned()).collect()
}

enum Unread {
    Wire(WireError),
    Net(NetError),
}

impl From<WireError> for Unread {
    fn from(why: WireError) -> Self {
        Self::Wire(why)
    }
}

async fn read_hello(tls: &mut Tls) -> Result<(Preface, Hello), Unread> {
    let broken = |why| Unread::Net(tls::translate(why, "the peer"));
    let mut fixed = [0; PREFACE_LEN];
    tls.read_exact(&mut fixed).await.map_err(broken)?;
    let preface = hello::decode_preface(&fixed)?;
    let mut body = vec![0; preface.body_len];
    tls.read_exact(&mut body).await.map_err(broken)?;
    Ok((preface, Hello::decode(&body)?))
}
