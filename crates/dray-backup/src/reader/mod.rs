//! Reading a backup: single pieces, recipes, and streams of many pieces.

mod cache;
mod stream;

pub use stream::{Content, StreamOptions};

use crate::error::{Error, Result};
use crate::manifest::Manifest;
use crate::pack;
use crate::piece::{Hash, Piece, piece_count, piece_len};
use crate::place::PackSlice;
use crate::repository::{Core, Repository};
use crate::segment::{self, SEGMENT_PIECES};
use cache::Cache;
use std::ops::Range;
use std::sync::Arc;

/// Reads one backup. Any number of threads may share it.
pub struct Reader {
    pub(crate) core: Arc<Core>,
    manifest: Manifest,
    segments: Cache,
}

impl Repository {
    /// A reader of a backup.
    pub fn reader(&self, manifest: &Manifest) -> Reader {
        Reader::new(&self.core, manifest)
    }

    /// The recipe of a whole backup: for every piece the BLAKE3 of its content, none where it is
    /// zero. 32 bytes a piece: an image of 1 TiB has 16 million; [`Reader::recipe`] gives parts.
    ///
    /// # Errors
    /// As [`Reader::pieces`].
    pub fn hashes(&self, manifest: &Manifest) -> Result<Vec<Option<Hash>>> {
        self.reader(manifest).recipe(0..piece_count(manifest.info().bytes))
    }
}

impl Reader {
    pub(crate) fn new(core: &Arc<Core>, manifest: &Manifest) -> Self {
        Self { core: core.clone(), manifest: manifest.clone(), segments: Cache::default() }
    }

    /// The manifest that it reads.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Number of pieces of the image.
    pub fn piece_count(&self) -> u64 {
        piece_count(self.manifest.info().bytes)
    }

    /// The bytes of piece `ix`; zeros included. They are what was backed up: their hash was checked.
    ///
    /// # Errors
    /// `Damaged` about this piece alone ([`Error::piece`]), `NotFound` when its pack is gone,
    /// `Unavailable`; `Invalid` past the image's end.
    pub fn read_piece(&self, ix: u64) -> Result<Vec<u8>> {
        let len = piece_len(self.manifest.info().bytes, ix);
        match self.piece(ix)? {
            Piece::Zero => Ok(vec![0; len]),
            Piece::Data { hash, place } => {
                fetch(&self.core, &place, &hash, len).map_err(|e| e.at_piece(ix))
            }
        }
    }

    /// What the backup knows of piece `ix`.
    ///
    /// # Errors
    /// As [`Reader::read_piece`].
    pub fn piece(&self, ix: u64) -> Result<Piece> {
        if ix >= self.piece_count() {
            return Err(Error::invalid("the image has no such piece").at_piece(ix));
        }
        let segment = self.segment(ix / SEGMENT_PIECES).map_err(|e| e.at_piece(ix))?;
        Ok(segment[(ix % SEGMENT_PIECES) as usize])
    }

    /// What the backup knows of these pieces: zero, or hash and place.
    ///
    /// # Errors
    /// `Damaged`, `NotFound`, `Unavailable`: a segment cannot be read; `Invalid` past the end.
    pub fn pieces(&self, range: Range<u64>) -> Result<Vec<Piece>> {
        range.map(|ix| self.piece(ix)).collect()
    }

    /// The hashes of these pieces, none where a piece is zero.
    ///
    /// # Errors
    /// As [`Reader::pieces`].
    pub fn recipe(&self, range: Range<u64>) -> Result<Vec<Option<Hash>>> {
        range.map(|ix| self.piece(ix).map(|piece| piece.hash())).collect()
    }

    /// All pieces of segment `ix`.
    pub(crate) fn segment(&self, ix: u64) -> Result<Arc<Vec<Piece>>> {
        let read = || load_segment(&self.core, &self.manifest, ix).map(Arc::new);
        self.segments.get(ix, read)
    }
}

/// Reads and checks segment `ix` of a manifest.
pub(crate) fn load_segment(core: &Core, manifest: &Manifest, ix: u64) -> Result<Vec<Piece>> {
    let bytes = manifest.info().bytes;
    match manifest.segment(ix) {
        None if ix >= manifest.segment_count() => {
            Err(Error::invalid("the image has no such segment"))
        }
        None => Ok(vec![Piece::Zero; segment::pieces_in(bytes, ix)]),
        Some(segment) => {
            let encoded = fetch(core, &segment.place, &segment.hash, segment.plain as usize)?;
            segment::decode(&encoded, bytes, ix)
        }
    }
}

/// Reads `len` bytes of content from where they are stored, and checks their hash.
pub(crate) fn fetch(core: &Core, place: &PackSlice, hash: &Hash, len: usize) -> Result<Vec<u8>> {
    let stored =
        core.store.get_range(&place.pack.name(), place.offset.into(), place.stored as usize)?;
    unpack(core, place, stored, hash, len)
}

/// Content from its stored form, its hash checked.
pub(crate) fn unpack(
    core: &Core,
    place: &PackSlice,
    stored: Vec<u8>,
    hash: &Hash,
    len: usize,
) -> Result<Vec<u8>> {
    let damaged =
        |why: &str| Error::damaged(format!("{}, byte {}: {why}", place.pack, place.offset));
    let bytes =
        pack::extract(place, stored, len, &core.keys).map_err(|e| damaged(&e.to_string()))?;
    if Hash::of(&bytes) != *hash {
        return Err(damaged("the content differs from that which was written"));
    }
    Ok(bytes)
}
