//! Chooses what to read for an image, and from which providers.
//!
//! Of all backups and replicas that the configured places have of it, the newest that is of one of its
//! closed generations is wanted. Another place that has the same generation gives all of it; one with another
//! generation gives what is the same there, as the recipes tell; a replica has no recipe.

use super::gather::TASK_BYTES;
use super::state::task_count;
use super::tasks::{MAX_PROVIDERS, Mask};
use crate::provider::{Parts, Provider};
use crate::snapshots::{Catalogue, HeldCopy, PATIENCE, Snapshot, Snapshots, Wanted};
use dray_backup::{Kind, PIECE_BYTES, Piece, Reader, piece_count, piece_len};
use dray_engine::lineage::fits;
use dray_host::lineage::region_blocks;
use dray_image::ImageFile;
use dray_types::{Ancestor, BLOCK_SIZE, BlockRange, BlockSet};
use dray_wire::request::SeedImage;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

/// Pieces of one task.
const TASK_PIECES: u64 = TASK_BYTES / PIECE_BYTES as u64;
/// Tasks of which a place's recipe is read ahead of what is done with it.
const AHEAD: usize = 16;

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

    /// Bytes of data that each provider would give, were all equally quick.
    pub fn expected(&self) -> Vec<(String, u64)> {
        let mut given = vec![0; self.providers.len()];
        for (mask, bytes) in self.masks.iter().zip(&self.tasks) {
            let able = (0..given.len()).filter(|bit| mask & (1 << bit) != 0);
            able.for_each(|bit| given[bit] += u64::from(bytes / mask.count_ones()));
        }
        self.providers.iter().map(|provider| provider.name()).zip(given).collect()
    }
}

/// Neighbours together: fewer and longer writes.
pub(super) fn joined(mut pieces: Parts) -> Parts {
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

/// Somebody who can give something of the wanted generation.
struct Giver {
    place: String,
    held: Box<dyn HeldCopy>,
    /// It is of the wanted generation.
    same: bool,
    /// What each piece of it consists of, if it knows.
    recipe: Option<Arc<Reader>>,
    distrusted: BlockSet,
}

/// Who can give the wanted generation.
#[derive(Default)]
struct Givers {
    all: Vec<Giver>,
    generation: Option<Ancestor>,
    notes: Vec<String>,
}

impl Givers {
    fn add(&mut self, candidate: Snapshot) {
        let Snapshot { place, generation, held, .. } = candidate;
        let same = self.generation.is_none_or(|wanted| wanted.id == generation.id);
        if self.all.len() == MAX_PROVIDERS || self.all.iter().any(|known| known.place == place) {
            return;
        }
        // Of another generation nobody knows what of it is the same, without a recipe.
        if !same && !held.has_recipe() {
            return;
        }
        let recipe = match held.recipe() {
            Ok(recipe) => recipe,
            Err(why) => return self.notes.push(format!("{place}: {why}")),
        };
        let distrusted = region_blocks(held.distrusted().iter().copied());
        self.all.push(Giver { place, held, same, recipe, distrusted });
        self.generation.get_or_insert(generation);
    }
}

/// Chooses; `old` is a copy of the image that lies here, whatever it holds. What is not younger than
/// generation number `floor` is of no use: the target has it.
///
/// # Errors
/// What stands in the way at each place, for people; nothing when no place knows anything better.
pub fn choose(
    places: &[Arc<dyn Catalogue>],
    wanted: &SeedImage,
    old: Option<&Arc<dyn ImageFile>>,
    floor: Option<u64>,
) -> Result<Choice, Vec<String>> {
    let mut known = Snapshots::of(places, wanted.image.id);
    let mut givers = Givers { notes: std::mem::take(&mut known.notes), ..Givers::default() };
    let mut candidates = fitting(known.held, wanted, &mut givers.notes);
    // The source knows what was written since the copy that lies here, and sends just that: reading all
    // of a younger one from another host would spare it little.
    candidates.retain(|candidate| floor.is_none() || candidate.held.has_recipe());
    candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.generation.number));
    if candidates.first().is_some_and(|best| Some(best.generation.number) <= floor) {
        return Err(Vec::new());
    }
    candidates.into_iter().for_each(|candidate| givers.add(candidate));
    let Some(generation) = givers.generation else { return Err(givers.notes) };
    givers.notes.extend(known.silent);
    // Without a recipe of the wanted generation one of another is of no use.
    if !givers.all.iter().any(|giver| giver.same && giver.recipe.is_some()) {
        givers.all.retain(|giver| giver.recipe.is_none());
    }
    let choice = plan(wanted, generation, givers, old);
    // Nobody could say what it consists of.
    if choice.masks.iter().all(|mask| *mask == 0) { Err(choice.notes) } else { Ok(choice) }
}

/// The snapshots that are of one of the image's closed generations.
fn fitting(held: Vec<Snapshot>, wanted: &SeedImage, notes: &mut Vec<String>) -> Vec<Snapshot> {
    let unfit = |snapshot: &Snapshot| match fits(&wanted.ancestors, snapshot.generation) {
        _ if snapshot.len != wanted.image.len => Some("its copy has another length".to_owned()),
        fitting => fitting.err().map(|why| why.to_string()),
    };
    let (found, useless): (Vec<_>, Vec<_>) =
        held.into_iter().partition(|snapshot| unfit(snapshot).is_none());
    // Of a place that has something better this is nothing worth telling.
    let mut told: Vec<&str> = found.iter().map(|snapshot| &*snapshot.place).collect();
    for snapshot in useless.iter().rev() {
        if let Some(why) = unfit(snapshot).filter(|_| !told.contains(&&*snapshot.place)) {
            notes.push(format!("{}: {why}", snapshot.place));
            told.push(&snapshot.place);
        }
    }
    found
}

