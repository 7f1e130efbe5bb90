//! What is read for an image, and from where.
//!
//! Of all backups that the configured places have of it, the newest that is of one of its closed
//! generations is wanted. Another place that has the same generation gives all of it; one with another
//! generation gives what is the same there, as the recipes tell.

use super::gather::{Failure, Parts, Provider, TASK_BYTES};
use super::state::task_count;
use super::tasks::{MAX_PROVIDERS, Mask};
use crate::backup::destination::Destination;
use crate::config::Config;
use dray_backup::{
    Backup, Content, Hash, Kind, Listing, PIECE_BYTES, Piece, Reader, Repository, StreamOptions,
    piece_count, piece_len,
};
use dray_engine::lineage::fits;
use dray_image::{FileImage, Image};
use dray_types::Ancestor;
use dray_wire::request::SeedImage;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pieces of one task.
const TASK_PIECES: u64 = TASK_BYTES / PIECE_BYTES as u64;

/// What is read.
pub struct Choice {
    /// The generation.
    pub generation: Ancestor,
    /// Bytes of data in all.
    pub bytes: u64,
    /// Bytes of data of each task.
    tasks: Vec<u32>,
    /// Who gives it.
    pub providers: Vec<Arc<dyn Provider>>,
    /// Which of them have each task.
    pub masks: Vec<Mask>,
    /// What could not be used, for people.
    pub notes: Vec<String>,
}

impl Choice {
    /// Bytes of data in the tasks that are done.
    pub fn bytes_of(&self, done: &[bool]) -> u64 {
        let done = self.tasks.iter().zip(done).filter(|(_, done)| **done);
        done.map(|(bytes, _)| u64::from(*bytes)).sum()
    }
}

/// A backup that could be used.
struct Candidate {
    place: usize,
    repository: Repository,
    backup: Backup,
}

/// A place that gives pieces.
struct Source {
    name: String,
    reader: Reader,
    /// Its backup is of the wanted generation.
    same: bool,
    /// An old copy of the image on this host, of whatever state: what is the same in it, as the
    /// recipe tells, is read from there.
    old: Option<Arc<FileImage>>,
    /// Bytes that came from it.
    from_old: AtomicU64,
}

impl Source {
    /// The piece as the old copy has it, if that is what is wanted.
    fn at_hand(&self, ix: u64) -> Option<Vec<u8>> {
        let old = self.old.as_ref()?;
        let hash = self.reader.piece(ix).ok()?.hash()?;
        let bytes = &mut vec![0; piece_len(self.reader.manifest().info().bytes, ix)];
        old.read_at(bytes, ix * PIECE_BYTES as u64).ok()?;
        (Hash::of(bytes) == hash).then(|| std::mem::take(bytes))
    }

    /// What the old copy has of some pieces, and the other pieces.
    fn split(&self, range: Range<u64>) -> (Parts, Vec<Range<u64>>) {
        if self.old.is_none() {
            return (Vec::new(), vec![range]);
        }
        let (mut found, mut left) = (Vec::new(), Vec::new());
        for ix in range {
            match self.at_hand(ix) {
                Some(bytes) => found.push((ix * PIECE_BYTES as u64, bytes)),
                None => left.push(ix..ix + 1),
            }
        }
        let bytes = found.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        self.from_old.fetch_add(bytes, Ordering::Relaxed);
        (found, left)
    }
}

impl Provider for Source {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn bytes_of_old(&self) -> u64 {
        self.from_old.load(Ordering::Relaxed)
    }

    fn read(&self, offset: u64, len: u64) -> Result<Parts, Failure> {
        let first = offset / PIECE_BYTES as u64;
        let range = first..first + piece_count(len);
        let (mut pieces, left) = self.split(range);
        let mut failed = None;
        let options = StreamOptions { parallel: 1 };
        self.reader.stream(left, options, |ix, content| match content {
            Ok(Content::Zero) => ControlFlow::Continue(()),
            Ok(Content::Data(bytes)) => {
                pieces.push((ix * PIECE_BYTES as u64, bytes));
                ControlFlow::Continue(())
            }
            Err(why) => {
                failed = Some(why);
                ControlFlow::Break(())
            }
        });
        match failed {
            None => Ok(joined(pieces)),
            Some(why) if matches!(why.kind(), Kind::Damaged | Kind::NotFound) => {
                Err(Failure::Damaged(why.to_string()))
            }
            Some(why) => Err(Failure::Unavailable(why.to_string())),
        }
    }
}

/// Neighbours together: fewer and longer writes.
fn joined(mut pieces: Parts) -> Parts {
    pieces.sort_by_key(|(at, _)| *at);
    let mut parts = Parts::new();
    for (at, bytes) in pieces {
        match parts.last_mut() {
            Some((start, part)) if *start + part.len() as u64 == at => part.extend(bytes),
            _ => parts.push((at, bytes)),
        }
    }
    parts
}

