//! [`Endpoint`]: where a client finds the images of a host.

use crate::text;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// What is spoken at an endpoint. It travels by number: new kinds at the end only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndpointKind {
    /// NBD on a unix socket.
    Nbd,
}

/// A place in the file system of a host at which its images are served.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Endpoint {
    /// What is spoken there.
    pub kind: EndpointKind,
    /// Where it is.
    #[serde(deserialize_with = "text::de_text")]
    pub path: String,
}

impl Endpoint {
    /// NBD on the unix socket at `path`.
    pub fn nbd(path: &Path) -> Self {
        Self { kind: EndpointKind::Nbd, path: path.to_string_lossy().into_owned() }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.path)
    }
}
