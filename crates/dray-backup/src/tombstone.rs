//! What stands in the place of a manifest whose session was ended by another program.

use crate::envelope::{Content, holds};

/// True for a tombstone.
pub(crate) fn is_tombstone(bytes: &[u8]) -> bool {
    holds(bytes, Content::Tombstone)
}

/// Longest tombstone: head, salt, seal and checksum. Every manifest is longer.
pub(crate) const TOMBSTONE_BYTES: u64 = 8 + 32 + 16 + 32;
