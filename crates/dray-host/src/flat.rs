//! Disks that move flattened: what is durable of them, and what their guest sees.
//!
//! What the guest writes goes into an [`Overlay`] that is dray's own; the chain below is only read, by
//! whoever knows its formats ([`ChainImage`]). Both together are an image like any other. [`peeks`] are
//! of those who look before.

pub mod peeks;

use crate::migration::present::PresentFile;
use crate::registry::{ImageRecord, Place};
use dray_files::StatePath;
use dray_image::{FileImage, FileOptions, Image, ImageFile, ImageNames, Overlay};
use dray_types::{BlockRange, ImageId};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// A chain of images as one image, whoever reads it. Whoever reads waits while nobody does.
pub trait ChainImage: Image {
    /// The active image's file is at `path` from now on. Who has it open keeps it.
    fn moved(&self, path: &Path);

    /// Whether its active image was at `path` when it was described.
    fn is_of(&self, path: &Path) -> bool;

    /// Lets nobody open it from now on, and closes it where it is only read, at once.
    fn hold(&self);

    /// The chain may be read again.
    fn resume(&self);

    /// Opens it if it is not open, and checks what it is.
    ///
    /// # Errors
    /// Why it cannot be opened.
    fn open(&self) -> io::Result<()>;

    /// From now on the chain may be written, or may not: opened anew, once what was held back is
    /// written down. One that was finished is open again.
    ///
    /// # Errors
    /// When it cannot be closed or opened; who reads tries again.
    fn set_writable(&self, write: bool) -> io::Result<()>;

    /// Closes it after everything is written down: the files are whole, and nobody has them open. Who
    /// reads waits from now on, until [`set_writable`](Self::set_writable).
    ///
    /// # Errors
    /// When it is not; what was written since the last flush may be lost.
    fn finish(&self) -> io::Result<()>;

    /// Closes it for good.
    fn close(&self);

    /// How often it was asked for something.
    fn asked(&self) -> u64;

    /// Closes one that is only read until somebody asks again.
    fn rest(&self);

    /// How often it was opened. What was written before it was opened last and not flushed may be lost.
    fn life(&self) -> u64;
}

/// What a chain is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// Serving a flattened disk.
    Serve,
    /// A look at one whose disk is not flattened yet. Reads of it fail after a while.
    Peek,
}

/// An exchange of a disk's nodes that is under way: the guest is stopped for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Turn {
    /// The overlay is merged and the disk goes back to its chain; once the chain has its name it may be
    /// there ([`ImageRecord::may_be_home`]). Otherwise it comes from there, and the overlay is still empty.
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

impl ImageRecord {
    /// Whether its guest may be writing to the chain that was flattened. From the moment at which the chain has
    /// everything and gets its name, until it has lost that again, nothing is written to the overlay: merged once
    /// more it would undo what the guest has written since.
    pub fn may_be_home(&self) -> bool {
        let turn = self.flat.as_ref().and_then(|flat| flat.turn);
        turn.is_some_and(|turn| turn.home && (turn.done || self.place == Place::Named))
    }

    /// Whether its guest may be writing to the chain that is being flattened, alone or beside the overlay: until
    /// it is known where its disk is, nobody is let in but by the process that takes it from there.
    pub fn may_be_there_still(&self) -> bool {
        self.flat.as_ref().and_then(|flat| flat.turn).is_some_and(|turn| !turn.home)
    }
}

/// A flattened image that is open.
pub struct Flat {
    /// The chain below.
    pub chain: Arc<dyn ChainImage>,
    /// Both together.
    pub overlay: Arc<Overlay>,
    /// This process is taking the disk from its chain.
    taking: AtomicBool,
}

/// The disk is being taken from its chain, by the process that has this.
pub struct Taking<'a>(&'a AtomicBool);

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Flat {
    /// Takes the disk from its chain: its QEMU has to be let in for that.
    pub fn take(&self) -> Taking<'_> {
        self.taking.store(true, Ordering::SeqCst);
        Taking(&self.taking)
    }

    /// Whether this process is taking the disk from its chain.
    pub fn is_being_taken(&self) -> bool {
        self.taking.load(Ordering::SeqCst)
    }

    /// The image of a record over its `chain`; `file` is its overlay's, `present` where it is written down
    /// which blocks are in it.
    ///
    /// # Errors
    /// When what was written since the pivot cannot be told.
    pub(crate) fn open(
        record: &ImageRecord,
        chain: Arc<dyn ChainImage>,
        file: &Arc<dyn ImageFile>,
        present: &StatePath,
    ) -> io::Result<Self> {
        chain.moved(&record.current_path().map_err(io::Error::other)?);
        let log = PresentFile::open(present, BlockRange::whole(record.len).len)?;
        let (below, here) = (Arc::clone(&chain) as Arc<dyn Image>, log.all());
        let (file, noted) = (Arc::clone(file) as Arc<dyn Image>, log.noted());
        let overlay = Overlay::new(below, file, &here, &noted, log).map_err(io::Error::other)?;
        Ok(Self { chain, overlay: Arc::new(overlay), taking: AtomicBool::new(false) })
    }
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
pub(crate) mod tests {
    use super::*;
    use crate::registry::Surroundings;
    use dray_image::{ErrorKind, Extent, ExtentKind, Geometry, Result, ZeroMode};

    /// A chain that nobody reads.
    struct Unread(u64);

    fn unread<T>() -> Result<T> {
        Err(dray_image::Error::new(ErrorKind::Unavailable, "asking a chain", "nobody reads it"))
    }

    impl Image for Unread {
        fn geometry(&self) -> Geometry {
            Geometry { len: self.0, min_block: 1, preferred_block: 4096, read_only: true }
        }

        fn read_at(&self, _buf: &mut [u8], _offset: u64) -> Result<()> {
            unread()
        }

        fn write_at(&self, _data: &[u8], _offset: u64, _fua: bool) -> Result<()> {
            unread()
        }

        fn zero(&self, _offset: u64, _len: u64, _mode: ZeroMode, _fua: bool) -> Result<()> {
            unread()
        }

        fn discard(&self, _offset: u64, _len: u64, _fua: bool) -> Result<()> {
            unread()
        }

        fn flush(&self) -> Result<()> {
            unread()
        }

        fn sync(&self) -> Result<()> {
            unread()
        }

        fn extents(&self, _offset: u64, len: u64, _max: usize) -> Result<Vec<Extent>> {
            Ok(vec![Extent { len, kind: ExtentKind::Data }])
        }
    }

    impl ChainImage for Unread {
        fn moved(&self, _path: &Path) {}

        fn is_of(&self, _path: &Path) -> bool {
            false
        }

        fn hold(&self) {}

        fn resume(&self) {}

        fn open(&self) -> io::Result<()> {
            unread().map_err(io::Error::other)
        }

        fn set_writable(&self, _write: bool) -> io::Result<()> {
            self.open()
        }

        fn finish(&self) -> io::Result<()> {
            Ok(())
        }

        fn close(&self) {}

        fn asked(&self) -> u64 {
            0
        }

        fn rest(&self) {}

        fn life(&self) -> u64 {
            0
        }
    }

    /// Surroundings in which nobody reads chains.
    pub struct Plain;

    impl Surroundings for Plain {
        fn is_direct(&self, _path: &Path) -> bool {
            false
        }

        fn chain(
            &self,
            _purpose: Purpose,
            _id: ImageId,
            _layers: Vec<ChainLayer>,
            len: u64,
        ) -> Arc<dyn ChainImage> {
            Arc::new(Unread(len))
        }
    }
}
