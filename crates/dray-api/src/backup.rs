//! Backups: what is asked for, what is told while they are made, and what became of them.

use super::generation::GenerationStatus;
use super::text;
use dray_types::{BitRate, ImageId};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Makes one backup of some images, all as they are at one moment. Ends when the client hangs up.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backup {
    /// Names of the images: all of one VM, or one.
    pub images: Vec<String>,
    /// A destination's name in the configuration, or a URL: `file:///folder`. The only one that is configured when
    /// absent.
    #[serde(default)]
    pub to: Option<String>,
    /// File of the repository's key; as configured when absent.
    #[serde(default)]
    pub key_file: Option<PathBuf>,
    /// Socket of the guest agent in the VM: freeze its file systems for the moment.
    #[serde(default)]
    pub fsfreeze: Option<PathBuf>,
    /// Limit of what is read; no more than that is stored. None when absent.
    #[serde(default)]
    pub bandwidth: Option<BitRate>,
    /// Read all blocks, also those that the repository has already already.
    #[serde(default)]
    pub full: bool,
    /// Remove all but this many of the newest backups of each image at the end; none when absent.
    #[serde(default)]
    pub keep_last: Option<u32>,
}

/// Ends the backup of an image that is under way, whoever began it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupCancel {
    /// The image.
    pub image: String,
}

/// Where a repository is, for what is done to it as a whole.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repository {
    /// A destination's name in the configuration, or a URL. The only one that is configured when absent.
    #[serde(default)]
    pub at: Option<String>,
    /// File of the repository's key; as configured when absent.
    #[serde(default)]
    pub key_file: Option<PathBuf>,
}

/// Makes a repository.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BackupInit(pub Repository);

/// Removes content that no backup in a repository needs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BackupGc(pub Repository);

/// Lists the backups in a repository.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backups {
    /// Which; without one the configured destinations and what is under way.
    #[serde(default)]
    pub repository: Option<Repository>,
    /// Only of this image: its name, or its id.
    #[serde(default)]
    pub image: Option<String>,
}

/// Checks the backups in a repository.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupVerify {
    /// The repository to list; none: what is configured and in progress.
    pub repository: Repository,
    /// Only of this image: its name, or its id.
    #[serde(default)]
    pub image: Option<String>,
    /// Read and check all content, and not only what describes it.
    #[serde(default)]
    pub read_data: bool,
}

/// Removes backups. A backup stays when any of these keeps it; days, weeks and months are UTC's.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupPrune {
    /// The repository to prune.
    pub repository: Repository,
    /// Only of this image: its name, or its id.
    #[serde(default)]
    pub image: Option<String>,
    /// The newest so many stay.
    #[serde(default)]
    pub keep_last: u32,
    /// Those of the last so many days stay.
    #[serde(default)]
    pub keep_within_days: u32,
    /// The newest of each of the last so many days that have one stays.
    #[serde(default)]
    pub keep_daily: u32,
    /// Likewise by week.
    #[serde(default)]
    pub keep_weekly: u32,
    /// Likewise by month.
    #[serde(default)]
    pub keep_monthly: u32,
    /// Only tell what would be removed.
    #[serde(default)]
    pub dry_run: bool,
}

/// What was removed, or would be.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct BackupPruned {
    /// Nothing was removed.
    pub dry_run: bool,
    /// Backups that stay.
    pub kept: u64,
    /// Those that went.
    pub removed: Vec<BackupStatus>,
}

/// What a collection did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct BackupCollected {
    /// Bytes of content that no backup needed and that went.
    pub removed_bytes: u64,
    /// Bytes that go in a collection after the grace period.
    pub condemned_bytes: u64,
    /// Backups whose content was moved together.
    pub revised_backups: u64,
    /// Writers that had given no sign of life and were given up.
    pub fenced_writers: u64,
    /// Collections that wait for writers or for the grace period.
    pub waiting: u64,
}

/// Makes an image of a backup.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    /// The repository.
    pub repository: Repository,
    /// The image: its name when it was backed up, or its id.
    pub image: String,
    /// The generation's number, or the first digits of its id; the newest backup when absent.
    #[serde(default)]
    pub generation: Option<String>,
    /// Name of the new image.
    pub name: String,
    /// The pool that it is put into; the first one when absent.
    #[serde(default)]
    pub pool: Option<String>,
    /// Limit of what is written, none when absent.
    #[serde(default)]
    pub bandwidth: Option<BitRate>,
}

