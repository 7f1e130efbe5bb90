//! Whether everything is there and is what was written.

use crate::error::{Error, Result};
use crate::gc::{Walk, walk};
use crate::manifest::{self, Backup, Manifest};
use crate::pack::MAX_PACK;
use crate::piece::{Hash, Piece, piece_len};
use crate::place::{PackId, PackSlice};
use crate::reader::{load_segment, unpack};
use crate::repository::{Repository, manifests};
use crate::segment::SEGMENT_PIECES;
use crate::writer::packs;
use std::collections::{BTreeMap, HashMap, HashSet};

/// How much is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// Manifests and segments are read; packs are there and long enough.
    Manifests,
    /// Every pack is read and every piece hashed.
    Everything,
}

/// What is wrong with a backup.
#[derive(Debug)]
pub struct Problem {
    /// Which one; none for an object that should be a manifest.
    pub backup: Option<Backup>,
    /// Pieces of it that cannot be read.
    pub pieces: u64,
    /// The first of them.
    pub first_piece: Option<u64>,
    /// Why the object counts as faulty.
    pub error: Error,
}

/// What [`Repository::verify`] found.
#[derive(Debug, Default)]
pub struct VerifyReport {
    /// Manifests that were read.
    pub backups: u64,
    /// Pieces with content that they name, each stored one once.
    pub pieces: u64,
    /// Packs that are named.
    pub packs: u64,
    /// Bytes of packs that were read.
    pub bytes_read: u64,
    /// What is wrong; empty when all is well.
    pub problems: Vec<Problem>,
}

/// What lies at a place of a pack.
struct Stored {
    hash: Hash,
    stored: u32,
    plain: usize,
}

type Contents = BTreeMap<PackId, BTreeMap<u32, Stored>>;
/// Why what lies at a place cannot be read.
type Bad = HashMap<(PackId, u32), String>;

impl Repository {
    /// Checks all backups. Writers, pruners and collectors may go on meanwhile.
    ///
    /// # Errors
    /// `Unavailable`; what is wrong with the repository is in the report.
    pub fn verify(&self, level: Level) -> Result<VerifyReport> {
        let core = &self.core;
        let found = manifests(core, manifest::FOLDER)?;
        let mut report = VerifyReport { backups: found.whole.len() as u64, ..Default::default() };
        for (_, error) in found.damaged {
            report.problems.push(Problem { backup: None, pieces: 0, first_piece: None, error });
        }
        let (mut contents, mut bad, mut seen) = (Contents::new(), Bad::new(), HashSet::new());
        for manifest in &found.whole {
            let bytes = manifest.info().bytes;
            walk(core, manifest, &mut seen, |step| {
                match step {
                    Walk::Segment { segment, pieces, ix } => {
                        add(&mut contents, segment.place, segment.hash, segment.plain as usize);
                        for (nth, piece) in (ix * SEGMENT_PIECES..).zip(pieces) {
                            let Piece::Data { hash, place } = piece else { continue };
                            let new = add(&mut contents, *place, *hash, piece_len(bytes, nth));
                            report.pieces += u64::from(new);
                        }
                    }
                    Walk::Broken { error, ix } => {
                        if let Some(segment) = manifest.segment(ix) {
                            bad.insert(
                                (segment.place.pack, segment.place.offset),
                                error.to_string(),
                            );
                        }
                    }
                }
                Ok(())
            })?;
        }
        report.packs = contents.len() as u64;
        match level {
            Level::Manifests => self.check_lengths(&contents, &mut bad)?,
            Level::Everything => report.bytes_read = self.check_packs(&contents, &mut bad)?,
        }
        if !bad.is_empty() {
            for manifest in &found.whole {
                report.problems.extend(self.problem(manifest, &bad)?);
            }
        }
        Ok(report)
    }

    fn check_lengths(&self, contents: &Contents, bad: &mut Bad) -> Result<()> {
        let present = packs(&self.core)?;
        for (pack, places) in contents {
            let len = present.get(pack).copied();
            for (offset, stored) in places {
                let end = u64::from(*offset) + u64::from(stored.stored);
                let why = match len {
                    None => format!("{pack} is missing"),
                    Some(len) if len < end => format!("{pack} is cut off at byte {len}"),
                    Some(_) => continue,
                };
                bad.insert((*pack, *offset), why);
            }
        }
        Ok(())
    }

    /// Reads each pack once; returns how many bytes that were.
    fn check_packs(&self, contents: &Contents, bad: &mut Bad) -> Result<u64> {
        let mut read = 0;
        for (pack, places) in contents {
            let bytes = match self.core.store.get(&pack.name(), MAX_PACK) {
                Ok(bytes) => bytes,
                Err(e) if e.is_of_store() => return Err(e),
                Err(e) => {
                    let why = e.to_string();
                    bad.extend(places.keys().map(|offset| ((*pack, *offset), why.clone())));
                    continue;
                }
            };
            read += bytes.len() as u64;
            for (offset, Stored { hash, stored, plain }) in places {
                let place = PackSlice { pack: *pack, offset: *offset, stored: *stored };
                let part = bytes.get(*offset as usize..place.end() as usize);
                let checked = match part {
                    None => {
                        Err(Error::damaged(format!("{pack} is cut off at byte {}", bytes.len())))
                    }
                    Some(part) => unpack(&self.core, &place, part.to_vec(), hash, *plain),
                };
                if let Err(error) = checked {
                    bad.insert((*pack, *offset), error.to_string());
                }
            }
        }
        Ok(read)
    }

    /// What `bad` means for one backup. One that was pruned meanwhile has no problem.
    fn problem(&self, manifest: &Manifest, bad: &Bad) -> Result<Option<Problem>> {
        let mut hit: Option<(u64, u64, String)> = None;
        let mut count = |ix: u64, pieces: u64, why: &str| match &mut hit {
            Some((_, all, _)) => *all += pieces,
            None => hit = Some((ix, pieces, why.to_owned())),
        };
        for (ix, segment) in manifest.stored() {
            let first = ix * SEGMENT_PIECES;
            let key = (segment.place.pack, segment.place.offset);
            let all = crate::segment::pieces_in(manifest.info().bytes, ix) as u64;
            if let Some(why) = bad.get(&key) {
                count(first, all, why);
                continue;
            }
            match load_segment(&self.core, manifest, ix) {
                Ok(pieces) => {
                    for (ix, piece) in (first..).zip(&pieces) {
                        let why = piece.place().and_then(|at| bad.get(&(at.pack, at.offset)));
                        why.into_iter().for_each(|why| count(ix, 1, why));
                    }
                }
                Err(e) if e.is_of_store() => return Err(e),
                Err(e) => count(first, all, &e.to_string()),
            }
        }
        let Some((first, pieces, why)) = hit else { return Ok(None) };
        let backup = manifest.backup().clone();
        if !self.core.store.exists(&backup.object)? {
            return Ok(None);
        }
        let error = Error::damaged(why);
        Ok(Some(Problem { backup: Some(backup), pieces, first_piece: Some(first), error }))
    }
}

/// Notes what lies at a place; true when that is new.
fn add(contents: &mut Contents, place: PackSlice, hash: Hash, plain: usize) -> bool {
    let stored = Stored { hash, stored: place.stored, plain };
    contents.entry(place.pack).or_default().insert(place.offset, stored).is_none()
}
