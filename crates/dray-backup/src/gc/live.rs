//! The segments and pieces that the backups name, each once.

use crate::error::{Error, Kind, Result};
use crate::manifest::{self, Manifest, SegmentRef};
use crate::piece::Piece;
use crate::place::{PackId, PackSlice};
use crate::reader::load_segment;
use crate::repository::{Core, manifests};
use std::collections::{HashMap, HashSet};

/// What a [`walk`] comes across.
pub(crate) enum Walk<'a> {
    /// A segment, of this many pieces.
    Segment { segment: &'a SegmentRef, pieces: &'a [Piece], ix: u64 },
    /// A segment that cannot be read.
    Broken { error: Error, ix: u64 },
}

/// Visits every segment of a manifest, but not those in `seen`.
///
/// # Errors
/// `Unavailable`, and what `visit` returns.
pub(crate) fn walk(
    core: &Core,
    manifest: &Manifest,
    seen: &mut HashSet<(PackId, u32)>,
    mut visit: impl FnMut(Walk<'_>) -> Result<()>,
) -> Result<()> {
    for (ix, segment) in manifest.stored() {
        if !seen.insert((segment.place.pack, segment.place.offset)) {
            continue;
        }
        match load_segment(core, manifest, ix) {
            Ok(pieces) => visit(Walk::Segment { segment, pieces: &pieces, ix })?,
            Err(error) if error.is_of_store() => return Err(error),
            Err(error) => visit(Walk::Broken { error, ix })?,
        }
    }
    Ok(())
}

/// Everything that manifests name.
pub(super) struct Live {
    pub(super) manifests: Vec<Manifest>,
    /// Places that are named in each pack: offset and length.
    places: HashMap<PackId, HashMap<u32, u32>>,
}

impl Live {
    /// Reads all manifests.
    ///
    /// # Errors
    /// `Damaged` when something cannot be read whose backup still exists; `Unavailable`.
    pub(super) fn read(core: &Core) -> Result<Self> {
        let found = manifests(core, manifest::FOLDER)?;
        if let Some((_, error)) = found.damaged.into_iter().next() {
            return Err(error);
        }
        let mut live = Self { manifests: Vec::new(), places: HashMap::new() };
        let mut seen = HashSet::new();
        for manifest in found.whole {
            if live.add(core, &manifest, &mut seen)? {
                live.manifests.push(manifest);
            }
        }
        Ok(live)
    }

    /// False when the manifest is gone meanwhile, and what it names with it.
    fn add(
        &mut self,
        core: &Core,
        manifest: &Manifest,
        seen: &mut HashSet<(PackId, u32)>,
    ) -> Result<bool> {
        let places = &mut self.places;
        // A segment that another manifest names as well is in `seen`, and its places are noted.
        let walked = walk(core, manifest, seen, |step| match step {
            Walk::Segment { segment, pieces, .. } => {
                note(places, &segment.place);
                pieces.iter().filter_map(Piece::place).for_each(|place| note(places, &place));
                Ok(())
            }
            Walk::Broken { error, ix } => Err(Error::damaged(format!(
                "{}: segment {ix} cannot be read: {error}",
                manifest.backup().object
            ))),
        });
        match walked {
            Err(e) if e.kind() == Kind::Damaged => {
                if core.store.exists(&manifest.backup().object)? { Err(e) } else { Ok(false) }
            }
            walked => walked.map(|()| true),
        }
    }

    pub(super) fn names(&self, pack: &PackId) -> bool {
        self.places.contains_key(pack)
    }

    /// Bytes of a pack that are named.
    pub(super) fn bytes(&self, pack: &PackId) -> u64 {
        self.places.get(pack).map_or(0, |places| places.values().map(|len| u64::from(*len)).sum())
    }
}

fn note(places: &mut HashMap<PackId, HashMap<u32, u32>>, place: &PackSlice) {
    places.entry(place.pack).or_default().insert(place.offset, place.stored);
}
