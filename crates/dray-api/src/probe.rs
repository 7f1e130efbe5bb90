//! How fast the links to other hosts are.

use super::Refusal;
use serde::{Deserialize, Serialize};

/// Measures the links to peers, one after the other; each takes half a second.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Names of peers; all of the configuration when there is none.
    #[serde(default)]
    pub peers: Vec<String>,
}

/// What was measured of one peer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PeerProbe {
    /// Its name.
    pub peer: String,
    /// Bytes a second that one connection carries from here to there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u64>,
    /// Bytes a second that the pool there is written with to which images from here come by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<u64>,
    /// Why nothing was measured.
    pub error: Option<Refusal>,
}
