//! Seeding: a target reads images from backups before they come.

use super::command::Subject;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Has the target read images from its backup repositories, as they were at a closed generation, so
/// that a migration that follows sends only what was written since. Ends with [`Seeded`], after
/// [`Event::Seeding`](super::Event::Seeding).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// What will be moved.
    pub subject: Subject,
    /// Name of the target.
    pub to: String,
    /// Pool at the target; its default one when absent.
    #[serde(default)]
    pub pool: Option<String>,
    /// Put before every name at the target.
    #[serde(default)]
    pub prefix: Option<String>,
    /// Names at the target, by image or device here.
    #[serde(default)]
    pub names: BTreeMap<String, String>,
}

/// How far a seeding is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct SeedProgress {
    /// Bytes of data that have arrived.
    pub bytes_done: u64,
    /// Bytes of data in all, as far as they are counted.
    pub bytes_total: u64,
}

/// What came of a seeding.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Seeded {
    /// The target.
    pub to: String,
    /// Each image that can begin with a backup, or could not.
    pub images: Vec<SeededImage>,
}

/// What came of one image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SeededImage {
    /// Its name here.
    pub image: String,
    /// Number of the generation that the target has now; absent when nothing was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Bytes of data that were read from each repository, by its name at the target.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub given: BTreeMap<String, u64>,
    /// Bytes that no repository could give: the source will send them.
    #[serde(default)]
    pub missing_bytes: u64,
    /// What stood in the way, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}
