//! What the QEMU of a VM gets that has left this host with its image. It may go on running, and somebody may let its
//! guest go on: the image is another host's by then, or has come back with the VM in another QEMU. All that the old
//! one still needs is to quit, and for that it wants its flushes answered.

use dray_image::{Disk, Error, ErrorKind, Extent, Geometry, Image, Result, ZeroMode};
use std::sync::Arc;

/// An image as such a QEMU sees it: nothing is read and nothing is changed.
pub(super) struct PastImage(pub(super) Arc<Disk>);

fn has_left<T>() -> Result<T> {
    let why = "the vm has left this host with the image; this qemu is of the past, end it";
    Err(Error::new(ErrorKind::Unavailable, "serving the image", why))
}

impl Image for PastImage {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn read_at(&self, _buf: &mut [u8], _offset: u64) -> Result<()> {
        has_left()
    }

    fn write_at(&self, _data: &[u8], _offset: u64, _fua: bool) -> Result<()> {
        has_left()
    }

    fn zero(&self, _offset: u64, _len: u64, _mode: ZeroMode, _fua: bool) -> Result<()> {
        has_left()
    }

    fn discard(&self, _offset: u64, _len: u64, _fua: bool) -> Result<()> {
        has_left()
    }

    /// All was durable when the image left, and nothing was written since.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn extents(&self, _offset: u64, _len: u64, _max: usize) -> Result<Vec<Extent>> {
        has_left()
    }
}
