//! Recording: a guest's accesses to an image, one by one, while they happen.

use serde::{Deserialize, Serialize};

/// Records what guests do to an image of this host, as `accesses` events, until the time is over,
/// the image is no longer served here, or the client hangs up.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Name of the image.
    pub image: String,
    /// How long, in milliseconds; until something else ends it when absent.
    #[serde(default)]
    pub duration_ms: Option<u64>,
}

/// Whether an access reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum AccessKind {
    /// It reads.
    R,
    /// It writes, zeroes or discards.
    W,
}

/// An access, as `[nanoseconds since the beginning, "R" or "W", offset, length]`, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AccessLine(pub u64, pub AccessKind, pub u64, pub u64);

/// Accesses that came since the last event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AccessBatch {
    /// In order of time.
    pub accesses: Vec<AccessLine>,
    /// Nanoseconds since the beginning until which everything was told.
    pub until_ns: u64,
    /// Accesses that were missed since the beginning because the client took the others too slowly.
    pub missed: u64,
}

/// Why a recording ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordEnd {
    /// The time was over.
    Duration,
    /// The image is no longer served here, or not with the same length.
    Gone,
}

/// A recording that ended by itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Recorded {
    /// The image.
    pub image: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Accesses that were told.
    pub accesses: u64,
    /// Accesses that were missed.
    pub missed: u64,
    /// How long it was recorded, in nanoseconds.
    pub duration_ns: u64,
    /// Why it ended.
    pub end: RecordEnd,
}
