//! Reading the source's images for data streams, peeks and hashes.

use super::jumps::Jumps;
use crate::hashes::Hashes;
use dray_image::{Image, runs};
use dray_net::RunSource;
use dray_types::{BlockRange, ImageIndex};
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// The images of a migration, in its order.
pub struct Content {
    files: RwLock<Vec<Arc<dyn Image>>>,
    jumps: Mutex<Jumps>,
}

impl Content {
    /// Reads from `files`.
    pub fn new(files: Vec<Arc<dyn Image>>) -> Arc<Self> {
        Arc::new(Self { files: RwLock::new(files), jumps: Mutex::default() })
    }

    /// Reads from other files from now on.
    pub fn replace(&self, files: Vec<Arc<dyn Image>>) {
        *self.files.write() = files;
    }

    /// What jumps between the runs that were sent have cost.
    pub fn jumps(&self) -> MutexGuard<'_, Jumps> {
        self.jumps.lock()
    }

    fn file(&self, image: ImageIndex) -> io::Result<Arc<dyn Image>> {
        let file = self.files.read().get(image.ix()).cloned();
        file.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "there is no such image"))
    }

    /// Bytes for a QEMU that opens the disk at the target before handover.
    ///
    /// # Errors
    /// What the disk says, or that the request leaves the image.
    pub fn peek(&self, image: ImageIndex, offset: u64, len: u32) -> io::Result<Vec<u8>> {
        let file = self.file(image)?;
        let mut data = vec![0; len as usize];
        file.read_at(&mut data, offset).map_err(io::Error::other)?;
        Ok(data)
    }

    /// The first 16 bytes of the BLAKE3 hash of each range; the image's tail counts as zeros.
    ///
    /// # Errors
    /// What the disk says.
    pub fn hash(&self, image: ImageIndex, ranges: &[BlockRange]) -> io::Result<Vec<[u8; 16]>> {
        let file = self.file(image)?;
        let mut hashes = Hashes::of(&*file);
        ranges.iter().map(|&range| hashes.hash(range).map_err(io::Error::other)).collect()
    }
}

impl RunSource for Content {
    fn read(&self, image: ImageIndex, range: BlockRange, buf: &mut [u8]) -> io::Result<()> {
        let file = self.file(image)?;
        let follows = self.jumps().begins(image, range);
        let began = Instant::now();
        let read = runs::read_run(&*file, range, buf).map_err(io::Error::other);
        self.jumps().took(follows, range.len, began.elapsed());
        read
    }
}
