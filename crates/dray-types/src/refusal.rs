//! [`Refusal`]: why something was not done, the same from host to host, from an agent to a command, and on a
//! terminal.

use crate::text::harmless;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;

/// What sort of failure it was: what a program decides by. Each has an exit code of its own in the
/// `dray` command, so kinds are added but never renumbered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// A defect of dray, or a failure that has no better name.
    Internal,
    /// The agent is not there or does not answer.
    AgentUnreachable,
    /// The request or the configuration makes no sense.
    Invalid,
    /// No such VM, image, migration or peer.
    NotFound,
    /// Something else is using it, or it is in a state in which this cannot be done.
    Conflict,
    /// Not allowed: outside the pools, wrong certificate, missing rights.
    Denied,
    /// The other host cannot be reached, or the link was lost for too long.
    Peer,
    /// QEMU refused, failed or went away.
    Hypervisor,
    /// No room left.
    NoSpace,
    /// A disk could not be read or written.
    Io,
    /// The operator cancelled it.
    Cancelled,
    /// The target is not equal to the source.
    Verification,
    /// The software on the other side (agent, QEMU, protocol) is too old or too new.
    Unsupported,
    /// It would lose data, and nobody has said that this is accepted.
    DataAtRisk,
}

impl ErrorKind {
    /// Every kind, in the order of the documentation.
    pub const ALL: [Self; 14] = [
        Self::Internal,
        Self::AgentUnreachable,
        Self::Invalid,
        Self::NotFound,
        Self::Conflict,
        Self::Denied,
        Self::Peer,
        Self::Hypervisor,
        Self::NoSpace,
        Self::Io,
        Self::Cancelled,
        Self::Verification,
        Self::Unsupported,
        Self::DataAtRisk,
    ];
}

/// One failure: what was being done, why it failed, and what the operator can do.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Refusal {
    /// What sort of failure.
    pub kind: ErrorKind,
    /// What failed, with names: `cannot migrate vm1 to hostb`.
    pub what: String,
    /// Why: `connection refused by 10.0.0.2:7600`.
    pub why: String,
    /// What to do about it.
    #[serde(default)]
    pub hint: Option<String>,
}

impl Refusal {
    /// An error without a hint.
    pub fn new(kind: ErrorKind, what: impl Into<String>, why: impl fmt::Display) -> Self {
        Self { kind, what: what.into(), why: why.to_string(), hint: None }
    }

    /// All of it as one text: what failed, why, and what to do.
    pub fn in_words(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{self}; {hint}"),
            None => self.to_string(),
        }
    }

    /// The same error with texts of a bounded length, as they may be shown.
    #[must_use]
    pub fn harmless(self) -> Self {
        let Self { kind, what, why, hint } = self;
        Self { kind, what: harmless(what), why: harmless(why), hint: hint.map(harmless) }
    }

    /// The same error with what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// One of another host, as it may be shown.
///
/// # Errors
/// When there is something else.
pub fn de_refusal<'de, D: Deserializer<'de>>(from: D) -> Result<Refusal, D::Error> {
    Refusal::deserialize(from).map(Refusal::harmless)
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)
    }
}

impl std::error::Error for Refusal {}
