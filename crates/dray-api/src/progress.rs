//! Events: what a watched migration reports while it runs.

use super::text;
use dray_types::Strategy;
use dray_types::{BitRate, MigrationId};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One event line of a watched migration.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The migration has an id; sent first.
    Started(Started),
    /// How far it is; about once a second, and at every change of phase.
    Progress(Progress),
    /// Something the operator should know: the link was lost, a disk was released.
    Notice {
        /// One line, lower case.
        text: String,
    },
    /// What guests did to an image that is recorded; about ten times a second.
    Accesses(super::AccessBatch),
    /// How far a target is that reads images from backups; about three times a second.
    Seeding(super::SeedProgress),
    /// How far the comparison of base images with files at the target is, both hosts together; about
    /// three times a second.
    Comparing(super::SeedProgress),
    /// What a target has of images before they are migrated.
    Seeded(super::Seeded),
    /// How far a backup, a restore or a check is; about once a second.
    Backup(super::BackupProgress),
    /// How far a batch is; about once a second, and whenever one of its migrations begins or ends.
    Batch(Box<super::BatchStatus>),
}

/// A migration exists: its intent is durable.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Started {
    /// Its id.
    #[serde(with = "text::id")]
    pub migration: MigrationId,
}

/// The phases a migration goes through, in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Checks, exports, adopting the disks.
    Prepare,
    /// Blocks go to the target while the guest runs at the source.
    Copy,
    /// What the guest wrote meanwhile goes again, and its memory goes.
    Sync,
    /// Ownership passes: the guest is stopped.
    Handover,
    /// The guest runs at the target; missing blocks follow.
    Backfill,
    /// Every block is there; disks are verified and released.
    Release,
    /// It is over.
    Ended,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Prepare => "prepare",
            Self::Copy => "copy",
            Self::Sync => "sync",
            Self::Handover => "handover",
            Self::Backfill => "backfill",
            Self::Release => "release",
            Self::Ended => "ended",
        })
    }
}

/// What a phase is busy with, where the phase alone does not say it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Guest memory is moving.
    Memory,
    /// Blocks are compared with what the target has from an earlier try.
    Compare,
    /// The target re-reads its disk for `verify`.
    Verify,
    /// Waiting for the link or the peer to come back.
    WaitForPeer,
    /// The target makes a qcow2 of its raw image.
    Convert,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Memory => "memory",
            Self::Compare => "compare",
            Self::Verify => "verify",
            Self::WaitForPeer => "waiting for the peer",
            Self::Convert => "making a qcow2",
        })
    }
}

/// How much of something has moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Amounts {
    /// Bytes that this phase has to bring to the target (holes and zeros count as done at once), or
    /// in Release, to compare there or to copy into a qcow2.
    pub bytes_total: u64,
    /// Of these, the bytes that are there, or are compared or copied.
    pub bytes_done: u64,
    /// Bytes of blocks that the target, as owner, does not have yet.
    pub bytes_missing: u64,
    /// Blocks of 4 KiB written since they were sent.
    pub dirty_blocks: u64,
}

impl Amounts {
    /// The sum of both, for totals.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            bytes_total: self.bytes_total + other.bytes_total,
            bytes_done: self.bytes_done + other.bytes_done,
            bytes_missing: self.bytes_missing + other.bytes_missing,
            dirty_blocks: self.dirty_blocks + other.dirty_blocks,
        }
    }
}

/// How far one image is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageProgress {
    /// The image's name on this host.
    pub image: String,
    /// How much has moved.
    #[serde(flatten)]
    pub amounts: Amounts,
}

impl ImageProgress {
    /// Of an image of which nothing has moved.
    pub fn new(image: impl Into<String>) -> Self {
        Self { image: image.into(), amounts: Amounts::default() }
    }
}

/// How far a migration is.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Progress {
    /// Id of the migration.
    #[serde(with = "text::id")]
    pub migration: MigrationId,
    /// Which blocks move when.
    pub strategy: Strategy,
    /// The present phase.
    pub phase: Phase,
    /// What the phase is busy with, where the phase does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<Step>,
    /// Seconds since it started.
    pub elapsed_seconds: f64,
    /// All images together.
    pub total: Amounts,
    /// Progress of each image.
    pub images: Vec<ImageProgress>,
    /// Guest memory sent, in bytes.
    pub memory_bytes: u64,
    /// Guest memory left to send as QEMU estimates it, in bytes.
    pub memory_left: u64,
    /// Everything sent so far, in bytes, as on the wire before TLS.
    pub wire_bytes: u64,
    /// Bytes that need not be sent because the target has the same content somewhere, so far.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_from_target: u64,
    /// Sent in the last second, in bytes a second.
    pub rate: u64,
    /// New dirty bytes a second.
    pub dirty_rate: u64,
    /// Times the whole image was gone through; the copy is round 1.
    pub round: u32,
    /// Reads at the target that had to wait for a missing block.
    pub remote_reads: u64,
    /// Backfill waits for `dray backfill start`: only what the guest asks for is fetched.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// False while the peer cannot be reached.
    pub link_up: bool,
    /// The limit in force.
    pub bandwidth: Option<BitRate>,
    /// Predicted seconds to the end.
    pub seconds_left: Option<f64>,
    /// Whether it will end: the guest writes no faster than is sent, as predicted, and of its memory
    /// as QEMU measures it. Not there when nobody knows, and after the handover.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub converges: Option<bool>,
    /// Predicted stop of the guest in milliseconds, until it has happened; then what it was.
    pub downtime_ms: Option<f64>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Progress {
    /// Everything is at the target: what was still to be sent when that was measured last is.
    pub fn complete(&mut self) {
        let rows = self.images.iter_mut().map(|image| &mut image.amounts);
        for amounts in rows.chain([&mut self.total]) {
            (amounts.bytes_done, amounts.bytes_missing) = (amounts.bytes_total, 0);
        }
        (self.phase, self.rate, self.seconds_left) = (Phase::Ended, 0, None);
    }

    /// A progress report of a migration that has done nothing yet.
    pub fn new(migration: MigrationId, strategy: Strategy) -> Self {
        Self {
            migration,
            strategy,
            phase: Phase::Prepare,
            step: None,
            elapsed_seconds: 0.0,
            total: Amounts::default(),
            images: Vec::new(),
            memory_bytes: 0,
            memory_left: 0,
            wire_bytes: 0,
            bytes_from_target: 0,
            rate: 0,
            dirty_rate: 0,
            round: 0,
            remote_reads: 0,
            paused: false,
            link_up: true,
            bandwidth: None,
            seconds_left: None,
            converges: None,
            downtime_ms: None,
        }
    }
}
