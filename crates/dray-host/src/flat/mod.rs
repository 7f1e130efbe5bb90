//! Disks that move flattened: what their guest sees. What is durable of them is in [`chain`](crate::record::chain).
//!
//! What the guest writes goes into an [`Overlay`] that is dray's own; the chain below is only read, by
//! whoever knows its formats ([`ChainImage`]). Both together are an image like any other. [`peeks`] are
//! of those who look before.

pub mod peeks;

use crate::folder::present::PresentFile;
use crate::record::ImageRecord;
use dray_files::StatePath;
use dray_image::{FileImage, FileOptions, Image, ImageFile, ImageNames, Overlay};
use dray_types::BlockRange;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// A flattened image that is open.
pub struct Flat {
    /// The chain below.
    pub chain: Arc<dyn ChainImage>,
    /// The overlay together with the chain below it.
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
        let log = PresentFile::open(present, &record.path, BlockRange::whole(record.len).len)?;
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
