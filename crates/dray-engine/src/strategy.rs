//! Strategies: which blocks move before handover and which after.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A named setting of the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Copy all, then re-send what was written until the rest fits the downtime limit; everything
    /// is equal at handover.
    PreCopy,
    /// Copy nothing; hand over a map and backfill everything.
    PostCopy,
    /// Copy all once; hand over a map of what was written meanwhile and backfill that
    /// (pre+post-copy in the scheduling literature).
    Hybrid,
    /// Copy nothing; hand over a map and fetch what the guest asks for, the rest when the operator
    /// says so (decoupled storage migration, DLSM).
    Deferred,
}

impl Strategy {
    /// All of them, in the order in which they are listed to people.
    pub const ALL: [Self; 4] = [Self::PreCopy, Self::PostCopy, Self::Hybrid, Self::Deferred];

    /// Whether blocks are copied before handover at all.
    pub const fn copies(self) -> bool {
        !matches!(self, Self::PostCopy | Self::Deferred)
    }

    /// Whether Backfill waits for the operator.
    pub const fn defers(self) -> bool {
        matches!(self, Self::Deferred)
    }

    /// Whether everything must be equal at handover.
    pub const fn syncs(self) -> bool {
        matches!(self, Self::PreCopy)
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PreCopy => "pre-copy",
            Self::PostCopy => "post-copy",
            Self::Hybrid => "hybrid",
            Self::Deferred => "deferred",
        })
    }
}

impl FromStr for Strategy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::ALL.iter().find(|strategy| strategy.to_string() == text);
        named.copied().ok_or_else(|| {
            let all: Vec<_> = Self::ALL.iter().map(ToString::to_string).collect();
            format!("'{text}' is not a strategy; use one of {}", all.join(", "))
        })
    }
}
