//! This host's certificates while the agent runs: what is wrong with them, and their renewal without a
//! restart.
//!
//! A certificate that has expired, or is not there, costs the connections that need it and nothing else.
//! The files are looked at again now and then ([`Identity::look_again`]). While somebody replaces them one by
//! one they do not fit each other: what was good before is used until they do.

use super::{
    CLIENT_CERT, CLIENT_KEY, SERVER_CERT, SERVER_KEY, TlsError, client_config, judge_own,
    server_config,
};
use crate::{NetError, NetErrorKind};
use parking_lot::RwLock;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ServerConfig};
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// This host's certificates, ready for connections either way. Clones are the same one.
#[derive(Clone)]
pub struct Identity(Arc<RwLock<Known>>);

#[derive(Default)]
struct Known {
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
        let mut known = Known::default();
        known.client.look(Ok(client_config(dir)?), Ok(()));
        known.server.look(Ok(server_config(dir)?), Ok(()));
        Ok(Self(Arc::new(RwLock::new(known))))
    }

    /// What there is of the certificates of `dir`, for the host called `name`, and what is wrong with them.
    pub fn of_host(dir: &Path, name: &str) -> (Self, Vec<TlsError>) {
        let this = Self(Arc::default());
        let faults = this.look_again(dir, name);
        (this, faults)
    }

    /// Takes what has been renewed, and tells what is wrong now.
    pub fn look_again(&self, dir: &Path, name: &str) -> Vec<TlsError> {
        let judge = |file: &str| judge_own(dir, file, name);
        let client = private(&dir.join(CLIENT_KEY)).and_then(|()| client_config(dir));
        let server = private(&dir.join(SERVER_KEY)).and_then(|()| server_config(dir));
        let (client_judged, server_judged) = (judge(CLIENT_CERT), judge(SERVER_CERT));
        let mut known = self.0.write();
        known.client.look(client, client_judged);
        known.server.look(server, server_judged);
        let mut faults: Vec<_> =
            [&known.client.fault, &known.server.fault].into_iter().flatten().cloned().collect();
        faults.dedup();
        faults
    }

    /// For connections that are opened.
    ///
    /// # Errors
    /// Why no peer would accept the certificate.
    pub(crate) fn client(&self) -> Result<Arc<ClientConfig>, NetError> {
        let known = self.0.read();
        let half = &known.client;
        half.config.clone().filter(|_| !half.is_bad).ok_or_else(|| half.refused())
    }

    /// For connections that are accepted. One that has expired is shown all the same: whoever connects is
    /// then told what is wrong.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn server(&self) -> Result<Arc<ServerConfig>, NetError> {
        let known = self.0.read();
        known.server.config.clone().ok_or_else(|| known.server.refused())
    }

    /// The same for somebody who keeps it: each client is shown the certificate of the day. The authority
    /// stays what it was.
    ///
    /// # Errors
    /// Why there is none.
    pub fn lasting_server(&self) -> Result<Arc<ServerConfig>, NetError> {
        let mut config = ServerConfig::clone(&*self.server()?);
        config.cert_resolver = Arc::new(Current(self.clone()));
        Ok(Arc::new(config))
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

/// The certificate of the day.
#[derive(Debug)]
struct Current(Identity);

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
