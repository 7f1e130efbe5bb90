//! The beginning of a session, in the order that makes it safe: announce, learn what is condemned,
//! and only then look at manifests.

use super::assemble::Segments;
use super::packer::{Packer, Shared};
use super::workers::Workers;
use super::{Writer, Written, current};
use crate::error::{Error, Result};
use crate::index::Index;
use crate::manifest::{self, Backup, Manifest};
use crate::mark;
use crate::piece::{MAX_IMAGE_BYTES, Piece};
use crate::place::{PackId, PackSlice};
use crate::reader::load_segment;
use crate::repository::{Core, Repository, manifests};
use crate::session::Session;
use dray_types::ImageId;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Which stored content a writer looks through for what it is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dedup {
    /// The parent's. Cheapest to begin.
    Parent,
    /// That of all backups of the same image.
    Image,
    /// Everything in the repository: reads all its segments, about 36 bytes for each piece.
    Everything,
}

/// How a backup is written.
#[derive(Clone, Copy, Debug)]
pub struct WriterOptions {
    /// Threads that hash, compress and upload; with none the caller's does it.
    pub threads: usize,
    /// What is looked through for content that is there already.
    pub dedup: Dedup,
    /// Pieces that are remembered for it at most, about 60 bytes of memory each.
    pub index_pieces: usize,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self { threads: 4, dedup: Dedup::Everything, index_pieces: 4 << 20 }
    }
}

/// What a writer may rely on.
pub(crate) struct Known {
    /// All packs that there are, with their length.
    present: HashMap<PackId, u64>,
    /// Those that will go: condemned, or to be written anew.
    avoid: HashSet<PackId>,
}

/// What may be done with something that is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Standing {
    /// It can be relied on.
    Sound,
    /// It must be stored again.
    Doomed,
    /// It is not there.
    Lost,
}

impl Known {
    pub(crate) fn standing(&self, place: &PackSlice) -> Standing {
        match self.present.get(&place.pack) {
            Some(bytes) if *bytes >= place.end() => {
                if self.avoid.contains(&place.pack) {
                    Standing::Doomed
                } else {
                    Standing::Sound
                }
            }
            _ => Standing::Lost,
        }
    }

    /// True when nothing that a manifest names can be doomed.
    pub(crate) fn avoids_nothing(&self) -> bool {
        self.avoid.is_empty()
    }
}

impl Repository {
    /// Begins a backup of an image of `bytes` bytes, on top of `parent` if there is one.
    ///
    /// # Errors
    /// `NotFound` when the parent was removed, `Unavailable`, `Damaged`, `Invalid`.
    pub fn writer(
        &self,
        image: ImageId,
        bytes: u64,
        parent: Option<&Manifest>,
        options: WriterOptions,
    ) -> Result<Writer> {
        let number = next_number(&self.core, image)?;
        let of = Of { image, number, bytes };
        begin(&self.core, of, parent, options, HashSet::new())
    }

    /// Begins to write a backup anew without the packs in `avoid`.
    pub(crate) fn reviser(
        &self,
        old: &Manifest,
        options: WriterOptions,
        avoid: HashSet<PackId>,
    ) -> Result<Writer> {
        let (info, number) = (old.info(), old.backup().number);
        let of = Of { image: info.image, number, bytes: info.bytes };
        let mut writer = begin(&self.core, of, Some(old), options, avoid)?;
        writer.revision_of = writer.parent.as_ref().map(|now| now.backup().clone());
        Ok(writer)
    }
}

/// Which backup is begun.
#[derive(Clone, Copy)]
struct Of {
    image: ImageId,
    number: u64,
    bytes: u64,
}

fn begin(
    core: &Arc<Core>,
    of: Of,
    parent: Option<&Manifest>,
    options: WriterOptions,
    mut avoid: HashSet<PackId>,
) -> Result<Writer> {
    let Of { image, number, bytes } = of;
    if bytes > MAX_IMAGE_BYTES {
        return Err(Error::invalid("the image is too long"));
    }
    if parent.is_some_and(|parent| parent.info().image != image) {
        return Err(Error::invalid("the parent is a backup of another image"));
    }
    let session = Session::begin(core, image, number)?;
    // From here on no pack goes that is not condemned already; see the protocol in `gc`.
    avoid.extend(mark::all_condemned(core)?);
    let parent = parent.map(|parent| current(core, parent)).transpose()?;
    let known = Arc::new(Known { present: packs(core)?, avoid });
    let mut index = Index::new(options.index_pieces);
    fill(core, &mut index, &known, image, parent.as_ref(), options.dedup)?;
    let shared = Arc::new(Shared::new(core, session.seen.session, index));
    Ok(Writer {
        core: core.clone(),
        revision_of: None,
        parent,
        bytes,
        known,
        workers: Workers::start(&shared, options.threads),
        segments: Segments::new(bytes),
        meta: Packer::new(&shared),
        written: Written::default(),
        session,
    })
}

fn next_number(core: &Core, image: ImageId) -> Result<u64> {
    let names = core.store.list(&format!("{}{image}/", manifest::FOLDER))?;
    let numbers = names.iter().filter_map(|object| manifest::parse_name(&object.name));
    Ok(numbers.map(|(_, number, _)| number).max().unwrap_or(0) + 1)
}

/// Every pack in the store.
pub(crate) fn packs(core: &Core) -> Result<HashMap<PackId, u64>> {
    let objects = core.store.list(crate::place::FOLDER)?;
    let packs = objects.iter().filter_map(|o| Some((PackId::parse(&o.name)?, o.bytes)));
    Ok(packs.collect())
}

/// Fills the index: the parent first, then the newest backups first.
fn fill(
    core: &Core,
    index: &mut Index,
    known: &Known,
    image: ImageId,
    parent: Option<&Manifest>,
    dedup: Dedup,
) -> Result<()> {
    let folder = match dedup {
        Dedup::Parent => None,
        Dedup::Image => Some(format!("{}{image}/", manifest::FOLDER)),
        Dedup::Everything => Some(manifest::FOLDER.to_owned()),
    };
    let mut all: Vec<Manifest> = parent.cloned().into_iter().collect();
    if let Some(folder) = folder {
        let mut others = manifests(core, &folder)?.whole;
        let taken = |backup: &Backup| std::cmp::Reverse(backup.info.taken_unix_ms);
        others.sort_by_key(|manifest| taken(manifest.backup()));
        all.extend(others);
    }
    let mut seen = HashSet::new();
    for manifest in &all {
        for (ix, segment) in manifest.stored() {
            if index.is_full() {
                return Ok(());
            }
            if !seen.insert(segment.hash) || known.standing(&segment.place) == Standing::Lost {
                continue;
            }
            match load_segment(core, manifest, ix) {
                Ok(pieces) => sound(&pieces, known).for_each(|piece| index.insert(piece)),
                Err(e) if e.is_of_store() => return Err(e),
                // Damaged: nothing in it is relied on.
                Err(_) => {}
            }
        }
    }
    Ok(())
}

fn sound<'a>(pieces: &'a [Piece], known: &'a Known) -> impl Iterator<Item = &'a Piece> {
    let sound = |place: PackSlice| known.standing(&place) == Standing::Sound;
    pieces.iter().filter(move |piece| piece.place().is_some_and(sound))
}
