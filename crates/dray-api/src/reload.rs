//! Reading the configuration again.

use super::text;
use dray_types::MigrationId;
use serde::{Deserialize, Serialize};

/// Asks the agent to read its configuration and its certificates again.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reload {}

/// What that has changed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Reloaded {
    /// What is in force now, a line each; empty when nothing has changed.
    pub changes: Vec<String>,
    /// Keys and tables of the file that differ and are not in force before the agent is restarted.
    pub needs_restart: Vec<String>,
    /// Connections of peers that were ended, because these peers may do less than before.
    pub ended: u64,
    /// Migrations under way with hosts that are no peers any more. They do not go on.
    pub held: Vec<Held>,
    /// Why the file is not kept as the last good configuration, if it cannot be kept; absent when it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_kept: Option<String>,
}

/// A migration that does not go on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Held {
    /// Its id.
    #[serde(with = "text::id")]
    pub migration: MigrationId,
    /// The host at its other end.
    pub peer: String,
}
