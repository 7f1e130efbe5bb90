//! What is durable about an image.

pub mod chain;

use crate::lineage::ReplicaNote;
use crate::owner::Owner;
use crate::process::QemuProcess;
use crate::stamp::FileStamp;
use chain::FlatRecord;
use dray_engine::lineage::FileIdentity;
use dray_files::files::{Cache, Files};
use dray_image::ImageNames;
use dray_types::{BlockRange, BlockSet, Epoch, ImageId, MigrationId};
use dray_wire::ImageOffer;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Longest image, in bytes: a petabyte. Memory is made for the blocks of an image when it is opened, some
/// 100 MiB for this one.
pub const MAX_LEN: u64 = 1 << 50;

/// Permission bits of an image that has come here: for its owner alone.
pub const MODE: u32 = 0o600;

/// What this host's copy of an image is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyState {
    /// This host accepts writes.
    Owner,
    /// The image is on its way here.
    Incoming,
    /// Ownership has passed to another host.
    Replica,
}

/// Which of its names an image's file has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NameKind {
    /// Its own.
    Named,
    /// That of an incomplete image.
    Partial,
    /// That of the copy left behind when this epoch began elsewhere.
    Replica(Epoch),
    /// That of a chain's active image while the newer writes are in an overlay.
    Chain,
}

/// A VM's disk that was spliced under dray while it ran, and goes back to QEMU.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Adopted {
    /// QMP socket of the VM.
    pub qmp: PathBuf,
    /// The process of the VM's QEMU; none where the system did not tell.
    pub qemu: Option<QemuProcess>,
    /// The disk's device id.
    pub device: String,
    /// The splice, as the hypervisor side needs it to undo it.
    pub splice: serde_json::Value,
    /// It came to its end: the disk was on dray. Until then, and while it goes back, it may be on its file.
    pub done: bool,
    /// QEMU's command line does not tell how the disk's nodes are made, a note of an earlier release
    /// did: there has to be one again when it goes back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub noted: bool,
}

impl Adopted {
    /// Whether it was adopted from this process, as far as can be told: how it was says nothing about another.
    pub fn is_of(&self, qemu: Option<&QemuProcess>) -> bool {
        match (&self.qemu, qemu) {
            (Some(then), Some(now)) => then.is_process(now),
            _ => true,
        }
    }
}

/// What is durable of a disk that goes over to a qcow2 that was made of the image.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Swap {
    /// QMP socket of the VM.
    pub qmp: PathBuf,
    /// The process of the VM's QEMU; none where the system did not tell.
    pub qemu: Option<QemuProcess>,
    /// How the disk is attached to the qcow2, and where that is, as the hypervisor side needs it.
    pub plan: serde_json::Value,
    /// The guest was stopped for it, and is to run again.
    pub running: bool,
    /// The qcow2 is the truth, and the raw image of no use.
    pub done: bool,
}

/// The number of the file system on which the folder of the file at `path` lies.
pub fn file_system_below(path: &Path) -> Option<u64> {
    rustix::fs::statvfs(path.parent()?).ok().map(|about| about.f_fsid)
}

impl Swap {
    /// Whether it has not come to its end, or its guest may be stopped since.
    pub fn is_under_way(&self) -> bool {
        !self.done || self.running
    }
}

/// What a claim has made zeros of.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Lost {
    /// How many blocks.
    pub blocks: u64,
    /// Where: the first thousand runs.
    pub first: Vec<BlockRange>,
}

impl Lost {
    /// Runs that are listed; the rest is only counted.
    const LISTED: usize = 1000;

    /// These blocks.
    pub fn of(lost: &BlockSet) -> Self {
        Self { blocks: lost.len(), first: lost.runs().take(Self::LISTED).collect() }
    }
}

/// An operator took the image although another host may have owned it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Claim {
    /// The migration that it was taken from, and which is void.
    pub migration: Option<MigrationId>,
    /// The host at the other end of that, as far as its folder could say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Its file has its name, a device no mark any more.
    pub named: bool,
    /// The epoch in which this host owns it since: in a later one the claim is history.
    pub epoch: Epoch,
    /// The other host may have writes of its guest that nobody knows of here.
    pub writes_may_be_lost: bool,
    /// What has become zeros.
    pub lost: Lost,
}

/// What is durable about an image.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Name of the image and of its export.
    pub name: String,
    /// The same on every host.
    pub id: ImageId,
    /// The path it has as a complete, owned image.
    pub path: PathBuf,
    /// The name its file has now (I1).
    pub place: NameKind,
    /// It is a block device: it keeps its path, and a marker says what `place` says of a file.
    #[serde(default)]
    pub device: bool,
    /// Permission bits of the file under its own name.
    pub mode: u32,
    /// To whom the file of an image that comes belongs as soon as it has its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// Exported length in bytes.
    pub len: u64,
    /// Its file has had all of that, and it does not grow: a file that is shorter is not what it was.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
    /// Exported with room to grow.
    pub growable: bool,
    /// Writes are refused.
    pub read_only: bool,
    /// The file was here before the image came, and is used where it lies: how it looked then. It is
    /// never written, renamed or removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_place: Option<FileStamp>,
    /// The file that is filled while the image comes, and that one of which nobody writes has come in; none of one that
    /// has a device, or is used in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arriving: Option<FileIdentity>,
    /// What is inside, as the operator said.
    pub format: Option<String>,
    /// What this copy is.
    pub state: CopyState,
    /// Ownership counter (I1).
    pub epoch: Epoch,
    /// The migration it takes part in.
    pub migration: Option<MigrationId>,
    /// Set while QEMU believes the disk is its own file.
    pub adopted: Option<Adopted>,
    /// The QEMU that the image has come for, which has it still on its export as far as is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub came_for: Option<QemuProcess>,
    /// What a copy holds that was left behind; kept while a migration back makes the image of it.
    #[serde(default)]
    pub replica: Option<ReplicaNote>,
    /// Set while the image is a chain, frozen under `path`, with an overlay of dray's over it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flat: Option<FlatRecord>,
    /// Set once the disk goes over to a qcow2 that was made of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap: Option<Swap>,
    /// Set when it was claimed here; written with the new id and epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<Claim>,
    /// The file system that its file was on when it was opened last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_system: Option<u64>,
    /// How long that file system has been mounted then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mounted: Option<Mounted>,
}

