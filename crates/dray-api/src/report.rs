//! Results: what the commands answer when they succeed.

use super::Refusal;
use super::command::Subject;
use super::generation::GenerationStatus;
use super::options::Order;
use super::plan::{Predicted, Provided};
use super::progress::{ImageProgress, Progress};
use super::text;
use super::trouble::Trouble;
use super::verified::{Compared, Verified};
use dray_types::{BitRate, ByteSize, Epoch, ImageId, MigrationId};
use dray_types::{Endpoint, Strategy};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Who the agent is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AgentInfo {
    /// Name of this host, as peers know it.
    pub host: String,
    /// Version of the software.
    pub version: String,
    /// Version of this interface.
    pub api_version: u32,
    /// Process id of the agent.
    pub pid: u32,
    /// Names of the peers in its configuration; `peers` asks them.
    #[serde(default)]
    pub peers: Vec<String>,
    /// Bytes of content in this host's pools that its index knows by hash.
    #[serde(default)]
    pub indexed_bytes: u64,
    /// What does not work just now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<Trouble>,
}

/// How a migration ended. Failed and cancelled ones answer with an error instead; in a status both
/// stand side by side.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// The target is the owner and has every block.
    Completed,
    /// The operator stopped it; the source is the owner.
    Cancelled,
    /// It failed.
    Failed,
}

/// How long the guest stood still, in milliseconds, and what for. The parts follow each other and
/// add up to the total.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Downtime {
    /// From the guest's stop at the source to its start at the target.
    pub total: f64,
    /// QEMU stops the guest and sends the last of its memory and device state.
    pub memory: f64,
    /// Writes in flight end and the source's disks are synced.
    pub quiesce: f64,
    /// The missing map and, in pre-copy, the last dirty blocks reach the target.
    pub map: f64,
    /// Prepared at the target, handed over at the source, committed: each made durable.
    pub commit: f64,
    /// The target's QEMU starts the guest.
    pub resume: f64,
}

/// Bytes sent by the source and the target for this migration, by kind; as on the wire before TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct WireBytes {
    /// The sum.
    pub total: u64,
    /// Blocks sent as they are.
    pub raw: u64,
    /// Blocks sent compressed, as sent.
    pub compressed: u64,
    /// Descriptions of zeros and holes.
    pub zero: u64,
    /// Guest memory and device state.
    pub memory: u64,
    /// Messages between the agents.
    pub control: u64,
    /// Hashes: for resuming and verifying.
    pub hash: u64,
}

/// What one image contributed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageSummary {
    /// Its name at the source.
    pub image: String,
    /// Its name at the target.
    pub name_at_target: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Blocks of 4 KiB sent with data, each sending counted.
    pub blocks_sent: u64,
    /// Blocks that were sent with data more than once.
    pub blocks_sent_twice: u64,
    /// Bytes that the target had in a replica of an earlier generation and that nobody had changed
    /// when the migration began.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_from_replica: u64,
    /// Bytes of the image where the target had a file with its content, which it uses where it is.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_in_place: u64,
    /// Bytes that were not sent because the target had the same content somewhere.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_from_target: u64,
    /// Who gave the target what its copy began with, where it had that read for this migration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given: Vec<Provided>,
    /// Why a replica that the target has was of no use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_not_used: Option<String>,
    /// The file name of the qcow2 that the target has made of it, and on which its disk is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qcow2: Option<String>,
    /// Why there is no qcow2 although one was asked for: the disk is raw at the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stays_raw: Option<String>,
}

pub(super) fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// How long each phase of a migration took, in seconds. All but the last make up the total.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct PhaseSeconds {
    /// Checks, and the prediction.
    pub prepare: f64,
    /// All that was to be copied was copied once.
    pub copy: f64,
    /// What the guest wrote meanwhile, and its memory.
    pub sync: f64,
    /// The guest stood still; without a VM, the images did.
    pub handover: f64,
    /// The target fetched what it missed.
    pub backfill: f64,
    /// Since then: the target was compared (`verify`), and QEMU took the disks back.
    pub after: f64,
}

impl PhaseSeconds {
    /// From the start until the source was no longer needed.
    pub fn total(&self) -> f64 {
        self.prepare + self.copy + self.sync + self.handover + self.backfill
    }
}

