//! The envelope of every small object: kind, version, checksum, and the seal if there is one.
//!
//! `DRAYBK` · kind · version · salt (32) · body · BLAKE3 of all before (32). In an encrypted
//! repository the body is sealed with a key that comes from the salt. So truncation and damage are
//! noticed before anything is decoded, and without a key.

use crate::error::{Error, Kind, Result};
use crate::key::Keys;
use crate::seal::Sealer;
use crate::world::World;
use serde::Serialize;
use serde::de::DeserializeOwned;

const MAGIC: &[u8; 6] = b"DRAYBK";
/// The version of every object that this program writes.
pub(crate) const VERSION: u8 = 1;
const SALT_AT: usize = 8;
const BODY_AT: usize = SALT_AT + 32;
const SUM_BYTES: usize = 32;

/// What an envelope holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Content {
    Config = b'C',
    Manifest = b'M',
    /// In a manifest's place: its session was ended.
    Tombstone = b'T',
    /// What a collector condemned.
    Mark = b'K',
    /// The sessions that a collector waits for.
    Waits = b'W',
}

/// Encodes, seals and wraps `value`.
pub(crate) fn wrap<T: Serialize>(
    content: Content,
    value: &T,
    keys: &Keys,
    world: &dyn World,
) -> Result<Vec<u8>> {
    let mut body = postcard::to_allocvec(value)
        .map_err(|e| Error::invalid(format!("cannot encode a {content:?}: {e}")))?;
    let mut salt = [0; 32];
    if keys.sealed() {
        world.fill(&mut salt)?;
    }
    Sealer::new(keys.of_object(&salt))?.seal(0, &mut body)?;
    let mut bytes = Vec::with_capacity(BODY_AT + body.len() + SUM_BYTES);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&[content as u8, VERSION]);
    bytes.extend_from_slice(&salt);
    bytes.extend_from_slice(&body);
    let sum = blake3::hash(&bytes);
    bytes.extend_from_slice(sum.as_bytes());
    Ok(bytes)
}

/// The kind of content that `bytes` claim to hold, if they are an envelope at all.
pub(crate) fn holds(bytes: &[u8], content: Content) -> bool {
    bytes.len() >= BODY_AT && bytes.starts_with(MAGIC) && bytes[6] == content as u8
}

/// Checks, opens and decodes what [`wrap`] made. `name` is for errors.
pub(crate) fn unwrap<T: DeserializeOwned>(
    content: Content,
    name: &str,
    bytes: &[u8],
    keys: &Keys,
) -> Result<T> {
    let damaged = |why: &str| Error::damaged(format!("{name} is damaged: {why}"));
    if bytes.len() < BODY_AT + SUM_BYTES {
        return Err(damaged("it is too short"));
    }
    if !bytes.starts_with(MAGIC) {
        return Err(damaged("dray did not write it"));
    }
    let (covered, sum) = bytes.split_at(bytes.len() - SUM_BYTES);
    if blake3::hash(covered).as_bytes() != sum {
        return Err(damaged("its checksum does not match"));
    }
    if covered[7] != VERSION {
        let text = format!("{name} is of version {}; this dray knows {VERSION}", covered[7]);
        return Err(Error::new(Kind::Unsupported, text));
    }
    if covered[6] != content as u8 {
        return Err(damaged("it is of another kind"));
    }
    let mut salt = [0; 32];
    salt.copy_from_slice(&covered[SALT_AT..BODY_AT]);
    let body = Sealer::new(keys.of_object(&salt))?
        .open(0, covered[BODY_AT..].to_vec())
        .map_err(|_| damaged("it was not sealed with this repository's key"))?;
    match postcard::take_from_bytes(&body) {
        Ok((value, [])) => Ok(value),
        _ => Err(damaged("it cannot be decoded")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::SystemWorld;

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        for keys in [Keys::new(None), Keys::new(Some([7; 32]))] {
            let value = (5u64, "text".to_owned());
            let bytes = wrap(Content::Waits, &value, &keys, &SystemWorld).unwrap();
            let read = |bytes: &[u8]| unwrap::<(u64, String)>(Content::Waits, "x", bytes, &keys);
            assert_eq!(read(&bytes).unwrap(), value);
            for len in 0..bytes.len() {
                assert_eq!(read(&bytes[..len]).unwrap_err().kind(), Kind::Damaged);
            }
            for bit in 0..bytes.len() * 8 {
                let mut wrong = bytes.clone();
                wrong[bit / 8] ^= 1 << (bit % 8);
                assert!(read(&wrong).is_err(), "bit {bit}");
            }
        }
    }

    #[test]
    fn another_kind_key_or_version_is_refused() {
        let keys = Keys::new(Some([7; 32]));
        let bytes = wrap(Content::Waits, &1u64, &keys, &SystemWorld).unwrap();
        let read = |content, keys: &Keys| unwrap::<u64>(content, "x", &bytes, keys).unwrap_err();
        assert_eq!(read(Content::Mark, &keys).kind(), Kind::Damaged);
        assert_eq!(read(Content::Waits, &Keys::new(Some([8; 32]))).kind(), Kind::Damaged);
        let mut newer = bytes[..bytes.len() - SUM_BYTES].to_vec();
        newer[7] = VERSION + 1;
        let sum = blake3::hash(&newer);
        newer.extend_from_slice(sum.as_bytes());
        let error = unwrap::<u64>(Content::Waits, "x", &newer, &keys).unwrap_err();
        assert_eq!(error.kind(), Kind::Unsupported);
    }
}