/// A life of a mounted file system: what was written and not synced is lost with it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Mounted {
    /// The boot of the host.
    pub boot: String,
    /// As [`dray_files::files::Files::instance`].
    pub instance: u64,
}

impl Mounted {
    fn of(cache: &Cache) -> Option<Self> {
        let instance = cache.instance?;
        Some(Self { boot: String::from_utf8_lossy(&cache.boot).into_owned(), instance })
    }
}

impl ImageRecord {
    /// A writable image in a file of its own under `path`, which this host owns: the first epoch, and
    /// nothing else known of it.
    pub fn owned(name: String, id: ImageId, path: PathBuf, len: u64) -> Self {
        Self {
            name,
            id,
            path,
            place: NameKind::Named,
            device: false,
            mode: MODE,
            owner: None,
            len,
            whole: false,
            growable: false,
            read_only: false,
            in_place: None,
            arriving: None,
            format: None,
            state: CopyState::Owner,
            epoch: Epoch(1),
            migration: None,
            adopted: None,
            came_for: None,
            replica: None,
            flat: None,
            swap: None,
            claim: None,
            file_system: None,
            mounted: None,
        }
    }

    /// A writable image on its way here in a migration, in a file that is to get the name `path`.
    pub fn coming(offer: &ImageOffer, path: PathBuf, migration: MigrationId) -> Self {
        Self {
            place: NameKind::Partial,
            read_only: offer.read_only,
            state: CopyState::Incoming,
            epoch: Epoch(0),
            migration: Some(migration),
            ..Self::owned(offer.name.clone(), offer.id, path, offer.len)
        }
    }

    /// Permission bits of its file when it has its name: those that its source wanted, if it comes.
    pub fn named_mode(&self) -> u32 {
        self.owner.map_or(self.mode, |owner| owner.mode)
    }

    /// The id that is in the name of a flattened image's overlay: the one it was made under.
    pub fn overlay_id(&self) -> ImageId {
        self.flat.as_ref().and_then(|flat| flat.overlay).unwrap_or(self.id)
    }

    /// Whether it is a copy whose migration is over: nobody waits for anything of it.
    pub fn has_left(&self) -> bool {
        self.state == CopyState::Replica && self.migration.is_none()
    }

    /// Whether its file is complete and only read, so that others may use it as well.
    pub fn is_base(&self) -> bool {
        let named = self.place == NameKind::Named && self.state == CopyState::Owner;
        self.in_place.is_some() || self.read_only && named
    }

    /// Whether its file was a replica that a migration to here, which is not over, brings up to date.
    pub(crate) fn returns(&self) -> bool {
        let coming = self.state == CopyState::Incoming && self.place == NameKind::Partial;
        let file = !self.device && self.in_place.is_none() && self.flat.is_none();
        coming && file && self.replica.is_some()
    }

    /// Other places where its file may be: a crash may have come between a new name and the record of it,
    /// or that record could not be written. There is none while nothing is under way with the image:
    /// another one may have such a name by then.
    pub(crate) fn other_places(&self) -> Vec<NameKind> {
        let under_way = self.migration.is_some() || self.is_unnamed_claim();
        match self.place {
            NameKind::Partial if self.returns() => {
                vec![NameKind::Replica(self.epoch), NameKind::Named]
            }
            NameKind::Partial => vec![NameKind::Named],
            NameKind::Named | NameKind::Chain if under_way => {
                vec![NameKind::Replica(self.epoch.next())]
            }
            NameKind::Replica(_) if under_way => vec![NameKind::Named],
            _ => Vec::new(),
        }
    }

    /// The number of the file system that the image's folder is on now; none of a device.
    pub(crate) fn file_system_now(&self) -> Option<u64> {
        if self.device { None } else { file_system_below(&self.path) }
    }

    /// The life that the file system with its folder is in, among `files`; none where that cannot be told.
    pub(crate) fn mounted_now(&self, files: &dyn Files) -> Option<Mounted> {
        let folder = self.path.parent().filter(|_| !self.device)?;
        Mounted::of(&Cache::of(files, folder).ok()?)
    }

    /// Whether its file system was mounted anew since the image was opened last, and the host was not booted.
    pub(crate) fn was_mounted_anew(&self, files: &dyn Files) -> bool {
        let both = self.mounted.as_ref().zip(self.mounted_now(files));
        both.is_some_and(|(then, now)| then.boot == now.boot && then.instance != now.instance)
    }

    /// Whether its folder is on another file system than when it was opened last.
    pub(crate) fn is_on_other_file_system(&self) -> bool {
        let now = self.file_system_now();
        self.file_system.zip(now).is_some_and(|(known, now)| known != now)
    }

    /// The path under which the file can be found now.
    ///
    /// # Errors
    /// When the configured path is none.
    pub fn current_path(&self) -> dray_image::Result<PathBuf> {
        if self.device {
            return Ok(self.path.clone());
        }
        let names = ImageNames::of(&self.path)?;
        Ok(match self.place {
            NameKind::Named => self.path.clone(),
            NameKind::Partial => names.partial(),
            NameKind::Replica(epoch) => names.replica(epoch),
            NameKind::Chain => names.chain(),
        })
    }
}
