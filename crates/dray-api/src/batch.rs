//! Several migrations with one command: a batch. The agent keeps its queue, durably.

use super::Refusal;
use super::command::{Migrate, Subject};
use super::progress::Progress;
use super::report::Summary;
use super::text;
use dray_types::{BatchId, BitRate, MigrationId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Migrations of one batch that run at the same time, when nobody says how many: while one hands
/// over or is verified, another uses the link.
pub const JOBS: usize = 2;
/// Migrations of one batch: more than a host has VMs.
pub const MAX_MOVES: usize = 1024;

fn jobs() -> usize {
    JOBS
}

/// Begins several migrations, one after the other or together.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// Each as it would be asked for alone; `detach` says nothing here, and `bandwidth` is that
    /// migration's own limit.
    pub moves: Vec<Migrate>,
    /// How many run at the same time.
    #[serde(default = "jobs")]
    pub jobs: usize,
    /// Limit of everything that all of them send together; none when absent.
    #[serde(default)]
    pub budget: Option<BitRate>,
    /// One after the other as they are listed; otherwise the shortest first, as predicted.
    #[serde(default)]
    pub in_order: bool,
    /// Answer once the batch is durable.
    #[serde(default)]
    pub detach: bool,
}

/// A batch as an operator names it: its id, or enough of its beginning to tell it from others.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BatchRef(pub String);

impl fmt::Display for BatchRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Asks for every batch that the agent knows, or for one.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batches {
    /// Which one; all when absent.
    #[serde(default)]
    pub batch: Option<BatchRef>,
}

/// Follows a batch to its end.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchWatch {
    /// Which; the only one running when absent.
    #[serde(default)]
    pub batch: Option<BatchRef>,
}

/// Begins nothing more of a batch, and cancels what of it is before its handover.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchCancel {
    /// Which; the only one running when absent.
    #[serde(default)]
    pub batch: Option<BatchRef>,
}

/// Changes what a batch may send, or how many of it run at the same time.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchLimit {
    /// Which; the only one running when absent.
    #[serde(default)]
    pub batch: Option<BatchRef>,
    /// The new budget; none when absent.
    #[serde(default)]
    pub budget: Option<BitRate>,
}

/// What one migration of a batch is doing, in one word.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoveState {
    /// Its turn has not come.
    Waiting,
    /// The migration is running.
    Running,
    /// The target is the owner and has every block.
    Completed,
    /// Ended by the operator; the source is the owner.
    Cancelled,
    /// Ended by a failure.
    Failed,
}

impl MoveState {
    /// Whether nothing more will happen to it.
    pub const fn is_over(self) -> bool {
        !matches!(self, Self::Waiting | Self::Running)
    }
}

/// One migration of a batch.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MoveStatus {
    /// The VM's name, that of its QMP socket while it is not known, or the images' names.
    pub name: String,
    /// The VM or the images that the migration moves.
    pub subject: Subject,
    /// Name of the target host.
    pub to: String,
    /// What it is doing.
    pub state: MoveState,
    /// Its id, once it has one.
    #[serde(default, with = "text::optional_id", skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationId>,
    /// Seconds that it was predicted to take; nobody knew when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_seconds: Option<f64>,
    /// How far it is, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// How it ended, when it came through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// Why it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Refusal>,
}

/// A batch: an event while it is watched, and its last line.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct BatchStatus {
    /// Id of the batch.
    #[serde(with = "text::id")]
    pub batch: BatchId,
    /// This host.
    pub from: String,
    /// Milliseconds since 1970 (UTC) at the start.
    pub started_unix_ms: u64,
    /// Seconds since then, or until the end.
    pub elapsed_seconds: f64,
    /// Nothing of it runs or waits.
    pub over: bool,
    /// How many run at the same time.
    pub jobs: usize,
    /// Limit of everything that they send together.
    pub budget: Option<BitRate>,
    /// Sent by all of them in the last second, in bytes a second.
    pub rate: u64,
    /// Each, in the order in which they are begun.
    pub moves: Vec<MoveStatus>,
}

impl BatchStatus {
    /// How many are in this state.
    pub fn count(&self, state: MoveState) -> usize {
        self.moves.iter().filter(|one| one.state == state).count()
    }
}
