//! Certificates that their authority has taken back: [`CA_CRL`] in the directory of certificates, as QEMU reads it.
//!
//! Where the file is absent, nothing was taken back. Where it is there and cannot be used, no new certificate is
//! judged by it: what was known before stays, and an agent that starts trusts nobody.

use super::{CA_CERT, TlsError, error, read_certs};
use rustls::pki_types::CertificateRevocationListDer;
use rustls::pki_types::pem::PemObject;
use std::io;
use std::path::Path;
use x509_parser::prelude::{CertificateRevocationList, FromDer};

/// The authority's list of revoked certificates.
pub const CA_CRL: &str = "ca-crl.pem";

pub(super) const HINT: &str =
    "copy the authority's ca-crl.pem ('dray pki revoke' makes it) to this host, or remove the file";

/// The lists in `dir`; none where there is no file.
///
/// # Errors
/// A file that cannot be read, is no list, or is the list of another authority.
pub(super) fn read(dir: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
    let path = dir.join(CA_CRL);
    let wrong = |why: String| TlsError { hint: HINT.to_owned(), ..error(&path, why) };
    let pem = match std::fs::read(&path) {
        Ok(pem) => pem,
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(why) => return Err(wrong(why.to_string())),
    };
    let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&pem).collect();
    let lists = lists.map_err(|why| wrong(format!("not a PEM revocation list: {why}")))?;
    if lists.is_empty() {
        return Err(wrong("it holds no PEM revocation list".to_owned()));
    }
    let authorities = authorities(dir)?;
    for list in &lists {
        let issuer = issuer(list).ok_or_else(|| wrong("not a revocation list".to_owned()))?;
        if !authorities.contains(&issuer) {
            return Err(wrong(format!("it is the list of another authority than {CA_CERT}")));
        }
    }
    Ok(lists)
}

/// Subjects of the authorities, as they are encoded.
fn authorities(dir: &Path) -> Result<Vec<Vec<u8>>, TlsError> {
    let path = dir.join(CA_CERT);
    let subject = |cert: &rustls::pki_types::CertificateDer<'_>| {
        let (_, cert) =
            x509_parser::parse_x509_certificate(cert).map_err(|why| error(&path, why))?;
        Ok(cert.subject().as_raw().to_vec())
    };
    read_certs(&path)?.iter().map(subject).collect()
}

fn issuer(list: &CertificateRevocationListDer<'_>) -> Option<Vec<u8>> {
    let (_, list) = CertificateRevocationList::from_der(list).ok()?;
    Some(list.tbs_cert_list.issuer.as_raw().to_vec())
}
