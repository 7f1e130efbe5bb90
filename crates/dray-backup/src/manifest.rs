//! Manifests: one per backup, immutable. What was backed up, and the list of its segments.

use crate::envelope::{Content, unwrap, wrap};
use crate::error::{Error, Result};
use crate::key::Keys;
use crate::piece::{Hash, MAX_IMAGE_BYTES};
use crate::place::{PackId, PackSlice};
use crate::segment::{MAX_ENCODED, check_place, segment_count};
use crate::world::World;
use dray_types::{Ancestor, ImageId, list, text};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// Folder of all manifests.
pub(crate) const FOLDER: &str = "manifests/";
/// Longest manifest object: an image of 64 TiB has 2 million segments of at most 50 bytes, and their
/// packs.
pub(crate) const MAX_BYTES: usize = 256 << 20;
/// Most segments of an image, and so most packs that they are in.
const MAX_SEGMENTS: usize = segment_count(MAX_IMAGE_BYTES) as usize;
/// Longest text in an [`Info`].
const MAX_TEXT: usize = 4096;
/// Highest number of a backup of an image: whoever counts on from it must be able to.
const MAX_NUMBER: u64 = 1 << 32;
/// Most ancestors that a backup names.
const MAX_ANCESTORS: usize = 4096;

/// How far a backup can be trusted to be what a guest would find.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Consistency {
    /// As after a power cut at that moment.
    Crash,
    /// The guest's file systems were frozen.
    Filesystem,
}

/// What a backup is of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Info {
    /// The image, the same on every host.
    pub image: ImageId,
    /// The image's name where the backup was made.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// The generation that this is the end of.
    pub generation: Ancestor,
    /// The generation that the backup it builds on is of.
    pub parent: Option<Ancestor>,
    /// The generations before it, as far as they were remembered, oldest first.
    #[serde(deserialize_with = "list::at_most::<_, _, MAX_ANCESTORS>")]
    pub ancestors: Vec<Ancestor>,
    /// When, in milliseconds since 1970.
    pub taken_unix_ms: u64,
    /// The host that made it.
    pub host: String,
    /// What the guest was asked before.
    pub consistency: Consistency,
}

/// Number of the generation of an image whose content is always the same: a base image of others.
pub const NEVER_CHANGES: u64 = 0;

impl Info {
    /// Whether it is of an image that others are built on, and that never changes.
    pub fn is_base(&self) -> bool {
        self.generation.number == NEVER_CHANGES
    }

    pub(crate) fn check(&self) -> Result<()> {
        // A terminal would obey what is no plain text.
        let is_plain = |text: &str| text.len() <= MAX_TEXT && text::harmless(text) == text;
        let bounded = self.bytes <= MAX_IMAGE_BYTES
            && is_plain(&self.name)
            && is_plain(&self.host)
            && self.ancestors.len() <= MAX_ANCESTORS;
        let why = "the backup's description is too long, or is no plain text";
        if bounded { Ok(()) } else { Err(Error::invalid(why)) }
    }
}

/// One backup: its place in the repository and what it is of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Backup {
    /// Which one: 32 hexadecimal digits tell it from all others for ever. A backup keeps it when a
    /// collector writes its manifest anew.
    pub id: u128,
    /// Number among the image's backups, ascending with time; two that were made at once on two
    /// hosts may share one.
    pub number: u64,
    /// What it is of.
    pub info: Info,
    /// Bytes of the pieces that this backup added to the repository, as stored.
    pub added_bytes: u64,
    pub(crate) revision: u32,
    pub(crate) object: String,
}

/// Where a segment is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SegmentRef {
    pub(crate) hash: Hash,
    pub(crate) plain: u32,
    pub(crate) place: PackSlice,
}

/// A backup's manifest. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Manifest {
    backup: Backup,
    /// Those that are not all zeros, in order: what a repository names takes memory by its own length.
    segments: Arc<Vec<(u64, SegmentRef)>>,
}

impl Manifest {
    /// The backup that it is of.
    pub fn backup(&self) -> &Backup {
        &self.backup
    }

    /// What was backed up.
    pub fn info(&self) -> &Info {
        &self.backup.info
    }

    /// How many segments the image has.
    pub(crate) fn segment_count(&self) -> u64 {
        segment_count(self.info().bytes)
    }

    /// The segments that are not all zeros, each with its number.
    pub(crate) fn stored(&self) -> impl Iterator<Item = (u64, &SegmentRef)> {
        self.segments.iter().map(|(ix, segment)| (*ix, segment))
    }

