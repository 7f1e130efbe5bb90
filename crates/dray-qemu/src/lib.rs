//! dray's side of QEMU: everything that is done to a VM through its QMP socket.
//!
//! * [`qmp`]: the client.
//! * [`graph`], [`options`]: what disks a VM has, and what its block nodes were made with.
//! * [`plan`]: how a layer gets under dray and back, worked out before anything is touched.
//! * [`mod@adopt`], [`mod@release`]: doing it (`pivot` holds what both share); [`bitmap`]: what QEMU
//!   writes in between; [`shrunk`]: that it cut nothing off; [`held`]: that nobody else did; [`resize`]: a guest is told that its disk has grown; [`flatten`]: dray above a format
//!   driver; [`sign`]: which of its open files QEMU has under a node.
//! * [`migrate`]: the guest's memory and devices, step by step; [`mod@activate`]: the disks of a guest
//!   that arrived stopped; [`blockdev`] and [`command_line`]: how the target is started; [`status`]: small commands.
//! * [`stopped`]: a guest that has to stand still, and whether its user lets it.
//! * [`error`]: the error type.
//!
//! Nothing here knows other agents or the data path: images come as paths, servers as socket paths
//! and export names. Nothing keeps state between calls except the VM itself and the values that
//! the functions return.

#![forbid(unsafe_code)]

pub mod activate;
pub mod adopt;
pub mod bitmap;
pub mod blockdev;
pub mod command_line;
pub mod error;
pub mod flatten;
pub mod graph;
pub mod held;
pub mod iothread;
pub mod migrate;
mod nodes;
pub mod options;
mod pivot;
pub mod plan;
pub mod qmp;
pub mod release;
pub mod resize;
pub mod shrunk;
pub mod sign;
pub mod status;
pub mod stopped;

pub use activate::{activate, is_inactive, was_started};
pub use adopt::{AdoptOptions, Adopted, NbdExport, OldFile, adopt, adopt_keeping};
pub use bitmap::NewBitmap;
pub use error::{Error, ErrorKind, Result};
pub use graph::{Layer, Node, VmDisk};
pub use migrate::{Incoming, Limits, Outgoing, Progress};
pub use options::NodeOptions;
pub use pivot::{MayPivot, abandon_pivot};
pub use plan::{LayerPlan, Pivot, options_of_part};
pub use qmp::{Event, Events, Qmp, Version};
pub use release::{Released, is_released, leave_export, release, release_tracked};
pub use stopped::{Stopped, Watched};
