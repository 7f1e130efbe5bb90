//! The table of commands, and under it a type for each: its fields, one for one the JSON of the
//! public interface. Unknown fields are refused, so that a misspelt option is not silently ignored.
//! The types of a larger subject stand in its file, as [`Backup`](crate::Backup).
//! [`table`](crate::table) says what is made of the table.

use super::options::Order;
use super::options::Tuning;
use super::text::MigrationRef;
use super::{ApiResult, Command, ErrorKind, Refusal, Repository, Started, Summary};
use dray_types::{BitRate, ByteSize, Strategy};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Hands the table to the macro that it is given, which makes something of its rows. A row is
///
/// ```text
/// /// What the command does.
/// Level: "name" Type -> Answer, sends "event" "event";
/// ```
///
/// `Level` is the least [`AccessLevel`](crate::AccessLevel) that may give it. `Type` is a type of this crate and holds the command's fields. `, sends …` is left out when no
/// event comes before the answer. Every macro that is given the table begins with the same pattern,
/// that of a row.
#[macro_export]
macro_rules! commands {
    ($make:ident) => {
        $make! {
            /// Says who is there.
            Reader: "info" Info -> AgentInfo;
            /// Asks every configured peer who it is, all at once, for 5 s at most.
            Reader: "peers" Peers -> Vec<PeerStatus>;
            /// Measures the links to peers and their pools, half a second each. Predictions use what it finds.
            Operator: "probe" Probe -> Vec<PeerProbe>;
            /// Reads the configuration and the certificates again. A file with an error changes nothing.
            Operator: "reload" Reload -> Reloaded;

            /// Moves a VM or images. Everything that can be checked at once is checked before
            /// anything moves. The target begins with what its backups and peers have of the images, unless
            /// a migration is prepared. It is followed to its end unless it is detached; a client that hangs
            /// up ends the following, not the migration.
            Operator: "migrate" Migrate -> Migrated,
                sends "comparing" "seeding" "seeded" "started" "progress" "notice";
            /// Makes the exports at the target and says how to start the incoming QEMU.
            Operator: "prepare" Prepare -> Prepared, sends "comparing" "seeding" "seeded" "notice";
            /// One migration, or all that the agent knows, the newest first.
            Reader: "status" Status -> Vec<MigrationStatus>;
            /// Follows a migration to its end. One that has ended already is answered at once, one
            /// that failed or was cancelled with its error.
            Reader: "watch" Watch -> Summary, sends "progress" "notice";
            /// Stops a migration before its handover; the guest goes on at the source.
            Operator: "cancel" Cancel -> Cancelled;
            /// Takes up a migration that was interrupted.
            Operator: "resume" Resume -> Started;
            /// Changes the bandwidth limit of a running migration.
            Operator: "limit" Limit -> Limited;
            /// Starts, pauses or paces Backfill; this host is the target.
            Operator: "backfill" Backfill -> Backfilling;
            /// Ends the QEMU of a VM that has left this host, and no other.
            Operator: "quit" Quit -> QemuEnded;
            /// Ends the stall of guest I/O that waits for a lost source.
            Operator: "unstall" Unstall -> Unstalled;
            /// Predicts what a migration would take; nothing moves.
            Operator: "plan" Plan -> Planned;
            /// Has a target read images from backups. Ends when its client hangs up.
            Operator: "seed" Seed -> Seeded, sends "comparing" "seeding";

            /// Makes a batch of migrations durable, and goes on with it in the background. It is
            /// followed to its end unless it is detached. That some of it failed is no error: the
            /// answer says which.
            Operator: "batch" Batch -> BatchStatus,
                sends "comparing" "seeding" "seeded" "notice" "batch";
            /// Every batch that the agent knows, the newest first.
            Reader: "batches" Batches -> Vec<BatchStatus>;
            /// Follows a batch to its end.
            Reader: "batch-watch" BatchWatch -> BatchStatus, sends "batch";
            /// Begins nothing more of a batch, and cancels what is before its handover.
            Operator: "batch-cancel" BatchCancel -> BatchStatus;
            /// Changes what a batch may send.
            Operator: "batch-limit" BatchLimit -> BatchStatus;

            /// Every image that the agent knows.
            Reader: "images" Images -> Vec<ImageStatus>;
            /// Serves a file or block device as an image.
            Operator: "image-add" ImageAdd -> ImageStatus;
            /// Stops serving an image and forgets it. The answer is the image as it was.
            Operator: "image-remove" ImageRemove -> ImageStatus;
            /// Splices disks of a running VM under dray.
            Operator: "adopt" Adopt -> Spliced;
            /// Hands disks of a running VM back to its QEMU.
            Operator: "release" Release -> Spliced;
            /// Grows an image.
            Operator: "resize" Resize -> ImageStatus;
            /// Takes ownership of an image whose owner is gone for good. Stands outside I1.
            Operator: "claim" Claim -> Claimed;
            /// The generations of an image, as this host knows them.
            Reader: "lineage" Lineage -> LineageStatus;
            /// Tells what guests do to an image until the recording ends, or its client hangs up.
            Operator: "record" Record -> Recorded, sends "accesses";

            /// Makes a backup of images that this host serves. Ends when its client hangs up.
            Operator: "backup" Backup -> BackupDone, sends "backup";
            /// Ends a backup that is under way. The answer is how far it was.
            Operator: "backup-cancel" BackupCancel -> BackupProgress;
            /// Lists destinations, or the backups in a repository.
            Reader: "backups" Backups -> BackupListing;
            /// Makes a repository.
            Operator: "backup-init" BackupInit -> RepositoryMade;
            /// Removes backups.
            Operator: "backup-prune" BackupPrune -> BackupPruned;
            /// Removes content that no backup needs.
            Operator: "backup-gc" BackupGc -> BackupCollected;
            /// Checks the backups in a repository. Ends when its client hangs up.
            Operator: "backup-verify" BackupVerify -> BackupVerified, sends "backup";
            /// Makes an image of a backup. Ends when its client hangs up.
            Operator: "restore" Restore -> Restored, sends "backup";
        }
    };
}

