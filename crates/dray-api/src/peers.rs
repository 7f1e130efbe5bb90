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
    /// The pools there that this host may use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<PeerPool>,
    /// For how many whole days its certificates are valid still; none unless it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_days: Option<u64>,
    /// By how many milliseconds its clock is ahead of this host's, to half a round trip; none unless it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_ahead_ms: Option<i64>,
    /// What the last migration there has measured of the link, in bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Why it does not answer.
    pub error: Option<Refusal>,
}

/// A pool of a peer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PeerPool {
    /// Its name.
    pub name: String,
    /// Bytes that are free in it, if that is known.
    pub free: Option<u64>,
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
