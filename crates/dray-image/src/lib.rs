//! What dray moves: the [`Image`] trait, its backends, and the layers between a guest and its file.
//!
//! A guest's write passes, in this order, the gate (counts in-flight writes, can quiesce), the
//! tracker (the blocks count as dirty from before the write is issued until after it completes),
//! the missing map (at a target that does not have every block yet) and then the image.

pub mod backend;
pub mod disk;
pub mod error;
pub mod image;
mod sys;

pub use backend::{FileImage, FileOptions};
pub use disk::{DirtyRuns, Disk, DiskStats, Fetcher, Fill, IntentLog, PresentLog, Quiesced};
pub use error::{Error, ErrorKind, Result};
pub use image::{Attempt, Extent, ExtentKind, Geometry, Image, ZeroMode};