/// Asks who is there.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Info {}

/// Asks for every image that the agent knows.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Images {}

/// The VM or the images that a migration moves.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    /// A running VM with its disks and memory.
    Vm {
        /// QMP socket of its QEMU on this host.
        qmp: PathBuf,
    },
    /// Images only, by name; whoever uses them is moved by somebody else.
    Images {
        /// Their names.
        names: Vec<String>,
    },
}

/// What happens to the disks at the target when every block is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReleaseAtEnd {
    /// A disk that was adopted is released to QEMU, a resident one stays with dray.
    #[default]
    AsBefore,
    /// Every disk is released.
    Always,
    /// Every disk stays with dray.
    Never,
}

/// What becomes of a disk's chain of images.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Chain {
    /// Every image of it moves as it is.
    #[default]
    Keep,
    /// Only the content that the guest sees moves; the target gets a raw image.
    Flatten,
}

impl Chain {
    /// Whether it is the default, which is not written.
    pub fn is_keep(&self) -> bool {
        *self == Self::Keep
    }
}

/// What a disk that moves flattened is at the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetFormat {
    /// A raw image.
    #[default]
    Raw,
    /// A fresh qcow2, which the target makes of the raw image when that is complete.
    Qcow2,
}

impl TargetFormat {
    /// Whether it is the default, which is not written.
    pub fn is_raw(&self) -> bool {
        *self == Self::Raw
    }
}

