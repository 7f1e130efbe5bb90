//! TLS between agents: version 1.3 only, both sides prove a certificate, names are checked, and
//! every refusal is said in plain words.
//!
//! The files are those that QEMU and libvirt already use. Which peers may do what is not decided
//! here: [`Identity`] proves who the peer is, the configuration says who may connect. How certificates are
//! read, judged and renewed while the agent runs is in [`identity`].

mod identity;
mod revoked;

pub use identity::Identity;
pub use revoked::CA_CRL;

use crate::{NetError, NetErrorKind};
use dray_types::text::harmless;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Certificate of the authority that signed every agent's certificates.
pub const CA_CERT: &str = "ca-cert.pem";
/// This host's certificate for connections it accepts.
pub const SERVER_CERT: &str = "server-cert.pem";
/// Its key.
pub const SERVER_KEY: &str = "server-key.pem";
/// This host's certificate for connections it opens.
pub const CLIENT_CERT: &str = "client-cert.pem";
/// Its key.
pub const CLIENT_KEY: &str = "client-key.pem";

/// Why this host's certificates cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsError {
    /// The file it is about.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
    /// What the operator can do.
    pub hint: String,
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "use certificate {}: {}; {}", self.path.display(), self.why, self.hint)
    }
}

impl std::error::Error for TlsError {}

const MAKE_NEW: &str = "make new ones with 'dray pki' or point [tls] dir at the right directory";

fn error(path: &Path, why: impl fmt::Display) -> TlsError {
    TlsError { path: path.to_owned(), why: why.to_string(), hint: MAKE_NEW.to_owned() }
}

/// Reads the certificates of a PEM file.
pub(crate) fn read_certs(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let pem = std::fs::read(path).map_err(|why| error(path, why))?;
    let certs: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let certs = certs.map_err(|why| error(path, format!("not a PEM certificate: {why}")))?;
    if certs.is_empty() {
        return Err(error(path, "it holds no PEM certificate"));
    }
    Ok(certs)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let pem = std::fs::read(path).map_err(|why| error(path, why))?;
    PrivateKeyDer::from_pem_slice(&pem)
        .map_err(|why| error(path, format!("not a PEM private key: {why}")))
}

fn roots(dir: &Path) -> Result<Arc<RootCertStore>, TlsError> {
    let path = dir.join(CA_CERT);
    let mut roots = RootCertStore::empty();
    for cert in read_certs(&path)? {
        roots.add(cert).map_err(|why| error(&path, why))?;
    }
    Ok(Arc::new(roots))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// Whom this host trusts: who accepts checks a client with the one, who connects a server with the other.
#[derive(Debug, Clone)]
pub(crate) struct Trust {
    pub(crate) clients: Arc<dyn ClientCertVerifier>,
    pub(crate) servers: Arc<WebPkiServerVerifier>,
}

impl Trust {
    fn read(dir: &Path) -> Result<Self, TlsError> {
        let (roots, crls) = (roots(dir)?, revoked::read(dir)?);
        let failed = |why: VerifierBuilderError| match why {
            VerifierBuilderError::InvalidCrl(why) => error(&dir.join(CA_CRL), format!("{why:?}")),
            why => error(&dir.join(CA_CERT), why),
        };
        // An authority without a list has taken back nothing.
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider())
            .with_crls(crls.iter().cloned())
            .only_check_end_entity_revocation()
            .allow_unknown_revocation_status();
        let servers = WebPkiServerVerifier::builder_with_provider(roots, provider())
            .with_crls(crls)
            .only_check_end_entity_revocation()
            .allow_unknown_revocation_status();
        let this = Self {
            clients: clients.build().map_err(failed)?,
            servers: servers.build().map_err(failed)?,
        };
        this.check_signature(dir).map(|()| this)
    }

    /// The signature of a list is looked at only where a certificate is judged by it, so this host's own is.
    fn check_signature(&self, dir: &Path) -> Result<(), TlsError> {
        let Ok(own) = read_certs(&dir.join(CLIENT_CERT)) else { return Ok(()) };
        match self.clients.verify_client_cert(&own[0], &own[1..], UnixTime::now()) {
            Err(why @ rustls::Error::InvalidCertRevocationList(_)) => {
                let (why, hint) = certificate_words(&why, "it");
                Err(TlsError { path: dir.join(CA_CRL), why, hint: hint.to_owned() })
            }
            _ => Ok(()),
        }
    }
}

