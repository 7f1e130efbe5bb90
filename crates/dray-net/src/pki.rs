//! A small certificate authority for those who have none: `dray pki`.
//!
//! ```text
//! DIR/ca-cert.pem, DIR/ca-key.pem      the authority; its key stays where it was made
//! DIR/NAME/ca-cert.pem                 ┐
//! DIR/NAME/server-{cert,key}.pem       ├ what host NAME gets: copy to its [tls] dir
//! DIR/NAME/client-{cert,key}.pem       ┘
//! ```
//! A host's name is its certificates' DNS name and common name; peers know it by that. Nothing
//! that exists is ever overwritten.

use crate::tls::{CA_CERT, CLIENT_CERT, CLIENT_KEY, SERVER_CERT, SERVER_KEY};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use std::fmt;
use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The authority's key.
pub const CA_KEY: &str = "ca-key.pem";

const DAY: Duration = Duration::from_secs(86_400);
/// How long an authority is good for: longer than the hosts it signs for.
const CA_DAYS: u32 = 3650;
/// How long a host's certificates are good for: what public authorities allowed for years, so that
/// renewing is a habit and not a surprise.
const HOST_DAYS: u32 = 397;
/// Clocks of two hosts may differ; a certificate is good from a little before it was made.
const BACKDATED: Duration = Duration::from_secs(3600);

/// Why a certificate was not made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PkiError {
    /// What failed and why.
    pub what: String,
    /// What to do, where there is something.
    pub hint: Option<&'static str>,
}

impl fmt::Display for PkiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        self.hint.map_or(Ok(()), |hint| write!(f, "; {hint}"))
    }
}

impl std::error::Error for PkiError {}

fn failed(what: String) -> PkiError {
    PkiError { what, hint: None }
}

/// From when to when a certificate is good.
#[derive(Debug, Clone, Copy)]
pub struct Validity {
    /// First moment.
    pub from: SystemTime,
    /// Last moment.
    pub until: SystemTime,
}

impl Validity {
    fn days(days: u32) -> Self {
        let now = SystemTime::now();
        Self { from: now - BACKDATED, until: now + DAY * days }
    }

    fn apply(self, params: &mut CertificateParams) {
        params.not_before = self.from.into();
        params.not_after = self.until.into();
    }
}

/// Makes an authority in `dir`.
///
/// # Errors
/// When there is one already, or `dir` cannot be written.
pub fn create_ca(dir: &Path) -> Result<(), PkiError> {
    private_dir(dir)?;
    refuse_existing(&[dir.join(CA_CERT), dir.join(CA_KEY)])?;
    let mut params = CertificateParams::default();
    Validity::days(CA_DAYS).apply(&mut params);
    params.distinguished_name = common_name("dray");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = new_key()?;
    let cert = params.self_signed(&key).map_err(|why| failed(format!("make authority: {why}")))?;
    write_new(&dir.join(CA_KEY), &key.serialize_pem(), 0o600)?;
    write_new(&dir.join(CA_CERT), &cert.pem(), 0o644)
}

/// Makes the certificates of host `name` in `dir/name`, signed by the authority in `dir`.
/// `addresses` are further DNS names or IP addresses the server's certificate shall be good for;
/// agents do not need them, QEMU and libvirt clients may. Returns the directory.
///
/// # Errors
/// When the name cannot be one, there are certificates already, or the authority cannot be read.
pub fn issue(dir: &Path, name: &str, addresses: &[String]) -> Result<PathBuf, PkiError> {
    issue_for(dir, name, addresses, Validity::days(HOST_DAYS))
}

/// [`issue`] with dates of one's own.
///
/// # Errors
/// Those of [`issue`].
pub fn issue_for(
    dir: &Path,
    name: &str,
    addresses: &[String],
    validity: Validity,
) -> Result<PathBuf, PkiError> {
    check_name(name)?;
    let ca_pem = read(&dir.join(CA_CERT))?;
    let ca_key = read(&dir.join(CA_KEY))?;
    let bad = |why: rcgen::Error| failed(format!("use the authority in {}: {why}", dir.display()));
    let ca_key = KeyPair::from_pem(&ca_key).map_err(bad)?;
    let issuer = Issuer::from_ca_cert_pem(&ca_pem, ca_key).map_err(bad)?;
    let host = dir.join(name);
    let files = [CA_CERT, SERVER_CERT, SERVER_KEY, CLIENT_CERT, CLIENT_KEY];
    refuse_existing(&files.map(|file| host.join(file)))?;
    private_dir(&host)?;
    let names = alternative_names(name, addresses)?;
    let server = ExtendedKeyUsagePurpose::ServerAuth;
    let client = ExtendedKeyUsagePurpose::ClientAuth;
    let mut params = host_params(name, names.clone(), validity, server);
    sign(&host, SERVER_CERT, SERVER_KEY, &params, &issuer)?;
    params = host_params(name, names[..1].to_vec(), validity, client);
    sign(&host, CLIENT_CERT, CLIENT_KEY, &params, &issuer)?;
    write_new(&host.join(CA_CERT), &ca_pem, 0o644)?;
    Ok(host)
}

