//! Where a store is, as an operator writes it.

use super::Store;
use super::access::S3Access;
use super::local::LocalStore;
use crate::error::{Error, Result};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// A store's place: a path, `file:///PATH`, `s3://BUCKET/PREFIX`, or `dray://HOST/FOLDER`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Location {
    /// A directory.
    Directory(PathBuf),
    /// A bucket of an S3-compatible object store; [`S3Access`] says how it is reached.
    S3 {
        /// The bucket.
        bucket: String,
        /// What all names begin with; may be empty.
        prefix: String,
    },
    /// A folder of the store that another dray host offers.
    Peer {
        /// The host's name.
        host: String,
        /// The folder; may be empty.
        folder: String,
    },
}

impl FromStr for Location {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong =
            |why: &str| Err(Error::invalid(format!("'{text}' is not a URL for backups: {why}")));
        let Some((scheme, rest)) = text.split_once("://") else {
            return match text {
                "" => wrong("it is empty"),
                path => Ok(Self::Directory(path.into())),
            };
        };
        match scheme {
            "file" if rest.starts_with('/') => Ok(Self::Directory(rest.into())),
            "file" => wrong("write file:///PATH"),
            "s3" => match split(rest) {
                Some((bucket, prefix)) => Ok(Self::S3 { bucket, prefix }),
                None => wrong("write s3://BUCKET/PREFIX"),
            },
            "dray" => match split(rest) {
                Some((host, folder)) => Ok(Self::Peer { host, folder }),
                None => wrong("write dray://HOST/FOLDER"),
            },
            _ => wrong("write file:///PATH, s3://BUCKET/PREFIX or dray://HOST/FOLDER"),
        }
    }
}

/// The first part of what follows a scheme, and the rest without slashes round it.
fn split(rest: &str) -> Option<(String, String)> {
    let (first, folder) = rest.split_once('/').unwrap_or((rest, ""));
    (!first.is_empty()).then(|| (first.to_owned(), folder.trim_matches('/').to_owned()))
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::S3 { bucket, prefix } if prefix.is_empty() => write!(f, "s3://{bucket}"),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
            Self::Peer { host, folder } if folder.is_empty() => write!(f, "dray://{host}"),
            Self::Peer { host, folder } => write!(f, "dray://{host}/{folder}"),
        }
    }
}

impl Location {
    /// The store there. A directory is created if it does not exist.
    ///
    /// # Errors
    /// `Unavailable`; `Invalid` when it is not said how an object store is to be reached;
    /// `Unsupported` for one when this program was built without them, and for another host's store,
    /// which takes more than a place.
    pub fn store(&self, access: &S3Access) -> Result<Arc<dyn Store>> {
        #[cfg(not(feature = "s3"))]
        let _ = access;
        match self {
            Self::Directory(path) => Ok(Arc::new(LocalStore::open(path)?)),
            #[cfg(feature = "s3")]
            Self::S3 { bucket, prefix } => {
                Ok(Arc::new(super::s3::S3Store::open(bucket, prefix, access)?))
            }
            #[cfg(not(feature = "s3"))]
            Self::S3 { .. } => Err(Error::new(
                crate::Kind::Unsupported,
                "this dray was built without object stores",
            )),
            Self::Peer { host, .. } => Err(Error::new(
                crate::Kind::Unsupported,
                format!("only the agent can use the store at {host}"),
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
        let peer =
            |host: &str, folder: &str| Location::Peer { host: host.into(), folder: folder.into() };
        for (text, place, printed) in [
            ("/srv/backups", Location::Directory("/srv/backups".into()), "/srv/backups"),
            ("file:///srv/b", Location::Directory("/srv/b".into()), "/srv/b"),
            ("s3://vms", s3("vms", ""), "s3://vms"),
            ("s3://vms/a/b/", s3("vms", "a/b"), "s3://vms/a/b"),
            ("dray://hostb", peer("hostb", ""), "dray://hostb"),
            ("dray://hostb/team1/", peer("hostb", "team1"), "dray://hostb/team1"),
        ] {
            assert_eq!(text.parse::<Location>().unwrap(), place);
            assert_eq!(place.to_string(), printed);
        }
        for wrong in ["", "file://srv", "s3://", "s3:///x", "dray:///x", "ftp://host/x"] {
            assert!(wrong.parse::<Location>().is_err(), "{wrong}");
        }
    }
}
