//! Sealing bytes with AES-256-GCM, or leaving them as they are.

use crate::error::{Error, Result};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

/// Bytes by which sealing makes something longer.
pub(crate) const TAG_BYTES: usize = 16;

/// One key, or none.
pub(crate) struct Sealer(Option<LessSafeKey>);

impl Sealer {
    /// A sealer with `key`; without one it does nothing.
    pub(crate) fn new(key: Option<[u8; 32]>) -> Result<Self> {
        let key = key.map(|key| UnboundKey::new(&AES_256_GCM, &key).map(LessSafeKey::new));
        Ok(Self(key.transpose().map_err(|_| Error::invalid("the key cannot be used"))?))
    }

    /// By how much sealing makes something longer.
    pub(crate) fn overhead(&self) -> usize {
        if self.0.is_some() { TAG_BYTES } else { 0 }
    }

    /// Seals `bytes` in place. `nonce` must differ between all that is sealed with one key.
    pub(crate) fn seal(&self, nonce: u64, bytes: &mut Vec<u8>) -> Result<()> {
        let Some(key) = &self.0 else { return Ok(()) };
        key.seal_in_place_append_tag(numbered(nonce), Aad::empty(), bytes)
            .map_err(|_| Error::invalid("too much to seal at once"))
    }

    /// Opens `bytes` in place; `Damaged` when they are not what was sealed.
    pub(crate) fn open(&self, nonce: u64, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
        let Some(key) = &self.0 else { return Ok(bytes) };
        let plain = key.open_in_place(numbered(nonce), Aad::empty(), &mut bytes).map_err(|_| {
            Error::damaged("the encrypted bytes differ from those that were written")
        })?;
        let len = plain.len();
        bytes.truncate(len);
        Ok(bytes)
    }
}

fn numbered(nonce: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&nonce.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}