/// How far a backup, a restore or a check is.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct BackupProgress {
    /// The repository, as the operator named it.
    pub to: String,
    /// Seconds since it began.
    pub elapsed_seconds: f64,
    /// Progress of each image.
    pub images: Vec<ImageAmount>,
}

/// How much of one image was dealt with.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ImageAmount {
    /// Name of the image.
    pub image: String,
    /// Bytes of the image to deal with; zero until that is known.
    pub bytes_total: u64,
    /// Of these, what was dealt with.
    pub bytes_done: u64,
    /// Bytes that were new to the repository, as stored there.
    pub stored_bytes: u64,
}

/// How far a backup can be trusted to be what a guest would find.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Consistency {
    /// As after a power cut at that moment.
    Crash,
    /// The guest's file systems were frozen.
    Filesystem,
}

/// A backup that was made.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct BackupDone {
    /// The repository, as the operator named it.
    pub to: String,
    /// The moment, in milliseconds since 1970.
    pub taken_unix_ms: u64,
    /// How long guests' writes were held back for it, in milliseconds.
    pub quiet_ms: f64,
    /// Seconds that everything took.
    pub seconds: f64,
    /// What guests would find.
    pub consistency: Consistency,
    /// The backup of each image.
    pub images: Vec<BackedUp>,
    /// Earlier backups that were removed.
    pub pruned: u64,
}

/// What was done for one image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BackedUp {
    /// Name of the image.
    pub image: String,
    /// The generation that is in backup now.
    pub generation: GenerationStatus,
    /// The generation of the backup that this one builds on.
    pub parent: Option<GenerationStatus>,
    /// Why everything was read; none of an incremental backup.
    pub full_because: Option<String>,
    /// The image's length in bytes.
    pub size: u64,
    /// Bytes that may have changed since the parent, in blocks of 4 KiB; everything without one.
    pub changed_bytes: u64,
    /// Bytes that were new to the repository, as stored there.
    pub stored_bytes: u64,
    /// Bytes that were kept aside because the guest overwrote them first.
    pub kept_aside_bytes: u64,
}

/// A backup in a repository.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BackupStatus {
    /// The image's name when it was made.
    pub image: String,
    /// The image's id.
    #[serde(with = "text::id")]
    pub id: ImageId,
    /// The generation that it holds.
    pub generation: GenerationStatus,
    /// The host that made it.
    pub host: String,
    /// Its moment, in milliseconds since 1970.
    pub taken_unix_ms: u64,
    /// What guests would find.
    pub consistency: Consistency,
    /// The image's length in bytes.
    pub size: u64,
    /// What it added to the repository, in bytes.
    pub added_bytes: u64,
}

/// A configured destination.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DestinationStatus {
    /// Name of the repository in the configuration.
    pub name: String,
    /// URL of the repository.
    pub url: String,
    /// Images that are backed up there by themselves.
    pub images: Vec<String>,
    /// How often, in seconds.
    pub every_seconds: Option<u64>,
    /// When that was last done, in milliseconds since 1970.
    pub last_unix_ms: Option<u64>,
    /// Why the last try failed, if it did.
    pub error: Option<String>,
}

/// What there is of backups.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct BackupListing {
    /// The configured destinations; when no repository was named.
    pub destinations: Vec<DestinationStatus>,
    /// What is under way; when no repository was named.
    pub running: Vec<BackupProgress>,
    /// The backups in the repository, oldest first.
    pub backups: Vec<BackupStatus>,
    /// What cannot be read there, and why.
    pub damaged: Vec<String>,
}

/// Backups that were checked.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct BackupVerified {
    /// Backups that were looked at.
    pub backups: u64,
    /// Bytes of their content that were read.
    pub bytes_read: u64,
    /// What is wrong; with everything in order nothing.
    pub damaged: Vec<String>,
}

/// An image that was made of a backup.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Restored {
    /// Name of the image.
    pub image: String,
    /// Its path.
    pub path: PathBuf,
    /// The generation that it holds, of the image that was backed up.
    pub generation: GenerationStatus,
    /// That image's name then.
    pub of: String,
    /// Its length in bytes.
    pub size: u64,
    /// Bytes that are not zeros and were written.
    pub written_bytes: u64,
    /// Seconds that it took.
    pub seconds: f64,
}

/// A repository that was made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RepositoryMade {
    /// The repository, as the command named it.
    pub at: String,
    /// Whether it is encrypted.
    pub encrypted: bool,
}
