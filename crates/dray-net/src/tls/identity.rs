//! This host's certificates while the agent runs: what is wrong with them, and their renewal without a
//! restart.
//!
//! A certificate that has expired, or is not there, costs the connections that need it and nothing else.
//! The files are looked at again now and then ([`Identity::look_again`]). While somebody replaces them one by
//! one they do not fit each other: what was good before is used until they do. A connection whose peer would
//! not be let in any more, because its certificate was revoked or its authority is gone, is ended then.

use super::{
    CLIENT_CERT, CLIENT_KEY, SERVER_CERT, SERVER_KEY, TlsError, Trust, client_config, judge_own,
    provider, server_config, server_name,
};
use crate::connections::{Connections, Opened, OtherEnd};
use crate::socket::Socket;
use crate::{NetError, NetErrorKind};
use parking_lot::RwLock;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, ServerConfig,
    SignatureScheme,
};
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// This host's certificates, ready for connections either way, and the connections that it has. Clones are the
/// same one.
#[derive(Clone, Default)]
pub struct Identity {
    known: Arc<RwLock<Known>>,
    connections: Connections,
}

#[derive(Default)]
struct Known {
    /// Whom it trusts, as that could last be read.
    trust: Option<Trust>,
    client: Half<ClientConfig>,
    server: Half<ServerConfig>,
}

/// One of the two certificates.
struct Half<T> {
    /// As it was when it could last be read.
    config: Option<Arc<T>>,
    /// What is wrong with it now.
    fault: Option<TlsError>,
    /// Peers would not accept it.
    is_bad: bool,
}

impl<T> Default for Half<T> {
    fn default() -> Self {
        Self { config: None, fault: None, is_bad: false }
    }
}

impl<T> Half<T> {
    fn look(&mut self, read: Result<Arc<T>, TlsError>, judged: Result<(), TlsError>) {
        match read {
            Ok(config) => {
                self.config = Some(config);
                self.is_bad = judged.is_err();
                self.fault = judged.err();
            }
            Err(why) => self.fault = Some(why),
        }
    }

    fn refused(&self) -> NetError {
        let why = self.fault.as_ref().map_or("it was not read", |fault| fault.why.as_str());
        let what = format!("this host's own certificate cannot be used: {why}");
        let error = NetError::new(NetErrorKind::Certificate, what);
        match &self.fault {
            Some(fault) => error.hint(fault.hint.clone()),
            None => error,
        }
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity")
    }
}

impl Identity {
    /// Reads the certificates and keys of `dir`.
    ///
    /// # Errors
    /// A file that is missing, is not what its name says, or does not fit its key.
    pub fn load(dir: &Path) -> Result<Self, TlsError> {
        let trust = Trust::read(dir)?;
        let this = Self::default();
        let mut known = this.known.write();
        known.client.look(Ok(client_config(dir, &trust)?), Ok(()));
        known.server.look(Ok(server_config(dir, &trust)?), Ok(()));
        known.trust = Some(trust);
        drop(known);
        Ok(this)
    }

    /// What there is of the certificates of `dir`, for the host called `name`, and what is wrong with them.
    pub fn of_host(dir: &Path, name: &str) -> (Self, Vec<TlsError>) {
        let this = Self::default();
        let faults = this.look_again(dir, name);
        (this, faults)
    }

    /// Takes what has been renewed or revoked, ends connections whose peers are not trusted any more, and tells
    /// what is wrong now.
    pub fn look_again(&self, dir: &Path, name: &str) -> Vec<TlsError> {
        let trust = Trust::read(dir);
        let judge = |file: &str| judge_own(dir, file, name);
        let with =
            |key: &str| private(&dir.join(key)).and_then(|()| trust.as_ref().map_err(Clone::clone));
        let client = with(CLIENT_KEY).and_then(|trust| client_config(dir, trust));
        let server = with(SERVER_KEY).and_then(|trust| server_config(dir, trust));
        let (client_judged, server_judged) = (judge(CLIENT_CERT), judge(SERVER_CERT));
        let mut known = self.known.write();
        known.client.look(client, client_judged);
        known.server.look(server, server_judged);
        let mut faults: Vec<_> =
            [&known.client.fault, &known.server.fault].into_iter().flatten().cloned().collect();
        faults.dedup();
        if let Ok(trust) = trust {
            known.trust = Some(trust);
        }
        drop(known);
        self.cut(|other| !self.trusts(other));
        faults
    }

    /// Notes a connection until its socket is dropped.
    ///
    /// # Errors
    /// `Certificate` when its peer has stopped being trusted since its handshake.
    pub(crate) fn list(
        &self,
        socket: &mut Socket<tokio::net::TcpStream>,
        other: OtherEnd,
    ) -> Result<(), NetError> {
        let other = Arc::new(other);
        let local = |why| NetError::new(NetErrorKind::Local, format!("note a connection: {why}"));
        let listed = self.connections.list(socket.tcp(), Arc::clone(&other));
        socket.listed = Some(listed.map_err(local)?);
        // What is revoked from now on finds it in the list.
        if self.trusts(&other) {
            return Ok(());
        }
        let what = format!("the certificate of {} was revoked", other.peer);
        Err(NetError::new(NetErrorKind::Certificate, what))
    }

    /// Ends the connections that `which` chooses, in both directions and at once. Returns how many.
    pub fn cut(&self, which: impl Fn(&OtherEnd) -> bool) -> usize {
        self.connections.cut(which)
    }

