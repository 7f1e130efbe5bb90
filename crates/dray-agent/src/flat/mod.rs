//! Disks that move flattened: what their guest sees, without the chain of images it is made of.
//!
//! dray never looks into a qcow2. The chain is *frozen*: a QEMU storage daemon (`server`) serves it
//! to this agent ([`chain`]), which only reads it, and what the guest writes goes into an
//! [`Overlay`] that is dray's own. Both together are an image like any other.
//! `freeze` puts a running VM's disk on it; `home` merges the overlay back into the chain and puts
//! the disk back, when the guest stays here after all (`merge` is how); [`peeks`] are of those who look
//! before. While the overlay is the truth the chain's active file has no name that anybody would open.
//!
//! At the target the image is raw. [`fresh`] makes a qcow2 of it where that was asked for, and [`swap`]
//! puts the disk on it.

pub mod chain;
mod freeze;
pub mod fresh;
mod home;
mod merge;
pub mod peeks;
mod server;
pub mod swap;

use crate::flat::chain::Chain;
use crate::migration::present::PresentFile;
use crate::registry::ImageRecord;
use dray_image::{FileImage, FileOptions, Image, ImageNames, Overlay};
use dray_qemu::{LayerPlan, Pivot};
use dray_types::ImageId;
pub use freeze::layers_of;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Options of a format node that change how an image is handled and not what is in it.
const HARMLESS: [&str; 19] = [
    "driver",
    "node-name",
    "read-only",
    "auto-read-only",
    "force-share",
    "discard",
    "discard-no-unref",
    "detect-zeroes",
    "cache",
    "cache-size",
    "cache-clean-interval",
    "lazy-refcounts",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "overlap-check",
    "pass-discard-request",
    "pass-discard-snapshot",
    "pass-discard-other",
];

/// One image of a chain.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ChainLayer {
    /// The file or block device.
    pub path: PathBuf,
    /// QEMU's driver for what is in it.
    pub format: String,
    /// QEMU's driver for the file.
    pub protocol: String,
}

impl ChainLayer {
    /// The images of a disk's chain, the active one first.
    ///
    /// # Errors
    /// What of it another process could not be told to open.
    pub fn of(layers: &[LayerPlan]) -> Result<Vec<Self>, String> {
        layers.iter().map(Self::one).collect()
    }

    fn one(plan: &LayerPlan) -> Result<Self, String> {
        let path = plan.path();
        if let Pivot::Reopen { options } = &plan.pivot
            && let Some(option) = options.keys().find(|key| !HARMLESS.contains(&key.as_str()))
        {
            let shown = path.display();
            return Err(format!("{shown} has the option {option}, which decides what is in it"));
        }
        let protocol = plan.local.get("driver").and_then(|name| name.as_str()).unwrap_or("file");
        Ok(Self { path, format: plan.format.clone(), protocol: protocol.to_owned() })
    }
}

/// An exchange of a disk's nodes that is under way: the guest is stopped for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Turn {
    /// The overlay is merged and the disk goes back to its chain. Otherwise it comes from there, and
    /// the overlay is still empty.
    pub home: bool,
    /// The guest ran before, and is to run again.
    pub running: bool,
    /// The disk is home: from now on its guest writes to the chain, and the overlay is of the past.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub done: bool,
}

/// What is durable about a flattened image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FlatRecord {
    /// The chain, the active image first.
    pub layers: Vec<ChainLayer>,
    /// Set while the disk's nodes are exchanged.
    #[serde(default)]
    pub turn: Option<Turn>,
    /// The id in the overlay's name, where the image has another one by now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<ImageId>,
}

/// A flattened image that is open.
pub struct Flat {
    /// The chain below.
    pub chain: Arc<Chain>,
    /// Both together.
    pub overlay: Arc<Overlay>,
}

impl Flat {
    /// Opens the image of a record; `file` is its overlay's, `present` where it is written down which
    /// blocks are in it.
    ///
    /// # Errors
    /// When what was written since the pivot cannot be told.
    pub fn open(
        record: &ImageRecord,
        file: &Arc<FileImage>,
        run_dir: &Path,
        present: &Path,
        stall: Option<Duration>,
    ) -> io::Result<Option<Self>> {
        let Some(flat) = &record.flat else { return Ok(None) };
        let place = daemon_place(run_dir, Purpose::Serve, record.id);
        let chain = Chain::new(place, flat.layers.clone(), record.len, stall);
        chain.moved(&record.current_path().map_err(io::Error::other)?);
        let log = PresentFile::open(present, dray_types::BlockRange::whole(record.len).len)?;
        let (below, here) = (Arc::clone(&chain) as Arc<dyn Image>, log.all());
        let (file, noted) = (Arc::clone(file) as _, log.noted());
        let overlay = Overlay::new(below, file, &here, &noted, log).map_err(io::Error::other)?;
        Ok(Some(Self { chain, overlay: Arc::new(overlay) }))
    }
}

/// What a storage daemon is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// It serves the chain of a flattened disk.
    Serve,
    /// It looks at one whose disk is not flattened yet.
    Peek,
}

impl Purpose {
    /// What the names of its files begin with.
    fn prefix(self) -> &'static str {
        match self {
            Self::Serve => "chain-",
            Self::Peek => "peek-",
        }
    }
}

/// Where the daemon that serves an image's chain has its socket, without the ending.
pub fn daemon_place(run_dir: &Path, purpose: Purpose, id: ImageId) -> PathBuf {
    run_dir.join(format!("{}{:016x}", purpose.prefix(), id.0 as u64))
}

/// Ends the storage daemons that an agent before this one has left behind: they serve nobody, and
/// keep QEMU from taking its disks back.
pub fn end_leftovers(run_dir: &Path) {
    for purpose in [Purpose::Serve, Purpose::Peek] {
        if let Err(why) = server::end_leftovers(run_dir, purpose.prefix()) {
            tracing::error!(%why, "cannot end what an earlier agent has left behind");
        }
    }
}

/// Name of a flattened disk's image at the target when none is given.
pub fn raw_name(name: &str) -> String {
    let stem = name.strip_suffix(".qcow2").or_else(|| name.strip_suffix(".qcow")).unwrap_or(name);
    if stem.ends_with(".raw") { stem.to_owned() } else { format!("{stem}.raw") }
}

/// Opens a flattened image's overlay, which has the image's length.
///
/// # Errors
/// What opening reports.
pub fn open_overlay(record: &ImageRecord, direct: bool) -> dray_image::Result<FileImage> {
    let names = ImageNames::of(&record.path)?;
    let options = FileOptions { write: true, direct, export_len: Some(record.len) };
    let id = record.overlay_id();
    FileImage::from_file(names.open_overlay(id)?, &names.overlay(id), options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_gets_a_raw_image() {
        assert_eq!(raw_name("vm.qcow2"), "vm.raw");
        assert_eq!(raw_name("vm"), "vm.raw");
        assert_eq!(raw_name("vm.raw"), "vm.raw");
    }
}