/// The one object in which `dray migrate --json` ends.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// How the migration ended.
    pub result: Ending,
    /// Id of the migration.
    #[serde(with = "text::id")]
    pub migration: MigrationId,
    /// Name of the VM as its QEMU tells it, when a VM was moved.
    pub vm: Option<String>,
    /// Host it came from.
    pub from: String,
    /// Host it went to.
    pub to: String,
    /// Which blocks moved when.
    pub strategy: Strategy,
    /// The order in which blocks moved.
    pub order: Order,
    /// Milliseconds since 1970 (UTC) at the start.
    pub started_unix_ms: u64,
    /// The same at the end.
    pub ended_unix_ms: u64,
    /// From the start until the source was no longer needed.
    pub total_seconds: f64,
    /// How long each phase took.
    pub phase_seconds: PhaseSeconds,
    /// How long the guest stood still; unknown (null) when the source's agent was restarted before
    /// it had seen the end of it.
    pub downtime_ms: Option<Downtime>,
    /// What crossed the wire.
    pub wire_bytes: WireBytes,
    /// Bytes that were not sent because the target had the same content somewhere in its pools.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_from_target: u64,
    /// Bytes of blocks whose content the target was given, before compression and without zeros.
    pub guest_bytes: u64,
    /// Times the images were gone through; the copy is round 1.
    pub rounds: u32,
    /// Blocks of 4 KiB sent with data, each sending counted.
    pub blocks_sent: u64,
    /// Blocks that were sent with data more than once.
    pub blocks_sent_twice: u64,
    /// Runs asked for again because their hash did not match.
    pub resends: u64,
    /// Times the link was lost and found again.
    pub reconnects: u64,
    /// Reads at the target that had to wait for a missing block.
    pub remote_reads: u64,
    /// Blocks sent because the guest wrote them while they were copied (`mirror`).
    pub blocks_mirrored: u64,
    /// Writes of the guest that were slowed at the source (`--throttle`).
    pub throttled_operations: u64,
    /// How long they waited, summed, in milliseconds.
    pub throttled_ms: f64,
    /// Whether the target's disk was re-read and compared.
    pub verified: Verified,
    /// How much of it was; absent when it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<Compared>,
    /// Why the disks are still on dray at the target, where QEMU was to have them at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_released: Option<String>,
    /// What was predicted at the start; not for hot-set and deferred.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Predicted>,
    /// What came of it, in the same fields; there when `predicted` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actual: Option<Predicted>,
    /// Where the bytes came from, all images together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub providers: Vec<Provided>,
    /// The summary of each image.
    pub images: Vec<ImageSummary>,
}

/// Which end of a migration this agent is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The guest comes from here.
    Source,
    /// The guest goes here.
    Target,
}

/// What a migration is doing, in one word.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationState {
    /// Prepared at the target, not begun.
    Prepared,
    /// The migration is running.
    Running,
    /// Stopped by a lost link or a restart; goes on by itself, or with `dray resume`.
    Interrupted,
    /// An agent has found it when it started, and cannot bring it back yet: it waits for what `error` names.
    Waiting,
    /// Ended well.
    Completed,
    /// Ended by the operator.
    Cancelled,
    /// Ended by a failure.
    Failed,
}

/// A migration as `dray status` shows it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MigrationStatus {
    /// Id of the migration.
    #[serde(with = "text::id")]
    pub migration: MigrationId,
    /// Which end this agent is.
    pub role: Role,
    /// The host at the other end.
    pub peer: String,
    /// Name of the VM, when a VM is moved.
    pub vm: Option<String>,
    /// What it is doing.
    pub state: MigrationState,
    /// Milliseconds since 1970 (UTC) at the start.
    pub started_unix_ms: u64,
    /// The last progress.
    pub progress: Progress,
    /// How it ended, when it has.
    pub summary: Option<Summary>,
    /// Why it failed, or what it waits for.
    pub error: Option<Refusal>,
    /// How long a target has been waiting for its source: for it to begin what is only prepared, or to
    /// come back and say what became of a handover.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_seconds: Option<u64>,
    /// What is moved, where it begins at this host: as `migrate` takes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Subject>,
}

impl MigrationStatus {
    /// The VM's name, or those of the images.
    pub fn moves(&self) -> String {
        what_moves(self.vm.as_deref(), &self.progress.images)
    }
}