    /// Segment `ix`, if it is one of these.
    pub(crate) fn segment(&self, ix: u64) -> Option<&SegmentRef> {
        let at = self.segments.binary_search_by_key(&ix, |(ix, _)| *ix).ok()?;
        Some(&self.segments[at].1)
    }
}

/// The name of the object of a backup that session `session` writes.
pub(crate) fn object_name(image: ImageId, number: u64, session: u128) -> String {
    format!("{FOLDER}{image}/{number:08}-{session:032x}")
}

/// The image whose backups lie in the object's folder, and its session.
pub(crate) fn parse_name(name: &str) -> Option<(ImageId, u64, u128)> {
    let (image, rest) = name.strip_prefix(FOLDER)?.split_once('/')?;
    let (number, session) = rest.split_once('-')?;
    let image = image.parse().ok()?;
    let (number, session) = (number.parse().ok()?, u128::from_str_radix(session, 16).ok()?);
    if number > MAX_NUMBER {
        return None;
    }
    (object_name(image, number, session) == name).then_some((image, number, session))
}

#[derive(Serialize, Deserialize)]
struct Stored {
    id: u128,
    number: u64,
    revision: u32,
    added_bytes: u64,
    info: Info,
    #[serde(deserialize_with = "list::at_most::<_, _, MAX_SEGMENTS>")]
    packs: Vec<PackId>,
    #[serde(deserialize_with = "list::at_most::<_, _, MAX_SEGMENTS>")]
    segments: Vec<Slot>,
}

#[derive(Serialize, Deserialize)]
enum Slot {
    /// That many segments of zeros.
    Zero(u64),
    Stored {
        pack: u32,
        offset: u32,
        stored: u32,
        plain: u32,
        hash: Hash,
    },
}

pub(crate) fn encode(
    backup: &Backup,
    segments: &[Option<SegmentRef>],
    keys: &Keys,
    world: &dyn World,
) -> Result<Vec<u8>> {
    let mut packs = Vec::new();
    let mut known = HashMap::new();
    let mut slots = Vec::new();
    for segment in segments {
        let Some(SegmentRef { hash, plain, place }) = *segment else {
            match slots.last_mut() {
                Some(Slot::Zero(count)) => *count += 1,
                _ => slots.push(Slot::Zero(1)),
            }
            continue;
        };
        let pack = *known.entry(place.pack).or_insert_with(|| {
            packs.push(place.pack);
            packs.len() as u32 - 1
        });
        slots.push(Slot::Stored { pack, offset: place.offset, stored: place.stored, plain, hash });
    }
    let Backup { id, number, revision, added_bytes, ref info, .. } = *backup;
    let info = info.clone();
    let stored = Stored { id, number, revision, added_bytes, info, packs, segments: slots };
    wrap(Content::Manifest, &stored, keys, world)
}

