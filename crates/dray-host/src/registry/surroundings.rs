//! What a host's images are opened in, which only their agent knows.

use crate::flat::{ChainImage, ChainLayer, Purpose};
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
