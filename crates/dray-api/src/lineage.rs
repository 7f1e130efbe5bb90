//! The generations of an image, and who holds them.

use super::generation::GenerationStatus;
use super::report::ImageState;
use super::text;
use dray_types::ImageId;
use serde::{Deserialize, Serialize};

/// A closed generation, as `dray lineage` shows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClosedGeneration {
    /// Number and id of the generation.
    #[serde(flatten)]
    pub at: GenerationStatus,
    /// Why it was closed.
    pub reason: String,
    /// The host that kept a replica of it then.
    pub host: String,
    /// When, in milliseconds since 1970 (UTC).
    pub closed_unix_ms: u64,
    /// Blocks of 4 KiB written during it; null of the first one that is remembered.
    pub changed_blocks: Option<u64>,
    /// This host has a replica of it.
    pub here: bool,
    /// Repositories that it is in backup in, as far as this host has put it there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backups: Vec<String>,
    /// Who holds it, of the repositories and peers that have answered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<Holder>,
}

/// How a generation is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeldAs {
    /// In a repository.
    Backup,
    /// As a replica at another host.
    Replica,
}

/// Who holds a generation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Holder {
    /// The repository's or the peer's name.
    pub place: String,
    /// How it is held.
    pub held_as: HeldAs,
    /// Bytes of the image that a replica does not hold as they were.
    #[serde(default, skip_serializing_if = "super::report::is_zero")]
    pub distrusted_bytes: u64,
}

/// A generation that somebody holds and that is not in the line as this host knows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stray {
    /// Number and id of the generation.
    #[serde(flatten)]
    pub at: GenerationStatus,
    /// Who holds it.
    pub held: Vec<Holder>,
}

/// The line of an image, as this host knows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LineageStatus {
    /// The image's name here.
    pub image: String,
    /// Its id.
    #[serde(with = "text::id")]
    pub id: ImageId,
    /// This host.
    pub host: String,
    /// What this host's copy is.
    pub state: ImageState,
    /// The closed generations, oldest first.
    pub past: Vec<ClosedGeneration>,
    /// The generation that was open when this host last owned the image.
    pub open: Option<GenerationStatus>,
    /// Blocks of 4 KiB written in it so far; null when nobody needs to know.
    pub changed_blocks: Option<u64>,
    /// Generations that others hold and that are not of this line, or older than it goes back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub strays: Vec<Stray>,
    /// Who could not be asked, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<String>,
}
