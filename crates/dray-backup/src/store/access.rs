//! The address and the account of an S3-compatible object store, as an operator has configured them
//! for a repository. Values that are absent come from the environment, under the names that other
//! tools use.

use crate::error::{Error, Result};
use std::fmt;
use std::path::{Path, PathBuf};

/// Longest credentials file.
const MAX_CREDENTIALS: u64 = 64 << 10;
/// The section of a credentials file that is read.
const SECTION: &str = "default";

/// What is configured of an object store; what is absent the environment says: `AWS_ENDPOINT_URL`,
/// `AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, …
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct S3Access {
    /// Its URL, without the bucket; Amazon's when neither this nor the environment names one.
    pub endpoint: Option<String>,
    /// Its region.
    pub region: Option<String>,
    /// A file with the keys, as `~/.aws/credentials`.
    pub credentials_file: Option<PathBuf>,
    /// The endpoint may be one without TLS.
    pub allow_http: bool,
}

impl S3Access {
    /// Whether the endpoint is one that may be used.
    ///
    /// # Errors
    /// `Invalid`: it is no URL, or one without TLS that is not allowed.
    pub fn check_endpoint(&self) -> Result<()> {
        let Some(endpoint) = &self.endpoint else { return Ok(()) };
        let host = |rest: &str| !rest.trim_end_matches('/').is_empty() && !rest.contains('@');
        match endpoint.split_once("://") {
            Some(("https", rest)) if host(rest) => Ok(()),
            Some(("http", rest)) if host(rest) && self.allow_http => Ok(()),
            Some(("http", rest)) if host(rest) => Err(Error::invalid(format!(
                "'{endpoint}' is without TLS: others could read names, sizes and unencrypted \
                 content"
            ))),
            _ => Err(Error::invalid(format!("'{endpoint}' is no https:// URL of a server"))),
        }
    }
}

/// The keys of an account.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Names the account.
    pub access_key_id: String,
    /// Proves it.
    pub secret_access_key: String,
    /// Of keys that are good for a while only.
    pub session_token: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(…)")
    }
}

impl Credentials {
    /// Reads them from a file: `aws_access_key_id = …` and `aws_secret_access_key = …` in its section
    /// `[default]`, or before any section.
    ///
    /// # Errors
    /// `Invalid` when it cannot be read or does not name both; its text is in no error.
    pub fn from_file(path: &Path) -> Result<Self> {
        let failed = |why: String| Error::invalid(format!("{}: {why}", path.display()));
        let length = std::fs::metadata(path).map_err(|why| failed(why.to_string()))?.len();
        if length > MAX_CREDENTIALS {
            return Err(failed("it is too long for a file of credentials".to_owned()));
        }
        let text = std::fs::read_to_string(path).map_err(|why| failed(why.to_string()))?;
        Self::parse(&text).map_err(|missing| failed(format!("it has no {missing}")))
    }

    /// What the text says, or the name of what it does not.
    fn parse(text: &str) -> std::result::Result<Self, &'static str> {
        let (mut id, mut secret, mut token) = (None, None, None);
        let mut ours = true;
        for line in text.lines().map(str::trim) {
            if let Some(section) = line.strip_prefix('[') {
                ours = section.trim_end_matches(']').trim() == SECTION;
            }
            let Some((name, value)) = line.split_once('=').filter(|_| ours) else { continue };
            let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            match name.trim() {
                "aws_access_key_id" => id = value,
                "aws_secret_access_key" => secret = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
        Ok(Self {
            access_key_id: id.ok_or("aws_access_key_id")?,
            secret_access_key: secret.ok_or("aws_secret_access_key")?,
            session_token: token,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_read_as_other_tools_write_them() {
        let plain = "aws_access_key_id=AK\naws_secret_access_key = s/=x\n";
        let read = Credentials::parse(plain).unwrap();
        assert_eq!((&*read.access_key_id, &*read.secret_access_key), ("AK", "s/=x"));
        assert_eq!(read.session_token, None);
        let sections = format!(
            "# ours\n[other]\naws_access_key_id = no\n[ default ]\n{plain}aws_session_token=T\n[x]\naws_session_token=no"
        );
        let read = Credentials::parse(&sections).unwrap();
        assert_eq!((&*read.access_key_id, read.session_token.as_deref()), ("AK", Some("T")));
        assert_eq!(
            Credentials::parse("aws_access_key_id=AK\naws_secret_access_key=\n"),
            Err("aws_secret_access_key")
        );
        assert_eq!(Credentials::parse("[x]\naws_access_key_id=AK"), Err("aws_access_key_id"));
        assert!(!format!("{read:?}").contains("AK"));
    }

    #[test]
    fn an_endpoint_without_tls_must_be_allowed() {
        let check = |endpoint: &str, allow_http| {
            S3Access { endpoint: Some(endpoint.to_owned()), allow_http, ..S3Access::default() }
                .check_endpoint()
                .is_ok()
        };
        assert!(check("https://minio.example:9000", false) && check("http://10.0.0.1", true));
        assert!(!check("http://10.0.0.1:9000/", false), "not allowed");
        for wrong in ["minio:9000", "https://", "ftp://x", "https://id:secret@minio", ""] {
            assert!(!check(wrong, true), "{wrong}");
        }
        S3Access::default().check_endpoint().unwrap();
    }
}