/// What a migration moves, for people: the VM by its name, otherwise the first image, and how many more there are.
pub fn what_moves(vm: Option<&str>, images: &[ImageProgress]) -> String {
    match (vm, images) {
        (Some(vm), _) => vm.to_owned(),
        (None, []) => "images".to_owned(),
        (None, [one]) => one.image.clone(),
        (None, [first, others @ ..]) => format!("{} and {} more", first.image, others.len()),
    }
}

/// One export that `prepare` made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PreparedImage {
    /// The image's name at the source.
    pub image: String,
    /// Device id (qdev) of its disk, when a VM is moved.
    pub device: Option<String>,
    /// Name of the export at the target.
    pub export: String,
    /// The target has a file with the image's content and uses it where it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_place: bool,
    /// Values of the `-blockdev` options for it, in order, as JSON.
    pub blockdev: Vec<String>,
}

/// What `prepare` made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Prepared {
    /// The migration it is for.
    #[serde(with = "text::id")]
    pub migration: MigrationId,
    /// The target host.
    pub to: String,
    /// Where the agent there serves images.
    pub endpoint: Endpoint,
    /// The exports.
    pub images: Vec<PreparedImage>,
    /// Further arguments for the target's QEMU: `-S`, `-incoming`, `defer`.
    pub qemu_args: Vec<String>,
    /// The whole command line of the target's QEMU, when it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_line: Option<WaitingCommand>,
}

/// What starts the QEMU that waits at the target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WaitingCommand {
    /// The name of the VM.
    pub vm: Option<String>,
    /// Process id of the QEMU from whose command line it was made.
    pub pid: i32,
    /// The user as whom the QEMU at the target has to run: who may open the disks' files when they are given back.
    pub user: Option<String>,
    /// The program.
    pub program: String,
    /// Each option with its value, if it has one.
    pub options: Vec<(String, Option<String>)>,
    /// What was left out because it cannot be repeated, a sentence each.
    pub left_out: Vec<String>,
    /// Files that QEMU reads.
    pub reads: Vec<PathBuf>,
    /// Sockets that QEMU makes.
    pub makes: Vec<PathBuf>,
    /// The working directory, when one of the file names is relative to it.
    pub directory: Option<PathBuf>,
    /// The QMP socket that dray will use, if QEMU makes it.
    pub qmp: Option<PathBuf>,
}

/// What became of a migration that was cancelled.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Cancelled {
    /// Id of the migration.
    #[serde(with = "text::id")]
    pub migration: MigrationId,
    /// Bytes the target keeps for the next try; 0 when they were discarded.
    pub bytes_kept: u64,
    /// The target was away when it was to throw away what it had received: it does so when it has
    /// heard of the cancel.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub target_was_away: bool,
    /// It was taken back at its target, which knows nothing of the guest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_target: bool,
    /// It had handed over, and its target knows nothing of it any more, or has everything and has not heard that
    /// this is known: the copies here stay, as replicas of no migration.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replicas_stay: bool,
}

impl Cancelled {
    /// This migration, with nothing left of it.
    pub fn of(migration: MigrationId) -> Self {
        Self {
            migration,
            bytes_kept: 0,
            target_was_away: false,
            at_target: false,
            replicas_stay: false,
        }
    }
}

/// The limit that is now in force.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Limited {
    /// Id of the migration.
    #[serde(with = "text::id")]
    pub migration: MigrationId,
    /// The limit; none when null.
    pub bandwidth: Option<BitRate>,
    /// Why a restart of the agent will bring the old limit back; absent when it will not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_kept: Option<String>,
}

/// What this host's copy of an image is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageState {
    /// This host may write it.
    Owner,
    /// It is on its way here.
    Incoming,
    /// A copy of an earlier generation; the owner is elsewhere.
    Replica,
    /// QEMU has it as a plain file; dray is out of the path.
    Released,
    /// Its record cannot be read.
    Unknown,
}

