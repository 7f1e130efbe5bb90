//! Chooses what to read for an image, and from which providers.
//!
//! Of all backups and replicas that the configured places have of it, the newest that is of one of its
//! closed generations is wanted. Another place that has the same generation gives all of it; one with another
//! generation gives what is the same there, as the recipes tell; a replica has no recipe.

use super::gather::{Failure, Parts, Provider, TASK_BYTES};
use super::replica::PeerReplica;
use super::state::task_count;
use super::tasks::{MAX_PROVIDERS, Mask};
use crate::snapshots::{self, Held, PATIENCE, Snapshot, Snapshots, Unheard};
use dray_backup::{
    Backup, Content, Hash, Kind, PIECE_BYTES, Piece, Reader, Repository, StreamOptions,
    piece_count, piece_len,
};
use dray_config::Config;
use dray_engine::lineage::fits;
use dray_host::lineage::region_blocks;
use dray_image::ImageFile;
use dray_net::questions::Questions;
use dray_net::tls::Identity;
use dray_types::{Ancestor, BLOCK_SIZE, BlockRange, BlockSet};
use dray_wire::StreamKind;
use dray_wire::request::SeedImage;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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

/// A place that gives pieces.
struct Source {
    name: String,
    reader: Arc<Reader>,
    /// Its backup is of the wanted generation.
    same: bool,
    /// An old copy of the image on this host, of whatever state: what is the same in it, as the
    /// recipe tells, is read from there.
    old: Option<Arc<dyn ImageFile>>,
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

/// A replica at a peer that holds the wanted generation.
struct Remote {
    peer: String,
    allocated: u64,
    distrusted: BlockSet,
}

/// Who can give the wanted generation.
#[derive(Default)]
struct Givers {
    sources: Vec<Source>,
    remotes: Vec<Remote>,
    generation: Option<Ancestor>,
    notes: Vec<String>,
}

impl Givers {
    fn add(&mut self, candidate: Snapshot, old: Option<&Arc<dyn ImageFile>>) {
        let Snapshot { place, generation, held, .. } = candidate;
        let same = self.generation.is_none_or(|wanted| wanted.id == generation.id);
        let known = self.sources.iter().map(|source| &source.name);
        let mut known = known.chain(self.remotes.iter().map(|remote| &remote.peer));
        let full = self.sources.len() + self.remotes.len() == MAX_PROVIDERS;
        if full || known.any(|known| *known == place) {
            return;
        }
        match held {
            Held::Backup(repository, backup) => match reader(repository, backup) {
                Err(why) => return self.notes.push(format!("{place}: {why}")),
                Ok(reader) => {
                    let (reader, old, from_old) =
                        (Arc::new(reader), old.cloned(), AtomicU64::new(0));
                    self.sources.push(Source { name: place, reader, same, old, from_old });
                }
            },
            // Of another generation nobody knows what of it is the same.
            Held::Replica { .. } if !same => return,
            Held::Replica { allocated, distrusted } => {
                let distrusted = region_blocks(distrusted);
                self.remotes.push(Remote { peer: place, allocated, distrusted });
            }
        }
        self.generation.get_or_insert(generation);
    }
}

/// Chooses; `old` is a copy of the image that lies here, whatever it holds. What is not younger than
/// generation number `floor` is of no use: the target has it.
///
/// # Errors
/// What stands in the way at each place, for people; nothing when no place knows anything better.
pub fn choose(
    config: &Arc<Config>,
    wanted: &SeedImage,
    old: Option<&Arc<dyn ImageFile>>,
    floor: Option<u64>,
) -> Result<Choice, Vec<String>> {
    let mut known = Snapshots::of(config, wanted.image.id);
    let mut givers = Givers { notes: std::mem::take(&mut known.notes), ..Givers::default() };
    let mut candidates = fitting(known.held, wanted, &mut givers.notes);
    // The source knows what was written since the copy that lies here, and sends just that: reading all
    // of a younger one from another host would spare it little.
    candidates.retain(|candidate| floor.is_none() || matches!(candidate.held, Held::Backup(..)));
    candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.generation.number));
    if candidates.first().is_some_and(|best| Some(best.generation.number) <= floor) {
        return Err(Vec::new());
    }
    candidates.into_iter().for_each(|candidate| givers.add(candidate, old));
    let Some(generation) = givers.generation else { return Err(givers.notes) };
    givers.notes.extend(known.silent);
    // Without a recipe of the wanted generation one of another is of no use.
    if givers.sources.iter().all(|source| !source.same) {
        givers.sources.clear();
    }
    let choice = plan(config, wanted, generation, givers, old);
    // Nobody could say what it consists of.
    if choice.masks.iter().all(|mask| *mask == 0) { Err(choice.notes) } else { Ok(choice) }
}