/// Moves a VM or images.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Migrate {
    /// The VM or the images to move.
    pub subject: Subject,
    /// Name of the target host, as in the configuration's list of peers.
    pub to: String,
    /// QMP socket, on the target host, of the QEMU that waits with `-incoming defer`. Needed when a
    /// VM is moved and `prepare` was not told; images have none.
    #[serde(default)]
    pub target_qmp: Option<PathBuf>,
    /// The migration that `prepare` made; found by its images when absent.
    #[serde(default)]
    pub prepared: Option<MigrationRef>,
    /// Pool at the target, if the migration was not prepared; its default one when absent.
    #[serde(default)]
    pub pool: Option<String>,
    /// Names at the target by image name or device id here; the same name when absent.
    #[serde(default)]
    pub names: BTreeMap<String, String>,
    /// Which blocks move when.
    #[serde(default)]
    pub strategy: Strategy,
    /// The order in which blocks move.
    #[serde(default)]
    pub order: Order,
    /// What else the strategy is to do.
    #[serde(default, skip_serializing_if = "Tuning::is_default")]
    pub tuning: Tuning,
    /// Limit of everything the migration sends; none when absent.
    #[serde(default)]
    pub bandwidth: Option<BitRate>,
    /// Longest stop of the guest to aim for, in milliseconds; the agent's default when absent.
    #[serde(default)]
    pub max_downtime_ms: Option<u64>,
    /// Longest time that it may take, in milliseconds; only auto heeds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// Re-read every block at the target at the end and compare with the source (I3).
    #[serde(default)]
    pub verify: bool,
    /// Answer once the migration has started.
    #[serde(default)]
    pub detach: bool,
    /// Adopt disks although their nodes carry dirty bitmaps, which are lost.
    #[serde(default)]
    pub drop_bitmaps: bool,
    /// Delete the source's replica when the target has every block.
    #[serde(default)]
    pub remove_replica: bool,
    /// What happens to the disks at the target at the end.
    #[serde(default)]
    pub release: ReleaseAtEnd,
    /// Also send content that the target has somewhere in its pools.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_reuse: bool,
    /// What becomes of chains of images; as it was prepared when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain: Option<Chain>,
    /// `USER` or `USER:GROUP` at the target to whom the files of images without a VM shall belong there; as here when
    /// absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Send everything, whatever backups and replicas the target could begin with.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_backups: bool,
}

/// Answer of [`Migrate`]. The one with more fields comes first: the other would be read of it too.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Migrated {
    /// The migration has ended.
    Ended(Box<Summary>),
    /// It has started, and was to be left alone.
    Started(Started),
}

impl Migrated {
    /// How it ended.
    ///
    /// # Errors
    /// When it has only started.
    pub fn ended(self) -> ApiResult<Summary> {
        match self {
            Self::Ended(summary) => Ok(*summary),
            Self::Started(_) => Err(Self::unexpected("the migration has not ended")),
        }
    }

    /// That it has started.
    ///
    /// # Errors
    /// When it has ended already.
    pub fn started(self) -> ApiResult<Started> {
        match self {
            Self::Started(started) => Ok(started),
            Self::Ended(_) => Err(Self::unexpected("the migration has ended")),
        }
    }

    fn unexpected(why: &str) -> Refusal {
        Refusal::new(ErrorKind::Internal, "the agent's answer does not fit the question", why)
    }
}

/// Makes room and exports at the target.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prepare {
    /// What will be moved.
    pub subject: Subject,
    /// Name of the target host.
    pub to: String,
    /// Pool at the target; its default one when absent.
    #[serde(default)]
    pub pool: Option<String>,
    /// Put before every name at the target.
    #[serde(default)]
    pub prefix: Option<String>,
    /// Names at the target by image name or device id here.
    #[serde(default)]
    pub names: BTreeMap<String, String>,
    /// QMP socket that the waiting QEMU at the target will have, so that `migrate` need not be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_qmp: Option<PathBuf>,
    /// What becomes of chains of images.
    #[serde(default, skip_serializing_if = "Chain::is_keep")]
    pub chain: Chain,
    /// What the disks are at the target that move flattened.
    #[serde(default, skip_serializing_if = "TargetFormat::is_raw")]
    pub target_format: TargetFormat,
    /// `USER` or `USER:GROUP` at the target to whom the files there shall belong; as here when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Prepare without what backups and replicas could give the target before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_backups: bool,
    /// What was prepared before goes, if it is there. Otherwise the answer is what was prepared, when that is the
    /// same, and a refusal when it differs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replace: bool,
    /// The answer has the whole command line of the waiting QEMU, made from that of the running one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub command_line: bool,
}

