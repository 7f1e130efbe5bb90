//! The intent: the operator's request, which the agent makes durable before a migration does
//! anything, and reads when it starts.

use super::log::{Folder, SOURCE_INTENT, TARGET_INTENT};
use crate::lineage::ReplicaNote;
use crate::process::QemuProcess;
use crate::record::MAX_LEN;
use crate::record::chain::ChainLayer;
use crate::stamp::{FileStamp, check_unwritten};
use dray_api::{Order, Provided, Tuning};
use dray_engine::plan::Goals;
use dray_types::ImageId;
use dray_types::list;
use dray_types::{BitRate, Epoch, MigrationId, text};
use dray_wire::ImageOffer;
use dray_wire::control::MAX_IMAGES;
use dray_wire::request::Base;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// An image as the plan of a migration knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// Its name here.
    pub name: String,
    /// Its file.
    pub path: PathBuf,
    /// The same on every host.
    pub id: ImageId,
    /// The length that its target has made room for.
    pub len: u64,
    /// Nobody writes it: others may use it as well, and it is known by what is in it.
    pub read_only: bool,
}

/// One image of a migration at its source.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SourceImage {
    /// Its name here.
    pub name: String,
    /// What the target was told; its name there is in it.
    pub offer: ImageOffer,
    /// The file, for images that are not registered here: backing images, and disks that will be
    /// adopted.
    pub path: PathBuf,
    /// Device id of its disk, when a VM moves.
    pub device: Option<String>,
    /// What the target's copy began with.
    #[serde(default = "empty")]
    pub base: Base,
    /// The chain of a disk that moves flattened, the active image first; empty otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chain: Vec<ChainLayer>,
    /// Who gave the target what its copy began with, where it had that read for this.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub given: Vec<Provided>,
    /// The target makes a qcow2 of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub qcow2: bool,
    /// How its file looked when the migration was prepared, if nobody writes it: what is in it moves, and nothing else.
    /// None of a block device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<FileStamp>,
}

impl SourceImage {
    /// An image of which the target has nothing, in a file of its own.
    pub fn new(name: String, offer: ImageOffer, path: PathBuf, device: Option<String>) -> Self {
        let (base, chain, given) = (Base::Empty, Vec::new(), Vec::new());
        Self { name, offer, path, device, base, chain, given, qcow2: false, seen: None }
    }

    /// Refuses an image of which a file was changed that nobody may write: its own, or one below it that moves with it.
    ///
    /// # Errors
    /// Which file, or what the file system reports.
    pub fn check_unwritten(&self) -> io::Result<()> {
        check_unwritten(&self.path, self.seen.as_ref())?;
        self.chain.iter().try_for_each(ChainLayer::check_unwritten)
    }

    /// The image as the plan knows it.
    fn wanted(&self) -> Wanted {
        let ImageOffer { id, len, read_only, .. } = self.offer;
        Wanted { name: self.name.clone(), path: self.path.clone(), id, len, read_only }
    }

    /// The name of its export at the target.
    pub fn export(&self) -> &str {
        match &self.base {
            Base::InPlace { export } => export,
            _ => &self.offer.name,
        }
    }
}

fn empty() -> Base {
    Base::Empty
}

impl SourceIntent {
    /// The images as the plan knows them.
    pub fn wanted(&self) -> Vec<Wanted> {
        self.images.iter().map(SourceImage::wanted).collect()
    }
}

/// Most layers of all disks of a VM.
const MAX_LAYERS: usize = 16 * MAX_IMAGES;

/// The VM as the source sees it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GuestFacts {
    /// Name of the VM.
    #[serde(default, deserialize_with = "text::de_optional")]
    pub name: Option<String>,
    /// QMP socket of the waiting QEMU at the target.
    pub qmp: PathBuf,
    /// Its disks' layers: the number of the image each is in, and how it is attached (JSON).
    #[serde(deserialize_with = "list::at_most::<_, _, MAX_LAYERS>")]
    pub layers: Vec<(u16, String)>,
    /// Whether it ran when the migration began; one that was paused stays paused.
    pub running: bool,
}

/// The VM that moves.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SourceVm {
    /// QMP socket of its QEMU here.
    pub qmp: PathBuf,
    /// Name of the VM.
    pub name: Option<String>,
    /// The process of its QEMU when the migration began: no other one is asked to do anything.
    #[serde(default)]
    pub qemu: Option<QemuProcess>,
    /// QMP socket of the QEMU that will wait at the target, where `prepare` was told.
    #[serde(default)]
    pub target_qmp: Option<PathBuf>,
    /// What the target needs to know; set once the migration proper begins.
    pub facts: Option<GuestFacts>,
}

/// What the target does when every block is there.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Settings {
    /// Re-read the disks and compare with the source's hashes.
    pub verify: bool,
    /// Hand the disks back to QEMU as plain files.
    pub release: bool,
}

/// What was measured of the guest and the way to the target before anything is sent.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Conditions {
    /// Round trip in seconds.
    pub rtt: f64,
    /// Bytes of guest memory to move.
    pub memory: u64,
    /// Bytes of it that the guest writes in a second.
    pub memory_dirty: u64,
    /// Bytes a second that the link has carried last.
    pub link: Option<u64>,
}

