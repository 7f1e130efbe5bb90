//! What dray moves: the [`Image`] trait, its backends, and the layers between a guest and its file.
//!
//! A guest's write passes, in this order, the brake (may hold it up), the [`gate`] (counts in-flight writes, can quiesce), the
//! [`tracker`] (the blocks count as dirty from before the write is issued until after it
//! completes), the missing map (at a target that does not have every block yet) and then the
//! image. [`Disk`] is that stack.
//!
//! Nothing here decides: when to copy, hand over or fetch is the engine's business, and how blocks
//! travel is the agent's. Beside the stack:
//!
//! * [`backend`]: files and block devices; [`layers`]: faults, delays, a rate, a recording.
//! * [`locks`], [`names`], [`device`]: who owns an image file or device, shown to QEMU and to the
//!   next boot (I1).
//! * [`overlay`]: what was written over an image that is only read. [`Late`]: an image that is not
//!   there yet.
//! * [`journal`]: records that survive `kill -9` and power cuts.
//! * [`snapshot`]: the content of one moment, read while the guest writes.
//! * [`runs`]: what a copier does with runs of blocks.

pub mod backend;
pub mod blockmap;
mod client;
mod descriptors;
pub mod device;
pub mod disk;
pub mod error;
pub mod gate;
pub mod image;
pub mod journal;
mod late;
mod latency;
pub mod layers;
pub mod locks;
mod missing;
pub mod names;
mod needs;
pub mod overlay;
pub mod runs;
pub mod snapshot;
mod spill;
mod stats;
mod stripes;
mod sync;
mod sys;
pub mod tracker;
mod unpoisoned;
mod unrecorded;
mod waiters;

pub use backend::{
    FileImage, FileOptions, ImageFile, Loss, LossLog, OpenImages, Past, RealImages, StateImages,
};
pub use client::{Client, Departure, IsRunning, IsThere, Origin, working_for};
pub use descriptors::{Descriptors, MOST_DESCRIPTORS, has_open, is_unseen};
pub use device::{DeviceMark, DeviceState};
pub use disk::{Access, Accesses, Disk, RECORDING_PLACES, Recording, WriteDelay, WriteWitness};
pub use error::{Error, ErrorKind, Result};
pub use gate::Quiesced;
pub use image::{Attempt, Extent, ExtentKind, Geometry, Image, WriteBackError, ZeroMode};
pub use journal::Journal;
pub use late::Late;
pub use latency::Latencies;
pub use locks::{FileId, Hold, InUse, QemuLocks};
pub use names::ImageNames;
pub use needs::{Fetcher, Fill, IntentLog, PresentLog};
pub use overlay::Overlay;
pub use snapshot::{Snapshot, Spill};
pub use spill::{SpillFile, growable_len, leave_room};
pub use stats::DiskStats;
pub use tracker::{DirtyRuns, INTENT_REGION_BYTES};