fn host_params(
    name: &str,
    names: Vec<SanType>,
    validity: Validity,
    usage: ExtendedKeyUsagePurpose,
) -> CertificateParams {
    let mut params = CertificateParams::default();
    validity.apply(&mut params);
    params.distinguished_name = common_name(name);
    params.subject_alt_names = names;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    params
}

fn sign(
    host: &Path,
    cert: &str,
    key: &str,
    params: &CertificateParams,
    issuer: &Issuer<'_, KeyPair>,
) -> Result<(), PkiError> {
    let pair = new_key()?;
    let signed = params.signed_by(&pair, issuer);
    let signed = signed.map_err(|why| failed(format!("sign {cert}: {why}")))?;
    write_new(&host.join(key), &pair.serialize_pem(), 0o600)?;
    write_new(&host.join(cert), &signed.pem(), 0o644)
}

fn new_key() -> Result<KeyPair, PkiError> {
    KeyPair::generate().map_err(|why| failed(format!("make a key: {why}")))
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn alternative_names(name: &str, addresses: &[String]) -> Result<Vec<SanType>, PkiError> {
    let dns = |name: &str| {
        let text = name.try_into().map(SanType::DnsName);
        text.map_err(|why| failed(format!("use '{name}' as a DNS name: {why}")))
    };
    let mut names = vec![dns(name)?];
    for address in addresses.iter().filter(|address| *address != name) {
        names.push(match address.parse::<IpAddr>() {
            Ok(ip) => SanType::IpAddress(ip),
            Err(_) => dns(address)?,
        });
    }
    Ok(names)
}

fn check_name(name: &str) -> Result<(), PkiError> {
    let good = rustls::pki_types::DnsName::try_from(name).is_ok() && name.len() <= 64;
    if good {
        return Ok(());
    }
    Err(PkiError {
        what: format!("'{name}' cannot be a host's name"),
        hint: Some("use a DNS name like hostb or hostb.example.org, at most 64 characters"),
    })
}

fn refuse_existing(files: &[PathBuf]) -> Result<(), PkiError> {
    match files.iter().find(|file| file.symlink_metadata().is_ok()) {
        None => Ok(()),
        Some(file) => Err(PkiError {
            what: format!("make {}: it exists already", file.display()),
            hint: Some("move the old one away first; dray overwrites nothing"),
        }),
    }
}

fn private_dir(dir: &Path) -> Result<(), PkiError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|why| failed(format!("make directory {}: {why}", dir.display())))
}

fn read(path: &Path) -> Result<String, PkiError> {
    std::fs::read_to_string(path).map_err(|why| PkiError {
        what: format!("read {}: {why}", path.display()),
        hint: Some("make an authority with 'dray pki init' first"),
    })
}

fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), PkiError> {
    let error = |why| failed(format!("write {}: {why}", path.display()));
    let mut file =
        OpenOptions::new().write(true).create_new(true).mode(mode).open(path).map_err(error)?;
    file.write_all(text.as_bytes()).map_err(error)?;
    file.sync_all().map_err(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::{Identity, judge_own};
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn issued_certificates_work_and_are_private() {
        let dir = tempfile::tempdir().unwrap();
        create_ca(dir.path()).unwrap();
        let host = issue(dir.path(), "hosta", &["10.0.0.1".into(), "a.example".into()]).unwrap();
        Identity::load(&host).unwrap();
        judge_own(&host, SERVER_CERT, "hosta").unwrap();
        judge_own(&host, CLIENT_CERT, "hosta").unwrap();
        let wrong = judge_own(&host, SERVER_CERT, "hostb").unwrap_err();
        assert!(wrong.why.contains("this agent's name is 'hostb'"), "{wrong}");
        for key in [dir.path().join(CA_KEY), host.join(SERVER_KEY), host.join(CLIENT_KEY)] {
            assert_eq!(key.metadata().unwrap().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn nothing_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        create_ca(dir.path()).unwrap();
        let again = create_ca(dir.path()).unwrap_err().to_string();
        assert!(again.contains("ca-cert.pem: it exists already"), "{again}");
        issue(dir.path(), "hosta", &[]).unwrap();
        assert!(issue(dir.path(), "hosta", &[]).is_err());
    }

    #[test]
    fn names_that_are_paths_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        create_ca(dir.path()).unwrap();
        for name in ["../x", "a/b", "", ".", "-", "ho st"] {
            assert!(issue(dir.path(), name, &[]).is_err(), "{name}");
        }
    }
}
