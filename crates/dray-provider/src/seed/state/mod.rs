//! The durable state of a seeding: the file that is being filled, and a note of its durable parts.
//!
//! `seeds/NAME.json` in the state folder names the generation and the tasks whose bytes are on disk; the
//! file is `.NAME.dray-seed` in the pool. Once the note says which regions hold something else, the file
//! becomes a replica, again after a crash if need be.
//!
//! The name alone says nothing: another file may have been put there, or this one edited, while no agent ran.
//! The note tells which file it is, and how that looked when it was left; of any other one nothing is trusted.

use super::gather::TASK_BYTES;
use dray_engine::lineage::{FileIdentity, Stamp};
use dray_files::StatePath;
use dray_files::unix_ms;
use dray_host::abort;
use dray_host::heartbeat::{self, Heartbeat};
use dray_host::lineage::{REGION_BLOCKS, ReplicaNote, stamp_of};
use dray_host::pool::PoolIo;
use dray_host::record::file_system_below;
use dray_host::record::{CopyState, ImageRecord, NameKind};
use dray_host::registry::Registry;
use dray_host::stamp::identity_of;
use dray_image::{FileImage, FileOptions, ImageNames};
use dray_types::{Ancestor, BLOCK_SIZE, BlockRange, BlockSet, Epoch, ImageId};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Extension of a seed's heartbeat.
const BEAT: &str = "beat";

/// Tasks of one region.
pub const REGION_TASKS: u64 = REGION_BLOCKS * BLOCK_SIZE / TASK_BYTES;

/// The note.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SeedNote {
    /// The image's name here.
    pub name: String,
    /// The image.
    pub id: ImageId,
    /// The path it will have as an image.
    pub path: PathBuf,
    /// Its length in bytes.
    pub len: u64,
    /// Nobody writes to it: a base image.
    #[serde(default)]
    pub read_only: bool,
    /// The generation that is read.
    pub generation: Ancestor,
    /// The epoch that the replica's name carries.
    pub epoch: Epoch,
    /// Tasks that are durable, as runs of number and count.
    pub done: Vec<(u64, u64)>,
    /// The file that is filled, whatever its name; none before it is made.
    pub file: Option<FileIdentity>,
    /// How the file looked when it was left; none while it is filled.
    pub left: Option<Stamp>,
    /// Set when everything is durable: the regions that hold something else than the generation.
    pub finished: Option<Vec<u64>>,
    /// The number of the file system that its folder was on.
    #[serde(default)]
    pub file_system: Option<u64>,
}

impl SeedNote {
    /// Whether it is a note of the same seeding as `wanted`, which has not begun.
    fn is_of(&self, wanted: &Self) -> bool {
        let Self { epoch, ref done, file, left, file_system, .. } = *self;
        *self == Self { epoch, done: done.clone(), file, left, file_system, ..wanted.clone() }
    }

    /// Refuses to look for its file where another file system is: it lies on the one that is not mounted.
    fn check_mounted(&self, names: &ImageNames) -> io::Result<()> {
        let now = file_system_below(&self.path);
        let elsewhere = self.file_system.zip(now).is_some_and(|(then, now)| then != now);
        // The same one may have got another number.
        if !elsewhere || names.seed().try_exists()? {
            return Ok(());
        }
        let path = self.path.display();
        Err(other(format!("{path} lay on another file system: is that of its pool mounted?")))
    }

    /// Nothing of what was read is trusted.
    fn distrusted(self) -> Self {
        Self { done: Vec::new(), file: None, left: None, finished: None, ..self }
    }

    /// Whether what lies at `path` is the file that the note is of, and nobody but agents has written to it, as
    /// far as that can be told. The note is at `at`.
    fn is_of_file(&self, path: &StatePath, at: &StatePath) -> io::Result<bool> {
        let now = stamp_of(path)?;
        let is_left = || heartbeat::is_left(&at.with_extension(BEAT), &path.look()?);
        let is_it = self.file.is_some_and(|known| now.file.is_same(&known)) && now.len == self.len;
        Ok(is_it
            && match self.left {
                Some(left) if left == now => true,
                // An agent that died since may have given it its replica's name.
                Some(left) => now.seems_unwritten(&left) && is_left()?,
                None => is_left()?,
            })
    }
}

/// A seeding's note and file.
pub struct SeedFile {
    at: StatePath,
    names: ImageNames,
    path: StatePath,
    /// The note as it is on disk.
    pub note: SeedNote,
    /// The file that is filled.
    pub file: Arc<FileImage>,
    _heartbeat: Arc<Heartbeat>,
}