fn pieces_of(task: u64, len: u64) -> Range<u64> {
    task * TASK_PIECES..((task + 1) * TASK_PIECES).min(piece_count(len))
}

/// The recipe of each task in turn, none where it cannot be read. After the first one that the store
/// does not give, or that takes too long, nothing more is asked of it.
fn recipes(reader: &Arc<Reader>, len: u64) -> Receiver<Option<Vec<Piece>>> {
    let (send, told) = mpsc::sync_channel(AHEAD);
    let reader = Arc::clone(reader);
    let work = move || {
        for task in 0..task_count(len) as u64 {
            let read = reader.pieces(pieces_of(task, len));
            let lost =
                |why: &dray_backup::Error| !matches!(why.kind(), Kind::Damaged | Kind::NotFound);
            if read.as_ref().is_err_and(lost) || send.send(read.ok()).is_err() {
                return;
            }
        }
    };
    // Without a thread there is no recipe.
    drop(std::thread::Builder::new().name("dray-recipes".to_owned()).spawn(work));
    told
}

/// Who has what of the image.
fn plan(
    wanted: &SeedImage,
    generation: Ancestor,
    givers: Givers,
    old: Option<&Arc<dyn ImageFile>>,
) -> Choice {
    let len = wanted.image.len;
    let count = task_count(len);
    let Givers { mut all, mut notes, .. } = givers;
    all.sort_by_key(|giver| giver.recipe.is_none());
    let recipe = all.iter().filter(|giver| giver.same).find_map(|giver| giver.recipe.clone());
    let provider = |giver: Giver| {
        let recipe = giver.recipe.clone().or_else(|| recipe.clone());
        let (image, generation, old) = (wanted.image.id, generation.id, old.cloned());
        let provider = giver.held.provider(Wanted { image, generation, old, recipe })?;
        Some((giver, provider))
    };
    let (givers, providers): (Vec<_>, Vec<_>) = all.into_iter().filter_map(provider).unzip();
    let begin = |giver: &Giver| giver.recipe.as_ref().map(|reader| recipes(reader, len));
    let mut recipes: Vec<_> = givers.iter().map(begin).collect();
    let without: Vec<_> =
        givers.iter().zip(0..).filter(|(giver, _)| giver.recipe.is_none()).collect();
    let even = without.iter().map(|(giver, _)| giver.held.allocated() / count as u64).max();
    let (mut masks, mut tasks) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for task in 0..count as u64 {
        let range = pieces_of(task, len);
        let pieces: Vec<_> = recipes.iter_mut().map(next).collect();
        let (recipe, stored) = stored(&givers, &pieces);
        let sound = |giver: &Giver| !giver.distrusted.intersects(blocks_of(task));
        let lying: Mask =
            without.iter().filter(|(giver, _)| sound(giver)).map(|(_, bit)| 1 << bit).sum();
        masks.push(stored | lying);
        tasks.push(match recipe {
            Some(pieces) => data_bytes(pieces, &range, len),
            // How its data is spread is not known before.
            None => even.unwrap_or(0).min(TASK_BYTES) as u32,
        });
    }
    let ended = givers.iter().zip(&recipes);
    let ended = ended.filter(|(giver, recipes)| giver.recipe.is_some() && recipes.is_none());
    notes.extend(ended.map(|(giver, _)| format!("{}: its recipe cannot be read", giver.place)));
    let bytes = tasks.iter().map(|bytes| u64::from(*bytes)).sum();
    Choice { generation, bytes, tasks, providers, masks, notes }
}

/// The blocks of a task.
fn blocks_of(task: u64) -> BlockRange {
    BlockRange::new(task * (TASK_BYTES / BLOCK_SIZE), TASK_BYTES / BLOCK_SIZE)
}

/// What a task consists of, if any recipe of the wanted generation says so, and who has it by its recipe.
fn stored<'a>(givers: &[Giver], pieces: &'a [Option<Vec<Piece>>]) -> (Option<&'a [Piece]>, Mask) {
    let wanted = givers.iter().zip(pieces).find(|(giver, pieces)| giver.same && pieces.is_some());
    let wanted = wanted.and_then(|(_, pieces)| pieces.as_deref());
    let gives = |(giver, pieces): (&Giver, &Option<Vec<Piece>>)| {
        let pieces = pieces.as_deref()?;
        (giver.same || alike(pieces, wanted?)).then_some(())
    };
    let bits = givers.iter().zip(pieces).zip(0..);
    (wanted, bits.filter_map(|(both, bit)| gives(both).map(|()| 1 << bit)).sum())
}

/// The recipe of the next task; one that does not come in time ends them all.
fn next(recipes: &mut Option<Receiver<Option<Vec<Piece>>>>) -> Option<Vec<Piece>> {
    match recipes.as_ref()?.recv_timeout(PATIENCE) {
        Ok(pieces) => pieces,
        Err(_) => {
            *recipes = None;
            None
        }
    }
}

fn alike(a: &[Piece], b: &[Piece]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.hash() == b.hash())
}

fn data_bytes(pieces: &[Piece], range: &Range<u64>, len: u64) -> u32 {
    let data = pieces.iter().zip(range.clone()).filter(|(piece, _)| piece.hash().is_some());
    data.map(|(_, ix)| piece_len(len, ix) as u32).sum()
}