/// How to migrate.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Options {
    /// Which blocks move when.
    pub strategy: dray_types::Strategy,
    /// The order in which blocks move.
    #[serde(default)]
    pub order: Order,
    /// What else the strategy is to do.
    #[serde(default)]
    pub tuning: Tuning,
    /// Limit of everything sent.
    pub bandwidth: Option<BitRate>,
    /// Longest downtime to aim for, in milliseconds.
    pub max_downtime_ms: u64,
    /// Longest time that it may take, in milliseconds.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
    /// The way to the target, as far as auto needs to know it.
    #[serde(default)]
    pub conditions: Conditions,
    /// What the target does at the end.
    pub settings: Settings,
    /// Delete the source's replica at the end.
    pub remove_replica: bool,
    /// Send everything, whatever the target has.
    #[serde(default)]
    pub no_reuse: bool,
}

impl Options {
    /// What the operator wants, for the planner.
    pub fn goals(&self) -> Goals {
        Goals {
            max_downtime: Some(self.max_downtime_ms as f64 / 1e3),
            max_added_latency: self.tuning.max_added_latency_ms.map(|ms| ms / 1e3),
            deadline: self.deadline_ms.map(|ms| ms as f64 / 1e3),
            bandwidth: self.bandwidth.map(|limit| limit.bytes_per_second as f64),
        }
    }
}

/// The source's intent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SourceIntent {
    /// The migration.
    pub migration: MigrationId,
    /// Name of the target host.
    pub peer: String,
    /// The images, in the migration's order.
    pub images: Vec<SourceImage>,
    /// To whom their files shall belong at the target, where `prepare` was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The VM, when one moves.
    pub vm: Option<SourceVm>,
    /// Set once `migrate` was asked for; only prepared until then.
    pub options: Option<Options>,
    /// The epoch in which the images are owned here.
    pub epoch: Epoch,
    /// Milliseconds since 1970 at the start.
    pub started_unix_ms: u64,
    /// Images adopted for this migration, to be handed back if it fails.
    pub adopted: Vec<String>,
}

/// One image of a migration at its target.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TargetImageIntent {
    /// What the source offered; its name here is in it.
    pub offer: ImageOffer,
    /// The path it will have.
    pub path: PathBuf,
    /// What was never received reads as zeros.
    pub zeroed: bool,
    /// The replica that it began as.
    #[serde(default)]
    pub replica: Option<ReplicaNote>,
    /// Why a replica that lay here was of no use.
    #[serde(default)]
    pub refused: Option<String>,
    /// The name here of a file that lay at the path already and is used where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_place: Option<String>,
    /// A qcow2 is to be made of it when it is complete; until then it keeps its hidden name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub qcow2: bool,
}

impl TargetImageIntent {
    /// Its name among the images of this host, and as an export.
    pub fn name_here(&self) -> &str {
        self.in_place.as_deref().unwrap_or(&self.offer.name)
    }

    /// What it begins with, as the source is told.
    pub fn base(&self) -> Base {
        if let Some(export) = &self.in_place {
            return Base::InPlace { export: export.clone() };
        }
        match (&self.replica, &self.refused) {
            (Some(note), _) => {
                let (generation, distrusted) = (note.generation, note.distrusted.clone());
                Base::Replica { generation, distrusted, unproved: note.unproved }
            }
            (None, Some(why)) => Base::Refused { why: why.clone() },
            (None, None) => Base::Empty,
        }
    }
}

/// The names here of those images that a guest may write.
pub fn written_by_guest(images: &[TargetImageIntent]) -> Vec<String> {
    let written = images.iter().filter(|image| !image.offer.read_only);
    written.map(|image| image.name_here().to_owned()).collect()
}

/// The target's intent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TargetIntent {
    /// The migration.
    pub migration: MigrationId,
    /// Name of the source host.
    pub peer: String,
    /// The images, in the migration's order.
    pub images: Vec<TargetImageIntent>,
    /// What happens at the end.
    pub settings: Settings,
    /// The VM, once the source has described it.
    pub guest: Option<GuestFacts>,
    /// The process of the QEMU that waits for it: no other one has its memory.
    #[serde(default)]
    pub qemu: Option<QemuProcess>,
    /// Milliseconds since 1970 at the start.
    pub started_unix_ms: u64,
}

/// The host at the other end of the migration in this folder, void or not, as far as an intent there says.
pub(crate) fn peer(folder: &Folder) -> Option<String> {
    let target = folder.intent_file(TARGET_INTENT).and_then(|at| at.peek::<TargetIntent>());
    let source = || folder.intent_file(SOURCE_INTENT).and_then(|at| at.peek::<SourceIntent>());
    target.map(|intent| intent.peer).or_else(|_| source().map(|intent| intent.peer)).ok()
}

/// An intent that cannot be what this agent has written is not acted on: memory is made for what it names.
///
/// # Errors
/// That it names more or longer images than a migration has.
pub(crate) fn check_lens(lens: impl Iterator<Item = u64>) -> io::Result<()> {
    let mut count = 0;
    for len in lens {
        count += 1;
        if count > MAX_IMAGES || len > MAX_LEN {
            let why = "it names more images, or longer ones, than a migration may have";
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A migration away that has begun.
    pub(crate) fn options_of_a_test() -> Options {
        Options {
            strategy: dray_types::Strategy::Hybrid,
            order: Order::default(),
            tuning: Tuning::default(),
            bandwidth: None,
            max_downtime_ms: 300,
            deadline_ms: None,
            conditions: Conditions::default(),
            settings: Settings::default(),
            remove_replica: false,
            no_reuse: true,
        }
    }
}