fn client_config(dir: &Path, trust: &Trust) -> Result<Arc<ClientConfig>, TlsError> {
    let path = dir.join(CLIENT_CERT);
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|why| error(&path, why))?
        .with_webpki_verifier(Arc::clone(&trust.servers))
        .with_client_auth_cert(read_certs(&path)?, read_key(&dir.join(CLIENT_KEY))?)
        .map_err(|why| error(&path, own_words(&why, CLIENT_KEY)))?;
    // Every connection proves the certificates anew: a revoked peer must not resume.
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

fn server_config(dir: &Path, trust: &Trust) -> Result<Arc<ServerConfig>, TlsError> {
    let path = dir.join(SERVER_CERT);
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|why| error(&path, why))?
        .with_client_cert_verifier(Arc::clone(&trust.clients))
        .with_single_cert(read_certs(&path)?, read_key(&dir.join(SERVER_KEY))?)
        .map_err(|why| error(&path, own_words(&why, SERVER_KEY)))?;
    // A data stream's sender never reads; tickets would lie unread and turn its close into a reset.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn own_words(why: &rustls::Error, key: &str) -> String {
    match why {
        rustls::Error::InconsistentKeys(_) => format!("{key} is not its key"),
        other => other.to_string(),
    }
}

/// What is wrong with a certificate of this host as peers will judge it, if anything: dates, the
/// authority, and (for the server's) the name.
pub fn judge_own(dir: &Path, file: &str, name: &str) -> Result<(), TlsError> {
    let path = dir.join(file);
    let certs = read_certs(&path)?;
    let now = UnixTime::now();
    Trust::read(dir)?.clients.verify_client_cert(&certs[0], &certs[1..], now).or_else(|why| {
        match why {
            // A server certificate need not be good for clients; everything else is judged first.
            rustls::Error::InvalidCertificate(
                CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. },
            ) if file == SERVER_CERT => Ok(rustls::server::danger::ClientCertVerified::assertion()),
            why => {
                let (why, hint) = certificate_words(&why, "it");
                Err(TlsError { path: path.clone(), why, hint: hint.to_owned() })
            }
        }
    })?;
    let names = dns_names(&certs[0]);
    if !names.iter().any(|have| have.eq_ignore_ascii_case(name)) {
        let why = format!(
            "it is for {}, but this agent's name is '{name}'",
            if names.is_empty() { "no DNS name at all".to_owned() } else { names.join(", ") }
        );
        return Err(error(&path, why));
    }
    Ok(())
}

/// Whole days for which all certificates of this host are valid still, its authority's among them; 0 when one has
/// expired.
///
/// # Errors
/// A file that is missing, or is no certificate.
pub fn days_left(dir: &Path) -> Result<u64, TlsError> {
    let now = UnixTime::now().as_secs();
    let left = |file: &str| {
        let path = dir.join(file);
        let certs = read_certs(&path)?;
        let (_, cert) = x509_parser::parse_x509_certificate(&certs[0])
            .map_err(|why| error(&path, why.to_string()))?;
        let until = u64::try_from(cert.validity().not_after.timestamp()).unwrap_or_default();
        Ok(until.saturating_sub(now) / 86_400)
    };
    let all = [CA_CERT, SERVER_CERT, CLIENT_CERT].map(left);
    all.into_iter().reduce(|least, one| Ok(least?.min(one?))).unwrap_or(Ok(0))
}

/// The DNS names a certificate is for.
pub fn dns_names(cert: &CertificateDer<'_>) -> Vec<String> {
    use x509_parser::extensions::GeneralName;
    let Ok((_, cert)) = x509_parser::parse_x509_certificate(cert) else { return Vec::new() };
    let Ok(Some(names)) = cert.subject_alternative_name() else { return Vec::new() };
    let dns = names.value.general_names.iter().filter_map(|name| match name {
        GeneralName::DNSName(name) => Some(harmless(*name)),
        _ => None,
    });
    dns.collect()
}

/// The name that a server's certificate must be for.
pub(crate) fn server_name(peer: &str) -> Result<ServerName<'static>, NetError> {
    ServerName::try_from(peer.to_owned()).map_err(|_| {
        NetError::new(NetErrorKind::Certificate, format!("'{peer}' cannot be a certificate's name"))
            .hint("name peers as their certificates do, for example hostb or hostb.example.org")
    })
}