    fn trusts(&self, other: &OtherEnd) -> bool {
        match other.opened {
            Opened::There => self.trusts_client(&other.certificates),
            Opened::Here => {
                let (Some(trust), Ok(name)) = (self.trust(), server_name(&other.peer)) else {
                    return true;
                };
                let Some((own, others)) = other.certificates.split_first() else { return true };
                let verified =
                    trust.servers.verify_server_cert(own, others, &name, &[], UnixTime::now());
                is_trusted(verified.err())
            }
        }
    }

    /// Whether a client with these certificates, its own first, that was let in once may stay.
    pub fn trusts_client(&self, certificates: &[CertificateDer<'_>]) -> bool {
        let (Some(trust), Some((own, others))) = (self.trust(), certificates.split_first()) else {
            return true;
        };
        is_trusted(trust.clients.verify_client_cert(own, others, UnixTime::now()).err())
    }

    fn trust(&self) -> Option<Trust> {
        self.known.read().trust.clone()
    }

    /// For connections that are opened.
    ///
    /// # Errors
    /// Why no peer would accept the certificate.
    pub(crate) fn client(&self) -> Result<Arc<ClientConfig>, NetError> {
        let known = self.known.read();
        let half = &known.client;
        half.config.clone().filter(|_| !half.is_bad).ok_or_else(|| half.refused())
    }

    /// For connections that are accepted. One that has expired is shown all the same: whoever connects is
    /// then told what is wrong.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn server(&self) -> Result<Arc<ServerConfig>, NetError> {
        let known = self.known.read();
        known.server.config.clone().ok_or_else(|| known.server.refused())
    }

    /// The same for somebody who keeps it: each client is shown the certificate of the day, and judged by the
    /// authority and the revocations of the day.
    ///
    /// # Errors
    /// Why there is none.
    pub fn lasting_server(&self) -> Result<Arc<ServerConfig>, NetError> {
        self.server()?;
        let current = Arc::new(Current(self.clone()));
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|why| NetError::new(NetErrorKind::Local, format!("set up TLS: {why}")))?
            .with_client_cert_verifier(Arc::clone(&current) as Arc<dyn ClientCertVerifier>)
            .with_cert_resolver(current);
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

/// Whether a certificate that was good once still speaks for its owner. One that has only expired does until the
/// connection ends, and so does one of which nothing can be said because a list of revoked ones cannot be used.
fn is_trusted(why: Option<rustls::Error>) -> bool {
    match why {
        None => true,
        Some(rustls::Error::InvalidCertificate(why)) => {
            matches!(why, CertificateError::Expired | CertificateError::ExpiredContext { .. })
        }
        Some(why) => matches!(why, rustls::Error::InvalidCertRevocationList(_)),
    }
}

/// A key that everybody may read proves nothing.
fn private(key: &Path) -> Result<(), TlsError> {
    let exposed = key.metadata().is_ok_and(|meta| meta.mode() & 0o007 != 0);
    let why = || "every user may read this key".to_owned();
    let hint = || format!("chmod 0600 {}", key.display());
    let fault = || TlsError { path: key.to_owned(), why: why(), hint: hint() };
    if exposed { Err(fault()) } else { Ok(()) }
}

/// The certificate, the authority and the revocations of the day.
#[derive(Debug)]
struct Current(Identity);

impl Current {
    fn clients(&self) -> Result<Arc<dyn ClientCertVerifier>, rustls::Error> {
        let trust = self.0.trust().ok_or_else(|| rustls::Error::General("no authority".into()))?;
        Ok(trust.clients)
    }
}

impl ClientCertVerifier for Current {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A hint for clients that have several certificates; those of the day cannot be borrowed.
        &[]
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.clients()?.verify_client_cert(own, others, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.clients()?.verify_tls12_signature(message, cert, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.clients()?.verify_tls13_signature(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.server().ok()?.cert_resolver.resolve(hello)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::{self, Validity};
    use std::time::{Duration, SystemTime};

    const DAY: Duration = Duration::from_secs(86_400);

    #[test]
    fn what_is_wrong_is_told_and_what_is_renewed_is_used() {
        let dir = tempfile::tempdir().unwrap();
        pki::create_ca(dir.path()).unwrap();
        let tls = dir.path().join("hosta");
        let (identity, faults) = Identity::of_host(&tls, "hosta");
        assert!(!faults.is_empty() && identity.client().is_err() && identity.server().is_err());
        assert!(identity.lasting_server().is_err());
        let now = SystemTime::now();
        let old = Validity { from: now - 20 * DAY, until: now - 10 * DAY };
        pki::issue_for(dir.path(), "hosta", &[], old).unwrap();
        let faults = identity.look_again(&tls, "hosta");
        assert!(faults[0].why.contains("it expired 10 days ago"), "{faults:?}");
        let why = identity.client().unwrap_err().to_string();
        assert!(why.contains("own certificate cannot be used: it expired 10 days ago"), "{why}");
        assert!(identity.server().is_ok(), "whoever connects is told");
        std::fs::remove_dir_all(&tls).unwrap();
        pki::issue(dir.path(), "hosta", &[]).unwrap();
        assert_eq!(identity.look_again(&tls, "hosta"), []);
        assert!(identity.client().is_ok() && identity.lasting_server().is_ok());
        // Half of them are replaced: what was good before is used.
        let key = std::fs::read(tls.join("client-key.pem")).unwrap();
        std::fs::copy(tls.join("server-key.pem"), tls.join("client-key.pem")).unwrap();
        assert!(!identity.look_again(&tls, "hosta").is_empty() && identity.client().is_ok());
        std::fs::write(tls.join("client-key.pem"), key).unwrap();
        assert_eq!(identity.look_again(&tls, "hosta"), []);
        assert_eq!(identity.look_again(&tls, "hostb").len(), 2);
        assert!(identity.client().is_err());
    }
}
