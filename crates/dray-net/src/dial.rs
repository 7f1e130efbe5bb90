//! Opening a connection to a peer: address, TLS, hello, its answer.

use crate::connections::{Opened, OtherEnd};
use crate::error::{NetError, NetErrorKind};
use crate::listen::peer_certificates;
use crate::socket::{self, Socket};
use crate::stream::{Stream, Tls};
use crate::tls::{self, Identity};
use dray_wire::hello::{self, PREFACE_LEN};
use dray_wire::{Hello, HelloReply, StreamKind};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{TlsConnector, TlsStream};

/// Port an agent listens on when nothing else is said.
pub const DEFAULT_PORT: u16 = 7421;

/// How long the steps of a dial may take.
#[derive(Clone, Copy, Debug)]
pub struct DialSettings {
    /// Until the TCP connection stands.
    pub connect: Duration,
    /// Until TLS and hello are done.
    pub handshake: Duration,
}

impl Default for DialSettings {
    fn default() -> Self {
        Self { connect: Duration::from_secs(5), handshake: Duration::from_secs(10) }
    }
}

/// Opens a stream of `kind` to the peer whose certificate is for `name`, at `address` (`host`,
/// `host:port` or `[v6]:port`).
///
/// # Errors
/// `Unreachable`, `Certificate`, `Refused`, `Version`, `Timeout` or `Protocol`, in plain words.
pub async fn dial(
    identity: &Identity,
    name: &str,
    address: &str,
    kind: StreamKind,
    hello: &Hello,
    settings: &DialSettings,
) -> Result<Stream, NetError> {
    let doing = format!("connect to {name} at {address}");
    let opened = open(identity, name, address, kind, hello, settings).await;
    opened.map_err(|error| error.doing(doing))
}

async fn open(
    identity: &Identity,
    name: &str,
    address: &str,
    kind: StreamKind,
    hello: &Hello,
    settings: &DialSettings,
) -> Result<Stream, NetError> {
    let server = tls::server_name(name)?;
    let tcp = connect(address, settings.connect).await?;
    let broken = |why| NetError::new(NetErrorKind::Local, format!("set up the socket: {why}"));
    socket::prepare(&tcp).map_err(broken)?;
    let handshake = async {
        let connector = TlsConnector::from(identity.client()?);
        let tls = connector.connect(server, Socket::new(tcp)).await;
        let mut tls = TlsStream::from(tls.map_err(|error| tls::translate(error, name))?);
        let (peer, certificates) = (name.to_owned(), peer_certificates(&tls));
        let other = OtherEnd { peer, opened: Opened::Here, certificates };
        identity.list(tls.get_mut().0, other)?;
        let (version, features) = greet(&mut tls, name, kind, hello).await?;
        Ok(Stream::new(tls, name.to_owned(), kind, version, features))
    };
    timeout(settings.handshake, handshake).await.unwrap_or_else(|_| {
        let seconds = settings.handshake.as_secs();
        Err(NetError::new(NetErrorKind::Timeout, format!("no answer within {seconds} s"))
            .hint("check that a dray agent listens there"))
    })
}

async fn connect(address: &str, limit: Duration) -> Result<TcpStream, NetError> {
    let unreachable = |why: String| {
        NetError::new(NetErrorKind::Unreachable, why)
            .hint("check that the agent runs there and that a firewall lets the port through")
    };
    let with_port = with_default_port(address);
    match timeout(limit, TcpStream::connect(&with_port)).await {
        Ok(Ok(tcp)) => Ok(tcp),
        Ok(Err(why)) => Err(unreachable(why.to_string())),
        Err(_) => Err(unreachable(format!("no connection within {} s", limit.as_secs()))),
    }
}

/// The address with [`DEFAULT_PORT`] when it names none.
pub fn with_default_port(address: &str) -> String {
    let has_port = match address.rsplit_once(':') {
        Some((host, port)) => {
            (!host.contains(':') || host.ends_with(']')) && port.parse::<u16>().is_ok()
        }
        None => false,
    };
    if has_port {
        return address.to_owned();
    }
    if address.contains(':') && !address.starts_with('[') {
        return format!("[{address}]:{DEFAULT_PORT}");
    }
    format!("{address}:{DEFAULT_PORT}")
}

async fn greet(
    tls: &mut Tls,
    name: &str,
    kind: StreamKind,
    hello: &Hello,
) -> Result<(u16, Vec<String>), NetError> {
    let broken = |error| tls::translate(error, name);
    tls.write_all(&hello.encode(kind)).await.map_err(broken)?;
    tls.flush().await.map_err(broken)?;
    let mut fixed = [0; PREFACE_LEN];
    tls.read_exact(&mut fixed).await.map_err(broken)?;
    let preface = hello::decode_preface(&fixed)?;
    let mut body = vec![0; preface.body_len];
    tls.read_exact(&mut body).await.map_err(broken)?;
    match HelloReply::decode(&body)? {
        HelloReply::Refused(why) => Err(NetError::refused(why)),
        HelloReply::Overtaken { newest } => {
            let why = format!("{name} has had session {newest} of this migration");
            Err(NetError::new(NetErrorKind::Overtaken(newest), why))
        }
        HelloReply::Welcome { version, features, .. } => {
            if version != preface.version || preface.kind != kind {
                let what = format!("{name} answered the hello of another stream");
                return Err(NetError::new(NetErrorKind::Protocol, what));
            }
            Ok((version, features))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_get_a_port() {
        assert_eq!(with_default_port("hostb"), "hostb:7421");
        assert_eq!(with_default_port("hostb:99"), "hostb:99");
        assert_eq!(with_default_port("10.0.0.2:99"), "10.0.0.2:99");
        assert_eq!(with_default_port("fd00::2"), "[fd00::2]:7421");
        assert_eq!(with_default_port("[fd00::2]:99"), "[fd00::2]:99");
        assert_eq!(with_default_port("[fd00::2]"), "[fd00::2]:7421");
    }
}
