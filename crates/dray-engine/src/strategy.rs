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
}

impl Strategy {
    /// Whether blocks are copied before handover at all.
    pub const fn copies(self) -> bool {
        !matches!(self, Self::PostCopy)
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
        })
    }
}

impl FromStr for Strategy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "pre-copy" => Ok(Self::PreCopy),
            "post-copy" => Ok(Self::PostCopy),
            "hybrid" => Ok(Self::Hybrid),
            _ => Err(format!("'{text}' is not a strategy; use pre-copy, post-copy or hybrid")),
        }
    }
}
