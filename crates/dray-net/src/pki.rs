//! A small certificate authority for those who have none: `dray pki`.
//!
//! ```text
//! DIR/ca-cert.pem, DIR/ca-key.pem      the authority; its key stays where it was made
//! DIR/ca-crl.pem                       what it has revoked: copy to every host's [tls] dir
//! DIR/NAME/ca-cert.pem                 ┐
//! DIR/NAME/server-{cert,key}.pem       ├ what host NAME gets: copy to its [tls] dir
//! DIR/NAME/client-{cert,key}.pem       ┘
//! ```
//! A host's name is its certificates' DNS name and common name; peers know it by that. Nothing
//! that exists is ever overwritten, except the list of what was revoked, which grows.

use crate::tls::{CA_CERT, CA_CRL, CLIENT_CERT, CLIENT_KEY, SERVER_CERT, SERVER_KEY, read_certs};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SanType, SerialNumber,
};
use rustls::pki_types::CertificateRevocationListDer;
use rustls::pki_types::pem::PemObject;
use std::fmt;
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use x509_parser::prelude::{CertificateRevocationList, FromDer};
use x509_parser::revocation_list::RevokedCertificate;

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
    let (ca_pem, issuer) = authority(dir)?;
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

/// The authority in `dir`: its certificate, and what signs in its name.
fn authority(dir: &Path) -> Result<(String, Issuer<'static, KeyPair>), PkiError> {
    let ca_pem = read(&dir.join(CA_CERT))?;
    let ca_key = read(&dir.join(CA_KEY))?;
    let bad = |why: rcgen::Error| failed(format!("use the authority in {}: {why}", dir.display()));
    let ca_key = KeyPair::from_pem(&ca_key).map_err(bad)?;
    let issuer = Issuer::from_ca_cert_pem(&ca_pem, ca_key).map_err(bad)?;
    Ok((ca_pem, issuer))
}

/// Revokes the certificates in these files, besides those that were revoked before. Returns the authority's list
/// and how many of the certificates are new in it.
///
/// # Errors
/// When a file is no certificate of the authority in `dir`, or the list cannot be read or written.
pub fn revoke(dir: &Path, certificates: &[PathBuf]) -> Result<(PathBuf, usize), PkiError> {
    let (_, issuer) = authority(dir)?;
    let path = dir.join(CA_CRL);
    let (mut revoked, number) = revoked(&path)?;
    let before = revoked.len();
    let now = SystemTime::now();
    for file in certificates {
        let serial = serial_of(file, &dir.join(CA_CERT))?;
        if revoked.iter().all(|one| one.serial_number != serial) {
            revoked.push(revoked_now(serial, now));
        }
    }
    let added = revoked.len() - before;
    if added == 0 && before > 0 {
        return Ok((path, 0));
    }
    let params = CertificateRevocationListParams {
        this_update: (now - BACKDATED).into(),
        next_update: (now + DAY * CA_DAYS).into(),
        crl_number: SerialNumber::from(number + 1),
        issuing_distribution_point: None,
        revoked_certs: revoked,
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let list = params.signed_by(&issuer).and_then(|list| list.pem());
    let list = list.map_err(|why| failed(format!("make {}: {why}", path.display())))?;
    replace(&path, &list)?;
    Ok((path, added))
}

fn revoked_now(serial_number: SerialNumber, now: SystemTime) -> RevokedCertParams {
    let revocation_time = now.into();
    RevokedCertParams { serial_number, revocation_time, reason_code: None, invalidity_date: None }
}

/// What the list at `path` holds, and its number; nothing where there is none.
fn revoked(path: &Path) -> Result<(Vec<RevokedCertParams>, u64), PkiError> {
    let wrong = |why: String| failed(format!("read {}: {why}", path.display()));
    let pem = match std::fs::read(path) {
        Ok(pem) => pem,
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), 0)),
        Err(why) => return Err(wrong(why.to_string())),
    };
    let list = CertificateRevocationListDer::from_pem_slice(&pem);
    let list = list.map_err(|why| wrong(format!("not a PEM revocation list: {why}")))?;
    let (_, list) =
        CertificateRevocationList::from_der(&list).map_err(|why| wrong(why.to_string()))?;
    let again = |one: &RevokedCertificate<'_>| {
        let serial = SerialNumber::from_slice(one.raw_serial());
        let at = u64::try_from(one.revocation_date.timestamp()).unwrap_or_default();
        revoked_now(serial, SystemTime::UNIX_EPOCH + Duration::from_secs(at))
    };
    let number = list.crl_number().and_then(|number| number.to_u64_digits().first().copied());
    Ok((list.iter_revoked_certificates().map(again).collect(), number.unwrap_or_default()))
}

/// The number of the certificate in `file`, which the authority with this certificate has signed.
fn serial_of(file: &Path, authority: &Path) -> Result<SerialNumber, PkiError> {
    let unread = |why: String| PkiError {
        what: format!("revoke {}: {why}", file.display()),
        hint: Some("name the file of the certificate to revoke with --cert"),
    };
    let parse =
        |path: &Path| read_certs(path).map_err(|why| unread(why.why)).map(|certs| certs[0].clone());
    let (own, authority) = (parse(file)?, parse(authority)?);
    let read =
        |der| x509_parser::parse_x509_certificate(der).map_err(|why| unread(why.to_string()));
    let ((_, own), (_, authority)) = (read(&own)?, read(&authority)?);
    if own.issuer().as_raw() != authority.subject().as_raw() {
        return Err(unread("another authority has signed it".to_owned()));
    }
    Ok(SerialNumber::from_slice(own.raw_serial()))
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

/// Puts `text` in the place of what is at `path`: all of it, or nothing.
fn replace(path: &Path, text: &str) -> Result<(), PkiError> {
    let error = |why| failed(format!("write {}: {why}", path.display()));
    let new = path.with_extension("pem.new");
    match std::fs::remove_file(&new) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(error(why)),
        _ => {}
    }
    write_new(&new, text, 0o644)?;
    std::fs::rename(&new, path).map_err(error)
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