fn other(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::other(why)
}

impl SeedFile {
    /// Goes on with what an earlier life has begun for the same generation, or begins: also where another file has
    /// the name, or this one was written to by others.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn open(
        registry: &Registry,
        seeds: &StatePath,
        wanted: SeedNote,
        io: PoolIo,
    ) -> io::Result<Self> {
        let at = note_path(seeds, &wanted.name);
        let names = ImageNames::of(&wanted.path).map_err(other)?;
        let path = registry.at(&names.seed());
        let known = at.peek::<SeedNote>().ok().filter(|known| known.is_of(&wanted));
        let known = known.filter(|known| is_trusted(known, &path, &at));
        let opened = known.and_then(|note| Some((note, names.open_seed().ok()?)));
        let (note, file) = match opened {
            Some((note, file)) => (SeedNote { left: None, ..note }, file),
            None => {
                // Bytes of another generation, or of others: removed before a note names this one.
                names.remove_seed().map_err(other)?;
                at.put(&wanted)?;
                let file = names.create_seed(wanted.len).map_err(other)?;
                let made = identity_of(&file.metadata()?);
                (SeedNote { file: Some(made), ..wanted }, file)
            }
        };
        at.put(&note)?;
        // From here on it is this agent that has the file.
        let heartbeat = begin_heartbeat(&at, registry)?;
        let direct = io == PoolIo::Direct;
        let options = FileOptions { write: true, direct, export_len: Some(note.len) };
        let file = FileImage::from_file(file, &names.seed(), options).map_err(other)?;
        Ok(Self { at, names, path, note, file: Arc::new(file), _heartbeat: heartbeat })
    }

    /// Which tasks were done before.
    pub fn done(&self) -> Vec<bool> {
        let mut done = vec![false; task_count(self.note.len)];
        for &(first, count) in &self.note.done {
            let end = first.saturating_add(count).min(done.len() as u64);
            done[first.min(end) as usize..end as usize].fill(true);
        }
        done
    }

    /// Makes what was written so far durable. If that fails nobody knows what is on the disk, whatever the file shows:
    /// the next one begins with a new file.
    fn sync(&self) -> io::Result<()> {
        dray_image::Image::flush(&*self.file).map_err(|why| {
            let gone = self.names.remove_seed().map_err(other).and_then(|()| forget(&self.at));
            if let Err(why) = gone {
                tracing::warn!(path = %self.path.display(), %why, "cannot remove a seed that has lost writes");
            }
            other(why)
        })
    }

    /// Makes what was written so far durable, and then the note that it was: `done` is from before.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn save(&mut self, done: &[bool]) -> io::Result<()> {
        self.sync()?;
        let set: BlockSet = done
            .iter()
            .zip(0..)
            .filter(|(done, _)| **done)
            .map(|(_, task)| BlockRange::new(task, 1))
            .collect();
        self.note.done = set.runs().map(|run| (run.start, run.len)).collect();
        self.at.put(&self.note)
    }

    /// Nobody goes on with it for now: as [`save`](Self::save), and what is written to it from here on, others have
    /// written.
    ///
    /// # Errors
    /// What the file system reports, or that another file has its name.
    pub fn leave(mut self, done: &[bool]) -> io::Result<()> {
        self.sync()?;
        self.note.left = Some(self.stamp()?);
        self.save(done)
    }

    /// How the file looks by its name.
    fn stamp(&self) -> io::Result<Stamp> {
        let now = stamp_of(&self.path)?;
        if self.note.file.is_some_and(|file| file.is_same(&now.file)) {
            return Ok(now);
        }
        Err(other(format!("another file is at {}", self.path.display())))
    }

    /// Everything is durable but what `failed` names: the file becomes a replica.
    ///
    /// # Errors
    /// What the file system or the registry reports, or that another file has its name.
    pub fn finish(mut self, failed: &[u32], registry: &Registry) -> io::Result<()> {
        self.sync()?;
        let mut regions: Vec<u64> =
            failed.iter().map(|&task| u64::from(task) / REGION_TASKS).collect();
        regions.sort_unstable();
        regions.dedup();
        self.note.finished = Some(regions);
        self.note.left = Some(self.stamp()?);
        abort::before(|| vec!["seed-finish".to_owned()]);
        self.at.put(&self.note)?;
        drop(self.file);
        become_replica(&self.at, &self.names, &self.note, registry)
    }

    /// Nothing is left of it.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn remove(self) -> io::Result<()> {
        self.names.remove_seed().map_err(other)?;
        forget(&self.at)
    }
}

