//! The other hosts: who of them answers.

use super::Refusal;
use serde::{Deserialize, Serialize};

/// Asks every peer of the configuration who it is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peers {}

/// A peer, as it was found.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its name: that in its certificate.
    pub peer: String,
    /// Where it was asked.
    pub address: String,
    /// What came of it.
    pub state: PeerState,
    /// How long a connection to it takes, in milliseconds; none when there was no connection.
    pub rtt_ms: Option<f64>,
    /// Name and version of its software; none unless it answers.
    pub agent: Option<String>,
    /// Why it does not answer.
    pub error: Option<Refusal>,
}

/// What came of asking a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerState {
    /// It answers, and each side accepts the other's certificate.
    Ready,
    /// One side does not accept the other's certificate.
    Untrusted,
    /// It is there, and says no or speaks another version of the protocol.
    Refuses,
    /// It cannot be reached, or does not answer in time.
    Silent,
}
