//! Writing a backup.
//!
//! A writer announces its session, learns what is condemned and what is there, and only then relies
//! on anything. Pieces go to packs, packs to the store, the manifest last: a crash at any moment
//! leaves a whole backup or none.

mod assemble;
mod packer;
mod start;
mod workers;

pub(crate) use start::packs;
pub use start::{Dedup, WriterOptions};

use crate::error::{Error, Kind, Result};
use crate::manifest::{self, Backup, Info, Manifest};
use crate::piece::{Piece, is_zero, piece_count, piece_len};
use crate::repository::{Core, read};
use crate::session::Session;
use assemble::Segments;
use packer::Packer;
use start::Known;
use std::ops::Range;
use std::sync::Arc;
use workers::Workers;

/// What a backup took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Written {
    /// Pieces that were given with content.
    pub data_pieces: u64,
    /// Pieces that were given as zeros.
    pub zero_pieces: u64,
    /// Bytes of new pieces and segments, as stored.
    pub stored_bytes: u64,
}

/// Writes one backup. Each piece is given at most once, in any order; what is not given is as in
/// the parent, or zero. Dropping it gives the backup up.
pub struct Writer {
    core: Arc<Core>,
    /// Names the backup when this is a revision of it.
    revision_of: Option<Backup>,
    parent: Option<Manifest>,
    bytes: u64,
    known: Arc<Known>,
    workers: Workers,
    segments: Segments,
    meta: Packer,
    written: Written,
    /// Last, so that the threads have ended before the session is given up.
    session: Session,
}

impl Writer {
    /// Gives the content of piece `ix`: exactly as many bytes as it has. Zeros are noticed.
    ///
    /// # Errors
    /// `Invalid` for a wrong length, index, or a piece that was given before; `Unavailable`, also
    /// about an earlier piece. The writer is of no use after an error.
    pub fn put(&mut self, ix: u64, bytes: &[u8]) -> Result<()> {
        let len = piece_len(self.bytes, ix);
        if ix >= piece_count(self.bytes) || bytes.len() != len {
            let text = format!("got {} bytes, and the image has {len} at this place", bytes.len());
            return Err(Error::invalid(text).at_piece(ix));
        }
        if is_zero(bytes) {
            return self.zero(ix..ix + 1);
        }
        self.segments.claim(ix)?;
        self.written.data_pieces += 1;
        self.session.renew()?;
        self.workers.put(ix, bytes)?;
        self.collect()
    }

    /// Says that these pieces are zero.
    ///
    /// # Errors
    /// As [`Writer::put`].
    pub fn zero(&mut self, pieces: Range<u64>) -> Result<()> {
        if pieces.end > piece_count(self.bytes) {
            return Err(Error::invalid("the image has no such piece").at_piece(pieces.end - 1));
        }
        for ix in pieces {
            self.segments.claim(ix)?;
            self.written.zero_pieces += 1;
            self.settle(ix, Piece::Zero)?;
        }
        self.session.renew()
    }

    /// Number of pieces of the image.
    pub fn piece_count(&self) -> u64 {
        piece_count(self.bytes)
    }

    /// Makes everything durable and the backup exist. `info` must name the image and length that
    /// the writer was made for.
    ///
    /// # Errors
    /// `Fenced` when a collector gave this writer up, `Damaged` when the parent is and something
    /// that was not given has to be read from it, `Unavailable`, `Invalid`. There is no backup then.
    pub fn finish(mut self, info: Info) -> Result<Backup> {
        info.check()?;
        if (info.image, info.bytes) != (self.session.seen.image, self.bytes) {
            return Err(Error::invalid("the description is of another image or length"));
        }
        self.inherit()?;
        self.workers.finish()?;
        self.collect()?;
        let segments = self.finish_segments()?;
        self.meta.flush()?;
        self.written.stored_bytes = self.workers.stored_bytes();
        let backup = self.backup(info);
        let bytes = manifest::encode(&backup, &segments, &self.core.keys, &*self.core.world)?;
        self.session.commit(&bytes)?;
        Ok(backup)
    }

    /// Gives the backup up. Dropping the writer does the same.
    pub fn abort(self) {}

    /// What it took so far.
    pub fn written(&self) -> Written {
        Written { stored_bytes: self.workers.stored_bytes(), ..self.written }
    }

    fn backup(&self, info: Info) -> Backup {
        let seen = &self.session.seen;
        let (id, revision, added_bytes) = match &self.revision_of {
            Some(old) => (old.id, old.revision + 1, old.added_bytes),
            None => (seen.session, 0, self.written.stored_bytes),
        };
        Backup { id, number: seen.number, info, added_bytes, revision, object: seen.outcome() }
    }

    /// Takes what the workers have finished.
    fn collect(&mut self) -> Result<()> {
        for (ix, piece) in self.workers.take()? {
            self.settle(ix, piece)?;
        }
        Ok(())
    }

    /// Piece `ix` is known; a segment that is complete goes to a pack at once.
    fn settle(&mut self, ix: u64, piece: Piece) -> Result<()> {
        if let Some((segment, pieces)) = self.segments.set(ix, piece) {
            self.segments.store(segment, &pieces, &mut self.meta)?;
        }
        Ok(())
    }
}

/// The parent as it is now; a collector may have written it anew.
fn current(core: &Core, parent: &Manifest) -> Result<Manifest> {
    match read(core, &parent.backup().object) {
        Err(e) if e.kind() == Kind::NotFound => {}
        manifest => return manifest,
    }
    let image = parent.info().image;
    let all = crate::repository::manifests(core, &format!("{}{image}/", manifest::FOLDER))?;
    let same = |manifest: &Manifest| manifest.backup().id == parent.backup().id;
    let newest = all.whole.into_iter().filter(same).max_by_key(|m| m.backup().revision);
    newest.ok_or_else(|| Error::new(Kind::NotFound, "the parent backup was removed"))
}