/// What a certificate that failed its check suffers from, and what helps.
fn certificate_words(why: &rustls::Error, whose: &str) -> (String, &'static str) {
    use CertificateError as E;
    if let rustls::Error::InvalidCertRevocationList(cause) = why {
        return (format!("this host's {CA_CRL} cannot be used: {cause:?}"), revoked::HINT);
    }
    let rustls::Error::InvalidCertificate(cause) = why else {
        return (why.to_string(), MAKE_NEW);
    };
    match cause {
        E::Expired => (format!("{whose} has expired"), "issue a new one with 'dray pki issue'"),
        E::ExpiredContext { time, not_after } => {
            let days = time.as_secs().saturating_sub(not_after.as_secs()) / 86_400;
            let text = format!("{whose} expired {days} days ago");
            (text, "issue a new one with 'dray pki issue', and check this host's clock")
        }
        E::NotValidYet | E::NotValidYetContext { .. } => {
            (format!("{whose} is not valid yet"), "check the clocks of both hosts")
        }
        E::UnknownIssuer | E::BadSignature => (
            format!("{whose} was signed by another authority than this host's ca-cert.pem"),
            "give both hosts certificates of one authority",
        ),
        E::NotValidForName => (format!("{whose} is for another name"), NAME_HINT),
        E::NotValidForNameContext { expected, presented } => {
            let names: Vec<&str> = presented.iter().map(|name| bare_name(name)).collect();
            let is_for = if names.is_empty() { "no name".to_owned() } else { names.join(", ") };
            (format!("{whose} is for {is_for}, not for '{}'", expected.to_str()), NAME_HINT)
        }
        E::InvalidPurpose | E::InvalidPurposeContext { .. } => (
            format!("{whose} is not for this use"),
            "the server's and the client's certificate differ: check that they are not exchanged",
        ),
        E::Revoked => {
            (format!("{whose} was revoked"), "give that host a new one with 'dray pki issue'")
        }
        other => (format!("{whose} was not accepted: {other}"), MAKE_NEW),
    }
}

const NAME_HINT: &str = "the name of a [[peer]] must be the DNS name in its certificate, and its address must lead there";

const NAMED_THERE: &str =
    "that host's dray.toml must call this host as its certificate does: compare the [[peer]] there";

/// `DnsName("hostb")` as rustls writes it, without the wrapping.
fn bare_name(name: &str) -> &str {
    name.trim_start_matches("DnsName(").trim_matches(|c| "()\"".contains(c))
}

/// A failed handshake, or a connection that ended with an alert, in plain words.
pub(crate) fn translate(error: io::Error, peer: &str) -> NetError {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let Some(inner) = inner else {
        return match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                NetError::new(NetErrorKind::Broken, "the peer closed the connection")
            }
            _ => NetError::new(NetErrorKind::Broken, error.to_string()),
        };
    };
    match inner {
        rustls::Error::InvalidCertificate(_) | rustls::Error::InvalidCertRevocationList(_) => {
            let (what, hint) = certificate_words(inner, &format!("the certificate of {peer}"));
            NetError::new(NetErrorKind::Certificate, what).hint(hint)
        }
        rustls::Error::NoCertificatesPresented => {
            NetError::new(NetErrorKind::Certificate, format!("{peer} presented no certificate"))
        }
        rustls::Error::AlertReceived(alert) => alert_words(*alert, peer),
        rustls::Error::InvalidMessage(_) => {
            NetError::new(NetErrorKind::Protocol, format!("{peer} does not speak TLS"))
                .hint("check that the address is a dray agent's")
        }
        other => NetError::new(NetErrorKind::Protocol, format!("TLS with {peer}: {other}")),
    }
}

fn alert_words(alert: AlertDescription, peer: &str) -> NetError {
    use AlertDescription as A;
    let certificate = |why: &str, hint: &str| {
        let what = format!("{peer} does not accept this host's certificate: {why}");
        NetError::new(NetErrorKind::Certificate, what).hint(hint)
    };
    match alert {
        A::CertificateExpired => certificate(
            "it has expired or is not valid yet",
            "issue a new one with 'dray pki issue', and check the clocks of both hosts",
        ),
        A::UnknownCA | A::DecryptError => certificate(
            "it was signed by an authority that is not in the ca-cert.pem of that host",
            "give both hosts certificates of one authority",
        ),
        A::CertificateRequired => certificate("none was presented", MAKE_NEW),
        A::BadCertificate => certificate("it is for another name", NAMED_THERE),
        A::UnsupportedCertificate => certificate("it is not for this use", MAKE_NEW),
        A::CertificateUnknown | A::AccessDenied => {
            certificate("it does not say why", "see the log of the agent there")
        }
        A::CertificateRevoked => certificate("it was revoked", MAKE_NEW),
        A::ProtocolVersion => {
            NetError::new(NetErrorKind::Protocol, format!("{peer} does not speak TLS 1.3"))
        }
        other => NetError::new(NetErrorKind::Broken, format!("{peer} ended TLS: {other:?}")),
    }
}
