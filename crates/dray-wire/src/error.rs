//! Why bytes from a peer were refused.

/// Bytes from a peer that are not what the protocol allows at this place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The peer does not speak dray's protocol at all.
    #[error("the peer does not speak dray's protocol: its first bytes are not 'dray'")]
    NotDray,
    /// No protocol version in common.
    #[error(
        "no common protocol version: the peer speaks {their_min} to {their_max}, this agent \
         {our_min} to {our_max}"
    )]
    Version {
        /// Lowest version the peer speaks.
        their_min: u16,
        /// Highest version the peer speaks.
        their_max: u16,
        /// Lowest version this agent speaks.
        our_min: u16,
        /// Highest version this agent speaks.
        our_max: u16,
    },
    /// A length over its limit.
    #[error("{what} of {len} bytes is over the limit of {limit}")]
    TooLong {
        /// What was too long.
        what: &'static str,
        /// How long it said it was.
        len: u64,
        /// The limit.
        limit: u64,
    },
    /// Bytes that do not decode.
    #[error("{what} does not decode: {why}")]
    Malformed {
        /// What was being decoded.
        what: &'static str,
        /// What was wrong with it.
        why: String,
    },
    /// A run whose content does not have the hash its frame names (I3).
    #[error("the content of a run does not match its hash")]
    Hash,
}

impl WireError {
    pub(crate) fn malformed(what: &'static str, why: impl ToString) -> Self {
        Self::Malformed { what, why: why.to_string() }
    }
}
