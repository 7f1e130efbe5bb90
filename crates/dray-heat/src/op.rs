//! What a guest does to an image.

/// A guest's access to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Blocks were read.
    Read,
    /// Blocks were changed: written, zeroed or discarded.
    Write,
}