/// Decodes the manifest in object `name`; everything in it is checked (I7).
pub(crate) fn decode(name: &str, bytes: &[u8], keys: &Keys) -> Result<Manifest> {
    let stored: Stored = unwrap(Content::Manifest, name, bytes, keys)?;
    let damaged = || Error::damaged(format!("{name} is damaged: it contradicts itself"));
    stored.info.check().map_err(|_| damaged())?;
    let (image, number, _) = parse_name(name).ok_or_else(damaged)?;
    if (image, number) != (stored.info.image, stored.number) {
        return Err(damaged());
    }
    let wanted = segment_count(stored.info.bytes);
    let (mut ix, mut segments) = (0, Vec::new());
    for slot in &stored.segments {
        match *slot {
            Slot::Zero(count) if count <= wanted - ix => ix += count,
            Slot::Stored { pack, offset, stored: len, plain, hash } if ix < wanted => {
                let pack = *stored.packs.get(pack as usize).ok_or_else(damaged)?;
                let place = PackSlice { pack, offset, stored: len };
                let fits = plain as usize <= MAX_ENCODED && plain > 0;
                check_place(&place, plain as usize).filter(|()| fits).ok_or_else(damaged)?;
                segments.push((ix, SegmentRef { hash, plain, place }));
                ix += 1;
            }
            _ => return Err(damaged()),
        }
    }
    if ix != wanted {
        return Err(damaged());
    }
    let Stored { id, revision, added_bytes, info, .. } = stored;
    let object = name.to_owned();
    let backup = Backup { id, number, info, added_bytes, revision, object };
    Ok(Manifest { backup, segments: Arc::new(segments) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piece::PIECE_BYTES;
    use crate::world::SystemWorld;
    use crate::{Kind, pack};
    use dray_types::GenerationId;
    use proptest::prelude::*;

    fn backup(segments: u64) -> Backup {
        let image = ImageId(7);
        let info = Info {
            image,
            name: "vm.img".into(),
            bytes: segments * 512 * PIECE_BYTES as u64,
            generation: Ancestor { id: GenerationId(3), number: 2 },
            parent: None,
            ancestors: vec![Ancestor { id: GenerationId(2), number: 1 }],
            taken_unix_ms: 5,
            host: "hosta".into(),
            consistency: Consistency::Filesystem,
        };
        let object = object_name(image, 4, 9);
        Backup { id: 9, number: 4, info, added_bytes: 6, revision: 1, object }
    }

    fn segment() -> impl Strategy<Value = Option<SegmentRef>> {
        let stored = (0u32..3, 0u32..1000, 1u32..600, any::<[u8; 32]>());
        let stored = stored.prop_map(|(number, offset, plain, hash)| {
            let pack = PackId { session: 5, number, hash: [number as u8; 16] };
            SegmentRef { hash: Hash(hash), plain, place: PackSlice { pack, offset, stored: plain } }
        });
        prop_oneof![Just(None), stored.prop_map(Some)]
    }

    /// What a stranger's repository names takes no more memory than it has bytes, many times over.
    #[test]
    fn an_image_of_zeros_takes_no_memory_and_a_list_without_end_is_refused() {
        let (backup, keys) = (backup(MAX_SEGMENTS as u64), Keys::new(None));
        let decoded = |segments: Vec<Slot>| {
            let Backup { id, number, revision, added_bytes, info, .. } = backup.clone();
            let packs = Vec::new();
            let stored = Stored { id, number, revision, added_bytes, info, packs, segments };
            let bytes = wrap(Content::Manifest, &stored, &keys, &SystemWorld).unwrap();
            decode(&backup.object, &bytes, &keys)
        };
        let zeros = decoded(vec![Slot::Zero(MAX_SEGMENTS as u64)]).unwrap();
        assert_eq!((zeros.segment_count(), zeros.segments.capacity()), (MAX_SEGMENTS as u64, 0));
        let endless = (0..=MAX_SEGMENTS).map(|_| Slot::Zero(0)).collect();
        assert_eq!(decoded(endless).unwrap_err().kind(), Kind::Damaged);
    }

    proptest! {
        #[test]
        fn what_is_encoded_comes_back(segments in prop::collection::vec(segment(), 0..40)) {
            let (backup, keys) = (backup(segments.len() as u64), Keys::new(None));
            let bytes = encode(&backup, &segments, &keys, &SystemWorld).unwrap();
            let manifest = decode(&backup.object, &bytes, &keys).unwrap();
            prop_assert_eq!(manifest.backup(), &backup);
            let found = (0..manifest.segment_count()).map(|ix| manifest.segment(ix).copied());
            prop_assert_eq!(found.collect::<Vec<_>>(), segments);
            let elsewhere = object_name(ImageId(8), 4, 9);
            let error = decode(&elsewhere, &bytes, &keys).unwrap_err();
            prop_assert_eq!(error.kind(), Kind::Damaged);
        }

        /// Whoever can compute a checksum can write anything: it is an error or within all bounds.
        #[test]
        fn a_forged_body_is_an_error_or_keeps_to_the_bounds(
            segments in prop::collection::vec(segment(), 0..8),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        ) {
            let (backup, keys) = (backup(segments.len() as u64), Keys::new(None));
            let mut bytes = encode(&backup, &segments, &keys, &SystemWorld).unwrap();
            let body = bytes.len() - 32;
            for (at, byte) in changes {
                bytes[40 + at.index(body - 40)] = byte;
            }
            let sum = *blake3::hash(&bytes[..body]).as_bytes();
            bytes[body..].copy_from_slice(&sum);
            match decode(&backup.object, &bytes, &keys) {
                Err(error) => prop_assert_eq!(error.kind(), Kind::Damaged),
                Ok(manifest) => {
                    prop_assert!(manifest.info().bytes <= MAX_IMAGE_BYTES);
                    for (ix, segment) in manifest.stored() {
                        prop_assert!(ix < manifest.segment_count());
                        prop_assert!(segment.place.end() <= pack::MAX_PACK as u64);
                    }
                }
            }
        }
    }
}
