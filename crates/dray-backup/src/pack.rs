//! Packs: objects of up to 16 MiB that hold pieces, one after the other.
//!
//! A pack's name is `packs/SESSION/NUMBER-HASH`: the session that wrote it, its number there, and
//! the first half of the BLAKE3 of its bytes. So no name is ever used for two things or used again
//! (the collector relies on it), and whoever holds a pack can check it without any key. A pack has
//! no header and no index; manifests and segments say what lies where.

use crate::error::{Error, Result};
use crate::key::Keys;
use crate::piece::PIECE_BYTES;
use crate::place::{PackId, PackSlice};
use crate::seal::{Sealer, TAG_BYTES};

/// A pack is closed when it holds this much.
pub const PACK_BYTES: usize = 16 << 20;
/// Longest pack: one that is not closed yet grows by a piece or a segment at most.
pub(crate) const MAX_PACK: usize = PACK_BYTES + PIECE_BYTES + TAG_BYTES;
/// zstd level: the fastest one; see the crate's documentation for why not more.
const LEVEL: i32 = 1;

/// Compresses if that saves more than 3 %.
fn compressed(plain: &[u8]) -> Option<Vec<u8>> {
    let most = plain.len() - plain.len() * 3 / 100;
    zstd::bulk::compress(plain, LEVEL).ok().filter(|small| small.len() < most)
}

/// A pack in the making.
pub(crate) struct Builder {
    session: u128,
    number: u32,
    sealer: Sealer,
    bytes: Vec<u8>,
}

impl Builder {
    pub(crate) fn new(session: u128, number: u32, keys: &Keys) -> Result<Self> {
        let sealer = Sealer::new(keys.of_pack(session, number))?;
        Ok(Self { session, number, sealer, bytes: Vec::new() })
    }

    /// Appends `plain`; returns its offset and stored length.
    pub(crate) fn append(&mut self, plain: &[u8]) -> Result<(u32, u32)> {
        let offset = self.bytes.len() as u32;
        let mut body = compressed(plain).unwrap_or_else(|| plain.to_vec());
        self.sealer.seal(u64::from(offset), &mut body)?;
        self.bytes.extend_from_slice(&body);
        Ok((offset, body.len() as u32))
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The finished pack and its id.
    pub(crate) fn close(self) -> (PackId, Vec<u8>) {
        (PackId::of(self.session, self.number, &self.bytes), self.bytes)
    }
}

/// Opens and decompresses what [`Builder::append`] stored; it must come to `plain` bytes.
pub(crate) fn extract(
    place: &PackSlice,
    stored: Vec<u8>,
    plain: usize,
    keys: &Keys,
) -> Result<Vec<u8>> {
    let sealer = Sealer::new(keys.of_pack(place.pack.session, place.pack.number))?;
    let raw = stored.len() == plain + sealer.overhead();
    let body = sealer.open(u64::from(place.offset), stored)?;
    if raw {
        return Ok(body);
    }
    match zstd::bulk::decompress(&body, plain) {
        Ok(bytes) if bytes.len() == plain => Ok(bytes),
        _ => Err(Error::damaged("the compressed bytes differ from those that were written")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ids_are_the_same_thing() {
        let id = PackId::of(77, 3, b"some bytes");
        assert_eq!(PackId::parse(&id.name()), Some(id));
        crate::store::check_name(&id.name()).unwrap();
        for wrong in ["packs/", "config", "packs/7/3-1", &id.name().to_uppercase(), "packs/+/"] {
            assert_eq!(PackId::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_is_appended_comes_back_sealed_or_not_small_or_not() {
        let noise: Vec<u8> = blake3::Hasher::new().finalize_xof_bytes(5000);
        let text = vec![b'x'; 5000];
        for keys in [Keys::new(None), Keys::new(Some([1; 32]))] {
            let mut builder = Builder::new(9, 1, &keys).unwrap();
            let places = [&noise, &text].map(|plain| builder.append(plain).unwrap());
            let (pack, bytes) = builder.close();
            for ((offset, stored), plain) in places.into_iter().zip([&noise, &text]) {
                let place = PackSlice { pack, offset, stored };
                let cut = bytes[offset as usize..][..stored as usize].to_vec();
                assert_eq!(&extract(&place, cut.clone(), plain.len(), &keys).unwrap(), plain);
                let wrong_length = extract(&place, cut, plain.len() + 1, &keys);
                assert_eq!(wrong_length.unwrap_err().kind(), crate::Kind::Damaged);
            }
            assert!(places[1].1 < 100, "text is compressed");
        }
    }

    trait Xof {
        fn finalize_xof_bytes(&self, len: usize) -> Vec<u8>;
    }
    impl Xof for blake3::Hasher {
        fn finalize_xof_bytes(&self, len: usize) -> Vec<u8> {
            let mut bytes = vec![0; len];
            self.finalize_xof().fill(&mut bytes);
            bytes
        }
    }
}
