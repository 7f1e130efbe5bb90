//! Where something is stored: which pack, and where in it.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Folder of all packs.
pub(crate) const FOLDER: &str = "packs/";

/// Which pack.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PackId {
    /// The session that wrote it.
    pub session: u128,
    /// Its number in that session.
    pub number: u32,
    /// First half of the BLAKE3 of its bytes.
    pub hash: [u8; 16],
}

impl PackId {
    /// The pack's name in the store.
    pub fn name(&self) -> String {
        self.to_string()
    }

    /// The pack that has `name`.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (session, rest) = name.strip_prefix(FOLDER)?.split_once('/')?;
        let (number, hash) = rest.split_once('-')?;
        if session.len() != 32 || number.len() != 8 || hash.len() != 32 {
            return None;
        }
        let id = Self {
            session: u128::from_str_radix(session, 16).ok()?,
            number: u32::from_str_radix(number, 16).ok()?,
            hash: u128::from_str_radix(hash, 16).ok()?.to_be_bytes(),
        };
        (id.to_string() == name).then_some(id)
    }

    /// The id of a pack with these bytes.
    pub(crate) fn of(session: u128, number: u32, bytes: &[u8]) -> Self {
        let mut hash = [0; 16];
        hash.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
        Self { session, number, hash }
    }
}

impl fmt::Display for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { session, number, hash } = self;
        write!(f, "{FOLDER}{session:032x}/{number:08x}-{:032x}", u128::from_be_bytes(*hash))
    }
}

impl fmt::Debug for PackId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Where something is stored: `stored` bytes at `offset` of a pack. They are compressed unless they
/// are as long as what they stand for (and its seal).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackSlice {
    /// The pack.
    pub pack: PackId,
    /// First byte there.
    pub offset: u32,
    /// Bytes there.
    pub stored: u32,
}

impl PackSlice {
    /// One past the last byte in the pack.
    pub(crate) fn end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.stored)
    }
}