/// Chooses; `old` is a copy of the image that lies here, whatever it holds.
///
/// # Errors
/// What stands in the way at each place, for people; nothing when no place knows the image.
pub fn choose(
    config: &Config,
    wanted: &SeedImage,
    old: Option<&Arc<FileImage>>,
) -> Result<Choice, Vec<String>> {
    let mut notes = Vec::new();
    let mut candidates = candidates(config, wanted, &mut notes);
    candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.backup.info.generation.number));
    let mut sources: Vec<Source> = Vec::new();
    let mut used = Vec::new();
    let mut generation: Option<Ancestor> = None;
    for candidate in candidates {
        if used.contains(&candidate.place) || sources.len() == MAX_PROVIDERS {
            continue;
        }
        let name = &config.backups[candidate.place].name;
        match candidate.repository.manifest(&candidate.backup) {
            Err(why) => notes.push(format!("{name}: {why}")),
            Ok(manifest) => {
                let its = candidate.backup.info.generation;
                let same = generation.get_or_insert(its).id == its.id;
                let reader = candidate.repository.reader(&manifest);
                let (name, old, from_old) = (name.clone(), old.cloned(), AtomicU64::new(0));
                sources.push(Source { name, reader, same, old, from_old });
                used.push(candidate.place);
            }
        }
    }
    match generation {
        Some(generation) => Ok(plan(generation, sources, wanted.image.len, notes)),
        None => Err(notes),
    }
}

/// The backups of the image in one place.
fn listing(
    config: &Config,
    name: &str,
    wanted: &SeedImage,
) -> Result<(Listing, Repository), String> {
    let place = Destination::resolve(config, name, None).map_err(|why| why.to_string())?;
    let repository = place.open().map_err(|why| why.to_string())?;
    let listing = repository.backups(wanted.image.id).map_err(|why| why.to_string())?;
    Ok((listing, repository))
}

/// The backups of the image that are of one of its closed generations.
fn candidates(config: &Config, wanted: &SeedImage, notes: &mut Vec<String>) -> Vec<Candidate> {
    let mut found = Vec::new();
    for (place, known) in config.backups.iter().enumerate() {
        let name = &known.name;
        let listed = listing(config, name, wanted);
        let (listing, repository) = match listed {
            Ok(listed) => listed,
            Err(why) => {
                notes.push(format!("{name}: {why}"));
                continue;
            }
        };
        notes.extend(listing.damaged.iter().map(|(_, why)| format!("{name}: {why}")));
        let mut unfit = None;
        for backup in listing.backups {
            let fitting = fits(&wanted.ancestors, backup.info.generation);
            if backup.info.bytes != wanted.image.len {
                unfit = Some("its backups are of another length".to_owned());
            } else if let Err(why) = fitting {
                unfit = Some(why.to_string());
            } else {
                found.push(Candidate { place, repository: repository.clone(), backup });
            }
        }
        if let Some(why) = unfit.filter(|_| found.iter().all(|known| known.place != place)) {
            notes.push(format!("{name}: {why}"));
        }
    }
    found
}

/// Who has what of the image of `len` bytes.
fn plan(generation: Ancestor, sources: Vec<Source>, len: u64, notes: Vec<String>) -> Choice {
    let count = task_count(len);
    let (mut masks, mut tasks) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for task in 0..count as u64 {
        let range = task * TASK_PIECES..((task + 1) * TASK_PIECES).min(piece_count(len));
        let pieces: Vec<_> =
            sources.iter().map(|source| source.reader.pieces(range.clone()).ok()).collect();
        let wanted =
            sources.iter().zip(&pieces).find(|(source, pieces)| source.same && pieces.is_some());
        let wanted = wanted.and_then(|(_, pieces)| pieces.as_deref());
        let gives = |(source, pieces): (&Source, &Option<Vec<Piece>>)| {
            let pieces = pieces.as_deref()?;
            (source.same || alike(pieces, wanted?)).then_some(())
        };
        let bits = sources.iter().zip(&pieces).zip(0..);
        let mask: Mask = bits.filter_map(|(both, bit)| gives(both).map(|()| 1 << bit)).sum();
        masks.push(mask);
        tasks.push(wanted.map_or(0, |pieces| data_bytes(pieces, &range, len)));
    }
    let bytes = tasks.iter().map(|bytes| u64::from(*bytes)).sum();
    let providers =
        sources.into_iter().map(|source| Arc::new(source) as Arc<dyn Provider>).collect();
    Choice { generation, bytes, tasks, providers, masks, notes }
}

fn alike(a: &[Piece], b: &[Piece]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.hash() == b.hash())
}

fn data_bytes(pieces: &[Piece], range: &Range<u64>, len: u64) -> u32 {
    let data = pieces.iter().zip(range.clone()).filter(|(piece, _)| piece.hash().is_some());
    data.map(|(_, ix)| piece_len(len, ix) as u32).sum()
}