/// An image as `dray images` shows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageStatus {
    /// Its name: the name of its export.
    pub name: String,
    /// Its id, the same on every host.
    #[serde(with = "text::id")]
    pub id: ImageId,
    /// The file or block device, under the name it has now.
    pub path: PathBuf,
    /// Size in bytes, as exported.
    pub size: u64,
    /// Bytes allocated on disk.
    pub allocated: u64,
    /// What this copy is.
    pub state: ImageState,
    /// Who owns it is decided by this counter.
    pub epoch: Epoch,
    /// Blocks of 4 KiB that are still at the source.
    pub missing_blocks: u64,
    /// NBD clients attached.
    pub clients: u32,
    /// Exported with room to grow.
    pub growable: bool,
    /// Writes are refused.
    pub read_only: bool,
    /// Its file was here before the image came, and is used where it lies.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_place: bool,
    /// The migration it takes part in.
    #[serde(default, with = "text::optional_id")]
    pub migration: Option<MigrationId>,
    /// Why a replica must stay: another host still reads from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_for: Option<KeptFor>,
    /// The generation that is open at an owner, or that a replica holds; unknown (absent) for images
    /// on their way and replicas of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationStatus>,
    /// When a replica was left behind, or an image was released, in milliseconds since 1970 (UTC).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_unix_ms: Option<u64>,
    /// Process id of the QEMU that tracks what it writes to a released image; absent when nobody does,
    /// and everything counts as changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracked_by: Option<i32>,
    /// Why its export is closed; absent when it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closed: Option<ClosedExport>,
    /// Who has its file, when dray could not lock it because of that; absent when dray has locked it or needs no
    /// lock, and when its export is closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_locked: Option<NotLocked>,
    /// Writes of its guest may be lost; absent when nothing speaks for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_back_error: Option<LostWrites>,
}

/// Why dray serves an image without locks on its file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NotLocked {
    /// Who has the file.
    pub why: String,
    /// What an operator can do.
    pub hint: String,
}

/// An error of making a guest's writes durable.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LostWrites {
    /// What the device said the last time.
    pub why: String,
    /// How often that has happened since the image was opened.
    pub count: u64,
    /// Flushes have reported it to every client whose writes it may concern; else the next flush of each does
    /// that was not told.
    pub told: bool,
}

/// Why nothing is served of an image, and what to do about it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClosedExport {
    /// What nobody can vouch for, and why.
    pub why: String,
    /// What an operator can do.
    pub hint: String,
}

/// Who still needs a replica.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeptFor {
    /// The owner.
    pub host: String,
    /// Bytes that only the replica has; null until the owner has told.
    pub bytes: Option<u64>,
}

/// One disk that was adopted or released.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SplicedDisk {
    /// Device id (qdev) in the VM.
    pub device: String,
    /// Node name in QEMU.
    pub node: String,
    /// Name of the image.
    pub image: String,
    /// The file or block device.
    pub path: PathBuf,
    /// How long its I/O was held, in milliseconds.
    pub ms: f64,
}

/// The disks that were adopted or released.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Spliced {
    /// In the VM's order.
    pub disks: Vec<SplicedDisk>,
}

/// A part of an image, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ByteRange {
    /// First byte of the range.
    pub start: u64,
    /// How long it is.
    pub len: u64,
}

/// What a claim led to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Claimed {
    /// The image.
    pub image: String,
    /// The epoch it has now.
    pub epoch: Epoch,
    /// The image's new id: from here on it is another line of descent.
    #[serde(with = "text::id")]
    pub id: ImageId,
    /// True when writes that the guest was told are durable may be lost.
    pub writes_may_be_lost: bool,
    /// Bytes gone with the source.
    pub bytes_lost: u64,
    /// Where: at most the first thousand ranges. They are zeros now.
    pub lost: Vec<ByteRange>,
    /// Other images of the same migration, which is void, that this host does not own or has not all of:
    /// closed until they are claimed as well.
    pub others: Vec<String>,
    /// Processes of this host that had the image before the claim, and still run; none when the claim is told once more.
    pub attached: Vec<u32>,
}

/// How a Backfill goes on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Backfilling {
    /// Id of the migration.
    #[serde(with = "text::id")]
    pub migration: MigrationId,
    /// Only what the guest asks for is fetched.
    pub paused: bool,
    /// The limit in force, as far as this host was told; none when null.
    pub bandwidth: Option<BitRate>,
    /// Bytes still at the source.
    pub bytes_missing: u64,
}

/// A QEMU that was told to end.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QemuEnded {
    /// Number of its process.
    pub pid: i32,
    /// Whether the process has ended. One that has not will, and needs nothing more.
    pub ended: bool,
}

/// What unstalling led to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Unstalled {
    /// The image.
    pub image: String,
    /// True when waiting I/O was failed, false when the source was asked again.
    pub failed: bool,
    /// Requests that were waiting.
    pub waiting: u64,
    /// Bytes still missing.
    pub bytes_missing: ByteSize,
}
