//! What is wrong on a host just now.

use serde::{Deserialize, Serialize};

/// One thing that does not work. Everything that it does not concern goes on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Trouble {
    /// What it is about, for programs: `pool.ssd`, `certificates`, `configuration`, …
    pub key: String,
    /// What does not work.
    pub what: String,
    /// The cause.
    pub why: String,
    /// How the operator can remove the cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Milliseconds since 1970 (UTC) when it was first met by this agent.
    pub since_unix_ms: u64,
}