/// Number of tasks of an image of `len` bytes.
pub fn task_count(len: u64) -> usize {
    len.div_ceil(TASK_BYTES) as usize
}

fn note_path(seeds: &StatePath, name: &str) -> StatePath {
    seeds.join(format!("{name}.json"))
}

/// The file of the note at `at` is this agent's from now on.
fn begin_heartbeat(at: &StatePath, registry: &Registry) -> io::Result<Arc<Heartbeat>> {
    let path = at.with_extension(BEAT);
    match registry.heartbeats.begin(&path, &[]) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => registry.heartbeats.make(&path, &[]),
        begun => begun,
    }
}

/// Removes a note and its heartbeat.
fn forget(at: &StatePath) -> io::Result<()> {
    at.with_extension(BEAT).remove()?;
    at.remove()
}

/// Whether what the note calls done can be believed of the file at `path`; the log tells if not.
fn is_trusted(note: &SeedNote, path: &StatePath, at: &StatePath) -> bool {
    match note.is_of_file(path, at) {
        Ok(false) if note.file.is_some() => {
            let seed = path.display();
            tracing::warn!(%seed, "was changed by another program: it is read again");
            false
        }
        is_it => is_it.unwrap_or(false),
    }
}

/// The file gets a replica's name and the registry a record of it. Can be repeated.
fn become_replica(
    at: &StatePath,
    names: &ImageNames,
    note: &SeedNote,
    registry: &Registry,
) -> io::Result<()> {
    abort::before(|| vec!["seed-name".to_owned()]);
    names.finish_seed(note.epoch).map_err(other)?;
    let record = ImageRecord {
        place: NameKind::Replica(note.epoch),
        state: CopyState::Replica,
        epoch: note.epoch,
        replica: Some(ReplicaNote {
            generation: note.generation,
            stamp: stamp_of(&registry.at(&names.replica(note.epoch)))?,
            since_unix_ms: unix_ms(),
            stays: false,
            lost: None,
            distrusted: note.finished.clone().unwrap_or_default(),
            // Those who gave it are believed by nobody: the owner's hashes decide.
            unproved: true,
        }),
        ..ImageRecord::owned(note.name.clone(), note.id, note.path.clone(), note.len)
    };
    let file = registry.open_file(&record).map_err(other)?;
    registry.add(record, file)?;
    forget(at)
}

/// After a restart: what was finished becomes a replica, and what nobody has gone on with since
/// `keep` ago is removed. What cannot be done now is tried again by the next start: nobody needs it.
pub fn revive(seeds: &StatePath, registry: &Registry, keep: std::time::Duration) {
    for at in seeds.entries(".json").unwrap_or_default() {
        let result = revive_one(&at, registry, keep);
        if let Err(why) = result {
            tracing::warn!(seed = %at.display(), %why,
                "cannot continue with an image that was being read from backups");
        }
    }
}

fn revive_one(at: &StatePath, registry: &Registry, keep: std::time::Duration) -> io::Result<()> {
    let note: SeedNote = at.get()?;
    let names = ImageNames::of(&note.path).map_err(other)?;
    if note.finished.is_some() {
        return match registry.get(&note.name) {
            Some(_) => forget(at),
            None => revive_finished(at, &names, note, registry),
        };
    }
    let age = std::fs::metadata(at)?.modified()?.elapsed().unwrap_or_default();
    if age < keep {
        return Ok(());
    }
    note.check_mounted(&names)?;
    names.remove_seed().map_err(other)?;
    forget(at)
}

/// What an agent had finished that died before it had made a replica of it.
fn revive_finished(
    at: &StatePath,
    names: &ImageNames,
    note: SeedNote,
    registry: &Registry,
) -> io::Result<()> {
    let mut path = registry.at(&names.seed());
    if !path.exists()? {
        path = registry.at(&names.replica(note.epoch));
    }
    if note.is_of_file(&path, at)? {
        // Its name changes next.
        let _heartbeat = begin_heartbeat(at, registry)?;
        return become_replica(at, names, &note, registry);
    }
    // It may be somebody's: it stays until there is another seed of the name, or this one is too old; for good if
    // it has a replica's name.
    at.put(&note.distrusted())?;
    let path = path.display();
    Err(other(format!("{path} is another file, or was changed while no agent ran")))
}

#[cfg(test)]
mod tests;