/// Asks how migrations are going.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// One migration; all when absent.
    #[serde(default)]
    pub migration: Option<MigrationRef>,
}

/// Follows a migration to its end.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Watch {
    /// Which; the only one running when absent.
    #[serde(default)]
    pub migration: Option<MigrationRef>,
}

/// Stops a migration before its handover.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cancel {
    /// Which; the only one running when absent.
    #[serde(default)]
    pub migration: Option<MigrationRef>,
    /// Also delete the blocks that the target has received; otherwise the next try starts from it.
    #[serde(default)]
    pub discard: bool,
}

/// Takes up an interrupted migration.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// Which; the only interrupted one when absent.
    #[serde(default)]
    pub migration: Option<MigrationRef>,
}

/// Changes the bandwidth limit.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Which; the only one running when absent.
    #[serde(default)]
    pub migration: Option<MigrationRef>,
    /// The new limit; none when absent.
    #[serde(default)]
    pub bandwidth: Option<BitRate>,
}

/// Serves a file or block device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageAdd {
    /// Its name: the name of its export.
    pub name: String,
    /// The file or block device, inside a pool.
    pub path: PathBuf,
    /// Export it with room to grow, as a format driver above needs. When absent: as `format` says.
    #[serde(default)]
    pub growable: Option<bool>,
    /// What is inside, for the defaults and the printed hints (`raw`, `qcow2`): dray itself never
    /// looks.
    #[serde(default)]
    pub format: Option<String>,
    /// Refuse writes, as for a backing image.
    #[serde(default)]
    pub read_only: bool,
}

/// Stops serving an image.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRemove {
    /// Name of the image.
    pub name: String,
    /// Also delete the file; only for a replica that no migration needs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub delete: bool,
}

/// Asks for the generations of an image.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lineage {
    /// Name of the image.
    pub image: String,
    /// Nobody else is asked who holds what.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub here_only: bool,
}

/// Splices disks of a running VM under dray.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adopt {
    /// QMP socket of the VM.
    pub qmp: PathBuf,
    /// Device ids (qdev) of the disks; every disk when empty.
    #[serde(default)]
    pub disks: Vec<String>,
    /// Go on although a node carries dirty bitmaps, which are lost.
    #[serde(default)]
    pub drop_bitmaps: bool,
}

/// Hands disks back to QEMU.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// QMP socket of the VM.
    pub qmp: PathBuf,
    /// Device ids (qdev) of the disks; every disk on dray when empty.
    #[serde(default)]
    pub disks: Vec<String>,
}

/// Grows an image.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// Name of the image.
    pub image: String,
    /// New size in bytes.
    pub size: ByteSize,
    /// QMP socket of the VM that uses it, to be moved to the larger export.
    #[serde(default)]
    pub qmp: Option<PathBuf>,
}

/// Takes ownership of an image whose owner is gone for good.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// Name of the image on this host.
    pub image: String,
    /// The operator's word that the other host can write it no more. Refused without.
    #[serde(default)]
    pub source_is_fenced: bool,
    /// Accept that acknowledged writes, or the missing ranges, are lost.
    #[serde(default)]
    pub accept_loss: bool,
}

/// Ends the QEMU of a VM that has left this host.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quit {
    /// Its QMP socket.
    pub qmp: PathBuf,
}

/// Ends the stall of guest I/O that waits for a lost source.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unstall {
    /// Name of the image.
    pub image: String,
    /// Fail the waiting requests with an I/O error; otherwise ask the source again now.
    #[serde(default)]
    pub fail: bool,
}