/// What is read of a backup, once its manifest is there.
fn reader(repository: Repository, backup: Box<Backup>) -> Result<Reader, Unheard> {
    let read = move || Ok(repository.reader(&repository.manifest(&backup)?));
    snapshots::apart(read).recv_timeout(PATIENCE).map_err(|_| Unheard::Late(PATIENCE))?
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
fn recipes(source: &Arc<Source>, len: u64) -> Receiver<Option<Vec<Piece>>> {
    let (send, told) = mpsc::sync_channel(AHEAD);
    let source = Arc::clone(source);
    let work = move || {
        for task in 0..task_count(len) as u64 {
            let read = source.reader.pieces(pieces_of(task, len));
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
    config: &Config,
    wanted: &SeedImage,
    generation: Ancestor,
    givers: Givers,
    old: Option<&Arc<dyn ImageFile>>,
) -> Choice {
    let len = wanted.image.len;
    let count = task_count(len);
    let Givers { sources, remotes, mut notes, .. } = givers;
    let sources: Vec<_> = sources.into_iter().map(Arc::new).collect();
    let mut recipes: Vec<_> = sources.iter().map(|source| Some(recipes(source, len))).collect();
    let (mut masks, mut tasks) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for task in 0..count as u64 {
        let range = pieces_of(task, len);
        let pieces: Vec<_> = recipes.iter_mut().map(next).collect();
        let (recipe, stored) = stored(&sources, &pieces);
        let sound = |remote: &Remote| !remote.distrusted.intersects(blocks_of(task));
        let bits = remotes.iter().zip(sources.len()..);
        let lying: Mask = bits.filter(|(remote, _)| sound(remote)).map(|(_, bit)| 1 << bit).sum();
        masks.push(stored | lying);
        let even = remotes.iter().map(|remote| remote.allocated / count as u64).max();
        tasks.push(match recipe {
            Some(pieces) => data_bytes(pieces, &range, len),
            // How its data is spread is not known before.
            None => even.unwrap_or(0).min(TASK_BYTES) as u32,
        });
    }
    let ended = sources.iter().zip(&recipes).filter(|(_, recipes)| recipes.is_none());
    notes.extend(ended.map(|(source, _)| format!("{}: its recipe cannot be read", source.name)));
    let recipe = sources.iter().find(|source| source.same).map(|source| Arc::clone(&source.reader));
    let replica = |remote: Remote| {
        let identity = Identity::load(&config.tls_dir).ok()?;
        let peer = config.peer(&remote.peer)?;
        Some(Arc::new(PeerReplica {
            questions: Questions::new(identity, &peer.name, &peer.address, StreamKind::Replica),
            image: wanted.image.id,
            generation: generation.id,
            old: old.cloned(),
            recipe: recipe.clone(),
            from_old: AtomicU64::new(0),
        }) as Arc<dyn Provider>)
    };
    let mut providers: Vec<_> =
        sources.iter().map(|source| Arc::clone(source) as Arc<dyn Provider>).collect();
    // Each was asked with this identity a moment ago.
    providers.extend(remotes.into_iter().filter_map(replica));
    let bytes = tasks.iter().map(|bytes| u64::from(*bytes)).sum();
    Choice { generation, bytes, tasks, providers, masks, notes }
}

/// The blocks of a task.
fn blocks_of(task: u64) -> BlockRange {
    BlockRange::new(task * (TASK_BYTES / BLOCK_SIZE), TASK_BYTES / BLOCK_SIZE)
}

/// What a task consists of, if any backup of the wanted generation says so, and which backups have it.
fn stored<'a>(
    sources: &[Arc<Source>],
    pieces: &'a [Option<Vec<Piece>>],
) -> (Option<&'a [Piece]>, Mask) {
    let wanted =
        sources.iter().zip(pieces).find(|(source, pieces)| source.same && pieces.is_some());
    let wanted = wanted.and_then(|(_, pieces)| pieces.as_deref());
    let gives = |(source, pieces): (&Arc<Source>, &Option<Vec<Piece>>)| {
        let pieces = pieces.as_deref()?;
        (source.same || alike(pieces, wanted?)).then_some(())
    };
    let bits = sources.iter().zip(pieces).zip(0..);
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
