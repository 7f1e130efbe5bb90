//! Where a store is, as an operator writes it.

use super::Store;
use super::local::LocalStore;
use crate::error::{Error, Result};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// A store's place: a path, `file:///PATH`, or `s3://BUCKET/PREFIX`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Location {
    /// A directory.
    Directory(PathBuf),
    /// A bucket of an S3-compatible object store. Endpoint, region and credentials are in the
    /// environment, as other tools expect them: `AWS_ENDPOINT_URL`, `AWS_REGION`,
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, …
    S3 {
        /// The bucket.
        bucket: String,
        /// What all names begin with; may be empty.
        prefix: String,
    },
}

impl FromStr for Location {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong =
            |why: &str| Err(Error::invalid(format!("'{text}' is no place for backups: {why}")));
        let Some((scheme, rest)) = text.split_once("://") else {
            return match text {
                "" => wrong("it is empty"),
                path => Ok(Self::Directory(path.into())),
            };
        };
        match scheme {
            "file" if rest.starts_with('/') => Ok(Self::Directory(rest.into())),
            "file" => wrong("write file:///PATH"),
            "s3" => {
                let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
                let prefix = prefix.trim_matches('/').to_owned();
                match bucket {
                    "" => wrong("write s3://BUCKET/PREFIX"),
                    bucket => Ok(Self::S3 { bucket: bucket.to_owned(), prefix }),
                }
            }
            _ => wrong("write a path, file:///PATH or s3://BUCKET/PREFIX"),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::S3 { bucket, prefix } if prefix.is_empty() => write!(f, "s3://{bucket}"),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
        }
    }
}

impl Location {
    /// The store there. A directory is created if it does not exist.
    ///
    /// # Errors
    /// `Unavailable`; `Unsupported` for an object store when this program was built without them.
    pub fn store(&self) -> Result<Arc<dyn Store>> {
        match self {
            Self::Directory(path) => Ok(Arc::new(LocalStore::open(path)?)),
            #[cfg(feature = "s3")]
            Self::S3 { bucket, prefix } => {
                Ok(Arc::new(super::s3::S3Store::from_environment(bucket, prefix)?))
            }
            #[cfg(not(feature = "s3"))]
            Self::S3 { .. } => Err(Error::new(
                crate::Kind::Unsupported,
                "this dray was built without object stores",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_parse_and_print() {
        let s3 = |bucket: &str, prefix: &str| Location::S3 {
            bucket: bucket.into(),
            prefix: prefix.into(),
        };
        for (text, place, printed) in [
            ("/srv/backups", Location::Directory("/srv/backups".into()), "/srv/backups"),
            ("file:///srv/b", Location::Directory("/srv/b".into()), "/srv/b"),
            ("s3://vms", s3("vms", ""), "s3://vms"),
            ("s3://vms/a/b/", s3("vms", "a/b"), "s3://vms/a/b"),
        ] {
            assert_eq!(text.parse::<Location>().unwrap(), place);
            assert_eq!(place.to_string(), printed);
        }
        for wrong in ["", "file://srv", "s3://", "s3:///x", "ftp://host/x"] {
            assert!(wrong.parse::<Location>().is_err(), "{wrong}");
        }
    }
}