/// Starts, pauses or paces the fetching of what a target misses. Asked of the target's agent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backfill {
    /// The action on the Backfill.
    pub action: BackfillAction,
    /// Which migration: the name of an image of it on this host, its id, or the start of it. The
    /// only one in Backfill when neither this nor `qmp` is given.
    #[serde(default)]
    pub which: Option<String>,
    /// QMP socket on this host of the VM that was moved.
    #[serde(default)]
    pub qmp: Option<PathBuf>,
}

/// What to do with a Backfill.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackfillAction {
    /// Fetch all missing blocks, in the background.
    Start,
    /// Fetch only the blocks that the guest reads.
    Pause,
    /// Change the limit of everything the migration sends; none when null.
    Rate(Option<BitRate>),
}

/// What a command names that the agent would open with its own rights.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Named<'a> {
    /// A repository.
    pub repository: Option<&'a str>,
    /// The file of a repository's key.
    pub key_file: Option<&'a Path>,
    /// Sockets of this host.
    pub sockets: Vec<&'a Path>,
}

impl Command {
    /// What it names that the agent would open with its own rights.
    pub fn named(&self) -> Named<'_> {
        use Command as C;
        match self {
            C::Migrate(of) => Named::subject(&of.subject),
            C::Prepare(of) => Named::subject(&of.subject),
            C::Plan(of) => Named::subject(&of.subject),
            C::Seed(of) => Named::subject(&of.subject),
            C::Batch(of) => {
                let sockets = of.moves.iter().flat_map(|one| Named::subject(&one.subject).sockets);
                Named { sockets: sockets.collect(), ..Named::default() }
            }
            C::Quit(of) => Named::socket(Some(&of.qmp)),
            C::Adopt(of) => Named::socket(Some(&of.qmp)),
            C::Release(of) => Named::socket(Some(&of.qmp)),
            C::Resize(of) => Named::socket(of.qmp.as_deref()),
            C::Backfill(of) => Named::socket(of.qmp.as_deref()),
            C::Backup(of) => {
                let (repository, key_file) = (of.to.as_deref(), of.key_file.as_deref());
                Named { repository, key_file, ..Named::socket(of.fsfreeze.as_deref()) }
            }
            C::Backups(of) => of.repository.as_ref().map(Named::repository).unwrap_or_default(),
            C::BackupInit(of) => Named::repository(&of.0),
            C::BackupPrune(of) => Named::repository(&of.repository),
            C::BackupGc(of) => Named::repository(&of.0),
            C::BackupVerify(of) => Named::repository(&of.repository),
            C::Restore(of) => Named::repository(&of.repository),
            // The path of an image has to be in a pool, whoever names it.
            C::ImageAdd(_) => Named::default(),
            C::Info(_)
            | C::Peers(_)
            | C::Probe(_)
            | C::Reload(_)
            | C::Status(_)
            | C::Watch(_)
            | C::Cancel(_)
            | C::Resume(_)
            | C::Limit(_)
            | C::Unstall(_)
            | C::Batches(_)
            | C::BatchWatch(_)
            | C::BatchCancel(_)
            | C::BatchLimit(_)
            | C::Images(_)
            | C::ImageRemove(_)
            | C::Claim(_)
            | C::Lineage(_)
            | C::Record(_)
            | C::BackupCancel(_) => Named::default(),
        }
    }
}

impl<'a> Named<'a> {
    fn subject(subject: &'a Subject) -> Self {
        match subject {
            Subject::Vm { qmp } => Self::socket(Some(qmp)),
            Subject::Images { .. } => Self::default(),
        }
    }

    fn socket(path: Option<&'a Path>) -> Self {
        Self { sockets: path.into_iter().collect(), ..Self::default() }
    }

    fn repository(of: &'a Repository) -> Self {
        let (repository, key_file) = (of.at.as_deref(), of.key_file.as_deref());
        Self { repository, key_file, ..Self::default() }
    }
}
