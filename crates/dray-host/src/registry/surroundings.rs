//! What a host's images are opened in, which only their agent knows.

use crate::flat::{ChainImage, Purpose};
use crate::record::chain::ChainLayer;
use dray_types::ImageId;
use std::path::Path;
use std::sync::Arc;

/// What a host's images are opened in.
pub trait Surroundings: Send + Sync {
    /// Whether an image at `path` is to bypass the page cache.
    fn is_direct(&self, path: &Path) -> bool;

    /// The chain of `layers`, the active one first, below the image with this id, `len` bytes long as its
    /// guest sees it. It need not be there yet: who reads waits for it.
    fn chain(
        &self,
        purpose: Purpose,
        id: ImageId,
        layers: Vec<ChainLayer>,
        len: u64,
    ) -> Arc<dyn ChainImage>;
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::record::chain::ChainLayer;
    use dray_image::{ErrorKind, Extent, ExtentKind, Geometry, Image, Result, ZeroMode};
    use dray_types::ImageId;
    use std::io;

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
